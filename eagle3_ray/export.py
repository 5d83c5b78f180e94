"""A trained drafter as SGLang serves it: the folder `<drafter>/export/`, written whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray

from eagle3_ray.config import ConfigError
from eagle3_ray.engines.sglang import ask_layer_ids
from eagle3_ray.run import Run
from eagle3_ray.store.commits import Units
from eagle3_ray.train.trainer import export_drafter


def export(run: Run, features: Units, drafter: str) -> dict[str, Any]:
    """Export the drafter trained below the key `drafter`, with the target's own SGLang layer ids. Ray must be running.

    The ids are asked of SGLang where its engines run, not on the driver, which may have no sglang.
    """
    done = run.read_json(f"{drafter}/export.json")
    if done is not None:
        return done
    if not run.files.exists(f"{drafter}/summary.json"):
        raise ConfigError(f"no finished drafter at {run.files.url(drafter)}; run ray_jobs.train first")
    boundaries = features.description()["boundaries"]
    ask = ray.remote(num_cpus=1, num_gpus=0.01 if run.config.hardware.device == "cuda" else 0)(ask_layer_ids)
    layer_ids = ray.get(ask.remote(run.config, boundaries))
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        folder = Path(scratch, "export")
        export_drafter(run.config, run.files, drafter, layer_ids, folder, run.config.engine.dtype)
        for path in sorted(folder.iterdir()):
            run.files.upload(path, f"{drafter}/export/{path.name}")
        size = sum(path.stat().st_size for path in folder.iterdir())
    summary = {
        "drafter_path": run.files.url(f"{drafter}/export"),
        "boundaries": boundaries,
        "layer_ids": layer_ids,
        "dtype": run.config.engine.dtype,
        "bytes": size,
    }
    run.write_json(f"{drafter}/export.json", summary)
    return summary
