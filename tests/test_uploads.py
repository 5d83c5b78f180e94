"""Shards staged and committed in the background, by real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from eagle3_ray.config import StoreConfig
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.uploads import Uploads

OTHERS: list[psutil.Process] = []
INDEX = [
    [{"id": str(i), "domain": None, "tokens": 1, "generated": 1, "finish_reasons": [], "targets": 0}] for i in range(5)
]


@pytest.fixture(autouse=True)
def _others() -> None:
    """What this process had started before the test: another file's engine, say."""
    OTHERS[:] = psutil.Process().children()


@pytest.fixture
def units(tmp_path: Path) -> Units:
    return Units(Filesystem(str(tmp_path / "store")), "features", "fp")


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[Uploads]:
    (tmp_path / "staging").mkdir()
    uploads = Uploads(StoreConfig(root="", uploaders=1, staging_bytes=100), tmp_path / "staging")
    yield uploads
    uploads.close()


def uploaders() -> list[psutil.Process]:
    """The processes that work; each has stepped aside from a child that only waits."""
    waiting = [p for p in psutil.Process().children() if p not in OTHERS and "store.uploader" in " ".join(p.cmdline())]
    return [process for child in waiting for process in child.children()]


def test_what_is_staged_is_committed_and_freed(units: Units, tmp_path: Path) -> None:
    uploads = Uploads(StoreConfig(root="", uploaders=3, staging_bytes=100), tmp_path)
    futures = [
        uploads.commit(units, f"u{i}", lambda path, i=i: path.write_bytes(bytes([i]) * 60), 60, INDEX[i], n=i)
        for i in range(5)
    ]
    assert all(future.result() for future in futures)
    assert [(commit.unit, commit.samples, commit.facts) for commit in units.commits()] == [
        (f"u{i}", INDEX[i], {"n": i}) for i in range(5)
    ]
    assert [units.fetch(commit, Cache(tmp_path)).read_bytes() for commit in units.commits()] == [
        bytes([i]) * 60 for i in range(5)
    ]
    assert list(tmp_path.glob("*.safetensors")) == [] and uploads.staged == 0
    assert len(uploaders()) == 3
    assert uploads.commit(units, "u0", lambda path: path.write_bytes(b"again"), 5, []).result() is False
    uploads.close()


def test_staging_waits_for_room(units: Units, uploads: Uploads) -> None:
    uploads.commit(units, "warm", lambda path: path.write_bytes(b"x"), 1, []).result()
    held = uploaders()
    for process in held:
        process.suspend()
    try:
        first = uploads.commit(units, "a", lambda path: path.write_bytes(b"a" * 70), 70, [])
        waiting = threading.Thread(
            target=uploads.commit, args=(units, "b", lambda path: path.write_bytes(b"b" * 40), 40, []), daemon=True
        )
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert [path.stat().st_size for path in uploads.folder.iterdir()] == [70]
    finally:
        for process in held:
            process.resume()
    assert first.result()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_shard_larger_than_all_the_room_goes_alone(units: Units, uploads: Uploads) -> None:
    assert uploads.commit(units, "a", lambda path: path.write_bytes(b"a" * 300), 300, []).result()


def test_a_killed_uploader_costs_nothing(units: Units, uploads: Uploads) -> None:
    uploads.commit(units, "warm", lambda path: path.write_bytes(b"x"), 1, []).result()
    held = uploaders()
    for process in held:
        process.suspend()
    futures = [uploads.commit(units, name, lambda path: path.write_bytes(b"a" * 40), 40, []) for name in "ab"]
    for process in held:
        process.kill()
    assert all(future.result(60) for future in futures)
    assert units.committed() == ["a", "b", "warm"]


def test_a_fault_of_the_store_comes_back_and_frees_the_room(tmp_path: Path, uploads: Uploads) -> None:
    (tmp_path / "file").write_text("")
    units = Units(Filesystem(str(tmp_path / "file" / "store")), "features", "fp")
    future = uploads.commit(units, "a", lambda path: path.write_bytes(b"a" * 70), 70, [])
    with pytest.raises(StoreError, match="store.root is"):
        future.result()
    assert list(uploads.folder.iterdir()) == [] and uploads.staged == 0


def test_a_full_staging_disk_is_named(units: Units, uploads: Uploads) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        Path("/dev/full").write_bytes(b"rest")

    with pytest.raises(StoreError, match="store.scratch_dir has no room in .*No space left on device"):
        uploads.commit(units, "a", write, 70, [])
    assert list(uploads.folder.iterdir()) == [] and uploads.staged == 0
    assert units.committed() == []


ORPHANED = """
import json, psutil, sys, time
from pathlib import Path
from eagle3_ray.config import StoreConfig
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.uploads import Uploads

if __name__ == "__main__":
    root = Path(sys.argv[1])
    units = Units(Filesystem(str(root / "store")), "features", "fp")
    uploads = Uploads(StoreConfig(root=""), root)
    uploads.commit(units, "a", lambda path: path.write_bytes(b"x"), 1, []).result()
    print(json.dumps([process.pid for process in psutil.Process().children(recursive=True)]), flush=True)
    time.sleep(600)
"""


def test_uploaders_end_with_an_actor_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "actor.py"
    script.write_text(ORPHANED)
    actor = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert actor.stdout is not None
    children = [psutil.Process(pid) for pid in json.loads(actor.stdout.readline())]
    assert len([child for child in children if "store.uploader" in " ".join(child.cmdline())]) == 2
    actor.send_signal(signal.SIGKILL)
    actor.wait()
    deadline = time.monotonic() + 20
    while any(child.is_running() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if child.is_running()]
