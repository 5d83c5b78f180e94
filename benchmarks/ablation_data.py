"""The ablations' corpora: answered and captured once, by the project's own stages, cut to what each row trains on."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from benchmarks.ablation_rows import Row
from eagle3_ray.conversations import BadRecord, join, parse, read_records, segments
from eagle3_ray.engines import start_engine
from eagle3_ray.engines.base import TargetEngine, each
from eagle3_ray.extract import ExtractError, extract, extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.progress import Progress
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.precision import dequantise, stored
from eagle3_ray.store.shards import Features, Response, ShardReader, target_rows, write_features
from eagle3_ray.train.features import Pair
from ray_jobs import typed
from ray_jobs.cluster import cluster

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Corpus:
    """A corpus's features by shard, as the target answered it."""

    answered: list[list[Features]]
    boundaries: tuple[int, ...]  # of aux
    facts: dict[str, Any]  # what it is; a line about another one is not taken for a result
    own: dict[str, Features] = field(default_factory=dict)  # the same conversations with the corpus's answers, by id
    argmax: dict[str, Tensor] = field(default_factory=dict)  # of each sample's target rows: the same in most rows

    def text(self, row: Row, pair: Pair) -> Features:
        """The sample that `row` trains on, at all boundaries."""
        sample = self.answered[pair[0]][pair[1]]
        return self.own[sample.id] if row.own else sample

    def trained(self, row: Row, pair: Pair) -> Features:
        sample = self.at(self.text(row, pair), row.trained)
        if not row.fp8:
            return sample
        states = stored(sample.aux, sample.last_hidden, "float8_e4m3")  # as capture.dtype would keep them
        return replace(
            sample,
            aux=dequantise(states["aux"], states["aux_scale"]).float(),
            last_hidden=states["last_hidden"].float(),
        )

    def served(self, row: Row, pair: Pair) -> Features:
        return self.at(self.answered[pair[0]][pair[1]], row.served)

    def at(self, sample: Features, boundaries: tuple[int, ...]) -> Features:
        states = sample.aux.unflatten(1, (len(self.boundaries), -1))  # [T, A, H]
        return replace(sample, aux=states[:, [self.boundaries.index(b) for b in boundaries]].flatten(1))  # [T, 3H]


def opened(*overrides: str) -> Run:
    """The demo's configuration, but for states in fp32."""
    common = ["prompts=demo", "target=smollm2", "hardware=cpu", "train=demo", "drafter=small", "capture.dtype=float32"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return open_run(typed(compose("config", overrides=[*common, *overrides])))


def answered(run: Run) -> Corpus:
    """The run's corpus, answered and captured where it is not yet. The tensors are maps of the shards."""
    prompts = prepare(run, run.config.prompts)
    try:
        features, commits = extracted(run, prompts)
    except ExtractError:
        with cluster(run.config.cluster):
            extract(run, prompts)
        features, commits = extracted(run, prompts)
    readers = [features.open(commit, node_cache(run.config.store)) for commit in commits]
    shards = [[reader.features(i) for i in range(len(reader))] for reader in readers]
    tokens = sum(len(sample.input_ids) for shard in shards for sample in shard)
    facts = {"features": features.folder, "samples": sum(map(len, shards)), "tokens": tokens}
    return Corpus(shards, run.spec.boundaries, facts)


def with_own_answers(run: Run, path: Path, store: Path) -> Corpus:
    """The corpus of the file at `path`, answered by the target, and captured with its own answers too."""
    records = [record for record in read_records(run.config.prompts) if isinstance(record, dict)]
    sources = Counter(str(record.get("source", path.name)) for record in records)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    corpus = answered(run)
    own = own_features(run, records, store / f"own-answers-{digest}-{Path(corpus.facts['features']).name}.safetensors")
    facts = corpus.facts | {"file": path.name, "sha256": digest, "sources": dict(sorted(sources.items()))}
    return replace(corpus, facts=facts, own=own)


def own_features(run: Run, records: list[dict[str, Any]], kept: Path) -> dict[str, Features]:
    """The states of the records' own answers, by id, captured once and kept in one shard."""
    import transformers

    if not kept.exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder)
        kwargs, limit = run.target["chat_template_kwargs"], run.config.sampling.max_new_tokens
        given = [own_ids(record, tokenizer, kwargs, limit) for record in records]
        engine = start_engine(run.config, run.folder, run.spec)
        try:
            progress = Progress("own answers", len(given), "conversations captured")
            found = each(lambda sample: _states(run, engine, sample), given, 8, progress.add)
        finally:
            engine.close()
        partial = kept.with_suffix(".partial")
        write_features(partial, [sample for sample in found if isinstance(sample, Features)], kept.stem)
        partial.rename(kept)
    reader = ShardReader(kept, kept.stem)
    return {sample.id: sample for sample in (reader.features(i) for i in range(len(reader)))}


def own_ids(record: dict[str, Any], tokenizer: Any, template_kwargs: dict[str, Any], limit: int) -> Response:
    """A conversation in the target's template with the answers that it has; each ends with the end token, and as one
    of the target's is cut to `limit` tokens. BadRecord unless every user turn has an answer."""
    turns = [turn for turn in record["messages"] if turn["role"] != "system"]
    if [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise BadRecord(f"--own-answers: {record.get('id')}: not an answer after each user turn")
    conversation = parse(record)
    ids: list[int] = []
    mask: list[bool] = []
    for segment, turn in zip(segments(conversation, tokenizer, template_kwargs), turns[1::2], strict=True):
        said = [*tokenizer(turn["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id][:limit]
        before = join(ids, segment)
        ids += [*before, *said]
        mask += [False] * len(before) + [True] * len(said)
    return Response(conversation.id, torch.tensor(ids, dtype=torch.int32), torch.tensor(mask), [])


def _states(run: Run, engine: TargetEngine, sample: Response) -> Features:
    (captured,) = engine.capture([sample.input_ids.tolist()])
    rows = target_rows(sample.loss_mask)  # [R]
    states = stored(captured.aux, captured.last_hidden[rows], run.spec.dtype)
    return Features(sample.id, sample.input_ids, sample.loss_mask, last_rows=rows, **states)
