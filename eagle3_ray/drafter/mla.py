"""Multi-head latent attention (MLA) of a drafter's layer, as SGLang's `Eagle3DeepseekV2ForCausalLM` has it.

Queries and keys/values pass through narrow latents (DeepSeek-V2, arXiv 2405.04434, section 2.1). Each head's query and
key have a part without position and a rotated one; the rotated key is one for all heads. In serving only the
latent and the rotated key are kept, and `kv_b_proj` is absorbed into query and output. In training, where each key is
used at once, the keys and values of all heads are written out: a score then costs nope + rope products instead of
kv_lora_rank + rope (192 against 576 in DeepSeek-V3), and `attend` sees plain attention with as many keys as heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_ray.drafter.gqa import RMSNorm


class LatentAttention(nn.Module):
    """Projections and RoPE, in the sizes of a DeepseekV3Config. `width` is that of its input, 2H."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        heads, query, latent = config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.heads, self.key_parts, self.value_parts = heads, (nope, rope), (nope, value)
        self.q_a_proj = nn.Linear(width, query, bias=False)
        self.q_a_layernorm = RMSNorm(query, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(query, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(latent, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)  # of config.head_dim, which is the rotated part's width
        self.sharpness = sharpness(config.rope_parameters)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:  # [n, 2H], [n] -> [n, h, nope + rope]
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        plain, rotated = query.split(self.key_parts, dim=-1)
        return torch.cat([plain, self._rotate(rotated, positions)], dim=-1) * self.sharpness

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 2H], [n] -> [n, h, nope + rope], [n, h, value]"""
        kept = self.kv_a_proj_with_mqa(x)  # [n, latent + rope]
        latent, shared = kept.split([kept.shape[-1] - self.key_parts[1], self.key_parts[1]], dim=-1)
        written = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))  # [n, h, nope + value]
        plain, value = written.split(self.value_parts, dim=-1)
        rotated = self._rotate(shared[:, None], positions).expand(-1, self.heads, -1)  # [n, h, rope]
        return torch.cat([plain, rotated], dim=-1), value

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, h, d]: neighbours form the pairs that are rotated, where a Llama pairs the two halves."""
        tables = self.rotary(x, positions[None])  # 2 x [1, n, d]: the halves are alike
        cos, sin = (table[0, :, None, : x.shape[-1] // 2] for table in tables)  # [n, 1, d/2]
        even, odd = x[..., 0::2], x[..., 1::2]  # [n, h, d/2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def sharpness(rope: dict[str, Any]) -> float:
    """What DeepSeek multiplies the attention scores by when YaRN stretches the context (`mscale_all_dim`, squared)."""
    if rope.get("rope_type") != "yarn" or rope["factor"] <= 1:
        return 1.0
    return (0.1 * float(rope.get("mscale_all_dim") or 0) * math.log(rope["factor"]) + 1) ** 2
