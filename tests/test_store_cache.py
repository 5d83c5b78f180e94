"""The copies of shards on a node's disk: few enough, fetched once, and never gone from under a reader."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import listed
from test_store import PRINT, _features

from eagle3_ray.config import StoreConfig, TrainConfig
from eagle3_ray.store import commits as commits_module
from eagle3_ray.store.cache import STALE_S, Cache, node_cache, scratch
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.shards import ShardReader, write_features
from eagle3_ray.train.features import WINDOW, stream


class Remote(Filesystem):
    """A local folder that is read as a bucket is: by download. Each is written down in a file."""

    def __init__(self, root: Path, log: Path):
        super().__init__(str(root))
        self.log = log

    def download(self, key: str, local_path: str | Path) -> None:
        with open(self.log, "a") as log:
            log.write(f"{key}\n")
        local = Filesystem(self.root)
        local.download(key, local_path)

    def size(self, key: str) -> int:
        return Filesystem(self.root).size(key)

    def downloads(self) -> Counter[str]:
        return Counter(self.log.read_text().split()) if self.log.exists() else Counter()


def store(tmp_path: Path, shards: int) -> tuple[Units, list[Commit], Remote]:
    """A store of one sample a shard, which from now on has to be downloaded."""
    remote = Remote(tmp_path / "root", tmp_path / "log")
    units = Units(remote, "features", PRINT)
    for i in range(shards):
        features = [_features(f"s{i}", [0, 1, 1, 1, 1])]
        write_features(tmp_path / "new", features, PRINT)
        units.commit(f"u{i:02}", tmp_path / "new", listed(features))
    found = units.commits()
    remote.local = False
    return units, found, remote


def copies(cache: Cache) -> set[str]:
    return {path.name.partition(".")[0] for path in cache.folder.rglob("*.safetensors")}


def test_every_epoch_after_the_first_reads_the_copies(tmp_path: Path) -> None:
    units, commits, remote = store(tmp_path, WINDOW + 3)
    config = TrainConfig(batch_size=1, seed=3)
    cache = Cache(tmp_path / "cache", sum(commit.size for commit in commits))
    read = [share[0].id for share in islice(stream(config, units, commits, cache, 0, 1, 0), 3 * len(commits))]
    assert set(Counter(read).values()) == {3}
    assert remote.downloads() == {commit.shard: 1 for commit in commits}


def test_a_smaller_cache_stays_within_its_bound_and_every_sample_is_still_read(tmp_path: Path) -> None:
    units, commits, remote = store(tmp_path, WINDOW + 3)
    cache = Cache(tmp_path / "cache", 3 * commits[0].size)
    config = TrainConfig(batch_size=1)
    for share in islice(stream(config, units, commits, cache, 0, 1, 0), 2 * len(commits)):
        assert share[0].aux.isfinite().all()
        assert len(copies(cache)) <= 3
    assert remote.downloads().total() > len(commits)


def test_the_least_recently_used_copy_goes_first(tmp_path: Path) -> None:
    units, (a, b, c, d), remote = store(tmp_path, 4)
    cache = Cache(tmp_path / "cache", 3 * a.size)
    for commit in (a, b, c, a, d):
        units.fetch(commit, cache)
        time.sleep(0.02)
    assert copies(cache) == {"u00", "u02", "u03"} and remote.downloads().total() == 4


def test_a_copy_makes_room_for_one_that_has_the_same_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of shards in 64 has."""
    monkeypatch.setattr("eagle3_ray.store.cache.LOCKS", 1)
    units, (a, b), _ = store(tmp_path, 2)
    cache = Cache(tmp_path / "cache", a.size)
    for commit in (a, b):
        units.fetch(commit, cache)
    assert copies(cache) == {"u01"}


def test_what_a_killed_process_left_half_downloaded_makes_room_too(tmp_path: Path) -> None:
    units, (a, b), _ = store(tmp_path, 2)
    cache = Cache(tmp_path / "cache", 2 * a.size)
    (cache.folder / "x").mkdir(parents=True)
    for name, age_s in (("dead", 2 * STALE_S), ("alive", 0)):
        (cache.folder / "x" / f".{name}.tmp").write_bytes(bytes(a.size))
        os.utime(cache.folder / "x" / f".{name}.tmp", (time.time() - age_s,) * 2)
    for commit in (a, b):
        units.fetch(commit, cache)
        time.sleep(0.02)
    assert copies(cache) == {"u01"} and [path.name for path in cache.folder.rglob("*.tmp")] == [".alive.tmp"]


def test_a_disk_with_less_room_than_the_bound_is_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units, (a, b, c), _ = store(tmp_path, 3)
    cache = Cache(tmp_path / "cache")

    def usage(folder: Path) -> Any:
        held = sum(path.stat().st_size for path in cache.folder.rglob("*.safetensors"))
        return shutil._ntuple_diskusage(0, 0, 2 * a.size - held)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for commit in (a, b, c):
        units.fetch(commit, cache)
        time.sleep(0.02)
    assert copies(cache) == {"u01", "u02"}


def test_an_open_shard_is_read_to_its_end_after_it_made_room(tmp_path: Path) -> None:
    units, (a, b), _ = store(tmp_path, 2)
    cache = Cache(tmp_path / "cache", a.size)
    reader = units.open(a, cache)
    units.fetch(b, cache)
    assert copies(cache) == {"u01"}
    assert torch.equal(reader.features(0).aux, _features("s0", [0, 1, 1, 1, 1]).aux)


def test_a_copy_that_went_between_fetch_and_open_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, (a,), remote = store(tmp_path, 1)
    cache, reader = Cache(tmp_path / "cache"), ShardReader

    def late(path: Path, fingerprint: str, listed: list[Any]) -> Any:
        if remote.downloads()[a.shard] == 1:
            path.unlink()
        return reader(path, fingerprint)

    monkeypatch.setattr("eagle3_ray.store.shards.ShardReader", late)
    assert units.open(a, cache).features(0).id == "s0" and remote.downloads()[a.shard] == 2
    with pytest.raises(StoreError, match="fingerprint"):  # what does not pass is not tried for ever
        other = Units(remote, "features", "other")
        other.open(a, cache)


def test_a_damaged_copy_is_found_by_each_process_and_by_one_that_verified_another(tmp_path: Path) -> None:
    units, (a,), remote = store(tmp_path, 1)
    cache = Cache(tmp_path / "cache")
    path = units.fetch(a, cache)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert units.fetch(a, cache).read_bytes() == good and remote.downloads()[a.shard] == 2


def test_a_second_use_does_not_hash_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units, (a,), _ = store(tmp_path, 1)
    cache = Cache(tmp_path / "cache")
    units.fetch(a, cache)
    monkeypatch.setattr(commits_module, "_sha256", lambda path: pytest.fail("hashed again"))
    units.fetch(a, cache)
    os.sync()
    units.fetch(a, cache)


def test_a_shard_that_is_gone_from_the_store_is_named(tmp_path: Path) -> None:
    units, (a,), remote = store(tmp_path, 1)
    Path(remote.root, a.shard).unlink()
    with pytest.raises(StoreError, match=f"{a.shard} is missing; delete .*commits/u00.json"):
        units.fetch(a, Cache(tmp_path / "cache"))


def _worker(units: Units, commits: list[Commit], cache: Cache, rounds: int) -> None:
    for _ in range(rounds):
        for commit in commits:
            assert len(units.open(commit, cache)) == 1


@pytest.mark.parametrize("room", [8, 2])
def test_processes_of_a_node_share_the_copies(tmp_path: Path, room: int) -> None:
    units, commits, remote = store(tmp_path, 8)
    cache = Cache(tmp_path / "cache", room * commits[0].size)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_worker, args=(units, commits, cache, 5)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    if room == 8:
        assert remote.downloads() == {commit.shard: 1 for commit in commits}
    else:
        units.fetch(commits[0], cache)
        assert len(copies(cache)) <= 2 + len(workers)


def test_threads_of_a_process_fetch_a_shard_once(tmp_path: Path) -> None:
    units, commits, remote = store(tmp_path, 3)
    cache = Cache(tmp_path / "cache")
    threads = [threading.Thread(target=_worker, args=(units, commits, cache, 1)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert remote.downloads() == {commit.shard: 1 for commit in commits}


def test_its_settings_decide_where_the_copies_lie_and_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert scratch(StoreConfig("s3://b/p")) == tmp_path / "temporary"
    cache = node_cache(StoreConfig("s3://b/p", scratch_dir=str(tmp_path / "nvme"), cache_bytes=7))
    assert cache.folder.parent == tmp_path / "nvme" and cache.limit == 7
