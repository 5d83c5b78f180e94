"""The target, running: one contract (`base.TargetEngine`), one file an engine."""

from __future__ import annotations

from pathlib import Path

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.config import ENGINES, Config, ConfigError
from eagle3_ray.engines.base import TargetEngine


def start_engine(config: Config, folder: Path, spec: CaptureSpec) -> TargetEngine:
    """Start the engine that `config.engine` names, ready to generate and to capture `spec`. Blocks until it is up."""
    if config.engine.name == "sglang":
        from eagle3_ray.engines.sglang import SGLangEngine

        return SGLangEngine(config, folder, spec)
    if config.engine.name == "transformers":
        from eagle3_ray.engines.transformers import TransformersEngine

        return TransformersEngine(config, folder, spec)
    raise ConfigError(f"engine.name: {config.engine.name!r} is none of {', '.join(ENGINES)}")
