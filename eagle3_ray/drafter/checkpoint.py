"""A drafter on disk, as SGLang 0.5.23 loads it: config.json and model.safetensors.

What SGLang would get wrong in silence is spelled out: the head is the drafter's own (`tie_word_embeddings` false), the
draft vocabulary's size is given, and so are the captured layers, in the layer ids of the target's SGLang class. The
target's embedding, which SGLang puts in place of the exported one unless the drafter is of another width, is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import read_config

# What in config.json decides whether the weights that begin so are there
FLAGS = {"input_norm": "norm_before_fc", "fc_norm": "fc_norm", "midlayer": "num_hidden_layers"}
FLAGS["layers"] = FLAGS["midlayer"]


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
    """The drafter that `export` wrote, in float32. ValueError as `check_weights`."""
    weights = load_file(folder / "model.safetensors")
    d2t = weights["d2t"]
    config = read_config(json.loads((folder / "config.json").read_text()))
    drafter = Drafter(config, d2t + torch.arange(len(d2t)))
    check_weights(drafter, weights)
    drafter.load_state_dict(weights)
    return drafter


def check_weights(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """ValueError unless the weights are exactly those that the drafter's config asks for.

    SGLang would leave what is missing as it came from memory, and pass over what its config does not ask for.
    """
    expected = drafter.state_dict()
    for name in sorted(expected.keys() ^ weights.keys()):
        flag = FLAGS.get(name.split(".")[0])
        says = f"config.json's {flag} is {getattr(drafter.config, flag)!r}" if flag else "config.json asks otherwise"
        raise ValueError(f"{name} is {'missing from' if name in expected else 'among'} the weights, but {says}")
    for name, tensor in expected.items():
        if tensor.shape != weights[name].shape:
            raise ValueError(f"{name} is {list(weights[name].shape)}; config.json asks for {list(tensor.shape)}")


def _state(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in drafter.state_dict().items()
    }
