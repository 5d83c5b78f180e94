"""The engine as it will serve: with a drafter, in the user's own settings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.config import Drafting
from eagle3_ray.drafter.shape import MLA
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.run import Run
from eagle3_ray.store.filesystem import Filesystem, below


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
    with temporary_folder() as scratch:
        folder = served_folder(run, drafter, scratch)
        if drafting is not None:
            args = drafting_args(run, drafting, str(folder), _architectures(folder))
        engine = SGLangEngine(config, run.folder, spec, args, watched)
        try:
            yield engine, folder
        finally:
            engine.close()


def drafting_args(run: Run, drafting: Drafting, folder: str, architectures: list[str]) -> dict[str, Any]:
    """SGLang's ServerArgs for speculation with the drafter of these `architectures` in `folder`. The settings' win."""
    args = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": folder,
        "speculative_num_steps": drafting.num_steps,
        "speculative_eagle_topk": drafting.topk,
        "speculative_num_draft_tokens": drafting.num_draft_tokens,
    }
    if run.config.hardware.device == "cuda" and run.model.get("kv_lora_rank") and MLA not in architectures:
        # The draft worker would inherit the target's attention backend, and those for latent attention alone serve no
        # other drafter (srt/layers/attention/attention_registry.py). This one is what SGLang's own draft workers fall
        # back to (srt/speculative/draft_worker_common.py); unmeasured
        args["speculative_draft_attention_backend"] = "flashinfer"
    return args


def _architectures(folder: Path) -> list[str]:
    """Of the drafter in `folder`; none where it has no config.json that says so, which SGLang will report."""
    try:
        return json.loads((folder / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return []


def served_folder(run: Run, drafter: str, scratch: Path) -> Path:
    """drafter.path, or what was exported at the key `drafter`, as a local folder: itself, or a copy below `scratch`."""
    files, key = run.files, f"{drafter}/export"
    if run.config.drafter.path:
        files, key = Filesystem(run.config.drafter.path, run.config.store.storage_options), ""
    if files.local:
        return Path(files.url(key))
    for name in files.list(key):
        files.download(name, below(scratch, name))
    return scratch / key
