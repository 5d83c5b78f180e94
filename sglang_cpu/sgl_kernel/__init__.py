"""Pure-torch stand-in for the CPU build of SGLang's kernel package, with the names and arguments SGLang 0.5.23 uses.

Words, here and in the modules: a slot is one row of the KV cache; `req_to_token[r, p]` is the slot of position p of the
request in row r of the request pool, and `req_pool_indices[b]` is the row of the b-th request of a batch."""

import torch

if torch.version.cuda or torch.version.hip:
    _build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    raise ImportError(
        f"this sgl_kernel is the stand-in for machines without a GPU, but torch is built for {_build}. "
        "With a GPU: pip uninstall sglang-cpu-standin; pip install --force-reinstall --no-deps sglang-kernel==0.4.10. "
        "Without one: install a CPU build of torch."
    )

from .attention import decode_attention_cpu, extend_attention_cpu  # noqa: E402
from .cache import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, rotate_input_ids_cpu, verify_tree_greedy_cpu  # noqa: E402

# SGLang's class of MLA drafters asks CUDA to synchronise on whatever device it is (srt/models/kimi_k25_eagle3.py)
torch.cuda.synchronize = lambda device=None: None

__version__ = "0.4.10"  # of the kernel package it stands in for; SGLang asks
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
