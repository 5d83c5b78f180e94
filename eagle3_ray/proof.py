"""The measuring of the proof, beside the engine that serves: what it is seen to do, against store, drafter and corpus.

Only small numbers leave here; `alignment.judge` says what they mean.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.alignment import matrix, relative_errors, shifted, spread
from eagle3_ray.capture import deciding_args, engine_version
from eagle3_ray.config import Config, ConfigError, SamplingConfig
from eagle3_ray.conversations import join
from eagle3_ray.drafter.checkpoint import check_folder
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.target import TargetPieces, load_pieces
from eagle3_ray.drafter.trained import (
    Trained,
    chain,
    folder_faults,
    folder_warnings,
    in_force_faults,
    read_another,
    read_trained,
)
from eagle3_ray.engines.base import Response
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.engines.sglang_served import Watched
from eagle3_ray.prepare import Corpus, Prompt
from eagle3_ray.run import Run
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.precision import dequantise, quantise
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train.features import read_samples

NEW_TOKENS = 32  # that are generated behind each prompt
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # of a draft logit, where two tokens are as good


def measure(
    run: Run, corpus: Corpus, features: Units, drafter: str, engine: SGLangEngine, folder: Path
) -> dict[str, Any]:
    """Serve some stored samples and compare all there is to compare; `folder` holds the served drafter."""
    description = features.description()
    stored = choose(run, features)
    samples = [cut(sample, run.config.verify.max_tokens) for sample in stored]
    boundaries, hidden = description["boundaries"], run.spec.hidden_size
    tensors, facts = engine.drafter_facts()
    trained = trained_drafter(run, drafter, len(boundaries))
    pieces = load_pieces(run.config.target, torch.float32, run.config.store.storage_options)
    prompts = _prompts(samples)
    greedy = SamplingConfig(max_new_tokens=NEW_TOKENS)
    whole = _prefilled(engine, [sample.input_ids.tolist() for sample in samples])
    again = [_in_chunks(engine, sample.input_ids.tolist()) for sample in samples]
    answers = engine.watch([ids for _, ids in prompts], greedy)
    half = len(prompts) // 2
    others = [
        pair for some in (prompts[:half], prompts[half:]) if some for pair in engine.watch([i for _, i in some], greedy)
    ]
    sequences = [sample.input_ids.tolist() for sample in samples] * 2
    alike = _prefilled(engine, [ids + r.token_ids for (_, ids), (r, _) in zip(prompts, answers, strict=True)])
    seen = list(zip(sequences, whole + again, strict=True))
    seen += [(ids + r.token_ids, one) for (_, ids), (r, one) in zip(prompts * 2, answers + others, strict=True)]
    width = whole[0].states.shape[1]
    measured = {
        "samples": len(samples),
        "trained": boundaries,
        "hidden_size": hidden,
        "width": width,
        "facts": facts,
        "precision": _coarser(description["dtype"], description["engine_dtype"]),
        "target_dtype": description["engine_dtype"],
        "drafter_dtype": description["engine_dtype"],
        "settings": differing(run.config, description),
        "drafter_faults": drafter_faults(run, trained, folder),
        "warnings": folder_warnings(folder, pieces),
        "in_force_faults": in_force_faults(tensors, trained, pieces, run.config.engine.dtype),
        "sample_faults": sample_faults(corpus, stored),
        "beside": beside(seen),
        "last_hidden": targets(engine, samples, pieces),
        "drafts": drafts(trained.drafter(pieces), answers, [ids for _, ids in prompts], run.config.evaluate.topk, facts)
        if width == len(boundaries) * hidden
        else None,
    }
    if width == len(boundaries) * hidden:
        kept = partial(as_stored, dtype=description["dtype"], boundaries=len(boundaries))
        measured |= compare(samples, prompts, kept, whole, again, answers, others, alike)
    return measured


def trained_drafter(run: Run, drafter: str, boundaries: int) -> Trained:
    """What training left of the drafter. Of another's drafter only its own files are known."""
    if not run.config.drafter.path:
        return read_trained(run.files, drafter)
    return read_another(run.config, run.model, boundaries)


def drafter_faults(run: Run, trained: Trained, folder: Path) -> list[str]:
    faults = [] if run.config.drafter.path else folder_faults(trained, folder, run.config.engine.dtype)
    return faults or check_folder(folder, run.model)


def choose(run: Run, features: Units) -> list[Features]:
    """verify.samples of the committed samples, by seed."""
    settings, commits = run.config.verify, features.commits()
    pairs = [(shard, i) for shard, commit in enumerate(commits) for i in range(len(commit.samples))]
    if not pairs:
        raise ConfigError(f"verify: no sample is committed below {features.files.url(features.folder)}")
    chosen = sorted(random.Random(run.config.train.seed).sample(pairs, min(settings.samples, len(pairs))))
    return read_samples(features, commits, node_cache(run.config.store), chosen)


def cut(sample: Features, tokens: int) -> Features:
    """Its first `tokens` tokens, or more: so many that NEW_TOKENS of its first answer are among them."""
    length = max(tokens, int(sample.loss_mask.int().argmax()) + NEW_TOKENS)
    if length >= len(sample.input_ids):
        return sample
    rows = int((sample.last_rows < length - 1).sum())  # a target row wants the token behind it
    return dataclasses.replace(
        sample,
        input_ids=sample.input_ids[:length],
        loss_mask=sample.loss_mask[:length],
        aux=sample.aux[:length],
        last_hidden=sample.last_hidden[:rows],
        last_rows=sample.last_rows[:rows],
    )


def _prompts(samples: list[Features]) -> list[tuple[int, list[int]]]:
    """The ids before each answer, and which sample they are of."""
    found = []
    for number, sample in enumerate(samples):
        mask = sample.loss_mask.int()  # [T]
        starts = ((mask.diff() > 0).nonzero().flatten() + 1).tolist()
        found += [(number, sample.input_ids[:start].tolist()) for start in starts]
    return found


def _prefilled(engine: SGLangEngine, sequences: list[list[int]]) -> list[Watched]:
    """What the drafter gets of each sequence where it is a prompt."""
    return [one for _, one in engine.watch(sequences, SamplingConfig(max_new_tokens=1))]


def _in_chunks(engine: SGLangEngine, ids: list[int]) -> Watched:
    """The same rows alone in the batch, and in two chunks: the second half is computed on the first one's cache."""
    salt, one = f"chunks-{id(ids)}-{len(ids)}", SamplingConfig(max_new_tokens=1)
    first, second = (engine.watch([some], one, salt)[0][1] for some in (ids[: len(ids) // 2], ids))
    missing = first.at < int(second.at[0])

    def both(name: str) -> Tensor:
        return torch.cat([getattr(first, name)[missing], getattr(second, name)])

    return dataclasses.replace(
        second,
        at=both("at"),
        positions=both("positions"),
        ids=both("ids"),
        states=both("states"),
        verified=both("verified"),
    )


def as_stored(states: Tensor, dtype: str, boundaries: int) -> Tensor:
    """[n, A*H] -> [n, A, H] float32, as the store keeps them."""
    is_fp8 = dtype == "float8_e4m3"
    kept = dequantise(*quantise(states, boundaries)) if is_fp8 else states.to(getattr(torch, dtype))
    return kept.float().unflatten(1, (boundaries, -1))


def _coarser(*dtypes: str) -> str:
    order = ("float32", "float16", "bfloat16", "float8_e4m3")
    return max(dtypes, key=order.index)


# ---------------------------------------------------------------- tokens and positions


def beside(seen: list[tuple[list[int], Watched]]) -> dict[str, dict[str, Any]]:
    """What stood beside the states, of whole sequences x and what was seen of each: {kind: rows, wrong_tokens, shifts}.

    `wrong_tokens` counts rows of x_q without x_{q+1}; `shifts` {"0": rows, …} by how much RoPE's position is above q.
    Kinds are prompt, verify, and draft: there a row is a draft step, the k-th of which lies k tokens further on.
    """
    found: dict[str, dict[str, Any]] = {
        kind: {"rows": 0, "wrong_tokens": 0, "shifts": Counter()} for kind in ("prompt", "verify", "draft")
    }
    for ids, one in seen:
        for kind, rows in (("prompt", ~one.verified), ("verify", one.verified)):
            at, tokens = one.at[rows], one.ids[rows]  # [n], [n]
            known = at + 1 < len(ids)
            expected = torch.tensor(ids)[at[known] + 1]
            found[kind]["rows"] += len(at)
            found[kind]["wrong_tokens"] += int((tokens[known] != expected).sum())
            found[kind]["shifts"].update(map(str, (one.positions[rows] - at).tolist()))
        for drafted in one.drafted:
            for step, positions in enumerate(drafted.positions):
                found["draft"]["rows"] += len(positions)
                found["draft"]["shifts"].update(str(position - drafted.length - step) for position in positions)
    return found


# ---------------------------------------------------------------- states


def compare(
    samples: list[Features],
    prompts: list[tuple[int, list[int]]],
    kept: partial[Tensor],
    whole: list[Watched],
    again: list[Watched],
    answers: list[tuple[Response, Watched]],
    others: list[tuple[Response, Watched]],
    alike: list[Watched],
) -> dict[str, Any]:
    """Errors, noise, the matrix and the shifts.

    The states of verify steps are held against the stored ones as far as an answer is the stored one, and from there
    on, as sampled answers leave it at once, against those that the same engine gives the answer as a prompt (`alike`).
    """
    trained = [kept(sample.aux) for sample in samples]  # [T, A, H] each
    served = [kept(one.states) for one in whole]  # [T, A, H]
    both = [(a, b[: len(a)]) for a, b in zip(served, trained, strict=True)]
    errors = [relative_errors(a, b) for a, b in both]  # [T, A] each
    noise = [relative_errors(kept(b.states), kept(a.states)[b.at]) for a, b in zip(whole, again, strict=True)]
    verified, verified_noise, from_store = [errors[0][:0]], [errors[0][:0]], 0
    for (number, ids), (response, one), (_, other), prompt in zip(prompts, answers, others, alike, strict=True):
        said = ids + response.token_ids
        slots = one.at[one.verified & (one.at < len(said))]  # nothing is missing of a watched answer: row q is slot q
        as_stored = alike_until(said, samples[number].input_ids.tolist())
        expected = torch.cat([trained[number][:as_stored], kept(prompt.states)[as_stored:]])  # [T', A, H]
        states = kept(one.states)
        verified.append(relative_errors(states[slots], expected[slots]))
        from_store += int((slots < as_stored).sum())
        until = alike_until(one.ids.tolist(), other.ids.tolist()) + 1
        common = [slot for slot in slots.tolist() if slot < until and slot < len(other.at) and other.verified[slot]]
        verified_noise.append(relative_errors(kept(other.states)[common], states[common]))
    joined, targets_joined = torch.cat([a for a, _ in both]), torch.cat([b for _, b in both])  # [N, A, H]
    per_sample = [shifted(a, b) for a, b in both]
    return {
        "errors": {"prompt": spread(torch.cat(errors)), "verify": spread(torch.cat(verified))},
        "by_sample": [
            {"id": sample.id, "error": float(of.median(dim=0).values.max())}
            for sample, of in zip(samples, errors, strict=True)
        ],
        "floor": {"prompt": spread(torch.cat(noise)), "verify": spread(torch.cat(verified_noise))},
        "matrix": matrix(joined, targets_joined),
        "cosines": torch.cosine_similarity(joined, targets_joined, dim=-1).mean(0).tolist(),  # [A]
        "shifts": {str(k): sum(of[k] for of in per_sample) / len(per_sample) for k in (-1, 0, 1)},
        "rows": {"prompt": len(joined), "verify": sum(map(len, verified)), "verify_stored": from_store},
    }


def alike_until(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def targets(engine: SGLangEngine, samples: list[Features], pieces: TargetPieces) -> dict[str, Any]:
    """Output head x last hidden state against the engine's own likeliest tokens and their log-probabilities."""
    errors: list[Tensor] = []
    normed: list[Tensor] = []
    same: list[Tensor] = []
    for sample in samples:
        if not len(sample.last_rows):
            continue
        after_each = engine.next_tokens(sample.input_ids.tolist())  # T of them
        said = [after_each[row] for row in sample.last_rows.tolist()]
        logprobs, tokens = (torch.tensor(column) for column in zip(*said, strict=True))  # [R], [R]
        last = sample.last_hidden.float()  # [R, H]
        scaled = last * last.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * pieces.norm  # if the norm was left out
        for state, into in ((last, errors), (scaled, normed)):
            mine = (state @ pieces.head.T).log_softmax(-1)  # [R, V]
            into.append((mine.gather(1, tokens[:, None])[:, 0] - logprobs).abs())
            if into is errors:
                same.append((mine.argmax(-1) == tokens).float())
    if not errors:
        return {}
    return {
        "rows": sum(len(rows) for rows in errors),
        "same_token": float(torch.cat(same).mean()),
        "logprob_error": float(torch.cat(errors).median()),
        "logprob_error_normed": float(torch.cat(normed).median()),
    }


# ---------------------------------------------------------------- the drafter


@torch.no_grad()
def drafts(
    drafter: Drafter,
    answers: list[tuple[Response, Watched]],
    prompts: list[list[int]],
    topk: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The trained drafter on the states that the served one got: is what SGLang drafted what we would draft?

    `logits` has, by step, the median relative error |served - ours| / |ours| of the first drafts behind each prompt:
    of the first step, and in chains also of later ones, where they run outside of a CUDA graph.
    """
    place = {token: i for i, token in enumerate(drafter.draft_ids.tolist())}
    same: list[bool] = []
    errors: dict[int, list[float]] = {}

    def compare_logits(step: int, ours: Tensor, served: Tensor) -> None:
        errors.setdefault(step, []).append(float((served[: len(ours)] - ours).norm() / ours.norm()))

    for (_, one), prompt in zip(answers, prompts, strict=True):
        states, known = one.states.float(), [prompt[0], *one.ids.tolist()]
        if one.logits is not None:
            ours = chain(drafter, known[: len(prompt) + 1], states[: len(prompt)], [0])
            compare_logits(0, ours[0], one.logits[0])
        for length, said, _, served in one.drafted:
            if topk > 1 or length >= len(known):
                continue
            ours = chain(drafter, known[: length + 1], states[:length], said[1:])
            for step, logits in enumerate([] if served is None else served, start=1):
                compare_logits(step, ours[step], logits)
            for logits, token in zip(ours, said[1:], strict=True):
                at = place.get(token)
                same.append(at is not None and float(logits.max() - logits[at]) <= TOLERANCE[facts["drafter_dtype"]])
    return {
        "compared": len(same),
        "same": sum(same) / len(same) if same else None,
        "logits": [statistics.median(errors[step]) for step in sorted(errors)],
    }


# ---------------------------------------------------------------- the corpus


def sample_faults(corpus: Corpus, samples: list[Features]) -> list[dict[str, str]]:
    """Samples that do not begin with their prompt as this target's template renders it, or whose mask is elsewhere."""
    prompts = {prompt.id: prompt for unit in corpus.units for prompt in corpus.read(unit)}
    faults = []
    for sample in samples:
        fault = _fault(prompts.get(sample.id), sample)
        if fault:
            faults.append({"id": sample.id, "kind": fault[0], "words": fault[1]})
    return faults


def _fault(prompt: Prompt | None, sample: Features) -> tuple[str, str] | None:
    if prompt is None:
        return "another corpus", "the corpus has no such prompt"
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    at = 0  # the end of the answer before
    for segment in prompt.segments:
        added = join(ids[:at], segment)
        here = ids[at : at + len(added)]
        if here != added[: len(here)]:
            wrong = next(i for i, (a, b) in enumerate(zip(here, added, strict=False)) if a != b)
            return "another chat template or tokenizer", f"token {at + wrong} is {here[wrong]}, not {added[wrong]}"
        start = at + len(added)
        if start >= len(ids):
            return "no answer", f"token {len(ids)} is its last, its answer begins at token {start}"
        begins = next((i for i in range(at, len(mask)) if mask[i]), len(mask))
        if begins != start:
            return "the loss mask is shifted", f"it begins at token {begins}, the answer at token {start}"
        at = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
        if at == len(ids):
            break
    if at < len(ids):
        return "the loss mask is shifted", f"it ends at token {at}, the answer at token {len(ids)}"
    if not torch.equal(sample.last_rows.long(), target_rows(sample.loss_mask)):
        return "the training targets are shifted", "their rows are not those of the loss mask"
    return None


# ---------------------------------------------------------------- settings


def differing(config: Config, description: dict[str, Any]) -> dict[str, Any]:
    """Settings of the serving engine that are not those of the capturing one: {name: [captured, served]}."""
    serving = {"engine_version": engine_version(config), "engine_dtype": config.engine.dtype}
    found = {name: [description[name], value] for name, value in serving.items() if description[name] != value}
    for group, values in deciding_args(config, "serve").items():
        before = description[group]
        for name in sorted(before.keys() | values.keys()):
            if before.get(name) != values.get(name):
                found[name] = [before.get(name), values.get(name)]
    return found
