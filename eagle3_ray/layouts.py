"""Features in the files that other trainers read: SpecForge 0.2.0 and speculators 0.9.0, EAGLE-3 from stored states.

Both want the last hidden state of every token; ours is kept only where it is a training target. What they read is
decided by their loss mask, so it is written such that they read exactly the rows that are there, and the other rows are
zeros. They disagree on which row a mask's token stands for:

    SpecForge     slot i at step k reads row i+1+k where mask[i+k] is set: the mask lies one before the target rows
    speculators   slot i at step k reads row i+1+k where mask[i+1+k] is set: the mask lies on the target rows

A slot counts for them when its own target is there, for us when all targets before it are, too: across two answers of
one conversation they train a few slots more. For speculators the last hidden state is the one before the final norm,
which its training applies. Ours is the one after it, so it is divided by the norm's weight (a norm takes out scale).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_ray.capture import describe_target, target_folder
from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.drafter.target import load_norm
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Units
from eagle3_ray.store.overview import Folder
from eagle3_ray.store.parallel import in_parallel
from eagle3_ray.store.shards import Features, ShardReader
from eagle3_ray.store.verify import whole_shard

OURS = ".eagle3_ray"  # in the exported folder: what it was made of, and a small file for each finished unit
GROUP = 2000  # files a folder, as SpecForge groups them
WORKERS = 4  # shards at a time
# The columns of speculators' data set; answer_ids, what the target said, is counted and left out
COLUMNS = {"input_ids": pa.list_(pa.int64()), "loss_mask": pa.list_(pa.int64()), "seq_len": pa.int64()}
SCHEMA = pa.schema({**COLUMNS, "answer_ids": pa.list_(pa.int64())})


def export_features(
    folder: Folder, to: Path, layout: str, target_path: str | None, scratch: Path | None = None
) -> dict[str, Any]:
    """Write every sample of `folder` below `to`; what an earlier call wrote of the same commits stays.

    Copies of a remote store's shards lie in `scratch`, a few at a time.
    """
    description = folder.units.description()
    samples = {commit.unit: len(commit.samples) for commit in folder.commits()}
    writer = _writer(layout, to, description, target_path)
    _claim(to, {"features": folder.name, "layout": layout, "samples": samples})
    numbers, total = {}, 0
    for unit, count in samples.items():
        numbers[unit], total = total, total + count
    progress = Progress("export", len(samples), "units")
    with temporary_folder(scratch) as cache:

        def write(unit: str) -> None:
            part = to / OURS / f"{unit}.parquet"
            if not part.exists():
                rows = _write_unit(folder.units, unit, numbers[unit], writer, cache)
                _place(part, lambda path: pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path))

        for _ in in_parallel(write, samples, WORKERS):
            progress.add(1)
    parts = [str(to / OURS / f"{unit}.parquet") for unit in samples]
    counts = _token_counts(parts)
    _place(to / "token_freq.pt", lambda path: torch.save(counts, path))
    if layout == "speculators":
        _save_dataset(parts, to)
    return {"to": str(to), "samples": total, "boundaries": description["boundaries"]}


def _writer(
    layout: str, to: Path, description: dict[str, Any], target_path: str | None
) -> Callable[[Features, int], Tensor]:
    """Writes sample number n and returns its loss mask."""
    boundaries = len(description["boundaries"])
    if layout == "speculators":
        return Speculators(to, boundaries, _norm(target_path, description))
    if boundaries != 3:
        raise ConfigError(f"layout: SpecForge trains on three boundaries, not on {description['boundaries']}")
    return SpecForge(to)


@dataclass
class SpecForge:
    """rows_0-2000/data_0.ckpt, …: dictionaries of tensors, as scripts/prepare_hidden_states.py saves them."""

    to: Path

    def __call__(self, sample: Features, number: int) -> Tensor:
        mask = target_mask(sample).roll(-1)  # [T]
        mask[-1:] = 0  # row 0 came round to here; no slot reads it
        data = {
            "input_ids": sample.input_ids.long(),  # [T]
            "loss_mask": mask,  # [T]
            "hidden_state": all_rows(sample, sample.last_hidden).unsqueeze(0),  # [1, T, H]
            "aux_hidden_state": sample.aux.unsqueeze(0).clone(),  # [1, T, A*H]; a view would save its whole shard
        }
        first = number // GROUP * GROUP
        _place(self.to / f"rows_{first}-{first + GROUP}" / f"data_{number}.ckpt", lambda path: torch.save(data, path))
        return mask


@dataclass
class Speculators:
    """hidden_states/hs_0.safetensors, …, beside a data set of ids and masks and the token counts."""

    to: Path
    boundaries: int
    norm: Tensor  # [H] float32

    def __call__(self, sample: Features, number: int) -> Tensor:
        before = sample.last_hidden.float() / self.norm  # [R, H]
        scale = before.square().mean(-1).sqrt()  # [R]
        if len(scale) and (scale - 1).abs().max() > 0.05:
            raise ConfigError(
                f"layout: sample {sample.id}: the last hidden state divided by the final norm's weight has the scale "
                f"{scale.min():.3g} to {scale.max():.3g}, not 1; this target's norm is another than speculators applies"
            )
        aux = sample.aux.unflatten(1, (self.boundaries, -1))  # [T, A, H]
        last = all_rows(sample, before.to(aux.dtype)).unsqueeze(1)  # [T, 1, H]
        data = {"token_ids": sample.input_ids.long(), "hidden_states": torch.cat([aux, last], 1)}  # [T], [T, A+1, H]
        _place(self.to / "hidden_states" / f"hs_{number}.safetensors", lambda path: save_file(data, path))
        return target_mask(sample)


def target_mask(sample: Features) -> Tensor:
    """[T] int64: 1 at the rows whose last hidden state is kept."""
    mask = torch.zeros(len(sample.input_ids), dtype=torch.int64)
    mask[sample.last_rows] = 1
    return mask


def all_rows(sample: Features, last_hidden: Tensor) -> Tensor:
    """[T, H]: `last_hidden` at the rows it belongs to, zeros elsewhere."""
    full = last_hidden.new_zeros(len(sample.input_ids), last_hidden.shape[1])
    full[sample.last_rows] = last_hidden
    return full


def _norm(target_path: str | None, description: dict[str, Any]) -> Tensor:
    """The final norm's weight of the very target that was captured."""
    if target_path is None:
        raise ConfigError("target_path: speculators' layout needs the target's final norm; name its folder or hub name")
    target = TargetConfig("target", target_path)
    folder = target_folder(target)
    if not Path(target_path).expanduser().is_dir():
        target.revision = folder.name
    weights = describe_target(target, folder)["weights"]
    if weights != description["target"]["weights"]:
        raise ConfigError(
            f"target_path: {target_path!r} has the weights {weights}, captured were {description['target']['weights']}"
        )
    norm = load_norm(target).float()  # [H]
    if not norm.all():
        raise ConfigError(f"target_path: the final norm of {target_path!r} has weights of 0; they cannot be undone")
    return norm


def _claim(to: Path, made_of: dict[str, Any]) -> None:
    """The numbers of the samples follow from the commits: a folder is of one list of them."""
    note = to / OURS / "features.json"
    if note.exists():
        if json.loads(note.read_text()) != made_of:
            raise ConfigError(
                f"to: {str(to)!r} holds an export of other features or other commits; name another folder"
            )
    elif to.exists() and any(path.name != OURS for path in to.iterdir()):
        raise ConfigError(f"to: {str(to)!r} is not empty and no export")
    else:
        _place(note, lambda path: path.write_text(json.dumps(made_of)))


def _write_unit(
    units: Units, unit: str, first: int, write: Callable[[Features, int], Tensor], cache: Path
) -> list[dict[str, Any]]:
    """Write the unit's samples, numbered from `first` on; returns their rows of the data set."""
    rows = []
    commit = units.read_commit(unit)
    with whole_shard(units, commit, cache) as path:
        reader = ShardReader(path, units.fingerprint, listed=commit.samples)
        for i in range(len(reader)):
            sample = reader.features(i)
            mask = write(sample, first + i)  # [T]
            rows.append(
                {
                    "input_ids": sample.input_ids.tolist(),
                    "loss_mask": mask.tolist(),
                    "seq_len": len(sample.input_ids),
                    "answer_ids": sample.input_ids[sample.loss_mask].tolist(),
                }
            )
    return rows


def _token_counts(parts: list[str]) -> dict[int, int]:
    """How often the target said each token."""
    counts = Counter[int]()
    for part in parts:
        said = pc.list_flatten(pq.read_table(part, columns=["answer_ids"])["answer_ids"])
        counts.update({pair["values"]: pair["counts"] for pair in pc.value_counts(said).to_pylist()})
    return dict(counts)


def _save_dataset(parts: list[str], to: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=to / OURS) as cache:
        rows = datasets.Dataset.from_parquet(parts, columns=list(COLUMNS), cache_dir=cache)
        rows.with_format("torch").save_to_disk(to)


def _place(path: Path, fill: Callable[[Path], Any]) -> None:
    """A file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    fill(temporary)
    os.replace(temporary, path)
