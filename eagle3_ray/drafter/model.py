"""The EAGLE-3 drafter, with the shape and the parameter names that SGLang's `LlamaForCausalLMEagle3` loads.

Training-time test (TTT) runs the drafter several steps ahead of every slot, as serving does. Step k at slot i takes the
token x_{i+1+k} and a hidden state: fc(aux_i) at step 0, its own previous output after that. A slot sees the step-0 keys
j <= i of its sample and its own keys of steps 1..k; its RoPE position is i + k.

Samples lie end to end, without padding. Only the step-0 keys and values are needed at every slot; all else is computed
at the slots that the caller names for each step, which in training are those that serving would draft from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from eagle3_ray.config import ConfigError, DrafterConfig, check_drafter
from eagle3_ray.drafter.attention import attend

# The RoPE settings that transformers and SGLang read alike (tests compare their tables). A target with another type
# gets plain RoPE for its drafter, which has no positions to inherit: training and serving only have to agree.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    + ("truncate",),
}


def drafter_config(settings: DrafterConfig, target: dict[str, Any], num_aux: int, draft_vocab_size: int) -> LlamaConfig:
    """The drafter's config.json, whole but for the layer ids: `target` is the target's text config."""
    if num_aux < 2:
        raise ConfigError(f"capture.boundaries: {num_aux} given; SGLang applies fc only to two or more")
    check_drafter(settings, target)
    hidden = int(target["hidden_size"])
    heads = settings.num_attention_heads or int(target["num_attention_heads"])
    kv_heads = settings.num_key_value_heads or int(target.get("num_key_value_heads") or heads)
    head_dim = settings.head_dim or target.get("head_dim") or hidden // heads
    config: dict[str, Any] = dict(
        architectures=["LlamaForCausalLMEagle3"],
        vocab_size=int(target["vocab_size"]),
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden,
        target_hidden_size=hidden,
        num_aux_hidden_states=num_aux,
        intermediate_size=settings.intermediate_size or int(target["intermediate_size"]),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=float(target.get("rms_norm_eps") or 1e-5),
        max_position_embeddings=int(target.get("max_position_embeddings") or 8192),
        rope_parameters=_rope(target),
        norm_output=settings.norm_output,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=target.get("eos_token_id"),
        pad_token_id=None,
    )
    return LlamaConfig(**config)


def _rope(target: dict[str, Any]) -> dict[str, Any]:
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # one entry a layer type: a drafter's layer attends to all
    theta = rope.get("rope_theta") or target.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KEYS:
        kind = "default"
    kept = {key: rope[key] for key in ROPE_KEYS[kind] if rope.get(key) is not None}
    if "original_max_position_embeddings" in ROPE_KEYS[kind]:
        kept.setdefault("original_max_position_embeddings", target["max_position_embeddings"])
    return {"rope_type": kind, "rope_theta": float(theta), **kept}


@dataclass
class Batch:
    """Samples end to end: N tokens in all. R rows of the target's last hidden state, those that serve as targets."""

    ids: tuple[str, ...]  # of the samples
    lengths: tuple[int, ...]  # of the samples; their sum is N
    input_ids: Tensor  # [N] int64
    loss_mask: Tensor  # [N] bool: the token belongs to a response
    aux: Tensor  # [N, A*H]
    last_hidden: Tensor  # [R, H]
    last_rows: Tensor  # [R] int64, ascending: the token of each row

    def to(self, device: torch.device) -> Batch:
        tensors: dict[str, Any] = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **tensors)

    def bounds(self) -> Tensor:
        """[S + 1]: where each sample starts, and N."""
        return torch.tensor([0, *self.lengths], device=self.input_ids.device).cumsum(0)

    def ends(self) -> Tensor:
        """[N]: where the sample of each token ends."""
        lengths = torch.tensor(self.lengths, device=self.input_ids.device)
        return self.bounds()[1:].repeat_interleave(lengths)

    def ahead(self, values: Tensor, slots: Tensor, distance: int) -> Tensor:
        """`values` [N] at `distance` tokens after each slot, 0 past the sample's end: [n]."""
        there = slots + distance  # [n]
        inside = there < self.ends()[slots]
        return values[there.clamp(max=len(values) - 1)] * inside


def valid_slots(batch: Batch, steps: int) -> list[Tensor]:
    """For each step k, the slots i with x_{i+1}..x_{i+2+k} all response tokens: the drafts that serving makes."""
    slots = torch.arange(len(batch.input_ids), device=batch.input_ids.device)  # [N]
    slots = slots[batch.ahead(batch.loss_mask, slots, 1)]
    valid = []
    for step in range(steps):
        slots = slots[batch.ahead(batch.loss_mask, slots, 2 + step)]  # [n_k], each step's within the last one's
        valid.append(slots)
    return valid


class RMSNorm(nn.RMSNorm):
    """Computes in its input's dtype, as in serving; torch's own falls back to slow pieces where weights are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections and RoPE; takes the embedding and the hidden state side by side (2H)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = int(config.head_dim or 0)
        query, kv = config.num_attention_heads * self.head_dim, int(config.num_key_value_heads or 0) * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:  # [n, 2H], [n] -> [n, h, d]
        return self._rotate(self.q_proj(x), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # [n, 2H], [n] -> 2 x [n, kv, d]
        return self._rotate(self.k_proj(x), positions), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))  # [n, h, d]
        cos, sin = (table[0, :, None] for table in self.rotary(x, positions[None]))  # [n, 1, d]
        return x * cos + rotate_half(x) * sin


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)  # [n, 2H]

    def outputs(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.o_proj(attended)  # [n, H]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [n, H]


class Drafter(nn.Module):
    """Parameters only by the names SGLang loads; `embed_tokens` is the target's and frozen. d2t and t2d are buffers."""

    d2t: Tensor  # [Vd] int64: target id minus draft id
    t2d: Tensor  # [V] bool: the target's token is in the draft vocabulary

    def __init__(self, config: LlamaConfig, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.requires_grad_(False)
        self.fc = nn.Linear(config.num_aux_hidden_states * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", t2d)

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, batch: Batch, slots: list[Tensor], attention: Callable[..., Tensor] = attend) -> list[Tensor]:
        """The normed output [n_k, H], ready for `lm_head`, at `slots[k]` [n_k] of every step k.

        A step's slots are ascending and among those of the step before.
        """
        layer, bounds, ends = self.midlayer, batch.bounds(), batch.ends()
        all_slots = torch.arange(len(batch.input_ids), device=ends.device)  # [N]
        positions = all_slots - bounds[:-1].repeat_interleave(bounds.diff())  # [N]
        hidden = self.fc(batch.aux)  # [N, H]
        x = layer.inputs(self.embed_tokens(batch.ahead(batch.input_ids, all_slots, 1)), hidden)  # [N, 2H]
        key, value = layer.self_attn.key_value(x, positions)  # [N, kv, d] each
        own: list[tuple[Tensor, Tensor]] = []  # of [n, kv, d]: this slot's keys and values of steps 1..k
        outputs = []
        for step, here in enumerate(slots):
            kept = torch.searchsorted(slots[step - 1], here) if step else here  # [n]: rows of the step before
            hidden = hidden[kept]  # [n, H]
            if step:
                x = layer.inputs(self.embed_tokens(batch.ahead(batch.input_ids, here, 1 + step)), hidden)  # [n, 2H]
                own = [(k[kept], v[kept]) for k, v in own]
                own.append(layer.self_attn.key_value(x, positions[here] + step))
            else:
                x = x[here]  # [n, 2H]
            query = layer.self_attn.query(x, positions[here] + step)  # [n, h, d]
            attended = attention(query, here, key, value, own, bounds)  # [n, h*d]
            hidden = layer.outputs(hidden, attended)  # [n, H]
            normed = self.norm(hidden)  # [n, H]
            outputs.append(normed)
            if self.config.norm_output:
                hidden = normed
        return outputs
