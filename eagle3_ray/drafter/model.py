"""The EAGLE-3 drafter, with the shapes and the parameter names of the two classes that SGLang serves:
`LlamaForCausalLMEagle3` (gqa.py) and `Eagle3DeepseekV2ForCausalLM` (mla.py). shape.py makes their config.

Training-time test (TTT) runs the drafter several steps ahead of every slot, as serving does. Step k at slot i takes the
token x_{i+1+k} and a hidden state: the projected aux_i at step 0, its own previous output after that. In each layer a
slot sees the step-0 keys j <= i of its sample and its own keys of steps 1..k; its RoPE position is i + k.

Samples lie end to end, without padding. What is needed at every slot is the step-0 keys and values of each layer, so
the step-0 outputs of all layers but the last; all else is computed at the slots that the caller names for each step,
which in training are those that serving would draft from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle3_ray.drafter.attention import attend
from eagle3_ray.drafter.gqa import GroupedAttention, RMSNorm
from eagle3_ray.drafter.mla import LatentAttention
from eagle3_ray.drafter.shape import is_mla


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


class Layer(nn.Module):
    """A decoder layer. The first one takes embedding and hidden state side by side, further ones the hidden state."""

    def __init__(self, config: Any, first: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps) if first else None
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = (LatentAttention if is_mla(config) else GroupedAttention)(config, hidden * (1 + first))
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:  # 2 x [n, H] -> [n, 2H] or [n, H]
        normed = self.hidden_norm(hidden)
        return normed if self.input_layernorm is None else torch.cat([self.input_layernorm(embeds), normed], dim=-1)

    def outputs(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.o_proj(attended)  # [n, H]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [n, H]


class Drafter(nn.Module):
    """Parameters only by the names SGLang loads. d2t and t2d are buffers.

    `embed_tokens` is the target's and frozen, unless the drafter is of another width than the target (Ht): then SGLang
    leaves the drafter its own, which is trained.
    """

    d2t: Tensor  # [Vd] int64: target id minus draft id
    t2d: Tensor  # [V] bool: the target's token is in the draft vocabulary

    def __init__(self, config: PreTrainedConfig, draft_ids: Tensor) -> None:
        super().__init__()
        shape: Any = config
        hidden, target, states = shape.hidden_size, shape.target_hidden_size, shape.num_aux_hidden_states
        self.config, self.own_embedding = shape, hidden != target
        self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embed_tokens.requires_grad_(self.own_embedding)
        self.input_norm = RMSNorm(states * target, shape.rms_norm_eps) if shape.norm_before_fc else None
        norms = [RMSNorm(target, shape.rms_norm_eps) for _ in range(states if shape.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = nn.Linear(states * target, hidden, bias=False)
        layers = [Layer(shape, first=i == 0) for i in range(shape.num_hidden_layers)]
        if len(layers) == 1:
            self.midlayer = layers[0]
        else:
            self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
        t2d[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", t2d)

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def decoder(self) -> list[Layer]:
        """The decoder layers, in order."""
        return [self.midlayer] if self.config.num_hidden_layers == 1 else list(self.layers)  # type: ignore[arg-type]

    def project(self, aux: Tensor) -> Tensor:
        """The hidden state of step 0: [N, A*Ht] -> [N, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)  # A x [N, Ht]
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def forward(self, batch: Batch, slots: list[Tensor], attention: Callable[..., Tensor] = attend) -> list[Tensor]:
        """The normed output [n_k, H], ready for `lm_head`, at `slots[k]` [n_k] of every step k.

        A step's slots are ascending and among those of the step before.
        """
        layers, bounds, ends = self.decoder, batch.bounds(), batch.ends()
        everywhere = torch.arange(len(batch.input_ids), device=ends.device)  # [N]
        positions = everywhere - bounds[:-1].repeat_interleave(bounds.diff())  # [N]
        contexts: list[tuple[Tensor, Tensor]] = []  # keys and values of step 0 a layer: [N, kv, d] each
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]  # [n, kv, d]: this slot's of steps 1..k, a layer

        def run(i: int, hidden: Tensor, x: Tensor, here: Tensor, step: int) -> Tensor:  # -> [n, H]
            query = layers[i].self_attn.query(x, positions[here] + step)  # [n, h, d]
            return layers[i].outputs(hidden, attention(query, here, *contexts[i], own[i], bounds))

        def embeds(here: Tensor, step: int) -> Tensor:  # [n, H]
            return self.embed_tokens(batch.ahead(batch.input_ids, here, 1 + step))

        hidden, first = self.project(batch.aux), embeds(everywhere, 0)  # 2 x [N, H]
        for i, layer in enumerate(layers):
            x = layer.inputs(first, hidden)  # [N, 2H] or [N, H]
            contexts.append(layer.self_attn.key_value(x, positions))
            if i + 1 < len(layers):
                hidden = run(i, hidden, x, everywhere, 0)  # [N, H]
        outputs: list[Tensor] = []
        for step, here in enumerate(slots):
            if step == 0:
                hidden = run(len(layers) - 1, hidden[here], x[here], here, 0)  # [n, H]
            else:
                kept = torch.searchsorted(slots[step - 1], here)  # [n]: rows of the step before
                hidden, token = hidden[kept], embeds(here, step)  # 2 x [n, H]
                for i, layer in enumerate(layers):
                    x = layer.inputs(token, hidden)  # [n, 2H] or [n, H]
                    own[i] = [(key[kept], value[kept]) for key, value in own[i]]
                    own[i].append(layer.self_attn.key_value(x, positions[here] + step))
                    hidden = run(i, hidden, x, here, step)  # [n, H]
            outputs.append(self.norm(hidden))
            if self.config.norm_output:
                hidden = outputs[-1]
        return outputs
