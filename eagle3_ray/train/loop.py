"""One worker's training: a step on its share of a global batch, and the state that resumes it to the bit.

Every step first counts the slots that have a loss, over all workers, and divides by that; then gradients are simply
summed. So the result does not depend on how a batch is cut into workers and micro-batches. Gradients are reduced by
hand and not by DistributedDataParallel, which averages over workers and waits for a backward pass of each: a worker
may have several micro-batches, or, where its share holds no valid slot, none. It then takes the step with zeros.

A step whose numbers cannot be right makes no update: clipping would turn a gradient norm that is not finite into a
parameter that is not, and one that is wrong would stay in AdamW's moments. All workers decide alike, since they look at
sums over all of them; the price is that the optimizer starts when these have come to the host, and not before.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3_ray.config import Drafting, TrainConfig
from eagle3_ray.drafter.loss import Metrics, target_argmax, targets, ttt_loss
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.store.shards import Features
from eagle3_ray.train.features import batches, check_fits
from eagle3_ray.train.simulate import simulate, totals

USUAL = 50  # steps whose mean loss is the usual one
LEAST_USUAL = 1.0  # nats: below it a loss may multiply without any harm
LOSSES, SKIPPED = "recent_losses", "skipped_steps"  # in a checkpoint
MOMENTS = ("exp_avg", "exp_avg_sq")


class Training:
    """A drafter, its optimizer and the target's head [V, H] on one device; `taken` steps so far, of which those in
    `skipped`, counted from 1, made no update. `fault` says why the last one did not."""

    def __init__(self, config: TrainConfig, drafter: Drafter, head: Tensor, device: torch.device) -> None:
        self.config, self.device, self.taken = config, device, 0
        self.losses: deque[float] = deque(maxlen=USUAL)  # of the steps that made an update
        self.skipped: list[int] = []
        self.fault: str | None = None
        self.dtype = getattr(torch, config.dtype)
        self.drafter = drafter.to(device)
        self.head = head.to(device, self.dtype)
        self.draft_head = self.head[self.drafter.draft_ids]  # [Vd, H]
        self.parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self._argmax: dict[str, Tensor] = {}  # of each sample's target rows: 4 bytes a row spare a large product

    def step(self, samples: list[Features]) -> tuple[Metrics, dict[str, float]]:
        """One optimizer step, or none where there is a `fault`. The metrics are those of the whole global batch."""
        steps = self.config.ttt_steps
        metrics, counts = Metrics.zero(steps, self.device), torch.zeros(steps, dtype=torch.int64, device=self.device)
        check_fits(samples, self.drafter.config)
        prepared = []
        for waiting in batches(samples, self.config.max_length, self.dtype):
            batch = replace(waiting, aux=waiting.aux[:0]).to(self.device)  # targets need none
            goal = targets(batch, self._greedy(batch), self.drafter, steps)
            counts += goal.count()
            prepared.append((waiting, goal))  # one micro-batch's states at a time lie on the device
        _sum(counts)
        seen = torch.zeros(2, dtype=torch.float64, device=self.device)
        for waiting, goal in prepared:
            batch = waiting.to(self.device)
            seen[0] += len(batch.input_ids)
            for states in (batch.aux, batch.last_hidden):  # what is wrong in them need not show in the loss
                seen[1] += torch.linalg.vector_norm(states, dtype=torch.float32)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                given = self.drafter, batch, goal, self.draft_head, counts
                loss, sums, _ = ttt_loss(*given, self.config.loss, self.config.step_decay)
            loss.backward()
            metrics += sums
        norm = self._gradient()
        of_all = torch.cat([metrics.stacked().flatten(), seen, norm.double()[None]])  # [5K + 3]
        _sum(of_all)
        *_, tokens, states_norm, norms = of_all.tolist()
        metrics = Metrics(*of_all[:-3].view(-1, steps))
        self.fault = self._fault(metrics, norms, states_norm)
        if self.fault is None:
            self._update(norm)
            if metrics.count.any():
                self.losses.append(mean_loss(metrics))
        self.optimizer.zero_grad()
        self.taken += 1
        if self.fault:
            self.skipped.append(self.taken)
        return metrics, {"lr": self._rate(self.taken - 1), "grad_norm": norms / _workers(), "tokens": tokens}

    def usual_loss(self) -> float:
        """The mean of the recent losses, or what is still small; infinite where there is none yet."""
        return max(LEAST_USUAL, sum(self.losses) / len(self.losses)) if self.losses else math.inf

    def _fault(self, metrics: Metrics, norm: float, states: float) -> str | None:
        """What of a step's numbers cannot be right, in words. All are sums over all workers, so that all decide alike;
        `states` is of the features' norms."""
        loss, factor = mean_loss(metrics), self.config.loss_spike
        if not math.isfinite(states):
            return "the features are not finite, or so large that float32 cannot hold their squares"
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if loss > factor * self.usual_loss():
            return (
                f"the loss is {loss:.4g}, more than train.loss_spike={factor:g} times the usual {self.usual_loss():.4g}"
            )
        return None

    def _greedy(self, batch: Batch) -> Tensor:
        """The target's greedy token of each target row: [R]. By sample, so that no batch's shape can change it."""
        rows = torch.searchsorted(batch.last_rows, batch.bounds()).diff().tolist()
        for name, last_hidden in zip(batch.ids, batch.last_hidden.split(rows), strict=True):
            if name not in self._argmax:
                self._argmax[name] = target_argmax(last_hidden, self.head).int().cpu()
        return torch.cat([self._argmax[name] for name in batch.ids]).long().to(self.device)

    def _gradient(self) -> Tensor:
        """Sum the gradients over all workers; returns their norm."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if _workers() > 1:
            flat = torch.cat([grad.flatten() for grad in grads])
            _sum(flat)
            for grad, reduced in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(reduced.view_as(grad))
        return torch.nn.utils.get_total_norm(grads)

    def _update(self, norm: Tensor) -> None:
        """Clip and step."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.taken)
        self.optimizer.step()

    def _rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `min_lr_share`."""
        warmup = max(1, round(self.config.warmup_share * self.config.steps))
        if step < warmup:
            return self.config.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.config.steps - warmup)
        low = self.config.min_lr_share
        return self.config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters and the vocabulary maps: all of the drafter but the target's embedding."""
        state = self.drafter.state_dict()
        if not self.drafter.own_embedding:
            del state["embed_tokens.weight"]
        return {name: tensor.cpu() for name, tensor in state.items()}

    def state(self) -> dict[str, Tensor]:
        """What `restore` needs beside `taken`: weights, AdamW's two moments of each, and what `_fault` looks at."""
        moments = {
            f"{moment}.{name}": self.moment(name, moment).cpu() for name in self.parameters for moment in MOMENTS
        }
        losses = torch.tensor(list(self.losses), dtype=torch.float64)
        return self.weights() | moments | {LOSSES: losses, SKIPPED: torch.tensor(self.skipped, dtype=torch.int64)}

    def moment(self, name: str, which: str) -> Tensor:
        """Of AdamW, which makes it at its first step: that may have been skipped."""
        parameter = self.parameters[name]
        made = self.optimizer.state.get(parameter)
        return made[which] if made else torch.zeros_like(parameter)

    def restore(self, state: dict[str, Tensor], taken: int) -> None:
        state = dict(state)
        self.losses.extend(state.pop(LOSSES, torch.empty(0)).tolist())
        self.skipped = state.pop(SKIPPED, torch.empty(0, dtype=torch.int64)).tolist()
        self.drafter.load_state_dict({n: t for n, t in state.items() if not n.startswith("exp_avg")}, strict=False)
        steps = float(taken - len(self.skipped))  # that AdamW has made
        for name, parameter in self.parameters.items():
            moments = {moment: state[f"{moment}.{name}"].to(self.device) for moment in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(steps, device=self.device), **moments}
        self.taken = taken

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all parameters and moments are, and their squares: what a checkpoint must be."""
        moments = [self.moment(name, which) for name in self.parameters for which in MOMENTS]
        norms = [torch.linalg.vector_norm(tensor) for tensor in [*self.parameters.values(), *moments]]
        return bool(torch.stack(norms).isfinite().all())

    @torch.no_grad()
    def loss_alone(self, sample: Features) -> float | None:
        """The loss of one sample as the drafter is now; None where it has no slot with one."""
        steps, of_all = self.config.ttt_steps, Metrics.zero(self.config.ttt_steps, self.device)
        for batch in batches([sample], self.config.max_length, self.dtype):
            batch = batch.to(self.device)
            goal = targets(batch, self._greedy(batch), self.drafter, steps)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                given = self.drafter, batch, goal, self.draft_head, goal.count()
                of_all += ttt_loss(*given, self.config.loss, self.config.step_decay)[1]
        return mean_loss(of_all) if of_all.count.any() else None

    def accept_length(self, samples: list[Features], num_steps: int) -> dict[str, Any]:
        """Simulated serving of the samples' greedy answers, in chains of `num_steps` drafts (`simulate`, `totals`)."""
        check_fits(samples, self.drafter.config)
        chain = Drafting(num_steps, 1, num_steps + 1)
        given = self.drafter, samples, self.head, chain, self.config.max_length, self.dtype
        return totals(simulate(*given))


def mean_loss(metrics: Metrics) -> float:
    """Over the steps of training-time test, each of which is a mean over slots: what is printed."""
    losses = metrics.means()["loss"]
    return sum(losses) / len(losses)


def _workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum(tensor: Tensor) -> None:
    """Over all workers, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def all_here(device: torch.device) -> None:
    """Return when every worker has come here."""
    _sum(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
