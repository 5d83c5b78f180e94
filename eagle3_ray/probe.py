"""The start-up probe: what an engine captures is compared with an independent reference before any of it is kept.

Where Transformers can hold the target too, every captured boundary must be nearest to, and equal to, the boundary of
that name there. For a larger target the engine itself is the witness: output head x captured last state must give the
engine's own likeliest tokens and their log-probabilities; of its boundaries the norms and the cosines to their
neighbours are recorded, and `layers_to_capture`, read back at the start, says which they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.drafter.target import load_head
from eagle3_ray.engines.base import Captured, RequestError, TargetEngine
from eagle3_ray.run import Run

REFERENCE_BYTES = 8 * 2**30  # of weights that Transformers loads too, in float32 on the actor's CPUs
ROWS = 256  # of one sequence that are compared
ERROR = {"float32": 1e-4, "bfloat16": 0.1}  # relative, mean over rows; in bf16 a neighbouring boundary is 0.3 away
LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.1}  # nats, median over rows
SAME_TOKEN = 0.9  # share of rows whose likeliest token must be the engine's: in 16 bits near ties fall either way
NORM_FACTOR = 4.0  # a sample's median norm may be so far outside the probe's


_kept: dict[str, list[Tensor]] = {}


class ProbeError(RuntimeError):
    """The engine captures something else than it was asked for: nothing it gives can be used."""


def probe(run: Run, engine: TargetEngine, sequences: list[list[int]]) -> dict[str, Any]:
    """Check `engine` on some sequences of token ids; returns what was compared, for the record.

    `norms` of the result has, a state, three quantiles of its rows' norms: 0.05, the median and 0.95, which a few
    massive rows leave alone. ProbeError names the boundary that came back in place of another.
    """
    sequences = [ids[:ROWS] for ids in sequences]
    captured = [engine.capture([ids])[0] for ids in sequences]
    states = [torch.cat(parts).float() for parts in zip(*(_states(run, one) for one in captured), strict=True)]
    names = [*(f"boundary {k}" for k in run.spec.boundaries), "last hidden"]
    norms = [state.norm(dim=-1) for state in states]
    for name, state, rows in zip(names, states, norms, strict=True):
        broken = int((~rows.isfinite()).sum())
        if broken:
            raise ProbeError(f"{name}: {broken} of {len(rows)} rows of the corpus's first prompts {_not_finite(state)}")
    reference: dict[str, Any] = {"reference": None}
    if run.config.engine.name != "transformers":
        reference = _against_transformers(run, sequences, states, names) or {}
        reference = reference or _against_head(run, engine, sequences, states)
    return {
        **reference,
        "rows": len(states[0]),
        "norms": {
            name: [round(float(value), 4) for value in norm.quantile(torch.tensor([0.05, 0.5, 0.95]))]
            for name, norm in zip(names, norms, strict=True)
        },
        "cosines": [
            round(float(torch.cosine_similarity(a, b, dim=-1).mean()), 4)
            for a, b in zip(states, states[1:], strict=False)
        ],
    }


def check_norms(run: Run, captured: Captured, norms: dict[str, list[float]]) -> None:
    """RequestError unless a sample's states are finite, no row is zeros, and their median norm is near the probe's."""
    for state, (name, (low, _, high)) in zip(_states(run, captured), norms.items(), strict=True):
        rows = state.float().norm(dim=-1)  # [T]
        if not rows.isfinite().all():
            raise RequestError(f"{name}: the states {_not_finite(state)}")
        if not rows.all():
            raise RequestError(f"{name}: a row is all zeros")
        middle = float(rows.median())
        if not low / NORM_FACTOR <= middle <= high * NORM_FACTOR:
            raise RequestError(f"{name}: the median norm {middle:.4g} is far from the probe's {low} to {high}")


def _not_finite(state: Tensor) -> str:
    """Why a row's norm is not finite: float32 holds no square of a value above 1.8e19, which no target has."""
    return "are so large that their squares are not finite" if state.isfinite().all() else "are not finite"


def _states(run: Run, captured: Captured) -> list[Tensor]:
    """One [T, H] a boundary, and the last."""
    return [*captured.aux.chunk(len(run.spec.boundaries), dim=-1), captured.last_hidden]


def _against_transformers(
    run: Run, sequences: list[list[int]], states: list[Tensor], names: list[str]
) -> dict[str, Any] | None:
    """Compare with every boundary of the same weights in Transformers; None where it cannot hold them."""
    found = _reference_states(run, sequences)
    if found is None:
        return None
    layers, limit, errors = len(found) - 1, ERROR[run.config.engine.dtype], {}
    for name, state, asked in zip(names, states, [*run.spec.boundaries, layers], strict=True):
        distances = [_error(state, other) for other in found]
        nearest = min(range(len(found)), key=distances.__getitem__)
        if nearest != asked or not distances[asked] <= limit:  # so that NaN is refused, here and below
            back = f"boundary {nearest}" if nearest < layers else "last hidden"
            raise ProbeError(
                f"{name} was asked for, {back} came back: its relative error against Transformers is "
                f"{distances[nearest]:.2g}, that of {name} {distances[asked]:.2g} (limit {limit})"
            )
        errors[name] = float(f"{distances[asked]:.2g}")
    return {"reference": "transformers", "errors": errors}


def _reference_states(run: Run, sequences: list[list[int]]) -> list[Tensor] | None:
    """[N, H] of every boundary, and the last; kept, since an engine may start many times."""
    size = sum(path.stat().st_size for path in run.folder.glob("*.safetensors"))
    if not 0 < size <= REFERENCE_BYTES or "quantization_config" in run.model:
        return None
    key = f"{run.folder} {sequences}"
    if key not in _kept:
        from eagle3_ray.engines.transformers import TransformersEngine

        config, layers = run.config, int(run.model["num_hidden_layers"])
        software = dataclasses.replace(config.engine, name="transformers", version=None, dtype="float32")
        config = dataclasses.replace(
            config, engine=software, hardware=dataclasses.replace(config.hardware, device="cpu")
        )
        spec = dataclasses.replace(run.spec, boundaries=tuple(range(layers)))
        try:
            engine = TransformersEngine(config, run.folder, spec)
        except (ValueError, ImportError):  # an architecture that it does not have
            return None
        wanted = [engine.capture([ids])[0] for ids in sequences]
        engine.close()
        aux, last = torch.cat([one.aux for one in wanted]), torch.cat([one.last_hidden for one in wanted])
        _kept.clear()
        _kept[key] = [*aux.chunk(layers, dim=-1), last]
    return _kept[key]


def _error(some: Tensor, other: Tensor) -> float:
    """Relative error of [N, H] rows, mean over them."""
    return float(((some - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-20)).mean())


def _against_head(run: Run, engine: TargetEngine, sequences: list[list[int]], states: list[Tensor]) -> dict[str, Any]:
    """Compare output head x last state with what the engine says comes next."""
    said = [best for ids in sequences for best in engine.next_tokens(ids)]
    logprobs, tokens = (torch.tensor(column) for column in zip(*said, strict=True))  # [N], [N]
    last = states[-1]  # [N, H]
    head = load_head(dataclasses.replace(run.config.target, weights=None))  # of the files that the engine runs
    pieces = [last @ piece.float().T for piece in head.split(16384)]  # of [N, V], V cut
    totals = torch.stack([piece.logsumexp(dim=-1) for piece in pieces]).logsumexp(dim=0)  # [N]
    logits = torch.cat(pieces, dim=-1)  # [N, V]
    same = float((logits.argmax(dim=-1) == tokens).float().mean())
    mine = logits.gather(1, tokens[:, None]).flatten() - totals
    error = float((mine - logprobs).abs().median())
    if same < SAME_TOKEN or not error <= LOGPROB_ERROR[run.config.engine.dtype]:
        raise ProbeError(
            f"last hidden: output head x state gives the engine's likeliest token on {same:.0%} of {len(tokens)} rows, "
            f"and its log-probability within {error:.2g} (median); what came back is not what the target answers from"
        )
    return {"reference": "output head", "same_token": round(same, 4), "logprob_error": float(f"{error:.2g}")}


def probe_sequences(prompts: list[list[int]]) -> list[list[int]]:
    """A few of the corpus's own prompts, enough for a stable range of norms."""
    chosen: list[list[int]] = []
    for ids in prompts:
        if sum(map(len, chosen)) < ROWS:
            chosen.append(ids)
    return chosen
