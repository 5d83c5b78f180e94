"""The store's tools on a real S3 server, and between it and a local disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from conftest import ROOT
from seaweed import Server, serve
from stores import fill
from test_store_tools import (  # noqa: F401
    test_a_copy_is_the_same_store_and_is_made_once,
    test_a_copy_that_is_stopped_shows_only_whole_units_and_goes_on,
    test_a_damaged_shard_is_not_copied_and_another_capture_not_mixed,
    test_a_fingerprint_may_be_shortened_while_it_is_one_folders,
    test_a_sound_store_has_no_faults,
    test_a_unit_that_is_committed_meanwhile_keeps_its_shard,
    test_each_damage_is_found_and_what_to_delete_is_named,
    test_garbage_is_what_nothing_names_and_is_kept_while_it_is_young,
    test_ls_has_a_line_for_each_folder,
)

from eagle3_ray.store.copying import copy
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.overview import find
from eagle3_ray.store.verify import WORKERS, verify

pytestmark = pytest.mark.full  # the same tests as on a local disk


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def files(server: Server) -> Filesystem:
    return Filesystem(f"s3://{server.bucket}/{uuid4().hex}/root", server.storage_options)


@pytest.fixture
def elsewhere(server: Server) -> Filesystem:
    return Filesystem(f"s3://{server.bucket}/{uuid4().hex}/elsewhere", server.storage_options)


def test_a_listing_tells_size_and_time(files: Filesystem) -> None:
    before = time.time()
    for key, data in (("a/2", b"22"), ("a/deep/1", b"1"), ("ab/3", b""), ("a/.x.tmp", b"tmp")):
        files.write(key, data)
    assert [(entry.key, entry.size) for entry in files.entries("a")] == [("a/.x.tmp", 3), ("a/2", 2), ("a/deep/1", 1)]
    assert all(before - 5 < entry.modified < time.time() + 5 for entry in files.entries(""))
    assert len(files.entries("")) == 4 and list(files.entries("none")) == []


def test_a_store_goes_to_local_disk_and_back(files: Filesystem, elsewhere: Filesystem, tmp_path: Path) -> None:
    fill(files, tmp_path)
    local = Filesystem(str(tmp_path / "local"))
    copy(find(files), local)
    copy(find(local), elsewhere)
    assert files.list("") == local.list("") == elsewhere.list("") and verify(find(elsewhere)) == []


def test_few_shards_lie_on_this_machine_at_a_time(
    files: Filesystem, elsewhere: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(files, tmp_path, units=10)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    download, most = Filesystem.download, 0

    def watch(self: Filesystem, key: str, path: Path) -> None:
        nonlocal most
        download(self, key, path)
        most = max(most, sum(1 for found in (tmp_path / "temporary").rglob("*.safetensors")))

    monkeypatch.setattr(Filesystem, "download", watch)
    assert verify(find(files)) == []
    copy(find(files), elsewhere)
    assert 1 <= most <= WORKERS and list((tmp_path / "temporary").iterdir()) == []


def test_the_commands_take_a_bucket(server: Server, files: Filesystem, tmp_path: Path) -> None:
    fill(files, tmp_path)
    options = server.storage_options
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        store = ["store=s3", f"store.root={files.root}", f"+store.storage_options.endpoint_url={server.endpoint}"]
        command = [sys.executable, "-m", "ray_jobs.store", *store, *overrides]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert run("action=verify").stdout.endswith("verify: 4 units, 0 bad\n")
    other = files.root.replace("/root", "/other")
    sent = run("action=copy", f"to={other}", f"+to_storage_options.endpoint_url={server.endpoint}")
    assert "4 units sent" in sent.stdout, sent.stderr
    assert verify(find(Filesystem(other, options))) == []
    missing = run("action=ls", "store.root=s3://no-such-bucket/x")
    assert missing.returncode == 2 and "store.root" in missing.stderr
