"""Tiny random targets for tests that need real weights but no sense: seconds to make, a megabyte on disk."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random fp32 Llama as a Hugging Face folder; `changes` go into its config (`tie_word_embeddings=True`)."""
    return _write(LlamaForCausalLM(LlamaConfig(**_sizes(**changes))), folder, seed)


def tiny_qwen3(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """The same for Qwen3, which also normalises each query and key head."""
    return _write(Qwen3ForCausalLM(Qwen3Config(**_sizes(**changes))), folder, seed)


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
    model.float().save_pretrained(folder)
    return Path(folder)
