"""States that came from elsewhere, held against the target's own: which boundary each of them really is.

An engine captures all boundaries of the same tokens, and each given state is compared with every one of them, row by
row, and with the rows before and after. Dumps of other tools are told by what a file holds; only tensors are read:

    SpecForge    *.ckpt: input_ids [T], aux_hidden_state [1, T, A*H], hidden_state [1, T, H], after the final norm
    speculators  *.safetensors: token_ids [T], hidden_states [T, A+1, H], the last of them before the final norm
    plain        *.safetensors, *.pt: input_ids [T], aux [T, A*H], last_hidden [T, H] if any, after the final norm
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_ray.alignment import MARGIN, NEAR, relative_errors, shifted
from eagle3_ray.config import ConfigError
from eagle3_ray.drafter.target import load_norm
from eagle3_ray.engines.base import Captured, EngineError
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.run import Run


@dataclass
class Taken:
    """One sequence as somebody captured it. A row of zeros of `last` was not kept."""

    name: str
    input_ids: Tensor  # [T] int64
    states: Tensor  # [T, A, H] float32
    last: Tensor | None = None  # [T, H] float32
    normed: bool = True  # `last` is said to be after the target's final norm

    def cut(self, tokens: int) -> Taken:
        last = None if self.last is None else self.last[:tokens]
        return dataclasses.replace(self, input_ids=self.input_ids[:tokens], states=self.states[:tokens], last=last)


def identify(run: Run, given: list[Taken], boundaries: list[int]) -> dict[str, Any]:
    """Hold `given`, said to be of `boundaries`, against the target. Runs as a Ray task.

    `causes` say in words what is not what it is said to be; `found` has of each state its nearest boundary, the shift
    of its rows and the median relative error; of the last hidden state its errors as it is and with the norm applied.
    """
    given, names, captured = _captured(run, given)
    every = [one.aux.float().unflatten(1, (len(names), -1)) for one in captured]  # [T, L, H] each
    last = [one.last_hidden.float() for one in captured]  # [T, H] each
    found = [
        nearest([one.states[:, i] for one in given], every, names)  # of [T, H] and [T, L, H]
        for i in range(len(boundaries))
    ]
    causes = _boundaries(boundaries, found)
    told: dict[str, Any] = {"boundaries": boundaries, "found": found}
    if all(one.last is not None for one in given):
        norm = load_norm(run.config.target, run.config.store.storage_options).float()
        eps = float(run.model.get("rms_norm_eps") or 1e-6)
        told["last_hidden"] = _last([one.last for one in given if one.last is not None], last, norm, eps)
        causes += _last_causes(told["last_hidden"], given[0].normed)
    return {**told, "causes": causes, "verdict": "misaligned" if causes else "aligned", "samples": len(given)}


def _captured(run: Run, given: list[Taken]) -> tuple[list[Taken], list[int], list[Captured]]:
    """`given`, cut to what there is room for; the boundaries that the engine can capture; and those of each sample.

    Not every class captures boundary 0, which is the embedding, and not every one gives 1 where 0 is left out.
    """
    layers, config = int(run.model["num_hidden_layers"]), run.config
    row = (layers + 1) * run.spec.hidden_size * 4
    tokens = min(config.verify.max_tokens, config.hardware.capture_bytes // row)
    given = [one.cut(tokens) for one in given]
    for first in (1, 0):
        names = list(range(first, layers))
        try:
            engine = SGLangEngine(config, run.folder, dataclasses.replace(run.spec, boundaries=tuple(names)))
        except EngineError as error:
            if first == 0 or "cannot be had" not in str(error):
                raise
            continue
        break
    try:
        found = []
        for one in given:  # its rows lie in shared memory: there is room for one sample's
            (captured,) = engine.capture([one.input_ids.tolist()])
            found.append(Captured(captured.aux.clone(), captured.last_hidden.clone()))
            del captured
        return given, names, found
    finally:
        engine.close()


def nearest(given: list[Tensor], every: list[Tensor], names: Sequence[int]) -> dict[str, Any]:
    """given [T, H] and every [T, L, H] of each sample: the boundary, of `names`, and the shift with the least error."""
    best: dict[str, Any] = {"error": float("inf")}
    for i, k in enumerate(names):
        for shift in (-1, 0, 1):
            errors = [shifted(one[:, None], all_[:, i : i + 1])[shift] for one, all_ in zip(given, every, strict=True)]
            error = sum(errors) / len(errors)
            if error < best["error"]:
                best = {"boundary": k, "shift": shift, "error": error}
    return best


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


def _last(given: list[Tensor], last: list[Tensor], norm: Tensor, eps: float) -> dict[str, float]:
    """Median errors of the last hidden states against the target's: as they are, normed, and one row on or back."""

    def error(of: list[Tensor], shift: int = 0) -> float:
        errors = []
        for mine, true in zip(of, last, strict=True):
            here = mine[max(0, -shift) : len(mine) - max(0, shift)]
            there = true[max(0, shift) : len(true) - max(0, -shift)]
            kept = here.norm(dim=-1) > 0  # [t]
            errors.append(relative_errors(here[kept, None], there[kept, None]).flatten())
        return float(torch.cat(errors).median())

    normed = [torch.nn.functional.rms_norm(one, [len(norm)], norm, eps) for one in given]
    return {
        "as_it_is": error(given),
        "with_the_norm": error(normed),
        "row_before": min(error(given, -1), error(normed, -1)),
        "row_after": min(error(given, 1), error(normed, 1)),
    }


def _last_causes(found: dict[str, float], normed: bool) -> list[str]:
    expected, other = ("as_it_is", "with_the_norm") if normed else ("with_the_norm", "as_it_is")
    if found[expected] < min(NEAR, MARGIN * found[other] + 1e-6):  # where the norm changes little, either will do
        return []
    if found[other] < NEAR:
        said = "after" if normed else "before"
        return [f"the last hidden state is {'before' if normed else 'after'} the target's final norm, not {said} it"]
    for name, words in (("row_before", "q+1"), ("row_after", "q-1")):
        if found[name] < NEAR:
            return [f"the last hidden states' rows are shifted: the state of token q lies in row {words}"]
    return [f"the last hidden state is not the target's: its relative error is {found[expected]:.2g}"]


# ---------------------------------------------------------------- other tools' files


def read_dump(path: Path, samples: int, boundaries: int) -> list[Taken]:
    """The first `samples` sequences below `path`; ConfigError where there is none, or one that cannot be read."""
    kinds = (".ckpt", ".pt", ".safetensors")
    files = sorted(file for file in path.rglob("*") if file.suffix in kinds and file.name != "token_freq.pt")
    if not files:
        raise ConfigError(f"features.path: no {', '.join(kinds)} below {str(path)!r}")
    return [_read(file, boundaries) for file in files[:samples]]


def _read(file: Path, boundaries: int) -> Taken:
    try:
        is_safe = file.suffix == ".safetensors"
        data = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
    except Exception as error:
        raise ConfigError(f"features.path: {file} cannot be read as tensors alone: {error}") from None
    if "aux_hidden_state" in tensors:  # SpecForge
        aux, last = tensors["aux_hidden_state"][0], tensors["hidden_state"][0]
        return _taken(file, tensors["input_ids"], aux.float().unflatten(-1, (boundaries, -1)), last.float())
    if "token_ids" in tensors:  # speculators
        states = tensors["hidden_states"].float()  # [T, A+1, H]
        return _taken(file, tensors["token_ids"], states[:, :-1], states[:, -1], normed=False)
    if "aux" in tensors and "input_ids" in tensors:
        aux, plain = tensors["aux"].float().unflatten(-1, (boundaries, -1)), tensors.get("last_hidden")
        return _taken(file, tensors["input_ids"], aux, None if plain is None else plain.float())
    raise ConfigError(f"features.path: {file} holds {sorted(tensors)}, which is no layout that is known here")


def _taken(file: Path, ids: Tensor, states: Tensor, last: Tensor | None, normed: bool = True) -> Taken:
    ids = ids.flatten().long()
    if len(states) != len(ids) or (last is not None and len(last) != len(ids)):
        raise ConfigError(f"features.path: {file} has {len(ids)} tokens and {len(states)} rows of states")
    return Taken(file.name, ids, states, last, normed)
