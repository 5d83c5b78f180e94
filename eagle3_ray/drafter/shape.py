"""A drafter's shape: its config.json, from the settings and the target's config, in the words that SGLang reads.

What SGLang would take otherwise, in silence, is written so that it cannot: the sizes that follow from others, both
flags of the norms before fc, and RoPE, which training takes from Transformers and serving from SGLang.
"""

from __future__ import annotations

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig

from eagle3_ray.config import MLA_SIZES, DrafterConfig, check_drafter, drafter_head_dim

GQA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
ROPE_WORDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")  # in a config.json
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# The RoPE settings that Transformers and SGLang read alike (tests compare their tables). A target with another type
# gets plain RoPE for its drafter, which has no positions to inherit: training and serving only have to agree. Of the
# types that both know, "dynamic" stretches short sequences too in SGLang, and "longrope" takes its long or short
# factors by the longest sequence of a batch, whichever those are in training and in serving.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (*YARN, "truncate"),
}
MLA_ROPE_KEYS = {"default": (), "yarn": YARN}  # all that is not plain SGLang's MLA takes for YaRN, always truncated


def drafter_config(
    settings: DrafterConfig, target: dict[str, Any], num_aux: int, draft_vocab_size: int
) -> PreTrainedConfig:
    """The drafter's config.json, whole but for the layer ids: `target` is the target's text config.

    ConfigError as `check_drafter`.
    """
    check_drafter(settings, target, num_aux)
    hidden = settings.hidden_size or int(target["hidden_size"])
    heads = settings.num_attention_heads or int(target["num_attention_heads"])
    shared: dict[str, Any] = dict(
        vocab_size=int(target["vocab_size"]),
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden,
        target_hidden_size=int(target["hidden_size"]),
        num_aux_hidden_states=num_aux,
        intermediate_size=settings.intermediate_size or int(target["intermediate_size"]),
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=heads,
        hidden_act="silu",
        rms_norm_eps=float(target.get("rms_norm_eps") or 1e-5),
        max_position_embeddings=int(target.get("max_position_embeddings") or 8192),
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=target.get("eos_token_id"),
        pad_token_id=None,
    )
    if settings.attention == "mla":
        shared |= {name: int(target[name]) for name in MLA_SIZES}
        return DeepseekV3Config(
            **shared,
            architectures=[MLA],
            num_key_value_heads=heads,
            rope_interleave=True,
            rope_parameters=_rope(target, MLA_ROPE_KEYS),
        )
    return LlamaConfig(
        **shared,
        architectures=[GQA],
        num_key_value_heads=settings.num_key_value_heads or int(target.get("num_key_value_heads") or heads),
        head_dim=drafter_head_dim(settings, target),
        rope_parameters=_rope(target, ROPE_KEYS),
    )


def read_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The config that `drafter_config` made, from its `to_dict()` or its config.json."""
    return _class(values)(**copy.deepcopy(values))  # a config completes its RoPE in place


def read_rope(values: dict[str, Any]) -> dict[str, Any]:
    """RoPE as SGLang gets it from a config.json: by Transformers, which takes `rope_scaling` before `rope_parameters`,
    and `rope_theta` only where the one it takes has none.

    ValueError with what is wrong where it makes no RoPE.
    """
    decides = {name: values[name] for name in (*ROPE_WORDS, "max_position_embeddings") if name in values}
    try:
        rope: dict[str, Any] = _class(values)(**copy.deepcopy(decides)).rope_parameters  # type: ignore[assignment]
    except (StrictDataclassError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    return {name: value for name, value in rope.items() if name != "type" and value is not None}  # now rope_type


def _class(values: dict[str, Any]) -> Any:
    return DeepseekV3Config if values.get("architectures") == [MLA] else LlamaConfig


def is_mla(config: PreTrainedConfig) -> bool:
    return config.architectures == [MLA]


def rope_type(target: dict[str, Any]) -> str:
    """The target's own kind of RoPE, whether a drafter can have it or not."""
    rope = _target_rope(target)
    return rope.get("rope_type") or rope.get("type") or "default"


def _target_rope(target: dict[str, Any]) -> dict[str, Any]:
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    return rope.get("full_attention", rope)  # one entry a layer type: a drafter's layer attends to all


def _rope(target: dict[str, Any], known: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    rope = _target_rope(target)
    theta = rope.get("rope_theta") or target.get("rope_theta") or 10000.0
    kind = rope_type(target) if rope_type(target) in known else "default"
    kept = {key: rope[key] for key in known[kind] if rope.get(key) is not None}
    if not (kept.get("mscale") and kept.get("mscale_all_dim")):  # one alone, or a zero, is read in two ways
        kept = {key: value for key, value in kept.items() if not key.startswith("mscale")}
    if "original_max_position_embeddings" in known[kind]:
        kept.setdefault("original_max_position_embeddings", target["max_position_embeddings"])
    return {"rope_type": kind, "rope_theta": float(theta), **kept}
