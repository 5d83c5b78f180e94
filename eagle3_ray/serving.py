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
from eagle3_ray.store.filesystem import Filesystem


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
        folder = served_folder(run, drafter, Path(scratch))
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


def served_folder(run: Run, drafter: str, scratch: Path) -> Path:
    """drafter.path, or what was exported at the key `drafter`, as a local folder: itself, or a copy below `scratch`."""
    files, key = run.files, f"{drafter}/export"
    if run.config.drafter.path:
        files, key = Filesystem(run.config.drafter.path, run.config.store.storage_options), ""
    if files.local:
        return Path(files.url(key))
    for name in files.list(key):
        files.download(name, scratch / name)
    return scratch / key
