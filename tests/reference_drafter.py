"""A drafter as serving runs it: one token at a time, with a KV cache, from nothing but its weights and its config.json.

Written from the papers (EAGLE-3, arXiv 2503.01840; DeepSeek-V2, arXiv 2405.04434; YaRN, arXiv 2309.00071) and from what
SGLang does with a checkpoint, for tests: no batching, no masks, no code of eagle3_ray. Latent attention is the
unabsorbed form of the paper: every head's key and value are made from the cached latent at each use.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Cache = list[list[tuple[Tensor, Tensor]]]  # a layer, a token: what is kept of it


def drafts(weights: Weights, config: dict[str, Any], ids: Tensor, aux: Tensor, slots: list[list[int]]) -> list[Tensor]:
    """The normed outputs [n_k, H] of one document at the slots of each step k, when serving drafts x_{i+1+k}.

    ids [T], aux [T, A*Ht]. The step-0 pass over slot i extends the cache for good; drafting goes on with a copy.
    """
    cache: Cache = [[] for _ in range(config["num_hidden_layers"])]
    outputs: list[dict[int, Tensor]] = [{} for _ in slots]
    for slot in range(max(slots[0], default=-1) + 1):
        hidden, normed = token(weights, config, cache, _at(ids, slot + 1), project(weights, config, aux[slot]), slot)
        branch = [list(layer) for layer in cache]
        for step, wanted in enumerate(slots):
            if slot not in wanted:
                break
            if step:
                fed = normed if config["norm_output"] else hidden
                hidden, normed = token(weights, config, branch, _at(ids, slot + 1 + step), fed, slot + step)
            outputs[step][slot] = normed
    width = weights["norm.weight"].shape[0]
    return [torch.stack([out[s] for s in sorted(out)]) if out else aux.new_empty(0, width) for out in outputs]


def _at(ids: Tensor, position: int) -> int:
    return int(ids[position]) if position < len(ids) else 0


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def project(weights: Weights, config: dict[str, Any], aux: Tensor) -> Tensor:
    """The features of one token, [A*Ht] -> [H]."""
    eps, width = config["rms_norm_eps"], config["target_hidden_size"]
    if config["norm_before_fc"]:
        aux = norm(aux, weights["input_norm.weight"], eps)
    if config["fc_norm"]:
        pieces = [aux[i * width : (i + 1) * width] for i in range(config["num_aux_hidden_states"])]
        aux = torch.cat([norm(piece, weights[f"fc_norm.{i}.weight"], eps) for i, piece in enumerate(pieces)])
    return weights["fc.weight"] @ aux


def token(
    weights: Weights, config: dict[str, Any], cache: Cache, token_id: int, hidden: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """One token through all layers, which extends the cache. The output, [H], and the same normed."""
    eps = config["rms_norm_eps"]
    attention = latent_attention if "kv_lora_rank" in config else grouped_attention
    for number, kept in enumerate(cache):
        prefix = "midlayer." if len(cache) == 1 else f"layers.{number}."
        w = {name[len(prefix) :]: weight for name, weight in weights.items() if name.startswith(prefix)}
        x = norm(hidden, w["hidden_norm.weight"], eps)
        if number == 0:
            embedded = norm(weights["embed_tokens.weight"][token_id], w["input_layernorm.weight"], eps)
            x = torch.cat([embedded, x])
        hidden = hidden + w["self_attn.o_proj.weight"] @ attention(w, config, kept, x, position)
        x = norm(hidden, w["post_attention_layernorm.weight"], eps)
        gate = w["mlp.gate_proj.weight"] @ x
        hidden = hidden + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["mlp.up_proj.weight"] @ x))
    return hidden, norm(hidden, weights["norm.weight"], eps)


def grouped_attention(w: Weights, config: dict[str, Any], kept: list, x: Tensor, position: int) -> Tensor:
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    turn = angles(config, d, position)
    keys = (w["self_attn.k_proj.weight"] @ x).split(d)
    keys = [halves_turned(key, turn) for key in keys]
    kept.append((torch.stack(keys), (w["self_attn.v_proj.weight"] @ x).view(kv_heads, d)))
    out = []
    for head, query in enumerate((w["self_attn.q_proj.weight"] @ x).split(d)):
        group = head // (heads // kv_heads)
        scores = torch.stack([halves_turned(query, turn) @ key[group] for key, _ in kept]) / math.sqrt(d)
        out.append(sum(p * value[group] for p, (_, value) in zip(scores.softmax(0), kept, strict=True)))
    return torch.cat(out)


def latent_attention(w: Weights, config: dict[str, Any], kept: list, x: Tensor, position: int) -> Tensor:
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    turn, eps = angles(config, rope, position), config["rms_norm_eps"]
    compressed = w["self_attn.kv_a_proj_with_mqa.weight"] @ x
    latent = norm(compressed[:rank], w["self_attn.kv_a_layernorm.weight"], eps)
    kept.append((latent, neighbours_turned(compressed[rank:], turn)))
    query = norm(w["self_attn.q_a_proj.weight"] @ x, w["self_attn.q_a_layernorm.weight"], eps)
    queries = (w["self_attn.q_b_proj.weight"] @ query).split(nope + rope)
    up = w["self_attn.kv_b_proj.weight"].split(nope + config["v_head_dim"])  # a head: [nope + v, rank]
    yarn = config["rope_parameters"]
    scale = (nope + rope) ** -0.5
    if yarn["rope_type"] == "yarn":
        scale *= (1 + 0.1 * yarn.get("mscale_all_dim", 0) * math.log(yarn["factor"])) ** 2
    out = []
    for query, matrix in zip(queries, up, strict=True):
        turned = neighbours_turned(query[nope:], turn)
        scores = [query[:nope] @ (matrix[:nope] @ c) + turned @ key for c, key in kept]
        weights = (torch.stack(scores) * scale).softmax(0)
        out.append(sum(p * (matrix[nope:] @ c) for p, (c, _) in zip(weights, kept, strict=True)))
    return torch.cat(out)


def halves_turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs are (x_i, x_{i + d/2})."""
    (a, b), (cos, sin) = x.chunk(2), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def neighbours_turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs are (x_{2i}, x_{2i+1})."""
    (a, b), (cos, sin) = x.view(-1, 2).unbind(-1), turn
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten()


def angles(config: dict[str, Any], d: int, position: int) -> tuple[Tensor, Tensor]:
    """cos and sin [d/2] of plain or YaRN's RoPE; in float32, as training and serving both have them."""
    rope = config["rope_parameters"]
    theta, length = rope["rope_theta"], 1.0
    frequencies = 1.0 / (theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    if rope["rope_type"] == "yarn":
        factor, context = rope["factor"], rope["original_max_position_embeddings"]

        def index(turns: float) -> float:  # the dimension that turns so often over the original context
            return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(index(rope["beta_fast"])), 0), min(math.ceil(index(rope["beta_slow"])), d - 1)
        slow = ((torch.arange(d // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies / factor * slow + frequencies * (1 - slow)
        if rope.get("mscale"):
            both = [1 + 0.1 * rope[name] * math.log(factor) for name in ("mscale", "mscale_all_dim")]
            length = both[0] / both[1]
        else:
            length = 1 + 0.1 * math.log(factor)
    angle = position * frequencies
    return angle.cos() * length, angle.sin() * length
