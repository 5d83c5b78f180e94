"""A drafter on disk, as SGLang 0.5.23 loads it: config.json and model.safetensors.

What SGLang would get wrong in silence is spelled out: the head is the drafter's own (`tie_word_embeddings` false), the
draft vocabulary's size is given, and so are the captured layers, in the layer ids of the target's SGLang class. The
target's embedding, which SGLang puts in place of the exported one unless the drafter is of another width, is the same,
or left out. `check_folder` tells of any folder, ours or not, what SGLang would take otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_ray.capture import text_config
from eagle3_ray.drafter.faults import (
    EMBEDDING,
    LAYER_IDS,
    config_faults,
    dtype_faults,
    map_faults,
    places,
    served_config,
    value_faults,
    weight_faults,
)
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import read_config
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.tensors import Tensors

WRITTEN_FOR = "0.5.23"  # the SGLang whose loaders all of this follows


def export(folder: Path, drafter: Drafter, layer_ids: list[int], dtype: str, embedding: bool = True) -> None:
    """`layer_ids` are SGLang's names for the boundaries of `aux`, in their order; `dtype` is that of the weights.

    Without `embedding`, SGLang serves the target's in its place: `set_embed` of both drafter classes replaces the
    parameter, whatever was loaded, unless the drafter is of another width. ValueError where it is.
    """
    if len(layer_ids) != drafter.config.num_aux_hidden_states:
        raise ValueError(f"{len(layer_ids)} layer ids for {drafter.config.num_aux_hidden_states} boundaries")
    if drafter.own_embedding and not embedding:
        raise ValueError("a drafter of another width than the target is served with its own embedding")
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter.config.to_dict() | {
        "dtype": dtype,
        "eagle_config": {LAYER_IDS: list(layer_ids), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n")
    state = _state(drafter, getattr(torch, dtype))
    if not embedding:
        del state[EMBEDDING]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, embedding: Tensor | None = None) -> Drafter:
    """The drafter that `export` wrote, in float32; `embedding` [V, H] is the target's, for a folder without it.

    ValueError as `check_weights`.
    """
    weights = load_file(folder / "model.safetensors")
    if embedding is not None:
        weights.setdefault(EMBEDDING, embedding)
    d2t = weights["d2t"]
    config = read_config(json.loads((folder / "config.json").read_text()))
    drafter = Drafter(config, d2t + torch.arange(len(d2t)))
    check_weights(drafter, weights)
    drafter.load_state_dict(weights)
    return drafter


def check_weights(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """ValueError unless the weights are exactly those that the drafter's config asks for."""
    wanted, found = ({name: tuple(t.shape) for name, t in state.items()} for state in (drafter.state_dict(), weights))
    for fault in weight_faults(wanted, found, drafter.config):
        raise ValueError(fault)


def check_folder(folder: Path, target: dict[str, Any]) -> list[str]:
    """What SGLang 0.5.23 would ignore in a drafter's folder, or take otherwise: a sentence each, none if all is well.

    `target` is the config.json of the target that it shall draft for, whole or the text part alone. Config, weights and
    the two vocabulary maps are read, a tensor at a time and in about two seconds a GB, and never a pickle. Source:
    SGLang's loaders, named in faults.py.
    """
    try:
        files = Filesystem(str(folder.resolve()))
        given: dict[str, Any] = json.loads(files.read("config.json"))
        tensors = Tensors(files)
        entries = {name: tensors.entry(name) for name in tensors.names()}
        maps = {name.split(".")[-1]: tensors.read(name) for name in entries if name.split(".")[-1] in ("d2t", "t2d")}
    except (FileNotFoundError, StoreError, ValueError) as error:
        return [f"{folder.name}: config.json and safetensors cannot be read ({error}); nothing else is opened"]
    target = text_config(target)
    faults = list(config_faults(given, target))
    faults += dtype_faults(given, entries)
    try:
        config: Any = served_config(given)
        wanted, found = places(list(entries), config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        return [*faults, f"config.json: its values make no drafter, nor would they in SGLang: {error}"]
    said = weight_faults(wanted, {ours: entries[theirs].shape for ours, theirs in found.items()}, config)
    said_of_maps = map_faults(maps.get("d2t"), maps.get("t2d"), int(config.draft_vocab_size), int(target["vocab_size"]))
    try:
        said_of_values = list(value_faults((name, tensors.read(name)) for name in entries))
    except StoreError as error:
        said_of_values = [f"a tensor cannot be read: {error}"]
    return faults + [f"model.safetensors: {fault}" for fault in (*said, *said_of_maps, *said_of_values)]


def _state(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in drafter.state_dict().items()
    }
