"""Targets, loss and accuracies of a training-time-test forward, at valid slots only.

Slot i of step k is taught the target's distribution at position i+1+k, so all steps share one target row a position. A
slot's loss compares the drafter with that distribution, restricted to the draft vocabulary and renormalised. A step's
loss is the mean over the valid slots whose target argmax is in the draft vocabulary, the total the mean over steps,
step k with the weight step_decay**k. Slots with another argmax have no loss and count as a miss in every accuracy.

With p that distribution, q the drafter's and overlap = sum(min(p, q)), the chance that a draft is accepted where the
draft vocabulary has all of p; where it has a share Z of it, that chance is sum(min(Zp, q)), and overlap is above it:

    soft_ce    -sum(p log q)
    lk_alpha   -log(overlap)
    lk_lambda  w KL(p|q) + (1 - w) (1 - overlap), w = exp(-3 overlap) without gradient

The last two are the LK losses of Samarin et al., "Direct Acceptance Rate Optimization for Speculative Decoding",
arXiv:2602.23881, with w a slot's own: their trainer takes it from a step's mean overlap, here every slot stands alone.

Nothing here divides by what one worker or one micro-batch sees: `count` gives the numbers, the caller adds them up over
all workers, and `ttt_loss` takes the sums. Logits exist a chunk at a time: the gradient of each chunk is taken on the
spot (`FusedLoss`), so that [n, Vd] is neither kept nor computed twice. `eager_loss` is its definition.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.drafter.model import Batch, Drafter, valid_slots

CHUNK_ELEMENTS = 2**23  # of a logits chunk on a CPU; 8 times that on a GPU
LK_DECAY = 3.0  # of w with the overlap, as in the paper


@torch.no_grad()
def target_argmax(last_hidden: Tensor, head: Tensor) -> Tensor:
    """The target's greedy token over its whole vocabulary, of equals the first: [R, H] x [V, H] -> [R] int64."""
    best = torch.full_like(last_hidden[:, 0], float("-inf"))  # [R]
    token = torch.zeros_like(best, dtype=torch.int64)  # [R]
    start = 0
    for block in head.split(max(1, _chunk(last_hidden) // 8)):  # [B, H]; on a CPU its logits stay in cache
        top, at = (last_hidden @ block.T).max(-1)  # [R] each
        token = torch.where(top > best, start + at, token)
        best = torch.maximum(best, top)
        start += len(block)
    return token


def _chunk(other: Tensor) -> int:
    """Rows that are multiplied with those of `other` at a time."""
    return CHUNK_ELEMENTS * (8 if other.is_cuda else 1) // max(1, len(other))


@dataclass
class Targets:
    """What each step of a batch is taught. A row is one of `batch.last_hidden`; -1 in `draft` is out of vocabulary."""

    slots: list[Tensor]  # [n_k] of step k, ascending
    rows: list[Tensor]  # [n_k]: the target row of each
    draft: Tensor  # [R]: the draft id of the target's argmax, or -1

    def count(self) -> Tensor:
        """[K] int64: slots that have a loss."""
        return torch.stack([(self.draft[rows] >= 0).sum() for rows in self.rows])


def targets(batch: Batch, argmax: Tensor, drafter: Drafter, steps: int) -> Targets:
    """`argmax` [R]: the target's greedy token of each row of `batch.last_hidden`."""
    slots = valid_slots(batch, steps)
    row_of = torch.full_like(batch.input_ids, -1)  # [N]
    row_of[batch.last_rows] = torch.arange(len(batch.last_rows), device=row_of.device)
    rows = [row_of[here + 1 + step] for step, here in enumerate(slots)]
    if any((r < 0).any() for r in rows):
        raise ValueError("a valid slot's target position has no last hidden state in the shard")
    to_draft = torch.full_like(drafter.t2d, -1, dtype=torch.int64)  # [V]
    to_draft[drafter.draft_ids] = torch.arange(len(drafter.d2t), device=to_draft.device)
    return Targets(slots, rows, to_draft[argmax])


@dataclass
class Metrics:
    """Sums over slots, one entry a step: add them up over batches and workers, then read the means."""

    loss: Tensor  # [K] float64: summed loss
    count: Tensor  # [K]: slots that have a loss
    hits: Tensor  # [K]: the drafter's greedy token is the target's
    prefix_hits: Tensor  # [K]: and so at every step before
    slots: Tensor  # [K]: valid slots

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def zero(cls, steps: int, device: torch.device | str = "cpu") -> Metrics:
        return cls(*(torch.zeros(steps, dtype=torch.float64, device=device) for _ in fields(cls)))

    def stacked(self) -> Tensor:
        return torch.stack([getattr(self, f.name) for f in fields(self)])  # [5, K] float64

    def means(self) -> dict[str, list[float]]:
        """loss, greedy_accuracy and prefix_accuracy, each [K]; 0 where there is no slot."""
        slots = self.slots.clamp(min=1)
        return {
            "loss": (self.loss / self.count.clamp(min=1)).tolist(),
            "greedy_accuracy": (self.hits / slots).tolist(),
            "prefix_accuracy": (self.prefix_hits / slots).tolist(),
        }


def ttt_loss(
    drafter: Drafter,
    batch: Batch,
    goal: Targets,
    head: Tensor,
    counts: Tensor,
    kind: str = "soft_ce",
    step_decay: float = 1.0,
) -> tuple[Tensor, Metrics, Tensor]:
    """Loss of one micro-batch, its sums, and the prefix hits by slot [N].

    `head` [Vd, H] are the rows of the target's lm_head that are in the draft vocabulary, `counts` [K] the slots with a
    loss in the whole global batch. Summed over micro-batches and workers, the losses are the weighted mean over steps
    of the steps' means.
    """
    steps = len(goal.slots)
    states = drafter(batch, goal.slots)  # [n_k, H] a step
    taught = [goal.draft[rows] >= 0 for rows in goal.rows]  # [n_k]
    weights = step_decay ** torch.arange(steps, device=counts.device)  # [K]
    scales = weights / (weights.sum() * counts.clamp(min=1))  # [K]
    sizes = [int(mask.sum()) for mask in taught]
    row = torch.cat([rows[mask] for rows, mask in zip(goal.rows, taught, strict=True)])  # [m], of all steps
    scale = scales.repeat_interleave(torch.tensor(sizes, device=scales.device))  # [m]
    hidden = torch.cat([state[mask] for state, mask in zip(states, taught, strict=True)])  # [m, H]
    weight = drafter.lm_head.weight  # [Vd, H]; one that wants no gradient has none taken
    given = hidden, weight if torch.is_grad_enabled() else weight.detach(), batch.last_hidden, head, row, scale
    loss, each, greedy = FusedLoss.apply(*given, kind)

    metrics, prefix = Metrics.zero(steps, each.device), torch.zeros_like(batch.input_ids)
    alive = torch.ones_like(batch.loss_mask)  # [N]: right at every step so far
    for step, (here, mask) in enumerate(zip(goal.slots, taught, strict=True)):
        hit = torch.zeros_like(mask)  # [n_k]
        hit[mask] = greedy.split(sizes)[step] == goal.draft[goal.rows[step]][mask]
        alive[here] &= hit
        prefix[here] += alive[here]
        metrics.loss[step] = each.split(sizes)[step].sum(dtype=torch.float64)
        metrics.count[step], metrics.slots[step] = mask.sum(), len(here)
        metrics.hits[step], metrics.prefix_hits[step] = hit.sum(), alive[here].sum()
    return loss, metrics, prefix


class FusedLoss(torch.autograd.Function):
    """sum(scale * loss) of draft logits against target rows, with the gradients computed chunk by chunk.

    hidden [m, H] (normed), weight [Vd, H], target_hidden [R, H], target_head [Vd, H]; row [m]: the target row of each
    slot, scale [m], `kind` of loss. Also returns each slot's loss [m] and greedy draft id [m], without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor,
        target_head: Tensor,
        row: Tensor,
        scale: Tensor,
        kind: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        order = row.argsort(stable=True)  # slots of one target row together: each target row is computed once
        used, first = row[order].unique_consecutive(return_counts=True)  # [u], [u]
        each = hidden.new_empty(len(row), dtype=torch.promote_types(hidden.dtype, torch.float32))  # [m]
        greedy = torch.empty_like(row)  # [m]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        start = 0
        most = max(1, _chunk(weight) // max(first.tolist(), default=1))  # target rows of a chunk of slots
        for rows, repeats in zip(used.split(most), first.split(most), strict=True):
            at = order[start : start + int(repeats.sum())]  # [c]
            start += len(at)
            goal = (target_hidden[rows] @ target_head.T).to(each.dtype).softmax(-1)  # [u, Vd]
            goal = goal.repeat_interleave(repeats, dim=0)  # [c, Vd]
            h = hidden[at]  # [c, H]
            logits = (h @ weight.T).to(each.dtype)  # [c, Vd]
            each[at], greedy[at], grad = _slot_losses(kind, goal, logits)
            if any(ctx.needs_input_grad):
                grad = grad.mul_(scale[at, None]).to(h.dtype)  # [c, Vd]
            if grad_hidden is not None:
                grad_hidden[at] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(each, greedy)
        return (each * scale).sum(), each, greedy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        taken = [None if of is None else grad * of for of in ctx.saved_tensors]  # by hidden, by weight
        return *taken, None, None, None, None, None


def _slot_losses(kind: str, goal: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each slot's loss [c], its likeliest draft id [c], and its loss's gradient by the logits [c, Vd].

    goal [c, Vd] is p; `logits` [c, Vd] are overwritten, step by step, so that few tensors of that size exist.
    """
    top, greedy = logits.max(-1, keepdim=True)  # [c, 1] each
    logits.sub_(top)
    expected = torch.linalg.vecdot(goal, logits)[:, None]  # [c, 1]
    total = logits.exp_().sum(-1, keepdim=True)  # [c, 1]
    cross = total.log() - expected  # [c, 1]
    draft = logits.div_(total)  # [c, Vd]: q
    if kind == "soft_ce":
        return cross[:, 0], greedy[:, 0], draft.sub_(goal)
    overlap = torch.minimum(goal, draft).sum(-1, keepdim=True)  # [c, 1]
    below = draft * (draft < goal)  # [c, Vd]: only these tokens' q are in the overlap
    rise = below - draft * below.sum(-1, keepdim=True)  # [c, Vd]: the overlap's gradient
    if kind == "lk_alpha":
        overlap = overlap.clamp(min=torch.finfo(overlap.dtype).tiny)
        return -overlap[:, 0].log(), greedy[:, 0], rise.div_(-overlap)
    w = (-LK_DECAY * overlap).exp()  # [c, 1]
    divergence = cross - torch.special.entr(goal).sum(-1, keepdim=True)  # [c, 1]
    each = w * divergence + (1 - w) * (1 - overlap)  # [c, 1]
    return each[:, 0], greedy[:, 0], draft.sub_(goal).mul_(w).sub_(rise.mul_(1 - w))


def eager_loss(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_head: Tensor,
    row: Tensor,
    scale: Tensor,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `FusedLoss`."""
    goal = (target_hidden @ target_head.T).softmax(-1)[row]  # [m, Vd]
    logits = hidden @ weight.T  # [m, Vd]
    log_draft = logits.log_softmax(-1)  # [m, Vd]
    overlap = torch.minimum(goal, log_draft.exp()).sum(-1)  # [m]
    if kind == "soft_ce":
        each = -(goal * log_draft).sum(-1)  # [m]
    elif kind == "lk_alpha":
        each = -overlap.log()  # [m]
    else:
        w = (-LK_DECAY * overlap.detach()).exp()  # [m]
        each = w * (goal * (goal.log() - log_draft)).sum(-1) + (1 - w) * (1 - overlap)  # [m]
    return (each * scale).sum(), each, logits.argmax(-1)


def walk(prefix_hits: Tensor, loss_mask: Tensor, num_steps: int) -> tuple[int, int]:
    """Completion tokens and verify steps of one sample's greedy answers, drafted `num_steps` ahead as serving does.

    The first response token x_p comes from prefill, so the first verify step drafts at slot p-1; each one accepts the
    slot's prefix hits and a bonus token, and the next starts behind them. Their quotient is the simulated accept
    length: as in SGLang, the prefill's own token counts as a completion token. prefix_hits [T], loss_mask [T].
    """
    hits = prefix_hits.clamp(max=num_steps).tolist()
    response = [False, *loss_mask.tolist(), False]
    tokens = verified = 0
    for p in range(1, len(hits)):
        if response[p + 1] and not response[p]:  # x_p starts an answer; `response` is shifted by one
            end = response.index(False, p + 1) - 1  # behind its last token
            tokens += end - p
            slot = p - 1
            while slot + 2 < end:
                slot += hits[slot] + 1
                verified += 1
    return tokens, verified
