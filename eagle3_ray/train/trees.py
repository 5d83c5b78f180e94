"""Draft trees without an engine: what SGLang 0.5.23 drafts with topk > 1, and how much of it a greedy target accepts.

The first step gives topk beams, the likeliest tokens behind the root x_{i+1} of slot i. Each later step tries topk
tokens behind each beam and goes on from the topk likeliest of those topk x topk, by the product of the probabilities
along their path. All candidates of all steps compete for the num_draft_tokens - 1 places beside the root that the
target verifies. Source: sglang/srt/speculative, `EagleDraftWorker.draft_forward`, `select_top_k_tokens`,
`organize_draft_results`.

A beam goes on from its parent's output, but in SGLang its keys stay where they are: the beam in place b sees what the
beams in place b wrote at the steps before, whether they are its ancestors or not. That is kept here, since it decides
what is served.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_ray.config import Drafting
from eagle3_ray.drafter.attention import Own, attend
from eagle3_ray.drafter.model import Batch, Drafter, valid_slots

CHUNK_ELEMENTS = 2**23  # of the logits that exist at a time


class Trees(NamedTuple):
    """The trees of n slots: M candidates each, step by step, and within a step beam by beam."""

    tokens: Tensor  # [n, M] int64: the target's ids
    parents: Tensor  # [n, M]: the candidate before each; -1 is the root
    kept: Tensor  # [n, num_draft_tokens - 1], ascending: the candidates that are verified

    def verified(self) -> Tensor:
        """The drafts that the target looks at, in SGLang's order: [n, num_draft_tokens - 1]."""
        return self.tokens.gather(1, self.kept)

    def accepted(self, said: Tensor) -> Tensor:
        """How far the target's own tokens `said` [n, K] go down the verified tree: [n]. -1 is no token."""
        tokens, parents = self.verified(), self.parents.gather(1, self.kept)  # 2 x [n, m]
        node = torch.full_like(said[:, 0], -1)  # [n]: how far the walk has come
        depth = torch.zeros_like(node)
        for token in said.T:
            right = (parents == node[:, None]) & (tokens == token[:, None])  # [n, m], at most one a row
            found = right.any(1)
            depth += found
            following = self.kept.gather(1, right.int().argmax(1, keepdim=True))[:, 0]
            node = torch.where(found, following, -2)  # -2 has no child
        return depth


@torch.no_grad()
def tree_hits(drafter: Drafter, batch: Batch, drafting: Drafting) -> Tensor:
    """The drafts that a verify step accepts at each slot of a batch, as far as its answer goes: [N]. For `walk`.

    Every slot has its tree, though a walk passes over most of them: topk beams a step for each.
    """
    grower, hits = Grower(drafter, batch), torch.zeros_like(batch.input_ids)
    (drafted,) = valid_slots(batch, 1)
    for here in drafted.split(max(1, CHUNK_ELEMENTS // (drafting.topk * len(drafter.d2t)))):
        said = [
            torch.where(batch.ahead(batch.loss_mask, here, 2 + step), batch.ahead(batch.input_ids, here, 2 + step), -1)
            for step in range(drafting.num_steps)
        ]
        hits[here] = grower.grow(here, drafting).accepted(torch.stack(said, dim=1))
    return hits


class Grower:
    """What the trees of a batch share: every slot's outputs and keys of step 0."""

    def __init__(self, drafter: Drafter, batch: Batch) -> None:
        self.drafter, self.bounds = drafter, batch.bounds()
        slots = torch.arange(len(batch.input_ids), device=batch.input_ids.device)  # [N]
        self.positions = slots - self.bounds[:-1].repeat_interleave(self.bounds.diff())  # [N]
        self.contexts: list[tuple[Tensor, Tensor]] = []  # a layer: [N, kv, d] each
        hidden = drafter.project(batch.aux)  # [N, H]
        token = drafter.embed_tokens(batch.ahead(batch.input_ids, slots, 1))  # [N, H]
        for i, layer in enumerate(drafter.decoder):
            x = layer.inputs(token, hidden)  # [N, 2H] or [N, H]
            self.contexts.append(layer.self_attn.key_value(x, self.positions))
            hidden = self._layer(i, x, hidden, slots, [], 0)  # [N, H]
        self.roots = hidden

    def grow(self, slots: Tensor, drafting: Drafting) -> Trees:
        """The trees at `slots` [n], ascending."""
        n, topk, drafter = len(slots), drafting.topk, self.drafter
        hidden, score = self.roots[slots][:, None], self.roots.new_ones(n, 1, dtype=torch.float32)  # [n, b, H], [n, b]
        place = torch.full((n, 1), -1, device=slots.device)  # [n, b]: the candidate that each beam is
        own: list[Own] = [[] for _ in drafter.decoder]  # a layer and step: [n*topk, kv, d], by place
        tokens, parents, scores = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(drafting.num_steps):
            normed = drafter.norm(hidden)  # [n, b, H]
            likely, ids = drafter.lm_head(normed).float().softmax(-1).topk(topk)  # 2 x [n, b, topk]
            tokens.append(drafter.draft_ids[ids].flatten(1))  # [n, b*topk]
            parents.append(place.repeat_interleave(topk, dim=1))
            scores.append((score[..., None] * likely).flatten(1))
            if step + 1 == drafting.num_steps:
                break
            score, chosen = scores[-1].topk(topk)  # 2 x [n, topk]
            place = chosen + sum(one.shape[1] for one in tokens[:-1])
            fed = normed if drafter.config.norm_output else hidden
            hidden = fed[torch.arange(n, device=slots.device)[:, None], chosen // topk]  # [n, topk, H]
            hidden = self._step(tokens[-1].gather(1, chosen), hidden, slots, own, step + 1)
        kept = torch.cat(scores, 1).topk(drafting.num_draft_tokens - 1).indices.sort().values  # [n, m]
        return Trees(torch.cat(tokens, 1), torch.cat(parents, 1), kept)

    def _step(self, tokens: Tensor, hidden: Tensor, slots: Tensor, own: list[Own], step: int) -> Tensor:
        """The output [n, b, H] of beams that end in `tokens` [n, b], whose parents gave `hidden` [n, b, H]."""
        n, beams = tokens.shape
        rows = slots.repeat_interleave(beams)  # [n*b]
        token, hidden = self.drafter.embed_tokens(tokens.flatten()), hidden.flatten(0, 1)  # 2 x [n*b, H]
        for i, layer in enumerate(self.drafter.decoder):
            x = layer.inputs(token, hidden)  # [n*b, 2H] or [n*b, H]
            own[i].append(layer.self_attn.key_value(x, self.positions[rows] + step))
            hidden = self._layer(i, x, hidden, rows, own[i], step)
        return hidden.unflatten(0, (n, beams))

    def _layer(self, i: int, x: Tensor, hidden: Tensor, rows: Tensor, own: Own, step: int) -> Tensor:
        layer = self.drafter.decoder[i]
        query = layer.self_attn.query(x, self.positions[rows] + step)  # [n, h, d]
        return layer.outputs(hidden, attend(query, rows, *self.contexts[i], own, self.bounds))  # [n, H]
