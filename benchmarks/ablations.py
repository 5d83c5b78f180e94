"""What decides acceptance: `python benchmarks/ablations.py STORE`. Every choice alone, at equal steps, on one corpus.

Responses and states are taken once, by the project's own stages, with twice the boundaries; every row slices what it
needs. Each (row, seed) trains the product's own pieces (`train.loop.Training`) in this process, and is then walked over
held-out samples as serving drafts, 3 ahead: accept length is completion tokens / verify steps. The held-out samples are
the same for all rows of a seed, so rows are compared pair by pair. What is done is a line of STORE/ablations.jsonl and
not done again. `--write docs/ablations.md` makes the table of it; the last line printed is one JSON object of means.

With `--own FILE` (JSONL of {messages} with the assistant's turns) the target also answers those prompts itself, and is
captured on the answers that FILE has: what is it worth to train on the target's own answers?
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from eagle3_ray.config import Config
from eagle3_ray.drafter.loss import Targets, targets
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import TargetPieces, initialise, load_pieces
from eagle3_ray.drafter.vocabulary import (
    count_probability,
    count_tokens,
    draft_vocabulary,
    end_tokens,
    tokenizer_ids,
)
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.extract import extract, extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.precision import dequantise, quantise
from eagle3_ray.store.shards import Features, Response, target_rows
from eagle3_ray.train import loop
from eagle3_ray.train.features import heldout, positions
from ray_jobs import typed
from ray_jobs.cluster import cluster

ROOT = Path(__file__).resolve().parents[1]
TRUE, NEXT = (0, 2, 4), (1, 3, 5)  # of the captured boundaries
CAPTURED = "[2,3,15,16,27,28]"
DRAFTS, HELD = 3, 64


@dataclass(frozen=True)
class Row:
    """One choice. What is not named is the demo's."""

    what: str
    drafter: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None
    trained_on: tuple[int, ...] = TRUE
    served: tuple[int, ...] = TRUE
    fp8: bool = False
    answers: str = "demo"  # demo | regenerated | own


ROWS = {
    "base": Row("the demo's settings"),
    "mask i": Row("loss where mask[i+k], as most trainers: the first draft of an answer is never trained", mask="i"),
    "mask i+1": Row("loss where mask[i+1+k]: also what follows an answer", mask="i+1"),
    "vocabulary 4096": Row("draft vocabulary of 4,096", {"draft_vocab_size": 4096}),
    "vocabulary 16384": Row("draft vocabulary of 16,384", {"draft_vocab_size": 16384}),
    "vocabulary whole": Row("draft vocabulary of all 49,152", {"draft_vocab_size": 49152}),
    "by probability": Row("vocabulary by the target's probability mass", {"vocabulary": "probability"}),
    "by probability 4096": Row("the same, of 4,096", {"vocabulary": "probability", "draft_vocab_size": 4096}),
    "1 step": Row("1 step of training-time test", train={"ttt_steps": 1}),
    "4 steps": Row("4 steps", train={"ttt_steps": 4}),
    "7 steps": Row("7 steps", train={"ttt_steps": 7}),
    "lk_alpha": Row("LK loss, alpha", train={"loss": "lk_alpha"}),
    "lk_lambda": Row("LK loss, lambda", train={"loss": "lk_lambda"}),
    "random head": Row("lm_head starts at random", {"initial_lm_head": "random"}),
    "average fc": Row("fc starts as the boundaries' average", {"initial_fc": "average"}),
    "random fc": Row("fc starts at random", {"initial_fc": "random"}),
    "shifted in capture": Row("trained on boundaries 3, 16, 28, served 2, 15, 27", trained_on=NEXT),
    "shifted in both": Row("boundaries 3, 16, 28 in training and serving", trained_on=NEXT, served=NEXT),
    "fp8": Row("boundaries' states stored in fp8", fp8=True),
    "regenerated": Row("other prompts, answered by the target", answers="regenerated"),
    "own answers": Row("the same prompts, with the answers that came with them", answers="own"),
}


# ---------------------------------------------------------------- data


@dataclass
class Data:
    run: Run
    samples: dict[str, list[Features]]  # by Row.answers; aux of all captured boundaries
    pieces: TargetPieces


def composed(store: Path, *overrides: str) -> Config:
    settings = ["capture.dtype=float32", f"capture.boundaries={CAPTURED}", f"store.root={store}", *overrides]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return typed(compose("config", overrides=settings))


def load(store: Path, own: Path | None, *overrides: str) -> Data:
    run = open_run(composed(store, *overrides))
    samples = {"demo": taken(run)}
    if own:
        given = [f"prompts.source={own}", "prompts.max_bad_share=1.0"]
        other = open_run(composed(store, *overrides, *given))
        samples["regenerated"] = taken(other)
        wanted = {sample.id for sample in samples["regenerated"]}
        samples["own"] = captured_answers(other, own, wanted)
    return Data(run, samples, load_pieces(run.config.target, torch.float32))


def taken(run: Run) -> list[Features]:
    """By the stages; what is committed is not taken again."""
    corpus = prepare(run, run.config.prompts)
    with cluster(run.config.cluster):
        extract(run, corpus)
    features, commits = extracted(run, corpus)
    readers = [features.open(commit, node_cache(run.config.store)) for commit in commits]
    return [reader.features(i) for reader in readers for i in range(len(reader))]


def captured_answers(run: Run, own: Path, wanted: set[str]) -> list[Features]:
    """The conversations of `own` as they are, through an engine like the stages'."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    records = [json.loads(line) for line in own.read_text().split("\n") if line]
    rendered = [
        (r["id"], *answered(tokenizer, r["messages"]))
        for r in records
        if r["id"] in wanted and r["messages"][-1]["role"] == "assistant"
    ]
    engine, found = SGLangEngine(run.config, run.folder, run.spec), []
    try:
        for name, ids, mask in rendered:
            (states,) = engine.capture([ids])
            marked = torch.tensor(mask)
            rows = target_rows(marked)
            tokens = torch.tensor(ids, dtype=torch.int32)
            found.append(Features(name, tokens, marked, states.aux.clone(), states.last_hidden[rows].clone(), rows))
    finally:
        engine.close()
    return found


def answered(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of a conversation that ends with an answer: the mask is on that answer."""
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False) + [tokenizer.eos_token_id]
    return [*before, *answer], [False] * len(before) + [True] * len(answer)


def sliced(sample: Features, boundaries: tuple[int, ...], fp8: bool) -> Features:
    aux = sample.aux.unflatten(1, (6, -1))[:, list(boundaries)].flatten(1)  # [T, A*H]
    return replace(sample, aux=dequantise(*quantise(aux, len(boundaries))).float() if fp8 else aux)


# ---------------------------------------------------------------- mask rules


def targets_by(rule: str) -> Callable[[Batch, Tensor, Drafter, int], Targets]:
    """`loss.targets` with another trainer's loss mask. A slot without a target row has no loss, as for them."""
    ahead = {"i": 0, "i+1": 1}[rule]

    def other(batch: Batch, argmax: Tensor, drafter: Drafter, steps: int) -> Targets:
        draft = targets(batch, argmax, drafter, steps).draft  # [R]
        row_of = torch.full_like(batch.input_ids, -1)  # [N]
        row_of[batch.last_rows] = torch.arange(len(batch.last_rows))
        everywhere = torch.arange(len(batch.input_ids))  # [N]
        rows, has_loss = [], []
        for step in range(steps):
            there = (everywhere + 1 + step).clamp(max=len(everywhere) - 1)
            inside = everywhere + 1 + step < batch.ends()
            rows.append(row_of[there])  # [N]
            has_loss.append(inside & (rows[-1] >= 0) & batch.ahead(batch.loss_mask, everywhere, ahead + step))
        # a step's slots must be among those of the step before: one that counts later is run, and has no loss yet
        runs = [torch.stack(has_loss[step:]).any(0).nonzero().flatten() for step in range(steps)]
        none = len(draft)
        kept = [torch.where(has_loss[step][here], rows[step][here], none) for step, here in enumerate(runs)]
        return Targets(runs, kept, torch.cat([draft, draft.new_tensor([-1])]))

    return other


@contextmanager
def mask_rule(rule: str | None) -> Iterator[None]:
    if rule:
        loop.targets = targets_by(rule)  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.targets = targets


# ---------------------------------------------------------------- one run


def trained(data: Data, row: Row, seed: int, steps: int) -> dict[str, Any]:
    config = data.run.config
    settings = replace(config.drafter, **row.drafter)
    train = replace(config.train, **row.train, steps=steps, seed=seed)
    demo = data.samples["demo"]
    held = {i for _, i in heldout(seed, [len(demo)], HELD)}
    evaluated = [sliced(demo[i], row.served, row.fp8) for i in sorted(held)]
    source = data.samples[row.answers]
    taught = [s for i, s in enumerate(source) if row.answers != "demo" or i not in held]
    ids = vocabulary(data, taught, settings.draft_vocab_size, settings.vocabulary)
    drafter = Drafter(drafter_config(settings, data.run.model, 3, len(ids)), ids)
    initialise(drafter, data.pieces, seed, settings)
    training = loop.Training(train, drafter, data.pieces.head, torch.device("cpu"))
    before = training.accept_length(evaluated, DRAFTS)["accept_length"]
    began, order = time.monotonic(), positions(train, [len(taught)], 0, 1, 0)
    with mask_rule(row.mask):
        for _ in range(steps):
            training.step([sliced(taught[i], row.trained_on, row.fp8) for _, i in next(order)])
    seconds = time.monotonic() - began
    after = training.accept_length(evaluated, DRAFTS)
    return {"before": round(before, 4), **after, "steps": steps, "seconds": round(seconds, 1)}


def vocabulary(data: Data, samples: list[Features], size: int, rule: str) -> Tensor:
    known, special = tokenizer_ids(data.run.folder)
    said = count_tokens([Response(s.id, s.input_ids, s.loss_mask, []) for s in samples], len(data.pieces.head))
    always = {*end_tokens(data.run.folder), *(number for number in special if said[number])}
    by = count_probability((s.last_hidden for s in samples), data.pieces.head) if rule == "probability" else said
    return draft_vocabulary(by, size, always, known)


# ---------------------------------------------------------------- the document


def means(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each row: mean accept length, its range over seeds, and the mean difference to the base, seed by seed."""
    by = {(line["row"], line["seed"]): line["accept_length"] for line in lines}
    found = {}
    for name, row in ROWS.items():
        seeds = sorted(seed for other, seed in by if other == name)
        if seeds:
            values = [by[name, seed] for seed in seeds]
            base = "regenerated" if row.answers == "own" else "base"
            pairs = [by[name, seed] - by[base, seed] for seed in seeds if (base, seed) in by]
            found[name] = {
                "mean": round(statistics.mean(values), 4),
                "low": round(min(values), 4),
                "high": round(max(values), 4),
                "difference": round(statistics.mean(pairs), 4) if pairs else None,
                "sign": all(p > 0 for p in pairs) or all(p < 0 for p in pairs),
                "seeds": len(seeds),
                "seconds": round(statistics.mean(line["seconds"] for line in lines if line["row"] == name)),
            }
    return found


def document(lines: list[dict[str, Any]]) -> str:
    steps = sorted({line["steps"] for line in lines})
    head = [
        "# Ablations",
        "",
        "What each choice is worth on the demo's corpus (SmolLM2-135M-Instruct, fp32), all else as in the demo: "
        f"{', '.join(map(str, steps))} optimizer steps a run. Accept length is walked over {HELD} held-out samples as "
        f"serving drafts, {DRAFTS} ahead (completion tokens / verify steps). The difference is the mean over seeds of "
        "the row less the base on the same held-out samples; it is bold where all seeds agree on its sign.",
        "",
        "    python benchmarks/ablations.py STORE --write docs/ablations.md",
        "",
        "| row | what | accept length | over seeds | difference | seconds |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for name, found in means(lines).items():
        difference = "" if found["difference"] is None or name == "base" else f"{found['difference']:+.3f}"
        if difference and found["sign"] and found["seeds"] > 1:
            difference = f"**{difference}**"
        rows.append(
            f"| {name} | {ROWS[name].what} | {found['mean']:.3f} | {found['low']:.3f} to {found['high']:.3f} "
            f"({found['seeds']}) | {difference} | {found['seconds']} |"
        )
    foot = ["", "`own answers` is compared with `regenerated`, which has the same prompts."] if own(lines) else []
    return "\n".join([*head, *rows, *foot]) + "\n"


def own(lines: list[dict[str, Any]]) -> bool:
    return any(line["row"] == "own answers" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every run")
    parser.add_argument("--own", type=Path, help="JSONL of conversations with their own answers")
    parser.add_argument("--write", type=Path, help="the document; with --seeds 0 nothing is trained")
    parser.add_argument("--set", nargs="*", default=[], help="Hydra overrides, for all rows")
    args = parser.parse_args()
    kept = args.store / "ablations.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(line["row"], line["seed"]) for line in lines}
    names = [name for name in args.rows if ROWS[name].answers == "demo" or args.own]
    todo = [(name, seed) for seed in range(args.seeds) for name in names if (name, seed) not in done]
    if todo:
        torch.set_num_threads(2)
        data = load(args.store.resolve(), args.own, *args.set)
    for number, (name, seed) in enumerate(todo, 1):
        line = {"row": name, "seed": seed, **trained(data, ROWS[name], seed, args.steps)}
        print(
            f"{number}/{len(todo)} {name}, seed {seed}: {line['accept_length']:.4f} in {line['seconds']} s", flush=True
        )
        with kept.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines.append(line)
    if args.write:
        args.write.write_text(document(lines))
    print(json.dumps({name: found["mean"] for name, found in means(lines).items()}))


if __name__ == "__main__":
    main()
