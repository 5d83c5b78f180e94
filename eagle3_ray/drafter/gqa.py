"""Grouped-query attention of a drafter's layer, as SGLang's `LlamaAttention` has it, and the norm of all drafters.

An attention of a drafter offers `query`, `key_value` and `o_proj`. What comes between the two, over which keys, is
`attention.attend`; so that the same step of training serves every kind (mla.py is the other one).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half


class RMSNorm(nn.RMSNorm):
    """Computes in its input's dtype, as in serving; torch's own falls back to slow pieces where weights are float32.

    Autocast is off, for on a GPU it would make the norm's input and output float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GroupedAttention(nn.Module):
    """Projections and RoPE. `width` is that of its input: 2H in the first layer, H in further ones."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim = int(config.head_dim or 0)
        query, kv = config.num_attention_heads * self.head_dim, int(config.num_key_value_heads or 0) * self.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:  # [n, W], [n] -> [n, h, d]
        return self._rotate(self.q_proj(x), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # [n, W], [n] -> 2 x [n, kv, d]
        return self._rotate(self.k_proj(x), positions), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))  # [n, h, d]
        cos, sin = (table[0, :, None] for table in self.rotary(x, positions[None]))  # [n, 1, d]
        return x * cos + rotate_half(x) * sin
