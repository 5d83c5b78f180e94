"""Features in another precision or compression, without an engine: what is stored is rewritten, unit by unit.

Units, their samples' index and the facts of their commits are carried over; each commit also names the shard that it
was made from. Compression changes no value, so the fingerprint stays and another root is needed. Another precision is
another fingerprint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import DECIDES_NOTHING, Commit, Units
from eagle3_ray.store.filesystem import Filesystem, StoreError, room_in
from eagle3_ray.store.precision import stored
from eagle3_ray.store.shards import Features, ShardReader, write_features
from eagle3_ray.strict_json import fingerprint


def destination(source: Units, files: Filesystem, dtype: str) -> Units:
    """The units below `files`, described, that shall hold the features of `source` in `dtype`, as capture.dtype has it.

    Where the values are those that a capture in `dtype` would have stored, these are that capture's own units: training
    finds them with that capture.dtype and the store.shard_bytes of their description. Values that lost bits on the way
    are another thing; the description says what they were made from, and so the fingerprint is another.
    """
    description = source.description()
    before, computed = description["dtype"], description["engine_dtype"]
    if dtype != before:
        description |= {"dtype": dtype, "shard_bytes": _shard_bytes(source, before, dtype)}
        if before != "float32" and (before, computed) != ("bfloat16", "bfloat16"):
            description["transcoded_from"] = source.folder
    decides = {name: value for name, value in description.items() if name not in DECIDES_NOTHING}
    target = Units(files, "features", fingerprint(decides))
    if (files.root, target.folder) == (source.files.root, source.folder):
        raise StoreError(f"{files.url(target.folder)} is {dtype} already; to compress it, write to another store.root")
    target.describe(description)
    if source.files.exists(f"{source.folder}/engine.json"):
        target.record("engine", source.files.read_json(f"{source.folder}/engine.json"))
    return target


def transcode(source: Units, target: Units, compression: str, cache: Cache, scratch: Path) -> int:
    """Rewrite the units of `source` that `target`, its `destination`, lacks; returns their number.

    May be stopped and repeated, and run in several places at once. `compression` is as store.compression has it; one
    new shard at a time lies in `scratch`.
    """
    dtype, done = target.description()["dtype"], set(target.committed())
    commits = source.commits()
    todo = [commit for commit in commits if commit.unit not in done]
    progress = Progress("transcode", len(commits), "units", done=len(commits) - len(todo))
    written = 0
    for commit in todo:
        with temporary_folder(scratch) as folder:
            written += _transcode(source, target, commit, dtype, compression, cache, folder / "shard")
        progress.add(1)
    return written


def _transcode(
    source: Units, target: Units, commit: Commit, dtype: str, compression: str, cache: Cache, shard: Path
) -> bool:
    reader, as_it_is = source.open(commit, cache), dtype == source.description()["dtype"]

    def sample(i: int) -> Features:
        if as_it_is:
            return reader.stored(i)
        features = reader.features(i)
        states: dict[str, Any] = stored(features.aux, features.last_hidden, dtype)
        return replace(features, **states)

    with room_in(shard.parent):
        write_features(shard, [sample(i) for i in range(len(reader))], target.fingerprint, compression)
    facts = commit.facts | {"transcoded_from": source.files.url(commit.shard)}
    return target.commit(commit.unit, shard, commit.samples, **facts)


def _shard_bytes(source: Units, before: str, after: str) -> int:
    """The store.shard_bytes that cuts rows stored as `after` where the source's cuts those stored as `before`."""
    description = source.description()
    first = next((commit for commit in source.commits() if commit.samples), None)
    if first is None:
        return description["shard_bytes"]
    hidden_size = ShardReader(first.shard, source.fingerprint, source.files).hidden_size
    rows = [CaptureSpec(tuple(description["boundaries"]), hidden_size, dtype).row_bytes for dtype in (before, after)]
    return max(1, description["shard_bytes"] * rows[1] // rows[0])
