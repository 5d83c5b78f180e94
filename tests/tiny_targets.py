"""Tiny random targets for tests that need real weights but no sense: seconds to make, a megabyte on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random fp32 Llama as a Hugging Face folder; `changes` go into its config (`tie_word_embeddings=True`)."""
    return _write(LlamaForCausalLM(LlamaConfig(**_sizes(**changes))), folder, seed)


def tiny_qwen3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """The same for Qwen3, which also normalises each query and key head."""
    return _write(Qwen3ForCausalLM(Qwen3Config(**_sizes(**changes))), folder, seed)


def tiny_deepseek_v3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """The same for DeepSeek-V3: latent attention (MLA), and experts in every layer but the first."""
    sizes = _sizes(kv_heads=4, **changes)
    del sizes["head_dim"]  # follows from those of the latent attention
    config = DeepseekV3Config(
        **sizes,
        q_lora_rank=48,
        kv_lora_rank=32,  # the cache's width, 32 + 8, is not that of a query, 16 + 8: no mix-up fits
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        # What SGLang also reads, and Transformers takes for granted. On CPU it refuses a DeepSeek without YaRN
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return _write(DeepseekV3ForCausalLM(config), folder, seed)


def tiny_kimi_k25(folder: Path, deepseek: Path) -> Path:
    """Kimi-K2.5 with the weights of a tiny DeepSeek-V3 as its language model, whose states it must have.

    Its vision tower has no weights: nothing here ever sees a picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(deepseek / "model.safetensors")
    save_file(
        {f"language_model.{name}": weight for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = json.loads((deepseek / "config.json").read_text()) | {"model_type": "kimi_k2"}
    vision = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision | {"vt_hidden_size": 32, "text_hidden_size": text["hidden_size"]},
        "media_placeholder_token_id": text["vocab_size"] - 1,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _sizes(
    vocab: int = 512, hidden: int = 64, layers: int = 6, heads: int = 4, kv_heads: int = 2, **changes: Any
) -> dict:
    config = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return config | changes


@torch.no_grad()
def _write(model: PreTrainedModel, folder: Path, seed: int) -> Path:
    """Every weight from one generator. Norms must differ from 1, or a test cannot see whether one was applied; matrices
    are large enough for the states to differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a router's; zero would hide whether it was applied
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
    model.float().save_pretrained(folder)
    return Path(folder)
