"""A store's units in another store, unit by unit: a shard first, its commit when the shard is whole there.

So a copy can be stopped at any moment, and what it left behind is a sound store with fewer units. Running it again
sends what is missing. Both stores may be local or remote; of a remote source a few shards lie on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.overview import Folder, readable
from eagle3_ray.store.parallel import in_parallel
from eagle3_ray.store.verify import whole_shard

WORKERS = 4  # shards at a time


def with_responses(chosen: list[Folder], everything: list[Folder]) -> list[Folder]:
    """`chosen`, and the responses that its features were taken from: training counts its vocabulary on them."""
    names = {folder.name for folder in chosen}
    names |= {f"responses/{folder.units.description().get('responses')}" for folder in chosen}
    return [folder for folder in everything if folder.name in names]


def copy(folders: list[Folder], target: Filesystem, scratch: Path | None = None) -> dict[str, int]:
    """Bring all committed units of `folders` to `target`; returns how many were sent, in units and bytes.

    Shards on their way lie in `scratch`, a few at a time.
    """
    sent = bytes_sent = 0
    progress = Progress("copy", sum(len(folder.committed) for folder in folders), "units")
    with temporary_folder(scratch) as cache:
        for folder in folders:
            source = folder.units
            there = Units(target, *folder.name.split("/"))
            for name in ("description", "engine"):
                if value := _read_json(source.files, f"{folder.name}/{name}.json"):
                    there.record(name, value)

            def bring(unit: str, source: Units = source, there: Units = there) -> int:
                return _bring(source, there, unit, cache)

            for size in in_parallel(bring, folder.committed, WORKERS):
                sent, bytes_sent = sent + (size > 0), bytes_sent + size
                progress.add(1, f"{readable(bytes_sent)} sent")
            if (summary := _read_json(source.files, f"{folder.name}/summary.json")) is not None:
                target.write_json(f"{folder.name}/summary.json", summary)
    return {"units_sent": sent, "bytes_sent": bytes_sent}


def _bring(source: Units, there: Units, unit: str, cache: Path) -> int:
    """Copy one unit; returns the bytes of its shard, or 0 where the shard was there."""
    target, commit, sent = there.files, source.read_commit(unit), 0
    if there.has(unit):
        _check_same(there, commit)
    if _size(target, commit.shard) != commit.size:
        with whole_shard(source, commit, cache) as path:
            target.upload(path, commit.shard)
        sent = commit.size
        if _size(target, commit.shard) != commit.size:
            raise StoreError(f"{target.url(commit.shard)} is not whole after its upload")
    if not there.create(commit):
        _check_same(there, commit)
    return sent


def _check_same(there: Units, commit: Commit) -> None:
    if there.read_commit(commit.unit) != commit:
        raise StoreError(
            f"{there.files.url(there.folder)} has another commit of unit {commit.unit}; two captures are not mixed"
        )


def _read_json(files: Filesystem, key: str) -> dict[str, Any] | None:
    try:
        return files.read_json(key)
    except FileNotFoundError:
        return None


def _size(files: Filesystem, key: str) -> int | None:
    try:
        return files.size(key)
    except (FileNotFoundError, NotADirectoryError):
        return None
