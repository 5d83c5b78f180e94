"""Runs inside SGLang's scheduler, for a test: writes down what the drafter proposed at every verify step.

A line of $DRAFTS_FILE is a request's {prompt, length, tokens}: `tokens` are the root x_length, which the target said,
and the drafts behind it.
"""

from __future__ import annotations

import json
import os
from typing import Any

DRAFT = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"


def load() -> None:
    if not os.environ.get("DRAFTS_FILE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(DRAFT, written_down, HookType.AROUND)


def written_down(original: Any, self: Any, batch: Any, **options: Any) -> Any:
    prompts = [list(request.origin_input_ids) for request in batch.reqs]
    lengths = batch.seq_lens.tolist()
    verify = original(self, batch, **options)
    tokens = verify.draft_token.view(len(prompts), -1).tolist() if prompts else []
    with open(os.environ["DRAFTS_FILE"], "a") as file:
        for prompt, length, said in zip(prompts, lengths, tokens, strict=True):
            file.write(json.dumps({"prompt": prompt, "length": length, "tokens": said}) + "\n")
    return verify
