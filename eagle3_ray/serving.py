"""The engine as it will serve: with a drafter, in the user's own settings."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.config import Drafting
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.run import Run


@contextlib.contextmanager
def serving(
    run: Run, drafter: str, drafting: Drafting | None, spec: CaptureSpec | None = None, watched: bool = False
) -> Iterator[tuple[SGLangEngine, Path]]:
    """An engine with the exported drafter, and the local folder of that; with no `drafting`, the target alone.

    `spec` and `watched` are those of `SGLangEngine`.
    """
    config = run.config
    dtype = config.evaluate.dtype or config.engine.dtype
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, dtype=dtype))
    args: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        folder = local_folder(run, f"{drafter}/export", Path(scratch))
        if drafting is not None:
            args = {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(folder),
                "speculative_num_steps": drafting.num_steps,
                "speculative_eagle_topk": drafting.topk,
                "speculative_num_draft_tokens": drafting.num_draft_tokens,
            }
        engine = SGLangEngine(config, run.folder, spec, args, watched)
        try:
            yield engine, folder
        finally:
            engine.close()


def local_folder(run: Run, key: str, scratch: Path) -> Path:
    """A folder of the store as a local path: itself, or a copy below `scratch`."""
    if run.files.local:
        return Path(run.files.url(key))
    for name in run.files.list(key):
        run.files.download(name, scratch / name)
    return scratch / key
