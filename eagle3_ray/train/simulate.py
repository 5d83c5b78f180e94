"""Accept length without an engine: a drafter walked over finished answers as serving would have drafted them.

Training walks its held-out samples before the first step and at the end; the evaluation walks the very answers that the
target gave alone (evaluate.simulate). A draft is right when it is what the target said, in a chain as in a tree
(trees.py): in greedy decoding that decides it, and of a sampled answer it is as likely as that serving accepts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.config import Drafting
from eagle3_ray.drafter.loss import targets, ttt_loss, walk
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.store.shards import Features
from eagle3_ray.train.features import batches
from eagle3_ray.train.trees import tree_hits


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
    drafting: Drafting,
    max_length: int = 2**31,
    dtype: torch.dtype = torch.float32,
) -> list[Walked]:
    """Each sample's completion tokens and verify steps, drafted as `drafting` says at each verify step (`walk`).

    `head` [V, H] is the target's, on the drafter's device. A sample is cut to `max_length` tokens; one without an
    answer is left out. Samples are taken one at a time, so they may come from a generator.
    """
    device, steps, walked = head.device, drafting.num_steps, []
    for sample in samples:
        for batch in batches([sample], max_length, dtype):
            batch = batch.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                chain = drafting.topk == 1
                hits = _chain_hits(drafter, batch, head, steps) if chain else tree_hits(drafter, batch, drafting)  # [T]
            tokens, verified = walk(hits, batch.loss_mask, steps)
            _, without = walk(torch.zeros_like(hits), batch.loss_mask, steps)
            walked.append(Walked(sample.id, tokens, verified, without))
    return walked


def _chain_hits(drafter: Drafter, batch: Batch, head: Tensor, steps: int) -> Tensor:
    """The drafts of a chain that are right at each slot, up to the first that is not: [T]."""
    said = batch.ahead(batch.input_ids, batch.last_rows, 1)  # [R]
    goal = targets(batch, said, drafter, steps)
    _, _, hits = ttt_loss(drafter, batch, goal, head[drafter.draft_ids], goal.count())
    return hits


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
