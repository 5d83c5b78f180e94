"""Attention of one training-time-test step: causal over the step-0 keys, plus the slot's own keys of steps 1..k.

At step k the query of slot i sees the step-0 keys j <= i of its sample and one key of each step 1..k: its own. A dense
mask over all steps would need [n, (k+1)N] scores, nearly all of them masked. Here the causal part is computed alone,
with its log-sum-exp, and the own keys are merged with it: attention over a union of keys is that over each part,
weighted by the softmax of their log-sum-exps. The causal part is FlexAttention on a GPU. On a CPU it goes over chunks
of queries, forward and backward: a chunk's scores stay in cache, most future keys are never multiplied, and no score is
kept from one pass to the other. `eager` is the dense definition of it all.

Samples lie end to end: `bounds` [S + 1] says where each begins, and no query sees another sample.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

CHUNK_ELEMENTS = 2**19  # of the scores that exist at a time on a CPU; measured: 2**18 to 2**20 are equally fast
Own = list[tuple[Tensor, Tensor]]  # ([n, kv, d], [n, kv, dv]) a step: the slots' own keys and values of steps 1..k


def attend(
    query: Tensor, slots: Tensor, key: Tensor, value: Tensor, own: Own, bounds: Tensor, scale: float | None = None
) -> Tensor:
    """Out [n, h*dv] of query [n, h, d] at `slots` [n], ascending; key [N, kv, d] and value [N, kv, dv] are step 0's.

    `scale` multiplies the scores; None is d**-0.5.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cuda and len(query):
        out, lse = _flex(query, slots, key, value, bounds, scale)  # [n, h, dv], [n, h]
    else:
        out, lse = _Causal.apply(query, slots, key, value, bounds, scale)
    return (_merge(out, lse, query, own, scale) if own else out).flatten(1)  # [n, h*dv]


def eager(
    query: Tensor, slots: Tensor, key: Tensor, value: Tensor, own: Own, bounds: Tensor, scale: float | None = None
) -> Tensor:
    """The definition of `attend`: every key of every step in one row, and a dense mask."""
    (n, heads, d), (length, kv, _) = query.shape, key.shape
    keys = torch.cat([key, *(k for k, _ in own)]).repeat_interleave(heads // kv, dim=1)  # [N + k*n, h, d]
    values = torch.cat([value, *(v for _, v in own)]).repeat_interleave(heads // kv, dim=1)  # [N + k*n, h, dv]
    context = torch.arange(length, device=slots.device)  # [N]
    start = bounds[torch.searchsorted(bounds, slots, right=True) - 1]  # [n]: of the slot's sample
    causal = (context <= slots[:, None]) & (context >= start[:, None])  # [n, N]
    itself = torch.eye(n, dtype=torch.bool, device=slots.device)  # [n, n]
    seen = torch.cat([causal, *[itself] * len(own)], dim=-1)  # [n, N + k*n]
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * (d**-0.5 if scale is None else scale)  # [h, n, N + k*n]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)  # [h, n, N + k*n]
    return torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)  # [n, h*dv]


def _merge(out: Tensor, lse: Tensor, query: Tensor, own: Own, scale: float) -> Tensor:
    """`out` [n, h, dv] with its log-sum-exp [n, h], and the own keys: [n, h, dv]."""
    n, heads, _ = query.shape
    grouped = query.unflatten(1, (own[0][0].shape[1], -1))  # [n, kv, g, d]
    with torch.autocast(query.device.type, enabled=False):  # in the precision of the log-sum-exp, as in a kernel
        q, keys = grouped.to(lse.dtype), (k.to(lse.dtype) for k, _ in own)
        scores = [torch.einsum("nagd,nad->nag", q, k).reshape(n, heads) * scale for k in keys]  # [n, h] each
    weights = torch.stack([lse, *scores]).softmax(0).to(out.dtype)  # [1+k, n, h]
    out = out * weights[0, ..., None]
    for weight, (_, v) in zip(weights[1:], own, strict=True):
        shared = weight.unflatten(1, (v.shape[1], -1))[..., None] * v[:, :, None]  # [n, kv, g, dv]
        out = out + shared.flatten(1, 2)
    return out


# ---------------------------------------------------------------- on a GPU


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """FlexAttention and its mask: both are kernels only when compiled. Dynamic: no two steps have the same shape."""
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _flex(
    query: Tensor, slots: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The causal part [n, h, dv] and its log-sum-exp [n, h]. Blocks of other samples or of the future are skipped."""
    flex, block_mask = _compiled() if query.is_cuda else (flex_attention, create_block_mask)
    start = bounds[torch.searchsorted(bounds, slots, right=True) - 1]  # [n]: of the slot's sample

    def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= slots[q]) & (k >= start[q])

    mask = block_mask(seen, None, None, len(query), len(key), device=query.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, h or kv, n or N, d or dv]
    out, aux = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out[0].transpose(0, 1), aux.lse[0].T


# ---------------------------------------------------------------- on a CPU


class _Causal(torch.autograd.Function):
    """The same as `_flex`, over chunks of queries; the backward pass computes each chunk's scores again.

    Backward is that of FlashAttention (Dao et al., arXiv:2205.14135), with a gradient of the log-sum-exp as well: with
    P the weights and dP = dO V^T, dS = P * (dP - sum(dO * O) + dLSE).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, slots: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        n, heads, _ = query.shape
        out = query.new_empty(n, heads, value.shape[-1])
        lse = query.new_empty(n, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, keys in _chunks(slots, bounds, heads):
            scores = _scores(query[rows] * scale, slots[rows], key, keys, lse.dtype)  # [kv, g*c, L]
            top = scores.amax(-1, keepdim=True)  # [kv, g*c, 1]
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            mixed = weights.to(value.dtype) @ value[keys].transpose(0, 1) / total  # [kv, g*c, dv]
            out[rows] = _by_row(mixed, heads)
            lse[rows] = _by_row(top + total.log(), heads)[..., 0]
        ctx.save_for_backward(query, slots, key, value, bounds, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, slots, key, value, bounds, out, lse = ctx.saved_tensors
        heads, kv = query.shape[1], key.shape[1]
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (
            torch.zeros_like(x.transpose(0, 1), dtype=lse.dtype) for x in (key, value)
        )  # [kv, N, ·]
        shift = (grad * out).sum(-1, dtype=lse.dtype) - grad_lse  # [n, h]
        for rows, keys in _chunks(slots, bounds, heads):
            scaled = query[rows] * ctx.scale  # [c, h, d]
            weights = _scores(scaled, slots[rows], key, keys, lse.dtype)  # [kv, g*c, L]
            weights.sub_(_by_head(lse[rows, :, None], kv)).exp_()
            back = _by_head(grad[rows], kv)  # [kv, g*c, dv]
            grad_value[:, keys] += weights.to(back.dtype).transpose(1, 2) @ back
            inner = (back @ value[keys].permute(1, 2, 0)).to(lse.dtype)  # [kv, g*c, L]
            inner = inner.sub_(_by_head(shift[rows, :, None], kv)).mul_(weights).to(query.dtype)
            grad_query[rows] = _by_row(inner @ key[keys].transpose(0, 1), heads) * ctx.scale
            grad_key[:, keys] += inner.transpose(1, 2) @ _by_head(scaled, kv)
        grad_key, grad_value = (x.transpose(0, 1).to(key.dtype) for x in (grad_key, grad_value))  # [N, kv, ·]
        return grad_query, None, grad_key, grad_value, None, None


def _chunks(slots: Tensor, bounds: Tensor, heads: int) -> Iterator[tuple[slice, slice]]:
    """Rows of queries of one sample, and the keys that the last of them sees."""
    firsts, at = torch.searchsorted(slots, bounds).tolist(), slots.tolist()
    for start, row, end in zip(bounds.tolist(), firsts, firsts[1:], strict=False):
        while row < end:
            longest = heads * (at[end - 1] + 1 - start)
            upto = min(end, row + max(1, CHUNK_ELEMENTS // longest))
            yield slice(row, upto), slice(start, at[upto - 1] + 1)
            row = upto


def _scores(query: Tensor, slots: Tensor, key: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
    """query [c, h, d] at `slots` [c] against key[keys], -inf at what comes after a slot: [kv, g*c, L] of `dtype`."""
    scores = (_by_head(query, key.shape[1]) @ key[keys].permute(1, 2, 0)).to(dtype)  # [kv, g*c, L]
    first = int(slots[0]) + 1 - keys.start  # key that some slot may not see
    future = torch.arange(keys.start + first, keys.stop) > slots[:, None]  # [c, L - first]
    scores.unflatten(1, (-1, len(slots)))[..., first:].masked_fill_(future, float("-inf"))
    return scores


def _by_head(x: Tensor, kv: int) -> Tensor:
    """[c, h, d] -> [kv, g*c, d]: the queries that share their keys side by side."""
    return x.unflatten(1, (kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x: Tensor, heads: int) -> Tensor:
    """[kv, g*c, d] -> [c, h, d]."""
    return x.unflatten(1, (heads // len(x), -1)).permute(2, 0, 1, 3).flatten(1, 2)
