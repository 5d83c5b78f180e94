"""The proof that training features equal serving features, on the engine that serves.

`proof.measure` runs where that engine does. Stored samples are served, and what SGLang's drafter really got for them
(engines/sglang_served.py) is compared with the store, with the trained drafter and with the corpus; `alignment.judge`
says what that means. Only small numbers leave the actor. Neither knows how a fault may have come about: they see a
store, a drafter and an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from eagle3_ray.alignment import UNKNOWN, judge
from eagle3_ray.capture import deciding_args, engine_version
from eagle3_ray.config import ConfigError, draftings
from eagle3_ray.engines.base import EngineError, RequestError
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.engines.sglang_nodes import actor_options
from eagle3_ray.engines.sglang_served import NothingWritten
from eagle3_ray.identify import Taken, identify, read_dump
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.prepare import Corpus
from eagle3_ray.proof import choose, drafter_faults, measure, trained_drafter
from eagle3_ray.run import Run, exported
from eagle3_ray.serving import served_folder, serving
from eagle3_ray.store.commits import Units
from eagle3_ray.strict_json import fingerprint, without_nan


def verify(run: Run, corpus: Corpus, features: Units, drafter: str, anew: bool = False) -> dict[str, Any]:
    """Judge what the engine that serves the exported `drafter` was seen to do; the summary is kept beside the drafter.

    What `watching` has left is judged; where there is nothing, or with `anew`, an engine is started for it. Ray must be
    running. The summary's `verdict` is aligned or misaligned; `causes` say why, and `warnings` what is wrong without
    harm. A kept one is of the files as they lie there now.
    """
    if run.config.engine.name != "sglang":
        raise ConfigError(f"engine.name: only sglang serves a drafter, {run.config.engine.name} does not")
    key = verification_key(run, features, drafter)
    summary = None if anew else _kept(run, key)
    if summary is not None:
        return summary
    hardware = run.config.hardware
    takes = {"num_cpus": hardware.cpus_per_actor, "num_gpus": hardware.gpus_per_actor, **actor_options(hardware)}
    measured = None if anew else run.read_json(f"{key}/measured.json")
    if measured is None:
        measured = ray.get(ray.remote(**takes, max_retries=1)(_alone).remote(run, corpus, features, drafter))
    causes = judge(measured)
    if any(UNKNOWN in cause for cause in causes):
        description, (sample, *_) = features.description(), choose(run, features)
        states = sample.aux.float().unflatten(1, (len(description["boundaries"]), -1))  # [T, A, H]
        taken = Taken(sample.id, sample.input_ids.long(), states)
        found = ray.get(ray.remote(**takes, max_retries=1)(identify).remote(run, [taken], description["boundaries"]))
        measured = {**measured, "identified": found["causes"][0] if found["causes"] else None}
        causes = judge(measured)
    summary = without_nan({"verdict": "misaligned" if causes else "aligned", "causes": causes, **measured})
    run.write_json(f"{key}/summary.json", summary)
    return summary


def elsewhere(run: Run) -> dict[str, Any]:
    """What another tool captured (features.path), against the target: no features of ours and no drafter are needed.

    The summary is kept in the store, at `summary_path`.
    """
    config, hardware, boundaries = run.config, run.config.hardware, list(run.spec.boundaries)
    given = read_dump(Path(str(config.features.path)), config.verify.samples, boundaries, run.spec.hidden_size)
    takes = {"num_cpus": hardware.cpus_per_actor, "num_gpus": hardware.gpus_per_actor, **actor_options(hardware)}
    found = ray.get(ray.remote(**takes, max_retries=1)(identify).remote(run, given, boundaries))
    decides = {
        "features_path": config.features.path,
        "target": run.target,
        "boundaries": boundaries,
        "engine_version": engine_version(config),
        "engine_dtype": config.engine.dtype,
        "verify": dataclasses.asdict(config.verify),
        **deciding_args(config, "capture"),
    }
    key = f"verifications/{fingerprint(decides)}/summary.json"
    summary = without_nan(found | {"features_path": config.features.path, "summary_path": run.files.url(key)})
    run.write_json(key, summary)
    return summary


def watching(run: Run, corpus: Corpus, features: Units, drafter: str) -> Callable[[SGLangEngine, Path], None] | None:
    """What `evaluate` is to call with its engine, so that one served engine does both; None where all is measured."""
    key = verification_key(run, features, drafter)
    if not run.config.verify.samples or _kept(run, key) or run.files.exists(f"{key}/measured.json"):
        return None
    return partial(_watch, run, corpus, features, drafter)


def _kept(run: Run, key: str) -> dict[str, Any] | None:
    """The summary at `key`, but for one of an engine that failed: it may have done so for reasons that pass."""
    summary = run.read_json(f"{key}/summary.json")
    return None if summary is None or "failed" in summary else summary


def _watch(run: Run, corpus: Corpus, features: Units, drafter: str, engine: SGLangEngine, folder: Path) -> None:
    measured = measure(run, corpus, features, drafter, engine, folder)
    run.write_json(f"{verification_key(run, features, drafter)}/measured.json", without_nan(measured))


def _alone(run: Run, corpus: Corpus, features: Units, drafter: str) -> dict[str, Any]:
    """A Ray task. An engine that fails on a faulty drafter leaves what can be told without it."""
    try:
        with serving(run, drafter, draftings(run.config.evaluate)[0], watched=True) as (engine, folder):
            return measure(run, corpus, features, drafter, engine, folder)
    except (EngineError, RequestError, NothingWritten) as error:
        with temporary_folder() as scratch:
            folder = served_folder(run, drafter, scratch)
            trained = trained_drafter(run, drafter, len(run.spec.boundaries))
            faults = drafter_faults(run, trained, folder)
        return {"failed": str(error), "drafter_faults": faults}


def verification_key(run: Run, features: Units, drafter: str) -> str:
    """One verification each of drafter as it lies there, features as committed, and settings of the serving engine."""
    decides = {
        "exported": exported(run, drafter),
        "features": [features.folder, *((commit.unit, commit.sha256) for commit in features.commits())],
        "dtype": run.config.evaluate.dtype or run.config.engine.dtype,
        "verify": dataclasses.asdict(run.config.verify),
        **{name: getattr(run.config.evaluate, name) for name in ("num_steps", "topk", "num_draft_tokens")},
        **deciding_args(run.config, "serve"),
    }
    return f"{drafter}/verifications/{fingerprint(decides)}"
