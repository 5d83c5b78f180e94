"""Whether every committed unit is whole: each shard is read in full and compared with its commit, sample by sample.

Only what is wrong with the stored bytes is a fault. A store that cannot be reached is an error and ends the scan: it
must not look like units to delete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Commit, Units, fault_of_bytes
from eagle3_ray.store.filesystem import StoreError
from eagle3_ray.store.overview import Folder, find
from eagle3_ray.store.parallel import in_parallel
from eagle3_ray.store.shards import ShardReader, target_rows

WORKERS = 4  # shards at a time: of a remote store so many lie in the scratch folder, and at most as many again wait


@dataclass(frozen=True)
class Fault:
    """A unit that cannot be used."""

    unit: str
    reason: str
    delete: list[str]  # the objects without which the next extraction makes the unit again


def verify(folders: list[Folder], scratch: Path | None = None) -> list[Fault]:
    """The faults of all units of `folders`. Copies of a remote store's shards lie in `scratch`, a few at a time."""
    faults = []
    total = sum(len(folder.committed) for folder in folders)
    progress = Progress("verify", total, "units")
    with temporary_folder(scratch) as cache:
        for folder in folders:

            def reason(unit: str, units: Units = folder.units) -> tuple[str, str | None]:
                return unit, _fault(units, unit, cache)

            for unit, fault in in_parallel(reason, folder.committed, WORKERS):
                if fault:
                    faults.append(Fault(f"{folder.name}: {unit}", fault, list(_to_delete(folder, unit))))
                progress.add(1, f"{len(faults)} bad")
    return faults


def _to_delete(folder: Folder, unit: str) -> Iterator[str]:
    """The unit's commit; of a response also the commits of what was captured from it, which other answers replace."""
    files = folder.units.files
    yield files.url(f"{folder.name}/commits/{unit}.json")
    if folder.name.startswith("responses/"):
        for taken in find(files):
            if taken.units.description().get("responses") == folder.fingerprint:
                yield from (files.url(e.key) for name, e in taken.committed.items() if name.startswith(f"{unit}-"))


def _fault(units: Units, unit: str, cache: Path) -> str | None:
    """What is wrong with one unit."""
    try:
        commit = units.read_commit(unit)
    except FileNotFoundError:
        return None  # deleted since it was listed
    except (ValueError, TypeError) as error:
        return f"its commit cannot be read: {error}"
    if commit.unit != unit:
        return f"its commit is of unit {commit.unit!r}"
    try:
        with whole_shard(units, commit, cache) as path:
            return _samples_fault(path, commit, units)
    except DamagedShard as error:
        return str(error)


class DamagedShard(StoreError):
    """A shard whose bytes are not those that were committed."""


@contextmanager
def whole_shard(units: Units, commit: Commit, cache: Path) -> Iterator[Path]:
    """The unit's shard as a local file, every byte compared with its commit: itself, or a copy removed at the end."""
    files = units.files
    path = Path(files.url(commit.shard)) if files.local else cache / commit.shard
    try:
        try:
            if not files.local:
                files.download(commit.shard, path)
        except FileNotFoundError:
            raise DamagedShard(f"shard {commit.shard} is missing") from None
        if fault := fault_of_bytes(path, commit):
            raise DamagedShard(f"shard {commit.shard} {fault}")
        yield path
    finally:
        if not files.local:
            path.unlink(missing_ok=True)


def _samples_fault(path: Path, commit: Commit, units: Units) -> str | None:
    """The shard's bytes are those that were committed: do they hold the samples that the commit lists?"""
    kind, _, fingerprint = units.folder.partition("/")
    try:
        reader = ShardReader(path, fingerprint)
        if len(reader) != len(commit.samples):
            return f"its shard has {len(reader)} samples, its commit lists {len(commit.samples)}"
        for i, listed in enumerate(commit.samples):
            found = _response_index(reader, i) if kind == "responses" else _feature_index(reader, i)
            for name, value in found.items():
                if listed.get(name) != value:
                    said = json.dumps(listed.get(name))
                    return f"sample {listed.get('id')}: {name} is {json.dumps(value)}, its commit says {said}"
    except (StoreError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        return f"its shard cannot be read: {error}"
    return None


def _response_index(reader: ShardReader, i: int) -> dict[str, object]:
    response = reader.response(i)
    return {
        "id": response.id,
        "tokens": len(response.input_ids),
        "generated": int(response.loss_mask.sum()),
        "finish_reasons": response.finish_reasons,
    }


def _feature_index(reader: ShardReader, i: int) -> dict[str, object]:
    sample = reader.stored(i)
    tokens, rows = len(sample.input_ids), len(sample.last_rows)
    if len(sample.loss_mask) != tokens or len(sample.aux) != tokens or len(sample.last_hidden) != rows:
        raise ValueError(f"sample {sample.id} has not one row of each state for each of its {tokens} tokens")
    if not torch.equal(sample.last_rows, target_rows(sample.loss_mask)):
        raise ValueError(f"sample {sample.id} keeps the last hidden state of other rows than its targets")
    return {"id": sample.id, "tokens": tokens, "generated": int(sample.loss_mask.sum()), "targets": rows}
