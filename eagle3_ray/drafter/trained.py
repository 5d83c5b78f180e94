"""A drafter as training left it in the store, and what of it a served one must still have.

The export is a copy of it, and a copy can be edited, converted or mixed up; so can a launch command. `folder_faults`
compares the served folder, `in_force_faults` what a scheduler says that it uses, `chain` gives the logits to compare
with those that were served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_ray.config import Config
from eagle3_ray.drafter.faults import EMBEDDING
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.published import by_path
from eagle3_ray.drafter.shape import ROPE_WORDS, read_config, read_rope
from eagle3_ray.drafter.target import TargetPieces
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.tensors import Tensors, read_tensors

SAYS_NOTHING = {"dtype", "transformers_version"}  # in config.json, of what was trained
JUDGED_ELSEWHERE = {"eagle_config", "torch_dtype", *SAYS_NOTHING, *ROPE_WORDS}


@dataclass(frozen=True)
class Trained:
    """What training left in the store of a drafter: its truth, whatever was exported since."""

    config: dict[str, Any]
    weights: dict[str, Tensor]  # without the target's embedding

    def drafter(self, pieces: TargetPieces) -> Drafter:
        drafter = Drafter(read_config(self.config), self.draft_ids)
        weights = {EMBEDDING: pieces.embedding, **self.weights}
        drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
        return drafter

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] int64."""
        return self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))


def read_trained(files: Filesystem, drafter: str) -> Trained:
    """The drafter trained below the key `drafter`."""
    weights, _ = read_tensors(files, f"{drafter}/weights/model.safetensors")
    return Trained(files.read_json(f"{drafter}/weights/config.json"), weights)


def read_another(config: Config, model: dict[str, Any], num_aux: int) -> Trained:
    """The drafter at drafter.path, of which only its own files are known; arguments and errors as `by_path`."""
    found = by_path(config, model, num_aux)
    return Trained(found.config.to_dict(), found.weights())


def folder_faults(trained: Trained, folder: Path, dtype: str) -> list[str]:
    """How the served folder differs from what was trained and then exported in `dtype`, in words."""
    found: list[Any] = []
    readers: dict[str, Callable[[Path], Any]] = {
        "config.json": lambda path: json.loads(path.read_text()),
        "model.safetensors": load_file,
    }
    for name, read in readers.items():
        try:
            found.append(read(folder / name))
        except (OSError, ValueError, SafetensorError) as error:
            return [f"{name} cannot be read: {error}"]
    config, weights = found
    faults = [*_config_faults(config, trained.config), *_dtype_faults(config, weights, dtype)]
    for name, value in trained.weights.items():
        faults += _tensor_faults(name, value, weights.get(name), trained, dtype)
    return faults


def _config_faults(config: dict[str, Any], trained: dict[str, Any]) -> Iterator[str]:
    if not (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        yield "config.json has no eagle_config with layer ids: SGLang picks layers of its own, in silence"
    for name, value in sorted(trained.items()):
        if name not in JUDGED_ELSEWHERE and config.get(name) != value:
            yield f"config.json: {name} is {config.get(name)!r}, trained was {value!r}"
    written = read_config(trained).to_dict()  # by the export
    for name in sorted(config.keys() - trained.keys() - written.keys() - JUDGED_ELSEWHERE):
        yield f"config.json: {name} is {config[name]!r}; the export wrote no such key, and SGLang may read it"
    yield from _rope_faults(config, trained)


def _rope_faults(config: dict[str, Any], trained: dict[str, Any]) -> Iterator[str]:
    """Where SGLang reads another RoPE, whatever the words: the same one in other words is no fault."""
    expected = read_rope(trained)
    try:
        served: Any = read_rope(config)
    except ValueError as error:
        served = f"unreadable ({error})"
    if served != expected:
        words = [name for name in ROPE_WORDS if config.get(name) != trained.get(name)]
        said = ", ".join(f"{name} is {config.get(name)!r}" for name in words)
        yield f"config.json: {said}: the RoPE that SGLang reads is {served}, trained was {expected}"


def _dtype_faults(config: dict[str, Any], weights: dict[str, Tensor], dtype: str) -> Iterator[str]:
    others = [name for name, t in weights.items() if t.is_floating_point() and t.dtype != getattr(torch, dtype)]
    stored = ""
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        stored = f"{others[0]}{more} is stored in {str(weights[others[0]].dtype).removeprefix('torch.')}"
    said = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) not in (None, dtype)}
    if said:
        name, value = next(iter(said.items()))
        yield f"config.json: {name} is {value}, exported was {dtype}{'; ' if stored else ''}{stored}"
    elif stored:
        yield f"{stored}, exported was {dtype}"


def folder_warnings(folder: Path, pieces: TargetPieces) -> list[str]:
    """What is wrong in the served folder, ours or not, and does no harm in SGLang, in words."""
    config, tensors = json.loads((folder / "config.json").read_text()), Tensors(Filesystem(str(folder.resolve())))
    names = [name for name in tensors.names() if name.removeprefix("model.") == EMBEDDING]
    own = config.get("target_hidden_size") not in (None, config.get("hidden_size"))
    if own or not names:
        return []
    there = tensors.read(names[0])
    if there.shape == pieces.embedding.shape and _same(there, pieces.embedding):
        return []
    return [f"{names[0]} in the file is not the target's; SGLang puts the target's in its place, others may not"]


def _tensor_faults(name: str, trained: Tensor, there: Tensor | None, all_trained: Trained, dtype: str) -> Iterator[str]:
    if there is None:
        yield f"model.safetensors has no {name}"
    elif name == "d2t" and there.shape == trained.shape and torch.equal(there.long(), all_trained.draft_ids):
        yield "d2t holds the target's ids themselves; SGLang adds the draft id to each"
    elif there.shape != trained.shape:
        yield f"{name} is {list(there.shape)}, trained was {list(trained.shape)}: another vocabulary or shape"
    elif not _same(there, trained, dtype):
        yield f"{name} holds other values than were trained"


def _same(there: Tensor, trained: Tensor, exported: str = "float32") -> bool:
    """Whether these are the trained values, cast to the dtype they are in from their own or from the exported one."""
    if not there.is_floating_point():
        return torch.equal(there, trained.to(there.dtype))
    ways = (trained, trained.to(getattr(torch, exported)))
    return any(torch.equal(there, way.to(there.dtype)) for way in ways)


def in_force_faults(tensors: dict[str, Tensor], trained: Trained, pieces: TargetPieces, dtype: str) -> list[str]:
    """The maps and matrices that the scheduler uses, against those that were trained with and exported in `dtype`."""
    faults = []
    ids = tensors.get("draft_ids")
    # Without d2t a draft id is the target's: right for a drafter of the whole vocabulary
    served = torch.arange(trained.config["vocab_size"]) if ids is None else ids.long()  # [Vd]
    if not torch.equal(served, trained.draft_ids):
        faults.append(
            "the draft vocabulary in force is not the trained one: "
            + ("SGLang uses none" if ids is None else f"its first ids are {ids[:4].tolist()}")
            + f", trained were {trained.draft_ids[:4].tolist()}"
        )
    embedding = trained.weights.get(EMBEDDING, pieces.embedding)
    for name, expected in (("embedding", embedding), ("head", trained.weights["lm_head.weight"])):
        if name not in tensors:
            continue
        at, rows = tensors[f"{name}.at"], tensors[name]
        at, rows = at[at < len(expected)], rows[at < len(expected)]
        if rows.shape[1:] != expected.shape[1:] or not _same(rows, expected[at], dtype):
            faults.append(f"the drafter's {name} in force is not the one it was trained with")
    return faults


def chain(drafter: Drafter, ids: list[int], aux: Tensor, said: list[int]) -> list[Tensor]:
    """Our logits [Vd] of each step at the last slot of x_0..x_n: `ids` [n + 1], aux [n, A*H], with `said` fed back."""
    steps = len(said)
    later = aux.new_zeros(steps, aux.shape[1])  # never looked at
    batch = Batch(
        ids=("chain",),
        lengths=(len(ids) + steps - 1,),
        input_ids=torch.tensor(ids + said[:-1]),
        loss_mask=torch.empty(0, dtype=torch.bool),
        aux=torch.cat([aux, later]),
        last_hidden=torch.empty(0),
        last_rows=torch.empty(0),
    )
    slots = torch.tensor([len(ids) - 2])
    return [drafter.lm_head(state)[0] for state in drafter(batch, [slots] * steps)]
