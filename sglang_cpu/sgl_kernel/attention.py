"""Attention over the paged KV cache, one request at a time: through torch's own scaled_dot_product_attention, or, for
the few queries of a decode or verify step, through two plain matrix products, which take half the time there.

SGLang's attention backend "intel_amx" calls both as `torch.ops.sgl_kernel.*`, so they are registered below under the
real kernels' signatures; `attn_logits` and `max_len_extend` serve those kernels' scratch space and are not used here.

Shapes: queries [T, Hq, D], caches [slots, Hkv, D], outputs [T, Hq, Dv]; query head h reads KV head h // (Hq // Hkv)."""

import torch
from torch.nn.functional import scaled_dot_product_attention

FEW = 16  # queries


def decode_attention_cpu(
    query, k_cache, v_cache, k_scale, v_scale, output, key, value, loc, attn_logits, req_to_token, req_pool_indices,
    seq_lens, sm_scale, logit_cap, is_cross_attn, sliding_window_size, encoder_lens=None, sinks=None,
):  # fmt: skip
    """One new token a request: store its key and value [B, Hkv, D] at slots `loc`, attend to all `seq_lens` tokens.

    `key` is None when the caller has stored them already. Writes `k_cache`, `v_cache` and `output`.
    """
    _refuse(query, k_cache, k_scale, v_scale, logit_cap, is_cross_attn, sliding_window_size, sinks)
    if key is not None:
        k_cache[loc] = key.view(len(loc), *k_cache.shape[1:])
        v_cache[loc] = value.view(len(loc), *v_cache.shape[1:])
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length]
        output[b] = _attend(query[b : b + 1], _rows(k_cache, slots), _rows(v_cache, slots), None, sm_scale)[0]


def extend_attention_cpu(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices,
    seq_lens, extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross_attn,
    sliding_window_size, encoder_lens=None, sinks=None, tree_mask=None, is_causal=True,
):  # fmt: skip
    """Several new tokens a request (prefill, or the verification of a draft), behind a prefix that is in the cache.

    Request b has `seq_lens[b]` tokens; the last `extend_seq_lens[b]` are new and start at `extend_start_loc[b]` in
    `q_extend`, `k_extend`, `v_extend` and `o_extend`. Without `k_extend` the new keys are in the cache too.
    Latent attention (MLA) prefills with keys and values in a shape of their own, while the cache holds the latents they
    were projected from: those can only be attended to as they come, without a prefix.
    `tree_mask` holds a flat [new, new] block a request: True where a new token (row) may see another. Without it the
    new tokens see each other causally, or all of them when not `is_causal`. All see the prefix. Writes `o_extend`.
    """
    _refuse(q_extend, k_buffer, k_scale, v_scale, logit_cap, is_cross_attn, sliding_window_size, sinks)
    mask_at = 0
    requests = (req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist())
    for row, length, new, start in zip(*requests, strict=True):
        if new == 0:
            continue
        mask = None
        if tree_mask is not None:
            mask = torch.ones(new, length, dtype=torch.bool)  # [new, prefix + new]
            mask[:, length - new :] = tree_mask.view(-1)[mask_at : mask_at + new * new].view(new, new)
            mask_at += new * new
        elif is_causal:
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        slots, rows = req_to_token[row, :length], slice(start, start + new)
        if k_extend is not None and k_extend.shape[1:] != k_buffer.shape[1:]:
            if new < length:
                raise NotImplementedError("the CPU stand-in for SGLang's attention kernels does not expand MLA's cache")
            k, v = k_extend[rows], v_extend[rows]
        else:
            k, v = _rows(k_buffer, slots), _rows(v_buffer, slots)
            if k_extend is not None:
                k[length - new :] = k_extend[rows]
                v[length - new :] = v_extend[rows]
        o_extend[rows] = _attend(q_extend[rows], k, v, mask, sm_scale)


def _rows(cache, slots):
    """cache [slots, Hkv, D] at some slots [S] -> [S, Hkv, D]; whole rows at a time, twice as fast as cache[slots]"""
    return cache.flatten(1).index_select(0, slots).unflatten(1, cache.shape[1:])


def _attend(q, k, v, mask, scale):
    """q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], mask [T, S] or None -> [T, Hq, Dv]"""
    tokens, heads, kv_heads = len(q), q.shape[1], k.shape[1]
    if tokens <= FEW:
        q = (q * scale).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G*T, D]
        scores = q @ k.permute(1, 2, 0)  # [Hkv, G*T, S]
        if mask is not None:
            scores.masked_fill_(~mask.repeat(heads // kv_heads, 1), float("-inf"))
        out = scores.softmax(-1) @ v.transpose(0, 1)  # [Hkv, G*T, Dv]
        return out.unflatten(1, (-1, tokens)).flatten(0, 1).transpose(0, 1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, T or S, D]
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)


def _refuse(query, k_cache, k_scale, v_scale, logit_cap, is_cross_attn, sliding_window_size, sinks):
    unsupported = {
        f"a logit soft cap ({logit_cap})": logit_cap != 0,
        "cross attention": is_cross_attn,
        f"a sliding window ({sliding_window_size})": sliding_window_size > 0,
        "attention sinks": sinks is not None,
        f"a scaled KV cache ({k_scale}, {v_scale})": (k_scale, v_scale) != (1.0, 1.0),
        f"a KV cache in {k_cache.dtype} for a model in {query.dtype}": k_cache.dtype != query.dtype,
    }
    for what, present in unsupported.items():
        if present:
            raise NotImplementedError(f"the CPU stand-in for SGLang's attention kernels does not do {what}")


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale,"
    " Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn,"
    " int sliding_window_size, Tensor? encoder_lens=None, Tensor? sinks=None) -> ()"
)
_library.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer,"
    " Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens=None, Tensor? sinks=None,"
    " Tensor? tree_mask=None, bool is_causal=True) -> ()"
)
_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
