"""Attention of one training-time-test step: causal over the step-0 keys, plus the slot's own keys of steps 1..k.

At step k the query of slot i sees the step-0 keys j <= i of its sample and one key of each step 1..k: its own. A dense
mask over all steps would need [n, (k+1)T] scores, nearly all of them masked. Here the own keys add k columns, so the
scores are [n, T + k]. `eager` is the dense definition; a test holds one against the other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(query: Tensor, slots: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One sample: [n, h*e]. query [n, h, d] at `slots` [n]; key [T, kv, d], value [T, kv, e] of step 0;
    own: a ([n, kv, d], [n, kv, e]) a step."""
    (n, heads, d), (length, kv, _) = query.shape, key.shape
    group = heads // kv
    query = query.view(n, kv, group, d) * d**-0.5  # [n, kv, g, d]
    rows = query.permute(1, 2, 0, 3).reshape(kv, group * n, d)  # [kv, g*n, d]: a group shares its keys
    scores = (rows @ key.permute(1, 2, 0)).view(kv, group, n, length)  # [kv, g, n, T]
    future = torch.arange(length, device=slots.device) > slots[:, None]  # [n, T]
    scores = scores.masked_fill(future, float("-inf"))
    if own:
        own_key = torch.stack([k for k, _ in own], dim=1)  # [n, k, kv, d]
        scores = torch.cat([scores, torch.einsum("nagd,nkad->agnk", query, own_key)], dim=-1)  # [kv, g, n, T+k]
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    out = weights[..., :length].reshape(kv, group * n, length) @ value.transpose(0, 1)  # [kv, g*n, e]
    out = out.view(kv, group, n, value.shape[-1])
    if own:
        own_value = torch.stack([v for _, v in own], dim=1)  # [n, k, kv, e]
        out = out + torch.einsum("agnk,nkad->agnd", weights[..., length:], own_value)
    return out.permute(2, 0, 1, 3).reshape(n, heads * value.shape[-1])  # [n, h*e]


def eager(query: Tensor, slots: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The definition of `attend`: every key of every step in one row, and a dense mask."""
    (n, heads, d), (length, kv, _) = query.shape, key.shape
    keys = torch.cat([key, *(k for k, _ in own)]).repeat_interleave(heads // kv, dim=1)  # [T + k*n, h, d]
    values = torch.cat([value, *(v for _, v in own)]).repeat_interleave(heads // kv, dim=1)  # [T + k*n, h, e]
    causal = torch.arange(length, device=slots.device) <= slots[:, None]  # [n, T]
    itself = torch.eye(n, dtype=torch.bool, device=slots.device)  # [n, n]
    seen = torch.cat([causal, *[itself] * len(own)], dim=-1)  # [n, T + k*n]
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * d**-0.5  # [h, n, T + k*n]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)  # [h, n, T + k*n]
    return torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)  # [n, h*e]
