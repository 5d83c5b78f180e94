"""An EAGLE-3 trainer as they are usually written, for `train_step.py` to compare with: it shares no code with ours.

Samples are padded to the longest. Every step of training-time test runs at every position and gives logits at all of
them; the target's logits too are made at all positions, over its whole vocabulary. Positions without a loss are masked
out at the end. Scores are [T, T+k] under a dense mask, in memory; SDPA with a mask of all [T, (k+1)T] keys took longer
at T = 2048. The maths is that of `tests/data/eagle3_ttt.safetensors`, which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Padded:
    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool
    aux: Tensor  # [B, T, 3H]
    last_hidden: Tensor  # [B, T, H]


def pad(ids: list[Tensor], masks: list[Tensor], aux: list[Tensor], last_hidden: list[Tensor]) -> Padded:
    """Of samples [T_i, ...]; behind the end comes no response token, and causality hides the rest."""
    return Padded(*(nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (ids, masks, aux, last_hidden)))


def ahead(x: Tensor, distance: int) -> Tensor:
    """x [B, T, ...] at `distance` positions further on, 0 past the end."""
    return torch.cat([x[:, distance:], torch.zeros_like(x[:, :distance])], dim=1)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv, self.head_dim, self.theta = heads, kv, head_dim, theta
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [B, h, T, d], [T]
        rates = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim)  # [d/2]
        angles = (positions[:, None] * rates).repeat(1, 2)  # [T, d]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:  # [B, T, 2H] -> [B, T, H]
        batch, length, _ = x.shape
        step = len(cache)
        positions = torch.arange(length) + step
        query = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)  # [B, h, T, d]
        key = self.k_proj(x).view(batch, length, self.kv, -1).transpose(1, 2)  # [B, kv, T, d]
        value = self.v_proj(x).view(batch, length, self.kv, -1).transpose(1, 2)  # [B, kv, T, d]
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        group = self.heads // self.kv
        cache.append((key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)))  # [B, h, T, d] each
        (keys, values), own = cache[0], cache[1:]
        future = torch.full((length, length), float("-inf")).triu(1)  # [T, T]
        query = query * self.head_dim**-0.5
        scores = (query @ keys.transpose(2, 3)).add_(future)  # [B, h, T, T]
        scores = torch.cat([scores, *((query * k).sum(-1, keepdim=True) for k, _ in own)], dim=-1)  # [B, h, T, T+k]
        earlier, *diagonal = scores.softmax(-1).split([length, *[1] * step], dim=-1)  # [B, h, T, T], k of [B, h, T, 1]
        out = earlier @ values  # [B, h, T, d]
        for weight, (_, v) in zip(diagonal, own, strict=True):
            out = out + weight * v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, intermediate: int, eps: float, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = attention
        self.mlp = MLP(hidden, intermediate)

    def forward(self, embeds: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:  # 2 x [B, T, H]
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)  # [B, T, 2H]
        hidden = hidden + self.self_attn(x, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Plain(nn.Module):
    """A drafter with the parameter names that SGLang loads; `d2t` and `t2d` as it reads them."""

    d2t: Tensor  # [Vd]
    t2d: Tensor  # [V] bool

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv: int,
        head_dim: int,
        intermediate: int,
        vocab: int,
        draft_vocab: int,
        theta: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.embed_tokens.requires_grad_(False)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(hidden, intermediate, eps, Attention(hidden, heads, kv, head_dim, theta))
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))

    def loss(self, batch: Padded, target_head: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """The mean over steps; each step's loss [K], and its greedy accuracy [K] over all valid slots."""
        with torch.no_grad():
            logits = batch.last_hidden @ target_head.T  # [B, T, V]
            best = logits.argmax(-1)  # [B, T]
            goal = logits[..., self.t2d].softmax(-1)  # [B, T, Vd]
            del logits
        ids = self.d2t + torch.arange(len(self.d2t))  # [Vd]
        hidden, cache = self.fc(batch.aux), []  # [B, T, H]
        valid = ahead(batch.loss_mask, 1)  # [B, T]
        losses, accuracies = [], []
        for step in range(steps):
            valid = valid & ahead(batch.loss_mask, 2 + step)
            hidden = self.midlayer(self.embed_tokens(ahead(batch.input_ids, 1 + step)), hidden, cache)
            logits = self.lm_head(self.norm(hidden))  # [B, T, Vd]
            wanted = ahead(best, 1 + step)  # [B, T]
            taught = valid & self.t2d[wanted]  # [B, T]
            each = -(ahead(goal, 1 + step) * logits.log_softmax(-1)).sum(-1)  # [B, T]
            losses.append((each * taught).sum() / taught.sum().clamp(min=1))
            hits = (ids[logits.argmax(-1)] == wanted) & valid  # [B, T]
            accuracies.append(hits.sum() / valid.sum().clamp(min=1))
        return torch.stack(losses).mean(), torch.stack(losses).detach(), torch.stack(accuracies)
