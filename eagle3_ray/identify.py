"""States that came from elsewhere, held against the target's own: which boundary each of them really is.

An engine captures all boundaries of the same tokens, and each given state is compared with every one of them, row by
row, and with the rows before and after. The engine does so twice, the second time in two chunks: that is its noise, and
values are judged by alignment's rule. Dumps of other tools are told by what a file holds; only tensors are read:

    SpecForge    *.ckpt: input_ids [T], aux_hidden_state [1, T, A*H], hidden_state [1, T, H], after the final norm
    speculators  *.safetensors: token_ids [T], hidden_states [T, A+1, H], the last of them before the final norm
    plain        *.safetensors, *.pt: input_ids [T], aux [T, A*H], last_hidden [T, H] if any, after the final norm
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_ray.alignment import LEAST_FLOOR, MARGIN, NEAR, beyond_noise, relative_errors, shifted, spread
from eagle3_ray.config import ConfigError
from eagle3_ray.drafter.target import load_norm
from eagle3_ray.engines.base import EngineError
from eagle3_ray.engines.sglang import SGLangEngine, ask_layer_ids
from eagle3_ray.run import Run

SHIFTS = (-1, 0, 1)


@dataclass
class Taken:
    """One sequence as somebody captured it. A row of zeros of `last` was not kept."""

    name: str
    input_ids: Tensor  # [T] int64
    states: Tensor  # [T, A, H]
    last: Tensor | None = None  # [T, H]
    normed: bool = True  # `last` is said to be after the target's final norm
    dtype: str | None = None  # in which they were kept; None: capture.dtype

    def cut(self, tokens: int) -> Taken:
        last = None if self.last is None else self.last[:tokens]
        return dataclasses.replace(self, input_ids=self.input_ids[:tokens], states=self.states[:tokens], last=last)


@dataclass
class Own:
    """The same sequence as the target's engine gives it, and how far that is from what it gives a second time."""

    every: Tensor  # [T, L, H]
    last: Tensor  # [T, H], after the final norm
    noise: Tensor  # [T, L], relative errors
    last_noise: Tensor  # [T, 1]


def identify(run: Run, given: list[Taken], boundaries: list[int]) -> dict[str, Any]:
    """Hold `given`, said to be of `boundaries`, against the target. Runs as a Ray task.

    `causes` say in words what is not what it is said to be. `found` has of each state its nearest boundary, the shift
    of its rows and the median relative error, and the same of the `next` nearest; `errors` and `floor` have, in the
    order of `boundaries`, median and 95th percentile of the error to the boundary of that name and of the engine's own
    noise; `last_hidden` the errors of the last hidden state, as it is and with the norm applied. ConfigError where
    SGLang's class of the target cannot capture one of `boundaries`.
    """
    given, names, own, engine = _captured(run, given, boundaries)
    precision = coarser(run.config.engine.dtype, *(one.dtype or run.spec.dtype for one in given))
    every, at = [one.every for one in own], [names.index(k) for k in boundaries]
    found = [nearest([one.states[:, i] for one in given], every, names) for i in range(len(boundaries))]
    errors = [relative_errors(one.states, mine.every[:, at]) for one, mine in zip(given, own, strict=True)]  # [T, A]
    told: dict[str, Any] = {
        "samples": len(given),
        "rows": sum(len(one.input_ids) for one in given),
        "boundaries": boundaries,
        "precision": precision,
        "found": found,
        "errors": spread(torch.cat(errors)),
        "floor": spread(torch.cat([one.noise[:, at] for one in own])),
    }
    causes = _boundaries(boundaries, found)
    causes = causes or _values(boundaries, found, told["errors"], told["floor"], precision)
    states, normed = [one.last for one in given if one.last is not None], given[0].normed
    if len(states) == len(given) and any(bool(one.any()) for one in states):
        norm = load_norm(run.config.target, run.config.store.storage_options).float()
        eps = float(run.model.get("rms_norm_eps") or 1e-6)
        last = _last(states, [one.last for one in own], norm, eps)
        # Before the norm the scale may be lost (our own export has 1): then its epsilon is added twice
        last["floor"] = spread(torch.cat([one.last_noise for one in own]).clamp(min=0.0 if normed else eps))
        causes += _last_causes(last, normed) or beyond_noise(
            ["the last hidden state"], last["as_it_is" if normed else "with_the_norm"], last["floor"], precision
        )
        told["last_hidden"] = last
    return {"verdict": "misaligned" if causes else "aligned", "causes": causes, **told, "engine": engine}


def _captured(
    run: Run, given: list[Taken], boundaries: list[int]
) -> tuple[list[Taken], list[int], list[Own], dict[str, Any]]:
    """`given`, cut to what there is room for; the boundaries that an engine can capture; what it captured; its info."""
    config, layers = run.config, int(run.model["num_hidden_layers"])
    tokens = min(config.verify.max_tokens, config.hardware.capture_bytes // ((layers + 1) * run.spec.hidden_size * 4))
    given = [one.cut(tokens) for one in given]
    names = _capturable(run, layers)
    for boundary in boundaries:
        if boundary not in names:
            raise ConfigError(
                f"capture.boundaries: {boundary} cannot be captured by SGLang's class of this target, which has "
                f"boundaries {names[0]} to {names[-1]}"
            )
    engine = SGLangEngine(config, run.folder, dataclasses.replace(run.spec, boundaries=tuple(names)))
    try:
        return given, names, [_own(engine, one.input_ids.tolist(), len(names)) for one in given], engine.info
    finally:
        engine.close()


def _capturable(run: Run, layers: int) -> list[int]:
    """Asked of SGLang without an engine: a large target takes minutes to load.

    Not every class captures boundary 0, which is the embedding, and not every one gives 1 where 0 is left out.
    """
    try:
        ask_layer_ids(run.config, names := list(range(1, layers)))
    except EngineError:
        ask_layer_ids(run.config, names := list(range(layers)))
    return names


def _own(engine: SGLangEngine, ids: list[int], boundaries: int) -> Own:
    (captured,) = engine.capture([ids])
    every, last = captured.aux.clone().unflatten(1, (boundaries, -1)), captured.last_hidden.clone()  # [T, L, H]
    del captured  # its rows lie in shared memory: there is room for one sample's
    again = engine.capture_in_two(ids)
    noise = relative_errors(again.aux.unflatten(1, (boundaries, -1)), every)  # [T, L]
    return Own(every, last, noise, relative_errors(again.last_hidden[:, None], last[:, None]))


def coarser(*dtypes: str) -> str:
    """The precision that noise is told by where values went through all of `dtypes`."""
    return max(dtypes, key=LEAST_FLOOR.__getitem__)


# ---------------------------------------------------------------- boundaries


def nearest(given: list[Tensor], every: list[Tensor], names: Sequence[int]) -> dict[str, Any]:
    """given [T, H] and every [T, L, H] of each sample: the boundary, of `names`, and the shift of the least error, and
    the `next` ones."""
    told = []
    for i, k in enumerate(names):
        errors = [shifted(one[:, None], all_[:, i : i + 1]) for one, all_ in zip(given, every, strict=True)]
        for shift in SHIFTS:
            error = sum(one[shift] for one in errors) / len(errors)
            told.append({"boundary": k, "shift": shift, "error": error if math.isfinite(error) else math.inf})
    best, second = sorted(told, key=lambda one: one["error"])[:2]
    return {**best, "next": second}


def _boundaries(names: list[int], found: list[dict[str, Any]]) -> list[str]:
    for name, one in zip(names, found, strict=True):
        if one["error"] > NEAR:
            return [
                f"the features are another target's, or of other tokens: the nearest of this target's boundaries to "
                f"what is said to be boundary {name} is {one['boundary']}, {one['error']:.2g} away"
            ]
    causes = []
    shifts = {one["shift"] for one in found}
    if shifts != {0}:
        causes.append(f"the features' rows are shifted: the state of token q lies in row {_row(-min(shifts, key=abs))}")
        if len(shifts) == 1:
            causes = [f"the features' rows are shifted: the state of token q lies in row {_row(-shifts.pop())}"]
    wrong = [f"{one['boundary']} lies where {k} is said to" for k, one in zip(names, found, strict=True)]
    off = {one["boundary"] - k for k, one in zip(names, found, strict=True)}
    if off != {0}:
        kind = "off by one" if off in ({1}, {-1}) else "others"
        if sorted(one["boundary"] for one in found) == sorted(names):
            kind = "permuted"
        causes.append(f"the features' boundaries are {kind}: {', '.join(wrong)}")
    return causes


def _row(shift: int) -> str:
    return f"q{shift:+d}"


# ---------------------------------------------------------------- values


def _values(
    names: list[int],
    found: list[dict[str, Any]],
    errors: dict[str, list[float]],
    floor: dict[str, list[float]],
    precision: str,
) -> list[str]:
    """Where each state is nearest to the boundary of its own name."""
    causes = beyond_noise([f"boundary {k}" for k in names], errors, floor, precision)
    for k, one in zip(names, found, strict=True):
        other = one["next"]
        if not causes and other["error"] < MARGIN * one["error"]:
            where = f"boundary {other['boundary']}" + (f", row {_row(other['shift'])}" if other["shift"] else "")
            causes.append(
                f"the features at boundary {k} cannot be told from those at {where}: they are {one['error']:.2g} and "
                f"{other['error']:.2g} away, less than {MARGIN:g} times as far"
            )
    return causes


# ---------------------------------------------------------------- the last hidden state


def _last(given: list[Tensor], last: list[Tensor], norm: Tensor, eps: float) -> dict[str, Any]:
    """Errors of the last hidden states against the target's, as `alignment.spread` has them: as they are, normed, and
    one row on or back."""

    def errors(of: list[Tensor], shift: int = 0) -> dict[str, list[float]]:
        found = []
        for mine, true in zip(of, last, strict=True):
            here = mine[max(0, -shift) : len(mine) - max(0, shift)]
            there = true[max(0, shift) : len(true) - max(0, -shift)]
            kept = here.norm(dim=-1) > 0  # [t]
            found.append(relative_errors(here[kept, None], there[kept, None]))
        return spread(torch.cat(found))

    given = [one.float() for one in given]
    normed = [torch.nn.functional.rms_norm(one, [len(norm)], norm, eps) for one in given]

    def nearer(shift: int) -> dict[str, list[float]]:
        return min((errors(of, shift) for of in (given, normed)), key=_median)

    return {
        "as_it_is": errors(given),
        "with_the_norm": errors(normed),
        "row_before": nearer(-1),
        "row_after": nearer(1),
    }


def _median(errors: dict[str, list[float]]) -> float:
    return errors["median"][0] if errors else math.inf


def _last_causes(found: dict[str, Any], normed: bool) -> list[str]:
    error = {name: _median(errors) for name, errors in found.items()}
    expected, other = ("as_it_is", "with_the_norm") if normed else ("with_the_norm", "as_it_is")
    if error[expected] < min(NEAR, MARGIN * error[other] + 1e-6):  # where the norm changes little, either will do
        return []
    if error[other] < NEAR:
        said = "after" if normed else "before"
        return [f"the last hidden state is {'before' if normed else 'after'} the target's final norm, not {said} it"]
    for name, words in (("row_before", "q+1"), ("row_after", "q-1")):
        if error[name] < NEAR:
            return [f"the last hidden states' rows are shifted: the state of token q lies in row {words}"]
    return [f"the last hidden state is not the target's: its relative error is {error[expected]:.2g}"]


# ---------------------------------------------------------------- other tools' files


def read_dump(path: Path, samples: int, boundaries: list[int], hidden: int) -> list[Taken]:
    """The first `samples` sequences below `path`, of states [.., hidden] at `boundaries`.

    ConfigError where there is none, one that cannot be read, or one with another width or number of states.
    """
    kinds = (".ckpt", ".pt", ".safetensors")
    files = sorted(file for file in path.rglob("*") if file.suffix in kinds and file.name != "token_freq.pt")
    if not files:
        raise ConfigError(f"features.path: no {', '.join(kinds)} below {str(path)!r}")
    taken = [_read(file, hidden) for file in files[:samples]]
    for one in taken:
        if one.states.shape[1] != len(boundaries):
            raise ConfigError(
                f"features.path: {one.name} holds states of {one.states.shape[1]} boundaries, capture.boundaries names "
                f"{len(boundaries)}: {boundaries}"
            )
    return taken


def _read(file: Path, hidden: int) -> Taken:
    try:
        is_safe = file.suffix == ".safetensors"
        data = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
    except Exception as error:
        raise ConfigError(f"features.path: {file} cannot be read as tensors alone: {error}") from None
    normed, last = "token_ids" not in tensors, tensors.get("last_hidden")
    if "aux_hidden_state" in tensors:  # SpecForge
        ids, aux, last = tensors["input_ids"], tensors["aux_hidden_state"][0], tensors["hidden_state"][0]
    elif not normed:  # speculators
        states = tensors["hidden_states"]  # [T, A+1, H]
        ids, aux, last = tensors["token_ids"], states[:, :-1].flatten(1), states[:, -1]
    elif "aux" in tensors and "input_ids" in tensors:
        ids, aux = tensors["input_ids"], tensors["aux"]
    else:
        raise ConfigError(f"features.path: {file} holds {sorted(tensors)}, which is no layout that is known here")
    return _taken(file, ids.flatten().long(), aux, last, normed, hidden)


def _taken(file: Path, ids: Tensor, aux: Tensor, last: Tensor | None, normed: bool, hidden: int) -> Taken:
    """aux is [T, A*H], of any A."""
    if len(ids) < 2 or len(aux) != len(ids) or (last is not None and len(last) != len(ids)):
        raise ConfigError(f"features.path: {file} has {len(ids)} tokens and {len(aux)} rows of states")
    if aux.shape[1] % hidden or (last is not None and last.shape[1] != hidden):
        theirs = f"{aux.shape[1]} numbers a row" if last is None else f"H is {last.shape[1]}"
        raise ConfigError(
            f"features.path: {file}: the features are another target's: {theirs}, and this target's H is {hidden}"
        )
    dtype = str(aux.dtype).removeprefix("torch.").removesuffix("fn")
    if dtype not in LEAST_FLOOR:
        raise ConfigError(f"features.path: {file} has states in {dtype}, not in one of {', '.join(LEAST_FLOOR)}")
    aux, last = aux.float(), None if last is None else last.float()
    if not all(bool(of.isfinite().all()) for of in (aux, last) if of is not None):
        raise ConfigError(f"features.path: {file} has states that are not finite numbers")
    return Taken(file.name, ids, aux.unflatten(1, (-1, hidden)), last, normed, dtype)
