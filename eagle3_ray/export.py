"""A trained drafter as SGLang serves it: the folder `<drafter>/export/`, with its model card, whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ray

from eagle3_ray import strict_json
from eagle3_ray.capture import target_config
from eagle3_ray.card import place, publish_card
from eagle3_ray.config import FORMATS, ConfigError
from eagle3_ray.drafter import formats
from eagle3_ray.drafter.checkpoint import check_folder
from eagle3_ray.drafter.faults import EMBEDDING
from eagle3_ray.drafter.shape import read_config
from eagle3_ray.engines.sglang import ask_layer_ids
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.run import Run
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.tensors import Tensors
from eagle3_ray.train.trainer import export_drafter, trained_drafter


class ExportError(RuntimeError):
    """The exported folder is not what SGLang would serve."""


def export(run: Run, features: Units, drafter: str) -> dict[str, Any]:
    """Export the drafter trained below the key `drafter`, with the target's own SGLang layer ids. Ray must be running.

    The ids are asked of SGLang where its engines run, not on the driver, which may have no sglang. ExportError where
    SGLang would take the folder otherwise than it is meant, or training ended in losses that are not finite; then
    nothing is uploaded. With another export.format, its
    folder lies beside the one for SGLang, and the answer names it as `also`.
    """
    _check_training(run, drafter)
    done = run.read_json(f"{drafter}/export.json")
    if done is not None and done.get("embedding") == run.config.export.embedding:
        return done | _beside(run, drafter, done["boundaries"])
    boundaries = features.description()["boundaries"]
    ask = ray.remote(num_cpus=1, num_gpus=0.01 if run.config.hardware.device == "cuda" else 0)(ask_layer_ids)
    done = export_with(run, features, drafter, ray.get(ask.remote(run.config, boundaries)))
    return done | _beside(run, drafter, boundaries)


def _check_training(run: Run, drafter: str) -> None:
    """That there is a finished one, and that it ended well: train.on_nonfinite has not always been there."""
    summary = run.read_json(f"{drafter}/summary.json")
    if summary is None:
        raise ConfigError(f"no finished drafter at {run.files.url(drafter)}; run ray_jobs.train first")
    losses = summary.get("loss", [])
    if not all(isinstance(loss, (int, float)) and math.isfinite(loss) for loss in losses):
        raise ExportError(
            f"the last losses of the drafter at {run.files.url(drafter)} are {losses}: it was trained with "
            f"train.lr={summary['settings']['train'].get('lr')} to no end; a lower one trains another drafter"
        )


def export_with(run: Run, features: Units, drafter: str, layer_ids: list[int]) -> dict[str, Any]:
    """`export`, with the layer ids that mean the features' boundaries."""
    with temporary_folder() as scratch:
        folder = scratch / "export"
        export_drafter(run.config, run.files, drafter, layer_ids, folder, run.config.engine.dtype)
        faults = check_folder(folder, run.model)
        if faults:
            cast = f" (exported in engine.dtype={run.config.engine.dtype})"
            raise ExportError(f"SGLang would not serve this drafter as it was trained{cast}: " + "; ".join(faults))
        if run.files.exists(f"{drafter}/export.json"):  # of an export with other settings
            run.files.delete(f"{drafter}/export.json")
        for form in FORMATS[1:]:
            run.files.delete(f"{drafter}/export-{form}/config.json")
        for path in sorted(folder.iterdir()):
            run.files.upload(path, f"{drafter}/export/{path.name}")
        summary = {
            "drafter_path": run.files.url(f"{drafter}/export"),
            "boundaries": features.description()["boundaries"],
            "layer_ids": layer_ids,
            "dtype": run.config.engine.dtype,
            "embedding": run.config.export.embedding,
            "parameters": _parameters(folder, run.model["hidden_size"]),
            "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        }
    publish_card(run, features, drafter, summary)
    run.write_json(f"{drafter}/export.json", summary)
    return summary


def _beside(run: Run, drafter: str, boundaries: list[int]) -> dict[str, str]:
    """The folder of export.format, if that is not SGLang's own. Its config.json comes last: with it, it is whole."""
    config, form = run.config, run.config.export.format
    key = f"{drafter}/export-{form}"
    if form == "sglang":
        return {}
    dtype, embedding = config.engine.dtype, config.export.embedding == "target"
    architectures = target_config(run.folder).get("architectures") or []
    served = {"target": place(config.target.path), "architectures": architectures}
    served["num_steps"] = config.evaluate.num_steps
    shape = read_config(run.files.read_json(f"{drafter}/weights/config.json"))
    try:
        made = formats.config_json(shape, boundaries, form, dtype, served)
    except ValueError as error:
        raise ExportError(f"export.format: {error}") from None
    there = run.read_json(f"{key}/config.json")
    if there is None:
        with temporary_folder() as scratch:
            path = scratch / "model.safetensors"
            formats.write_weights(path, trained_drafter(config, run.files, drafter, dtype), form, dtype, embedding)
            run.files.upload(path, f"{key}/{path.name}")
    if there != made:  # what it says of serving may be of other settings
        run.files.write(f"{key}/config.json", strict_json.dumps(made, indent=1).encode())
    return {"also": run.files.url(key)}


def _parameters(folder: Path, target_hidden_size: int) -> dict[str, Any]:
    """How many were trained: all but the target's embedding and the vocabulary maps."""
    tensors = Tensors(Filesystem(str(folder)))
    shapes = {name: tensors.entry(name).shape for name in tensors.names() if name not in ("d2t", "t2d")}
    own = EMBEDDING in shapes and shapes[EMBEDDING][1] != target_hidden_size
    trained = sum(math.prod(shape) for name, shape in shapes.items() if own or name != EMBEDDING)
    return {"trained": trained, "own_embedding": own}
