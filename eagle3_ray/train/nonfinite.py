"""A step of training whose numbers cannot be right: what is kept of it, and what is to blame.

The record `<drafter>/nonfinite/<step>.json` has the step's numbers, how parameters and moments are, each sample on all
workers (its unit, how many values are not finite, the largest of the others, its loss alone) and the settings. A number
that is not finite is null there; `fault` has it in words.

Finding out costs a forward pass a sample and one over parameters and states; an ordinary step pays nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3_ray.config import TrainConfig
from eagle3_ray.drafter.loss import Metrics
from eagle3_ray.store.commits import Commit
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.shards import STATES, Features
from eagle3_ray.strict_json import without_nan
from eagle3_ray.train.features import batches
from eagle3_ray.train.loop import MOMENTS, Training, mean_loss

MOST = 10  # steps in a row that may be skipped
FAR = 100.0  # times the largest value of other samples: massive outliers are in all of them, and some times apart
LARGE = 1e4  # no parameter of a drafter that learns comes near it


class NonFiniteError(RuntimeError):
    """Training has stopped at a step whose numbers cannot be right."""


def examine(
    training: Training,
    samples: list[Features],
    others: Iterable[Features],
    commits: list[Commit],
    metrics: Metrics,
    facts: dict[str, float],
) -> dict[str, Any]:
    """The record of the last step, the same on every worker; all must call it.

    `others` are samples to compare with, `commits` those of all samples. `suspected` is one of lr, features and sample,
    `because` a sentence; `stops_because` another one, or None where training can go on.
    """
    units = {sample["id"]: commit.unit for commit in commits for sample in commit.samples}
    usual = [_states(training, sample) for sample in others if sample.id not in {s.id for s in samples}]
    here = {
        "samples": [{"id": s.id, "unit": units.get(s.id), **_sample(training, s)} for s in samples],
        "usual": {name: max((_largest(one[name]) for one in usual), default=0.0) for name in STATES},
    }
    everywhere = _gathered(here)
    moments = {f"{which}.{name}": training.moment(name, which) for which in MOMENTS for name in training.parameters}
    record: dict[str, Any] = {
        "step": training.taken,
        "fault": training.fault,
        **facts,
        "loss": mean_loss(metrics),
        "loss_by_step": metrics.means()["loss"],
        "usual_loss": training.usual_loss(),
        "recent_losses": list(training.losses),
        "skipped": training.skipped,
        "parameters": _tensors(training.parameters),
        "moments": _tensors(moments),
        "samples": [sample | {"worker": rank} for rank, one in enumerate(everywhere) for sample in one["samples"]],
        "usual_largest": {name: max(one["usual"][name] for one in everywhere) for name in here["usual"]},
        "settings": asdict(training.config),
    }
    record["suspected"], record["because"] = suspect(record)
    record["stops_because"] = stops(training.config, record)
    return without_nan(record)


def suspect(record: dict[str, Any]) -> tuple[str, str]:
    """lr, features or sample, and why. Features come first: whatever they hold, parameters must follow it."""
    samples, usual, parameters = record["samples"], record["usual_largest"], record["parameters"]
    for name in usual:
        for sample in samples:
            broken, largest = sample["not_finite"][name], sample["largest"][name]
            if broken:
                return "features", f"{_named(sample)} holds {broken} values of {name} that are not finite"
            if largest > FAR * usual[name] > 0:
                return "features", (
                    f"{_named(sample)} reaches {largest:.3g} in {name}, where other samples reach {usual[name]:.3g}"
                )
    for kind in ("parameters", "moments"):
        if record[kind]["not_finite"]:
            names = record[kind]["not_finite"]
            return (
                "lr",
                f"{len(names)} of {record[kind]['tensors']} {kind}, or their squares, are not finite: {names[0]}",
            )
    if parameters["largest"] > LARGE:
        return "lr", f"a parameter has grown to {parameters['largest']:.3g}"
    in_a_row = _in_a_row(record)
    if in_a_row > 1:
        return "lr", f"{in_a_row} steps in a row are such, each with other samples"
    limit = record["settings"]["loss_spike"] * record["usual_loss"]
    judged = [sample for sample in samples if sample["loss"] is not None]
    odd = [sample for sample in judged if not (math.isfinite(sample["loss"]) and sample["loss"] <= limit)]
    if odd and len(odd) <= len(judged) / 2:
        return "sample", f"{_named(odd[0])} alone has a loss of {odd[0]['loss']:.4g}, most others of the batch have not"
    if len(judged) == 1 and record["recent_losses"]:
        return "sample", f"{_named(judged[0])} is the batch's only one with a loss, and those before had no such loss"
    return "lr", "the features are in the usual range, and no sample of the batch stands out"


def stops(config: TrainConfig, record: dict[str, Any]) -> str | None:
    """Why training must stop at this step; None where it can skip it."""
    if config.on_nonfinite == "stop":
        return "train.on_nonfinite is stop"
    if record["parameters"]["not_finite"] or record["moments"]["not_finite"]:
        return "no skipped batch makes parameters finite again"
    in_a_row, most = _in_a_row(record), min(MOST, config.steps)
    return f"{in_a_row} steps in a row were skipped, and {most} may be" if in_a_row >= most else None


def sentence(record: dict[str, Any]) -> str:
    """What a user is told: what happened, what is suspected and why, and what to change."""
    settings = record["settings"]
    asked = ", ".join(f"train.{name}={settings[name]}" for name in ("lr", "warmup_share", "max_grad_norm"))
    change = {
        "lr": f"{asked}: with a lower train.lr it is another drafter, trained from its first step",
        "features": "leave the batch out with train.on_nonfinite=skip, or capture the unit anew",
        "sample": "leave the batch out with train.on_nonfinite=skip; a higher train.loss_spike bears such a loss",
    }[record["suspected"]]
    suspected = f"Suspected: {record['suspected']}, since {record['because']} ({change})"
    return f"step {record['step']}: {record['fault']}. {suspected}"


# ---------------------------------------------------------------- the record in the store


def keep(files: Filesystem, prefix: str, record: dict[str, Any]) -> None:
    """By one worker. Says so, where training goes on."""
    files.write_json(f"{prefix}/nonfinite/{record['step']:08d}.json", record)
    if not record["stops_because"]:
        print(f"train: skipped {sentence(record)}", flush=True)


def forget(files: Filesystem, prefix: str, taken: int) -> None:
    """Remove the records of steps behind `taken`, which will be taken again."""
    for key in files.list(f"{prefix}/nonfinite"):
        if int(Path(key).stem) > taken:
            files.delete(key)


def check_stopped(files: Filesystem, prefix: str) -> None:
    """NonFiniteError where the workers stopped at a step. To Ray Train an error is a worker to start again, so the
    driver says it."""
    for key in files.list(f"{prefix}/nonfinite")[-1:]:
        record = files.read_json(key)
        if record["stops_because"]:
            saved = [int(Path(name).stem) for name in files.list(f"{prefix}/state")]
            raise NonFiniteError(
                f"train: {sentence(record)}. Training stopped, since {record['stops_because']}; the next run goes on "
                f"behind step {max(saved, default=0)}. All that is known: {files.url(key)}"
            )


# ---------------------------------------------------------------- what is found


def _states(training: Training, sample: Features) -> dict[str, Tensor]:
    """The states as they are trained on: cut, in the dtype of training, and none of a sample without a response."""
    whole = batches([sample], training.config.max_length, training.dtype)
    return {name: torch.cat([getattr(one, name) for one in whole]) if whole else torch.empty(0) for name in STATES}


def _sample(training: Training, sample: Features) -> dict[str, Any]:
    states = _states(training, sample)
    return {
        "tokens": len(sample.input_ids),
        "not_finite": {name: int((~tensor.isfinite()).sum()) for name, tensor in states.items()},
        "largest": {name: _largest(tensor) for name, tensor in states.items()},
        "loss": training.loss_alone(sample),
    }


def _largest(tensor: Tensor) -> float:
    """Of the values that are finite."""
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


@torch.no_grad()
def _tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "tensors": len(tensors),
        "not_finite": [name for name, tensor in tensors.items() if not torch.linalg.vector_norm(tensor).isfinite()],
        "largest": max(_largest(tensor) for tensor in tensors.values()),
    }


def _in_a_row(record: dict[str, Any]) -> int:
    """Steps skipped up to this one."""
    skipped, step = record["skipped"], record["step"]
    return next((i for i, other in enumerate(reversed(skipped)) if other != step - i), len(skipped))


def _named(sample: dict[str, Any]) -> str:
    return f"sample {sample['id']} of unit {sample['unit']}"


def _gathered(here: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every worker, by rank."""
    if not dist.is_initialized():
        return [here]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return everywhere
