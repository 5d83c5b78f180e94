"""A whole extraction and training by way of an S3 server that fails, stalls, lies, or no longer knows the credentials.

Each ends as an undisturbed one to the bit, or in an error that names store.root, after which the same command goes on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from chaos import EVERY, Place, place, tail
from faulty import Proxy, faulty

from eagle3_ray.store.filesystem import Filesystem

pytestmark = pytest.mark.full
STAGES = ("extract", "train")


@pytest.fixture(scope="module")
def here(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tiny_llama_folder, tmp_path_factory.mktemp("chaos-s3")) as found:
        yield found


@pytest.fixture
def proxy(here: Place) -> Iterator[Proxy]:
    with faulty(here.server.endpoint) as proxy:
        yield proxy


class Trial:
    """One store, and its two commands, which are run again until they end well."""

    def __init__(self, here: Place, proxy: Proxy, folder: Path) -> None:
        self.here, self.proxy, self.log = here, proxy, folder / "log"
        (folder / "scratch").mkdir()  # its node cache is its own
        self.files, settings = here.store(f"s3://{here.server.bucket}/{uuid4().hex[:8]}", proxy.endpoint)
        self.settings = [*settings, f"store.scratch_dir={folder / 'scratch'}"]
        self.runs = dict.fromkeys(STAGES, 0)

    def run(self, stage: str, *more: str) -> int:
        """One command. Where it fails it says so itself, and names the store or the object."""
        self.runs[stage] += 1
        began = self.log.stat().st_size if self.log.exists() else 0
        code = self.here.run(stage, [*self.settings, *more], self.log)
        said = self.log.read_text(errors="replace")[began:]
        named = re.search(rf"(StoreError|Damaged|error): .*{self.files.root}", said)
        assert code == 0 or code in (1, 2) and named, said[-4000:]
        return code

    def run_to_the_end(self, stage: str, most: int = 4) -> None:
        while self.run(stage):
            assert self.runs[stage] < most, tail(self.log)

    def end(self, name: str, more: str = "") -> None:
        """Both stages are done: compare, and print the line of the table."""
        self.here.check_features(self.files)
        lost = self.here.check_drafter(self.files)
        self.here.report(f"S3: {name}", sum(self.runs.values()) - 1, lost, self.files, more)


@pytest.fixture
def trial(here: Place, proxy: Proxy, tmp_path: Path) -> Trial:
    return Trial(here, proxy, tmp_path)


def test_bursts_of_500_and_503_change_nothing(trial: Trial, proxy: Proxy) -> None:
    """Of any request; 20 in a row would be minutes of waiting for one that is alone."""
    draw = random.Random(0)
    for stage in STAGES:
        for code in (500, 503):
            for skip in draw.sample(range(10, 100), 4):
                proxy.fail(code, times=5, skip=skip)
        trial.run_to_the_end(stage)
    left = proxy.left()
    trial.end("bursts of 500 and 503", f"{80 - left} faults")
    assert left <= 20


def test_bodies_that_break_off_change_nothing(trial: Trial, proxy: Proxy) -> None:
    for where in ("GET .*list-type", "GET .*/commits/", "GET .*/shards/", "GET .*start.json"):
        proxy.fail("half-answer", where, times=3, skip=1)
    proxy.fail("reset", "HEAD", times=3, skip=5)
    for stage in STAGES:
        trial.run_to_the_end(stage)
    assert not proxy.left(), proxy.faults
    trial.end("bodies that break off", "15 faults")


def test_stalls_of_30_seconds_change_nothing(trial: Trial, proxy: Proxy) -> None:
    proxy.fail("stall", "GET .*/commits/", skip=1)
    trial.run_to_the_end("extract")
    proxy.fail("stall", "GET .*/features/.*/shards/", skip=1)
    trial.run_to_the_end("train")
    assert not proxy.left()
    trial.end("stalls of 30 s", "2 faults")


def test_wrong_etags_of_parts_never_make_a_wrong_object(trial: Trial, proxy: Proxy) -> None:
    trial.run_to_the_end("extract")
    proxy.fail("wrong-etag", f"PUT .*state/{EVERY:08}.*partNumber=2")
    proxy.fail("wrong-etag", f"PUT .*state/{3 * EVERY:08}.*partNumber=1")
    trial.run_to_the_end("train")
    assert not proxy.left()
    trial.end("wrong ETags of parts", "2 faults")


def test_bytes_of_shards_and_commits_flipped_on_their_way_are_never_used(trial: Trial, proxy: Proxy) -> None:
    for kind in ("responses", "features"):
        proxy.fail("flip-answer", f"GET .*/{kind}/.*/shards/", times=1, skip=1)
    for stage in STAGES:
        trial.run_to_the_end(stage)
        proxy.fail("flip-answer", "GET .*/features/.*/commits/", times=1, skip=4)  # while training
    assert proxy.left() <= 1  # of the last, behind the end
    trial.end("flipped bytes of shards and commits", f"{4 - proxy.left()} faults")


def test_bytes_of_a_checkpoint_flipped_on_their_way_are_never_used(here: Place, trial: Trial, proxy: Proxy) -> None:
    """In each of its parts: of the weights, and of both moments."""
    here.extracted(trial.files)
    stop_after(proxy, f"PUT .*state/{2 * EVERY:08}.*partNumber=3")
    assert trial.run("train", "train.max_failures=0") == 1
    proxy.faults.clear()
    for first in (0, 1, 2):
        proxy.fail("flip-answer", "GET .*/state/", times=1, skip=first)
    trial.run_to_the_end("train")
    assert proxy.left() < 3
    trial.end("flipped bytes of a checkpoint", f"{3 - proxy.left()} faults")


def stop_after(proxy: Proxy, request: str) -> None:
    """From this request on, the credentials have expired."""
    proxy.fail(lambda: proxy.fail("expired", times=10**9), request)


@pytest.mark.parametrize("stage", STAGES)
def test_credentials_that_expire_end_the_command_and_the_next_goes_on(
    here: Place, trial: Trial, proxy: Proxy, stage: str
) -> None:
    if stage == "train":
        here.extracted(trial.files)
    where = {"extract": "PUT .*/features/.*/commits/", "train": f"POST .*state/{2 * EVERY:08}.*uploadId"}
    stop_after(proxy, where[stage])
    assert trial.run(stage, "train.max_failures=1") == 1
    assert "ExpiredToken" in tail(trial.log) or "a fault of the test" in tail(trial.log)
    kept = objects(trial.files)
    assert any("/commits/" in key for key in kept)
    proxy.faults.clear()
    for following in STAGES[STAGES.index(stage) :]:
        trial.run_to_the_end(following)
    assert all(objects(trial.files).get(key) == size for key, size in kept.items() if "/commits/" in key)
    trial.end(f"credentials expire in {stage}")


def objects(files: Filesystem) -> dict[str, Any]:
    return {entry.key: entry.size for entry in files.entries("")}
