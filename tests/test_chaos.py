"""Training that is killed, or whose disk is full, while it saves a checkpoint; two jobs on one store; a clock set back.

Each ends in a resume whose weights and checkpoints are those of an undisturbed training to the bit, or in an error that
names the setting, after which the same command goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from uuid import uuid4

import psutil
import pytest
from barriers import Barriers
from chaos import EVERY, Place, drafters, name, place, strike, tail, until, uploads
from faulty import faulty

from eagle3_ray.store.cache import Cache
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.garbage import garbage
from eagle3_ray.store.overview import find

pytestmark = pytest.mark.full
VICTIMS = ["writer", "other worker", "both workers", "driver", "node"]
SECOND = f"{2 * EVERY:08}"  # a checkpoint: there is one to go on from


@pytest.fixture(scope="module")
def here(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tiny_llama_folder, tmp_path_factory.mktemp("chaos")) as found:
        yield found


def on_s3(here: Place) -> str:
    return f"s3://{here.server.bucket}/{uuid4().hex[:8]}"


# ---------------------------------------------------------------- SIGKILL while a checkpoint is written


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_while_a_checkpoint_is_written_to_disk_changes_nothing(here: Place, tmp_path: Path, victim: str) -> None:
    files, settings = here.store(str(tmp_path / "store"))
    here.extracted(files)
    log = tmp_path / "log"
    driver = here.start("train", settings, log)
    (prefix,) = until(lambda: drafters(files) or driver.poll() is not None and pytest.fail(tail(log)))
    state = Path(files.url(f"{prefix}/state"))
    until((state / f"{EVERY:08}.safetensors").exists)
    halved = stop_while_it_writes(here, state)
    strike(here, victim, driver)
    for worker in here.workers():
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
    first = finish(here, driver)
    if victim in ("writer", "both workers", "node"):
        assert halved.exists()
    runs = 1 if first == 0 else 1 + here.run_to_the_end("train", settings, log)
    assert (victim == "driver") <= (first != 0)
    here.report(f"disk: {victim}", runs, here.check_drafter(files), files)


def stop_while_it_writes(here: Place, state: Path) -> Path:
    """Stop the workers when a checkpoint is there under its temporary name only."""
    while True:
        halved = until(lambda: list(state.glob(".*.tmp")))
        workers = here.workers()
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        if halved[0].exists():
            return halved[0]
        for worker in workers:
            worker.send_signal(signal.SIGCONT)


def finish(here: Place, driver: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 300
    while driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        here.repair()
    return driver.returncode


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_while_a_checkpoint_is_sent_to_s3_changes_nothing(here: Place, tmp_path: Path, victim: str) -> None:
    """With two thirds of it on the server, at most."""
    struck: list[str] = []
    one_at_a_time = Lock()

    def cut(moment: str, key: str) -> bool:
        with one_at_a_time:
            if struck or moment != "checkpoint" or f"{SECOND}.safetensors?partNumber=2" not in key:
                return False
            struck.append(key)
            strike(here, victim, driver)
            return victim in ("writer", "both workers", "node")

    proxy = Barriers(here.server.endpoint, cut)
    files, settings = here.store(on_s3(here), proxy.endpoint)
    here.extracted(files)
    driver = here.start("train", settings, tmp_path / "log")
    first = finish(here, driver)
    assert struck, tail(tmp_path / "log")
    if victim in ("writer", "both workers", "node"):
        assert uploads(files)
    runs = 1 if first == 0 else 1 + here.run_to_the_end("train", settings, tmp_path / "log")
    assert (victim == "driver") <= (first != 0)
    proxy.close()
    here.report(f"S3: {victim}", runs, here.check_drafter(files), files)


# ---------------------------------------------------------------- no room, and faults of S3, while it saves


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)])
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs rights that this user lacks")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full_ends_training_with_the_setting_and_keeps_the_last_checkpoint(
    here: Place, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 200) as disk:
        files, settings = here.store(str(disk / "store"))
        here.extracted(files)
        log = tmp_path / "log"
        driver = here.start("train", [*settings, "train.max_failures=0"], log)
        (prefix,) = until(lambda: drafters(files) or driver.poll() is not None and pytest.fail(tail(log)))
        until(lambda: files.list(f"{prefix}/state"))
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 4 * 2**20  # less than a checkpoint
        with open(disk / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, room)
        assert finish(here, driver) == 1
        said = tail(log)
        assert f"store.root is '{disk}/store': cannot write {files.url(prefix)}/state/" in said, said
        assert "No space left on device" in said
        kept = files.list(f"{prefix}/state")
        assert kept and not list(Path(files.url(prefix)).rglob(".*.tmp"))
        (disk / "ballast").unlink()
        runs = 1 + here.run_to_the_end("train", settings, log)
        here.report("disk full", runs, here.check_drafter(files), files, f"went on from {name(kept[-1])}")


def test_faults_of_s3_that_pass_while_a_checkpoint_is_sent_change_nothing(here: Place, tmp_path: Path) -> None:
    with faulty(here.server.endpoint) as proxy:
        files, settings = here.store(on_s3(here), proxy.endpoint)
        here.extracted(files)
        for number, kind in enumerate([503, "reset", "lost", "half-request"], 1):
            proxy.fail(kind, f"state/{number * EVERY:08}.safetensors.*partNumber", times=8)
        proxy.fail("lost", f"POST .*state/{EVERY:08}.safetensors.uploadId", times=1)  # was completed, unheard
        runs = here.run_to_the_end("train", settings, tmp_path / "log", most=1)
        assert not proxy.left()
    here.report("S3: 503, reset, lost, broken off", runs, here.check_drafter(files), files, "33 faults")


def test_an_s3_that_is_full_ends_training_with_the_setting_and_keeps_the_last_checkpoint(
    here: Place, tmp_path: Path
) -> None:
    with faulty(here.server.endpoint) as proxy:
        files, settings = here.store(on_s3(here), proxy.endpoint)
        here.extracted(files)
        proxy.fail(507, f"PUT .*state/{SECOND}", times=10**6)
        assert here.run("train", [*settings, "train.max_failures=0"], tmp_path / "log") == 1
        said = tail(tmp_path / "log")
        (prefix,) = drafters(files)
        assert f"store.root is '{files.root}': cannot write {files.url(prefix)}/state/{SECOND}" in said, said
        assert [name(key) for key in files.list(f"{prefix}/state")] == [f"{EVERY:08}.safetensors"]
        assert not uploads(files)
        proxy.faults.clear()
        runs = 1 + here.run_to_the_end("train", settings, tmp_path / "log", most=1)
    here.report("S3: full (507)", runs, here.check_drafter(files), files)


# ---------------------------------------------------------------- two drivers


def test_two_drivers_train_one_drafter_at_once(here: Place, tmp_path: Path) -> None:
    """Each with two workers, of one of two nodes."""
    second = here.cluster.add_node(num_cpus=2)
    try:
        files, settings = here.store(str(tmp_path / "store"))
        here.extracted(files)
        ended: dict[int, int] = {}

        def one(number: int) -> None:
            ended[number] = here.run_to_the_end("train", settings, tmp_path / f"{number}.log")

        both = [Thread(target=one, args=[number]) for number in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert sorted(ended) == [0, 1], [tail(tmp_path / f"{number}.log") for number in range(2)]
        here.report("two drivers", sum(ended.values()), here.check_drafter(files), files)
    finally:
        here.cluster.remove_node(second)


# ---------------------------------------------------------------- a clock that is set back


def set_back(*folders: Path, hours: float = 1) -> None:
    """What a job sees whose clock was set back: all that is there was written in the future."""
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            seen = path.lstat()
            times = (seen.st_atime_ns, seen.st_mtime_ns)
            os.utime(path, ns=tuple(int(at + hours * 3600e9) for at in times), follow_symlinks=False)


def test_a_clock_set_back_by_an_hour_between_runs_changes_nothing(here: Place, tmp_path: Path) -> None:
    files, settings = here.store(str(tmp_path / "store"))
    log = tmp_path / "log"

    def stopped(stage: str, done: str) -> None:
        """Killed when the first such object is there, and gone on with an hour earlier."""
        driver = here.start(stage, settings, log)
        until(lambda: list((tmp_path / "store").glob(done)) or driver.poll() is not None and pytest.fail(tail(log)))
        driver.kill()
        driver.wait()
        here.rest()
        keys = files.list("")
        set_back(tmp_path / "store", here.folder / "scratch")
        assert not any(garbage(files, time.time()).values())  # all of it may be somebody's who writes just now
        assert set(keys) <= set(files.list(""))

    stopped("extract", "features/*/commits/*.json")
    (folder,) = (folder for folder in find(files) if folder.name.startswith("features/"))
    began = len(folder.committed)
    assert began < 6
    runs = 1 + here.run_to_the_end("extract", settings, log)
    lost = here.check_features(files)
    (summary,) = (files.read_json(key) for key in files.list(folder.name) if name(key) == "summary.json")
    assert summary["seconds"] >= 0
    here.report("clock: extract", runs, lost, files, f"went on from {began} of 6 units")
    stopped("train", f"drafters/*/state/{SECOND}.safetensors")
    runs = 1 + here.run_to_the_end("train", settings, log)
    here.report("clock: train", runs, here.check_drafter(files), files)


def test_the_node_cache_works_with_a_clock_set_back(here: Place, tmp_path: Path) -> None:
    root = on_s3(here)
    files, _ = here.store(root)
    here.extracted(files)
    (folder,) = (folder for folder in find(files) if folder.name.startswith("features/"))
    commits = list(folder.commits())
    largest = max(commit.size for commit in commits)

    def here_now() -> set[str]:
        return {path.name for path in (tmp_path / "cache").rglob("*.safetensors")}

    cache = Cache(tmp_path / "cache", limit=3 * largest)
    for round in range(3):
        for commit in commits:
            units = find(Filesystem(files.root, files.storage_options), folder.name)[0].units
            assert len(units.open(commit, cache)) == len(commit.samples)
            assert name(commit.shard) in here_now() and 0 < len(here_now()) <= 4
        set_back(tmp_path / "cache")
        print(f"round {round}: {len(here_now())} of {len(commits)} shards in a cache of three")
