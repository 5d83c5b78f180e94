"""Damages a finished store the way mistakes do: `python plant_fault.py STORE FAULT TARGET`. It only edits files.

Faults of the exported drafter edit <drafter>/export/; faults of the features rewrite their shards, with commits that
are right for the new bytes. Some take states anew from the target's folder, by Transformers; "A + B" plants both.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_ray.store.shards import Features, ShardReader, write_features

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def export_folder(store: Path) -> Path:
    (folder,) = store.glob("drafters/*/export")
    return folder


def edit_export(store: Path, edit: Edit) -> None:
    folder = export_folder(store)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    edit(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def _samples(shard: Path) -> list[Features]:
    reader = ShardReader(shard, shard.parents[1].name)
    return [reader.features(i) for i in range(len(reader))]


def edit_features(store: Path, edit: Callable[[Features], Features]) -> None:
    for path in store.glob("features/*/commits/*.json"):
        commit = json.loads(path.read_text())
        shard = store / commit["shard"]
        samples = [edit(sample) for sample in _samples(shard)]
        new = shard.with_suffix(".new")
        write_features(new, samples, shard.parents[1].name)
        shard.unlink()
        new.rename(shard)
        commit |= {"size": shard.stat().st_size, "sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
        path.write_text(json.dumps(commit))


# ---------------------------------------------------------------- of the export


def ids_by(step: int) -> Edit:
    def edit(config: dict[str, Any], _: Any) -> None:
        eagle = config["eagle_config"]
        eagle["eagle_aux_hidden_state_layer_ids"] = [i + step for i in eagle["eagle_aux_hidden_state_layer_ids"]]

    return edit


def one_id_apart(config: dict[str, Any], _: Any) -> None:
    """In no list: only the middle one is wrong, by two."""
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"][1] += 2


def no_eagle_config(config: dict[str, Any], _: Any) -> None:
    del config["eagle_config"]


def other_theta(config: dict[str, Any], _: Any) -> None:
    config["rope_parameters"]["rope_theta"] *= 100


def older_word_for_rope(config: dict[str, Any], _: Any) -> None:
    """Beside what is right: as another drafter's config.json has it, for an older Transformers."""
    config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}


def absolute_d2t(_: Any, weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))


def other_t2d(_: Any, weights: dict[str, torch.Tensor]) -> None:
    weights["t2d"] = torch.cat([weights["t2d"], weights["t2d"][:64]])


def random_embedding(_: Any, weights: dict[str, torch.Tensor]) -> None:
    weights["embed_tokens.weight"] = torch.randn_like(weights["embed_tokens.weight"].float()) * 0.02


def weights_in_half(_: Any, weights: dict[str, torch.Tensor]) -> None:
    """As a converter does it that knows fp16 alone, and leaves config.json as it is."""
    for name, tensor in weights.items():
        weights[name] = tensor.half() if tensor.is_floating_point() else tensor


def half_precision(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    config["dtype"] = "float16"
    weights_in_half(config, weights)


def older_word_for_half(config: dict[str, Any], _: Any) -> None:
    """What older tools call dtype, copied from another drafter's config.json."""
    del config["dtype"]
    config["torch_dtype"] = "float16"


# ---------------------------------------------------------------- of the features


class Target:
    """The target in Transformers, or, with `other`, one of the same shape and other weights."""

    def __init__(self, folder: Path, store: Path, other: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        (description,) = store.glob("features/*/description.json")
        self.boundaries = json.loads(description.read_text())["boundaries"]
        if other:
            torch.manual_seed(7)
            for parameter in self.model.parameters():
                if parameter.dim() == 2:
                    parameter.data = parameter.data[torch.randperm(len(parameter))]

    @torch.no_grad()
    def taken_anew(self, sample: Features, step: int = 0) -> Features:
        """The sample's states, `step` boundaries further on."""
        states = self.model(sample.input_ids.long()[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[k + step][0] for k in self.boundaries], dim=-1)  # [T, A*H]
        last = states[-1][0][sample.last_rows]  # [R, H]
        return replace(sample, aux=aux.to(sample.aux.dtype), last_hidden=last.to(sample.last_hidden.dtype))

    def before_the_norm(self, sample: Features) -> Features:
        taken: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: taken.append(given[0][0]))
        self.taken_anew(sample)
        hook.remove()
        return replace(sample, last_hidden=taken[0][sample.last_rows].to(sample.last_hidden.dtype))


def without_beginning(sample: Features) -> Features:
    """As a template renders it that begins otherwise: half of what comes before the answer is not there."""
    cut = int(sample.loss_mask.int().argmax()) // 2
    kept = {name: getattr(sample, name)[cut:] for name in ("input_ids", "loss_mask", "aux")}
    return replace(sample, **kept, last_rows=sample.last_rows - cut)


def permuted(sample: Features) -> Features:
    low, middle, high = sample.aux.chunk(3, dim=-1)
    return replace(sample, aux=torch.cat([middle, low, high], dim=-1))


def rows_shifted(sample: Features) -> Features:
    return replace(sample, aux=sample.aux.roll(1, dims=0))


def mask_shifted(sample: Features) -> Features:
    return replace(sample, loss_mask=sample.loss_mask.roll(1))


EXPORT: dict[str, Edit] = {
    "ids one too high": ids_by(1),
    "ids one too low": ids_by(-1),
    "ids two too high": ids_by(2),
    "one id apart": one_id_apart,
    "no eagle_config": no_eagle_config,
    "other theta": other_theta,
    "other rope by the older key": older_word_for_rope,
    "absolute d2t": absolute_d2t,
    "other t2d": other_t2d,
    "random embedding": random_embedding,
    "half precision": half_precision,
    "weights in half precision": weights_in_half,
    "torch_dtype of half precision": older_word_for_half,
}
FEATURES: dict[str, Callable[[Features], Features]] = {
    "permuted": permuted,
    "rows shifted": rows_shifted,
    "mask shifted": mask_shifted,
}


def retaken(fault: str, target: Target) -> Callable[[Features], Features]:
    return {
        "another target": target.taken_anew,
        "captured one too high": lambda sample: target.taken_anew(sample, 1),
        "other template": lambda sample: target.taken_anew(without_beginning(sample)),
        "before the norm": target.before_the_norm,
    }[fault]


def main(store: Path, faults: str, folder: Path) -> None:
    """`faults` of one kind after the other: those of the export and those of the features do not touch each other."""
    for fault in faults.split(" + "):
        if fault in EXPORT:
            edit_export(store, EXPORT[fault])
        elif fault in FEATURES:
            edit_features(store, FEATURES[fault])
        else:
            edit_features(store, retaken(fault, Target(folder, store, other=fault == "another target")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
