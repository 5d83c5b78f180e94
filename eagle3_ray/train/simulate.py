"""Accept length without an engine: a drafter walked over finished greedy answers as serving would have drafted them.

Training walks its held-out samples before the first step and at the end; the evaluation walks the very answers that the
target gave alone (evaluate.simulate). Chains only: a draft is right when it is the target's likeliest token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.drafter.loss import target_argmax, targets, ttt_loss, walk
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.store.shards import Features
from eagle3_ray.train.features import batches


@dataclass(frozen=True)
class Walked:
    """What one sample's answers would have taken."""

    id: str
    completion_tokens: int
    verify_steps: int
    never_right: int  # verify steps of a drafter without a hit


@torch.no_grad()
def simulate(
    drafter: Drafter,
    samples: Iterable[Features],
    head: Tensor,
    num_steps: int,
    max_length: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> list[Walked]:
    """Each sample's completion tokens and verify steps, `num_steps` drafted a verify step (`walk`).

    `head` [V, H] is the target's, on the drafter's device. A sample is cut to `max_length` tokens; one without an
    answer is left out. Samples are taken one at a time, so they may come from a generator.
    """
    device, draft_head, walked = head.device, head[drafter.draft_ids], []  # [Vd, H]
    for sample in samples:
        for batch in batches([sample], max_length, dtype):
            batch = batch.to(device)
            goal = targets(batch, target_argmax(batch.last_hidden, head), drafter, num_steps)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                _, _, hits = ttt_loss(drafter, batch, goal, draft_head, goal.count())  # [T]
            tokens, steps = walk(hits, batch.loss_mask, num_steps)
            _, without = walk(torch.zeros_like(hits), batch.loss_mask, num_steps)
            walked.append(Walked(sample.id, tokens, steps, without))
    return walked


def totals(walked: Iterable[Walked]) -> dict[str, Any]:
    """Accept length over all samples together.

    `never_right` is the accept length of a drafter without a hit: above 1, for prefill's own tokens count.
    """
    rows = list(walked)
    tokens, steps = sum(row.completion_tokens for row in rows), sum(row.verify_steps for row in rows)
    return {
        "completion_tokens": tokens,
        "verify_steps": steps,
        "accept_length": tokens / max(1, steps),
        "never_right": tokens / max(1, sum(row.never_right for row in rows)),
    }
