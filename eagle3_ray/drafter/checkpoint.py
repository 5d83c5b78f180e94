"""A drafter on disk, as SGLang 0.5.23 loads it: config.json and model.safetensors.

What SGLang would get wrong in silence is spelled out: the head is the drafter's own (`tie_word_embeddings` false), the
draft vocabulary's size is given, and so are the captured layers, in the layer ids of the target's SGLang class.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from eagle3_ray.drafter.model import Drafter


def export(folder: Path, drafter: Drafter, layer_ids: list[int], dtype: str) -> None:
    """`layer_ids` are SGLang's names for the boundaries of `aux`, in their order; `dtype` is that of the weights."""
    if len(layer_ids) != drafter.config.num_aux_hidden_states:
        raise ValueError(f"{len(layer_ids)} layer ids for {drafter.config.num_aux_hidden_states} boundaries")
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter.config.to_dict() | {
        "dtype": dtype,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(_state(drafter, getattr(torch, dtype)), folder / "model.safetensors", {"format": "pt"})


def load(folder: Path) -> Drafter:
    """The drafter that `export` wrote, in float32."""
    weights = load_file(folder / "model.safetensors")
    d2t = weights["d2t"]
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    drafter = Drafter(config, d2t + torch.arange(len(d2t)))
    drafter.load_state_dict(weights)
    return drafter


def _state(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in drafter.state_dict().items()
    }
