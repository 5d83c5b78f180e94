"""What a run came to: runs/<run>/summary.json for programs, report.html for people."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from eagle3_ray import strict_json
from eagle3_ray.acceptance import LOOPING, SPEED
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.prepare import Corpus
from eagle3_ray.run import Run
from eagle3_ray.secrets import masked
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import below

# What the evaluation says, as it says it
MEASURED = ["accept_length", "accept_length_ci95", "accept_length_by_step", "tokens_per_verify_step", "verify_steps"]
MEASURED += ["completion_tokens", "distinct_bigram_share", "looping_answers", "greedy_identical", "identical_share"]
MEASURED += ["first_divergence", "different_answers", "refused", *SPEED, "by_domain", "by_drafting", "best_drafting"]
MEASURED += ["simulated", "not_simulated", "by_suite", "by_drafter", "best_drafter", "failed", "disagreement"]
MEASURED += ["turns_asked", "turns_answered"]
PACKAGES = ("sglang", "ray", "torch", "transformers", "hydra-core")


def summarise(
    run: Run,
    corpus: Corpus,
    features: Units,
    drafter: str,
    evaluation: dict[str, Any],
    verification: dict[str, Any] | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The run's summary.json, which is also written. `seconds` are those of this run's stages."""
    extraction = run.read_json(f"{features.folder}/summary.json") or {}
    exported = run.read_json(f"{drafter}/export.json") or {}
    folder = f"runs/{run.config.run}"
    stored = ("samples", "failed", "tokens_captured", "tokens_generated", "bytes_stored", "boundaries", "domains")
    summary = {
        "run": run.config.run,
        "target": run.config.target.name,
        **{name: evaluation[name] for name in MEASURED},
        "verification": verification,
        "prompts": corpus.summary["prompts"],
        "heldout": evaluation["conversations"],
        **{name: extraction.get(name) for name in stored},
        "layer_ids": exported.get("layer_ids"),
        "training": run.read_json(f"{drafter}/summary.json"),
        "seconds": seconds | {"total": round(sum(seconds.values()), 1)},
        "drafter": drafter,
        "drafter_path": run.files.url(f"{drafter}/export"),
        "report_path": run.files.url(f"{folder}/report.html"),
        "features_path": run.files.url(features.folder),
        "exclusive_create": run.files.exclusive,
        "engines": {"extract": extraction.get("engines"), "evaluate": [evaluation["engine"]]},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }
    run.write_json(f"{folder}/summary.json", summary)
    config = strict_json.dumps(masked(asdict(run.config)), indent=1)  # not sealed: it may be read as settings
    run.files.write(f"{folder}/config.json", config.encode())
    return summary


def report(run: Run, summary: dict[str, Any]) -> None:
    """Write runs/<run>/report.html: one file, pictures inside."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.jinja").render(
        summary=summary,
        evaluate=run.config.evaluate,
        looping=LOOPING,
        curves=_picture(training_curves(run, summary["drafter"])),
    )
    run.files.write(f"runs/{run.config.run}/report.html", page.encode())


def training_curves(run: Run, drafter: str) -> dict[str, list[tuple[int, float]]]:
    """The drafter's TensorBoard scalars: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: dict[str, list[tuple[int, float]]] = {}
    with temporary_folder() as scratch:
        for key in run.files.list(f"{drafter}/tensorboard"):
            local = below(scratch, key)
            run.files.download(key, local)
            events = EventAccumulator(str(local), size_guidance={"scalars": 0}).Reload()
            for name in events.Tags()["scalars"]:
                curves.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return {name: sorted(dict(points).items()) for name, points in sorted(curves.items())}


def _picture(curves: dict[str, list[tuple[int, float]]]) -> str | None:
    """Loss, accuracy and held-out accept length by step as a PNG, base64; None where nothing was trained."""
    if not curves:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"loss": "loss", "prefix_accuracy": "prefix accuracy", "heldout": "held out, walked"}
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.6))
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        for name, points in curves.items():
            if name.startswith(f"{kind}/"):
                steps, values = [step for step, _ in points], [value for _, value in points]
                shown = values if kind == "heldout" else _smoothed(values)
                axis.plot(steps, shown, label=name.partition("/")[2].replace("_", " "))
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    plt.close(figure)
    return base64.b64encode(data.getvalue()).decode()


def _smoothed(values: list[float], width: int = 20) -> list[float]:
    """The mean of the last `width` values at each."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
