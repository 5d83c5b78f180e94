"""Which KV slots the requests of a batch hold: SGLang's bookkeeping around speculative decoding, as plain loops.

`pool_len` is the width of `req_to_token` ([pool rows, pool_len]); the real kernels need it, these do not."""

import ctypes

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Give slots to positions: `out_cache_loc` [sum(end - start)], packed by request, goes to positions start..end."""
    at = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The way back: pack the slots of positions start..end of every request into `out_cache_loc`."""
    at = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The slots behind each request's tokens, where its draft goes: `out_cache_loc` [B * topk * num_steps]."""
    width = topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + width, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A `req_to_token` for drafting, with one row a branch: [B * topk, pool_len].

    Branch k of a request sees the request's tokens, then its own `num_steps` slots; the branches' slots lie behind the
    request's tokens one branch after the other.
    """
    table = torch.zeros(len(req_pool_indices) * topk, pool_len, dtype=req_to_token.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for k in range(topk):
            own = length + k * num_steps
            table[b * topk + k, :length] = req_to_token[row, :length]
            table[b * topk + k, length : length + num_steps] = req_to_token[row, own : own + num_steps]
    return table


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request: `accept_tokens` [B * accept_stride], `accept_lens` counts it too."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1  # [B]
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Pack the slots of the accepted tokens to the front; `accept_index` has -1 where nothing was accepted."""
    accepted = accept_index.view(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy slots `src_loc` to slots `tgt_loc`, which may overlap, in every buffer: address and bytes a slot of each."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + slot * stride, stride) for slot in sources]  # read all before writing any
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(pointer + slot * stride, row, stride)


def _ranges(req_pool_indices, start_offset, end_offset):
    return zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
