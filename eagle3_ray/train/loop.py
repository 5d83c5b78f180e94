"""One worker's training: a step on its share of a global batch, and the state that resumes it to the bit.

Every step first counts the slots that have a loss, over all workers, and divides by that; then gradients are simply
summed. So the result does not depend on how a batch is cut into workers and micro-batches. Gradients are reduced by
hand and not by DistributedDataParallel, which averages over workers and waits for a backward pass of each: a worker
may have several micro-batches, or, where its share holds no valid slot, none. It then takes the step with zeros.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3_ray.config import Drafting, TrainConfig
from eagle3_ray.drafter.loss import Metrics, target_argmax, targets, ttt_loss
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.store.shards import Features
from eagle3_ray.train.features import batches
from eagle3_ray.train.simulate import simulate, totals


class Training:
    """A drafter, its optimizer and the target's head [V, H] on one device; `taken` steps so far."""

    def __init__(self, config: TrainConfig, drafter: Drafter, head: Tensor, device: torch.device) -> None:
        self.config, self.device, self.taken = config, device, 0
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
        """One optimizer step. The metrics are those of the whole global batch."""
        steps = self.config.ttt_steps
        metrics, counts = Metrics.zero(steps, self.device), torch.zeros(steps, dtype=torch.int64, device=self.device)
        prepared = []
        for waiting in batches(samples, self.config.max_length, self.dtype):
            batch = replace(waiting, aux=waiting.aux[:0]).to(self.device)  # targets need none
            goal = targets(batch, self._greedy(batch), self.drafter, steps)
            counts += goal.count()
            prepared.append((waiting, goal))  # one micro-batch's states at a time lie on the device
        _sum(counts)
        for waiting, goal in prepared:
            batch = waiting.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                given = self.drafter, batch, goal, self.draft_head, counts
                loss, sums, _ = ttt_loss(*given, self.config.loss, self.config.step_decay)
            loss.backward()
            metrics += sums
        norm = self._update()
        stacked = metrics.stacked()  # [5, K]
        tokens = torch.tensor(sum(len(batch.input_ids) for batch, _ in prepared), device=self.device)
        _sum(stacked)
        _sum(tokens)
        return Metrics(*stacked), {"lr": self._rate(self.taken - 1), "grad_norm": norm, "tokens": tokens.item()}

    def _greedy(self, batch: Batch) -> Tensor:
        """The target's greedy token of each target row: [R]. By sample, so that no batch's shape can change it."""
        rows = torch.searchsorted(batch.last_rows, batch.bounds()).diff().tolist()
        for name, last_hidden in zip(batch.ids, batch.last_hidden.split(rows), strict=True):
            if name not in self._argmax:
                self._argmax[name] = target_argmax(last_hidden, self.head).int().cpu()
        return torch.cat([self._argmax[name] for name in batch.ids]).long().to(self.device)

    def _update(self) -> float:
        """Sum the gradients over all workers, clip, step. Returns the norm before clipping."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            flat = torch.cat([grad.flatten() for grad in grads])
            _sum(flat)
            for grad, reduced in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(reduced.view_as(grad))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.taken)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        return norm.item()

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
        """What `restore` needs beside `taken`: weights, and AdamW's two moments of each."""
        moments = {
            f"{moment}.{name}": self.optimizer.state[parameter][moment].cpu()
            for name, parameter in self.parameters.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return self.weights() | moments

    def restore(self, state: dict[str, Tensor], taken: int) -> None:
        self.drafter.load_state_dict({n: t for n, t in state.items() if not n.startswith("exp_avg")}, strict=False)
        for name, parameter in self.parameters.items():
            moments = {moment: state[f"{moment}.{name}"].to(self.device) for moment in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(taken), device=self.device), **moments}
        self.taken = taken

    def accept_length(self, samples: list[Features], num_steps: int) -> dict[str, Any]:
        """Simulated serving of the samples' greedy answers, in chains of `num_steps` drafts (`simulate`, `totals`)."""
        chain = Drafting(num_steps, 1, num_steps + 1)
        given = self.drafter, samples, self.head, chain, self.config.max_length, self.dtype
        return totals(simulate(*given))


def _sum(tensor: Tensor) -> None:
    """Over all workers, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def all_here(device: torch.device) -> None:
    """Return when every worker has come here."""
    _sum(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
