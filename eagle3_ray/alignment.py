"""Whether serving features are training features: what was measured, judged and said in words. No engine is known here.

States are compared row by row, by the relative error |served - trained| / |trained|. No fixed tolerance could serve
quantised weights, an fp8 KV cache and routed experts alike, so the noise is measured first: the serving engine gets the
same samples twice, in other batches and in other chunks. Aligned means that

  - each served boundary is nearest to the trained boundary of its own name, and any other is MARGIN times as far;
  - its error is at most TIMES_FLOOR times the noise, at the median and at the 95th percentile, for the states of
    prompts and for those of verify steps, each on its own (a verify step is one more way to cut a sequence in chunks,
    so the noise of chunks is forgiven there, too), and no single sample is further off than that;
  - the drafter gets token x_{q+1} and position q with the state of x_q, the layers, vocabulary, embedding, head and
    precision in force are those that it was trained with, and it drafts what our own forward drafts, with our logits;
  - the samples begin with the corpus's prompts, their masks cover the answers, and output head x last hidden state
    gives the log-probabilities that the engine gives;
  - there was something to compare in each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MARGIN = 3.0
TIMES_FLOOR = 3.0
# Two runs may agree to the bit, so noise counts as this much at least, relative to a row's norm
LEAST_FLOOR = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3": 2**-5}
UNKNOWN = "no states of this target there"  # of features that the served boundaries do not explain
NEAR = 0.2  # two states so near are the same one, in whatever precision; neighbouring boundaries are 0.3 apart
# Nats, median over rows. With fp8 states the last one is bfloat16
LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05, "float8_e4m3": 0.1}
SAME_DRAFTS = {"float32": 0.99, "bfloat16": 0.9, "float16": 0.9}  # share of drafts that are ours, too
DRAFT_LOGITS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # relative error of a step's, median


def relative_errors(served: Tensor, trained: Tensor) -> Tensor:
    """[n, A, H] x [n, A, H] -> [n, A]."""
    served, trained = served.float(), trained.float()
    return (served - trained).norm(dim=-1) / trained.norm(dim=-1).clamp(min=1e-20)


def spread(errors: Tensor) -> dict[str, list[float]]:
    """Median and 95th percentile of [n, A] over the rows; nothing where there is no row."""
    if not len(errors):
        return {}
    at = errors.quantile(torch.tensor([0.5, 0.95]), dim=0)  # [2, A]
    return {"median": at[0].tolist(), "p95": at[1].tolist()}


def matrix(served: Tensor, trained: Tensor) -> list[list[float]]:
    """Median relative error of each served boundary (row) against each trained one (column): [n, A, H] both."""
    columns = [relative_errors(served, trained[:, t : t + 1].expand_as(served)) for t in range(trained.shape[1])]
    return torch.stack([column.median(dim=0).values for column in columns], dim=1).tolist()  # [A, A]


def shifted(served: Tensor, trained: Tensor) -> dict[int, float]:
    """The median error, over rows and boundaries, if the served row q were the trained row q + shift of one sample."""
    found = {}
    for shift in (-1, 0, 1):
        here = served[max(0, -shift) : len(served) - max(0, shift)]
        there = trained[max(0, shift) : len(trained) - max(0, -shift)]
        found[shift] = float(relative_errors(here, there).median())
    return found


def judge(measured: dict[str, Any]) -> list[str]:
    """Every cause of misalignment in words; none means aligned. `measured` is what `proof.measure` returns, also
    as JSON has it, where null stands for an error that is no number."""
    if "failed" in measured:
        return [*measured["drafter_faults"], f"the serving engine failed: {measured['failed']}"]
    measured = _numbers(measured)
    causes = [*measured["drafter_faults"], *_in_force(measured), *_beside(measured), *_samples(measured)]
    if measured["width"] == len(measured["trained"]) * measured["hidden_size"]:
        causes += _states(measured)
    elif not causes:
        causes.append(
            f"the drafter gets {measured['width']} numbers a token, not {len(measured['trained'])} boundaries of "
            f"{measured['hidden_size']}"
        )
    causes += _targets(measured)
    return causes or [*_drafts(measured), *_nothing(measured)]


def _numbers(measured: dict[str, Any]) -> dict[str, Any]:
    """`measured` with NaN where an error is None."""

    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: number(one) for name, one in value.items()}
        return [number(one) for one in value] if isinstance(value, list) else math.nan if value is None else value

    names = ("errors", "floor", "matrix", "shifts", "by_sample", "last_hidden")
    drafts = measured["drafts"] and measured["drafts"] | {"logits": number(measured["drafts"]["logits"])}
    return measured | {name: number(measured[name]) for name in names if measured.get(name)} | {"drafts": drafts}


def _in_force(measured: dict[str, Any]) -> list[str]:
    """What the scheduler says of itself, against what the drafter was trained with."""
    facts, trained = measured["facts"], measured["trained"]
    causes = []
    if facts["algorithm"] != "EAGLE3":
        causes.append(
            f"speculative_algorithm is {facts['algorithm']}, not EAGLE3: the drafter gets {measured['width']} numbers "
            f"a token, not {len(trained)} boundaries of {measured['hidden_size']}, and SGLang skips its fc"
        )
    elif facts["layers_to_capture"] != trained:
        causes.append(_layers(facts["layers_to_capture"], trained))
    for name in ("target_dtype", "drafter_dtype"):
        if facts[name] != measured[name]:
            whose = "the target" if name == "target_dtype" else "the drafter"
            causes.append(f"{whose} is served in {facts[name]}, and {measured[name]} is what was trained for")
    return causes + measured["in_force_faults"]


def _layers(served: Sequence[int], trained: Sequence[int]) -> str:
    pairs = ", ".join(f"{s} where {t} was trained" for s, t in zip(served, trained, strict=False) if s != t)
    differences = {s - t for s, t in zip(served, trained, strict=False)}
    if len(served) != len(trained):
        return f"layer ids: boundaries {list(served)} are served, {list(trained)} were trained"
    if differences in ({1}, {-1}):
        return f"layer ids are off by one: boundary {pairs}"
    if sorted(served) == sorted(trained):
        return f"layer ids are permuted: boundary {pairs}"
    return f"other layer ids: boundary {pairs}"


def _beside(measured: dict[str, Any]) -> list[str]:
    """Tokens and positions beside the states."""
    causes = []
    for kind, of in measured["beside"].items():
        if of["wrong_tokens"]:
            causes.append(
                f"the drafter's tokens are shifted: on {of['wrong_tokens']} of {of['rows']} {kind} rows the token "
                "beside the state of x_q is not x_{q+1}"
            )
        wrong = {shift: rows for shift, rows in of["shifts"].items() if shift != "0"}
        if wrong:
            most = max(wrong, key=wrong.__getitem__)
            causes.append(
                f"the drafter's positions are shifted: on {sum(wrong.values())} of {of['rows']} {kind} rows RoPE has "
                f"not position q for slot q, but mostly q{int(most):+d}"
            )
    return causes


def _samples(measured: dict[str, Any]) -> list[str]:
    causes = []
    for kind in sorted({fault["kind"] for fault in measured["sample_faults"]}):
        of = [fault for fault in measured["sample_faults"] if fault["kind"] == kind]
        causes.append(f"{kind}: {of[0]['words']} (sample {of[0]['id']}; {len(of)} of {measured['samples']} samples)")
    return causes


def _states(measured: dict[str, Any]) -> list[str]:
    """The store's states against the served ones, where the engine serves the boundaries it was asked for."""
    if measured["facts"]["layers_to_capture"] != measured["trained"]:
        return []
    names, rows = measured["trained"], measured["matrix"]
    nearest = [min(range(len(names)), key=row.__getitem__) for row in rows]
    if all(row[t] < NEAR for row, t in zip(rows, nearest, strict=True)) and nearest != list(range(len(names))):
        pairs = ", ".join(f"{names[s]} lies where {names[t]} is said to" for s, t in enumerate(nearest) if s != t)
        return [f"boundaries are permuted in the features: {pairs}"]
    shift = min(measured["shifts"], key=measured["shifts"].__getitem__)
    if int(shift) and measured["shifts"][shift] < NEAR:
        return [f"the features' rows are shifted: the state of token q lies in row q{int(shift):+d}"]
    for s, row in enumerate(rows):
        other = min(value for t, value in enumerate(row) if t != s)
        if not (row[s] <= NEAR and other >= MARGIN * row[s]):  # so that NaN is a cause, here and below
            return [measured.get("identified") or _unlike(names[s], row[s], other)]
    return _beyond_noise(measured)


def _unlike(name: int, error: float, other: float) -> str:
    return (
        f"the features at boundary {name} are {UNKNOWN}: their relative error is {error:.2g}, "
        f"that of the next boundary {other:.2g}"
    )


def _beyond_noise(measured: dict[str, Any]) -> list[str]:
    """Where the order is right, but the values are not."""
    prompt, verify = measured["floor"]["prompt"], measured["floor"]["verify"]
    causes = []
    for kind, noises in (("prompt", [prompt]), ("verify", [prompt, verify])):
        names = [f"boundary {name} of {kind} rows" for name in measured["trained"]]
        floor = {
            at: [max(0.0, *noise) for noise in zip(*(noise[at] for noise in noises if noise), strict=True)]
            for at in measured["errors"][kind]
        }
        causes += beyond_noise(names, measured["errors"][kind], floor, measured["precision"])
    if causes:
        return [f"{cause}; settings that differ: {measured['settings'] or 'none'}" for cause in causes]
    return _single_samples(measured, max([LEAST_FLOOR[measured["precision"]], *prompt.get("p95", [])]))


def beyond_noise(
    names: list[str], errors: dict[str, list[float]], floor: dict[str, list[float]], precision: str
) -> list[str]:
    """The worst of `names` if its error is more than TIMES_FLOOR times the noise, at the median or else at p95.

    `errors` and `floor` are those of `spread`; noise counts as LEAST_FLOOR of `precision` at least.
    """
    for at, values in errors.items():
        floors = [max(LEAST_FLOOR[precision], noise) for noise in floor[at] or [0.0] * len(values)]
        beyond = [i for i in range(len(values)) if not values[i] <= TIMES_FLOOR * floors[i]]  # so that NaN is
        if beyond:
            worst = max(beyond, key=lambda i: values[i] / floors[i])
            return [
                f"values differ beyond the noise: {names[worst]} by {values[worst]:.2g} ({at}), "
                f"{values[worst] / floors[worst]:.1f} times the noise of {floors[worst]:.2g} in {precision}"
            ]
    return []


def _single_samples(measured: dict[str, Any], floor: float) -> list[str]:
    """Samples that are further off than noise; so few that the rows of all do not show it."""
    beyond = [one for one in measured["by_sample"] if not one["error"] <= TIMES_FLOOR * floor]
    if not beyond:
        return []
    worst = max(beyond, key=lambda one: one["error"])
    return [
        f"values differ beyond the noise in {len(beyond)} of {measured['samples']} samples: the features of sample "
        f"{worst['id']} by {worst['error']:.2g} (median of its rows), where the noise is {floor:.2g} (p95)"
    ]


def _targets(measured: dict[str, Any]) -> list[str]:
    """The training targets: the last hidden states."""
    last, limit = measured["last_hidden"], LOGPROB_ERROR[measured["precision"]]
    if not last or last["logprob_error"] <= limit:
        return []
    if last["logprob_error_normed"] <= limit:
        return ["the last hidden states lack the target's final norm: training targets come from pre-norm states"]
    return [
        f"training targets are not the target's: output head x last hidden state gives log-probabilities that are "
        f"{last['logprob_error']:.2g} off (median), and its likeliest token on {last['same_token']:.0%} of rows"
    ]


def _drafts(measured: dict[str, Any]) -> list[str]:
    drafts, dtype = measured["drafts"], measured["drafter_dtype"]
    causes = []
    if drafts["same"] is not None and drafts["same"] < SAME_DRAFTS[dtype]:
        causes.append(f"of {drafts['compared']} served drafts {drafts['same']:.1%} are those of the trained drafter")
    beyond = [(step, error) for step, error in enumerate(drafts["logits"]) if not error <= DRAFT_LOGITS[dtype]]
    for step, error in beyond[:1]:
        causes.append(
            f"the draft logits of step {step} are {error:.2g} away from the trained drafter's (relative, median)"
        )
    return causes


def _nothing(measured: dict[str, Any]) -> list[str]:
    """What no row was there to compare of: no proof."""
    drafts = measured["drafts"]
    missing = {
        "states of prompts": not measured["rows"]["prompt"],
        "states of verify steps": not measured["rows"]["verify"],
        "last hidden states": not measured["last_hidden"],
        "drafts": drafts["same"] is None and not drafts["logits"],
    }
    none = [name for name, is_missing in missing.items() if is_missing]
    return [f"nothing was compared of the {', the '.join(none)}: no proof"] if none else []
