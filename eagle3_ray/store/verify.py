"""Whether every committed unit is whole: each shard is read in full and compared with its commit, sample by sample.

Only what is wrong with the stored bytes is a fault. A store that cannot be reached is an error and ends the scan: it
must not look like units to delete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Commit, Units, doubled, fault_of_bytes
from eagle3_ray.store.filesystem import Damaged, below
from eagle3_ray.store.overview import Folder, find
from eagle3_ray.store.parallel import in_parallel
from eagle3_ray.store.shards import ShardReader

WORKERS = 4  # shards at a time: of a remote store so many lie in the scratch folder, and at most as many again wait


@dataclass(frozen=True)
class Fault:
    """A unit that cannot be used."""

    unit: str
    reason: str
    delete: list[str]  # the objects without which the next extraction makes the unit again


def verify(folders: list[Folder], scratch: Path | None = None) -> list[Fault]:
    """The faults of all units of `folders`. Copies of a remote store's shards lie in `scratch`, a few at a time."""
    faults: list[Fault] = []
    total = sum(len(folder.committed) for folder in folders)
    progress = Progress("verify", total, "units")
    with temporary_folder(scratch) as cache:
        for folder in folders:
            commits: list[Commit] = []

            def look(unit: str, units: Units = folder.units) -> tuple[str, Commit | None, str | None]:
                return unit, *_look(units, unit, cache)

            for unit, commit, fault in in_parallel(look, folder.committed, WORKERS):
                if fault:
                    faults.append(Fault(f"{folder.name}: {unit}", fault, list(_to_delete(folder, unit))))
                if commit:
                    commits.append(commit)
                progress.add(1, f"{len(faults)} bad")
            pairs = {(one, other): sample for sample, one, other in doubled(commits)}
            for (one, other), sample in pairs.items():
                delete = [*_to_delete(folder, one), *_to_delete(folder, other)]
                faults.append(Fault(f"{folder.name}: {other}", f"its sample {sample!r} is in unit {one} too", delete))
    return faults


def _to_delete(folder: Folder, unit: str) -> Iterator[str]:
    """The unit's commit; of a response also the commits of what was captured from it, which other answers replace."""
    files = folder.units.files
    yield files.url(f"{folder.name}/commits/{unit}.json")
    if folder.name.startswith("responses/"):
        for taken in find(files):
            if taken.units.description().get("responses") == folder.fingerprint:
                yield from (files.url(e.key) for name, e in taken.committed.items() if name.startswith(f"{unit}-"))


def _look(units: Units, unit: str, cache: Path) -> tuple[Commit | None, str | None]:
    """The unit's commit, and what is wrong with the unit; neither where it was deleted since it was listed."""
    try:
        commit = units.read_commit(unit)
    except FileNotFoundError:
        return None, None
    except Damaged as error:
        return None, str(error)
    try:
        with whole_shard(units, commit, cache) as path:
            reader = ShardReader(path, units.fingerprint, listed=commit.samples)
            for i in range(len(reader)):
                reader.response(i) if units.kind == "responses" else reader.stored(i)
    except Damaged as error:
        return commit, str(error)
    return commit, None


@contextmanager
def whole_shard(units: Units, commit: Commit, cache: Path) -> Iterator[Path]:
    """The unit's shard as a local file, every byte compared with its commit: itself, or a copy removed at the end."""
    files = units.files
    path = Path(files.url(commit.shard)) if files.local else below(cache, commit.shard)
    try:
        try:
            if not files.local:
                files.download(commit.shard, path)
        except FileNotFoundError:
            raise Damaged(f"shard {commit.shard} is missing") from None
        if fault := fault_of_bytes(path, commit):
            raise Damaged(f"shard {commit.shard} {fault}")
        yield path
    finally:
        if not files.local:
            path.unlink(missing_ok=True)
