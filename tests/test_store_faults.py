"""What goes wrong between the store and an S3 server: each ends in recovery, or in an error that names the setting."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faulty import Proxy, faulty
from seaweed import Server, serve
from test_store import PRINT, shard  # noqa: F401

from eagle3_ray.store import s3
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem, StoreError, room_in

PART = 5 * 2**20  # the least that S3 allows
LARGE = 3 * PART + 12345


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    monkeypatch.setattr(s3, "WAIT_S", 0.05)
    monkeypatch.setattr(s3, "LONGEST_WAIT_S", 0.5)
    with faulty(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def files(server: Server, proxy: Proxy) -> Filesystem:
    return through(proxy, server)


def through(proxy: Proxy, server: Server, bucket: str = "", **options: Any) -> Filesystem:
    options = {**server.storage_options, "endpoint_url": proxy.endpoint, **options}
    return Filesystem(f"s3://{bucket or server.bucket}/{uuid4().hex}/root", options)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


def unfinished(files: Filesystem) -> list[str]:
    """The uploads below the root that were begun and neither completed nor given up."""
    bucket, _, prefix = files.root.removeprefix("s3://").partition("/")
    return [u["Key"] for u in files._s3.fs.list_multipart_uploads(bucket) if u["Key"].startswith(prefix)]


def asked(proxy: Proxy, match: str) -> int:
    return sum(match in request for request in proxy.seen)


# ---------------------------------------------------------------- what may pass

TRANSIENT = [500, 503, 429, "reset", "half-request", "lost", "flip-request"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "skip", "kind"),
    [("POST", 0, 503), ("POST", 0, "lost"), ("POST", 1, 500), ("POST", 1, "lost"), ("POST", 1, "reset")]
    + [("partNumber=2", 0, kind) for kind in TRANSIENT],
)  # of the requests without a body of data, the first begins an upload, the second completes it
def test_a_large_upload_outlives_what_may_pass(
    files: Filesystem, proxy: Proxy, large: Path, where: str, skip: int, kind: Any
) -> None:
    proxy.fail(kind, where, times=2, skip=skip)
    files.upload(large, "large")
    assert not proxy.left()
    assert files.read("large") == large.read_bytes()
    assert files.list("") == ["large"] and unfinished(files) == []


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_small_object_outlives_what_may_pass(files: Filesystem, proxy: Proxy, kind: Any) -> None:
    proxy.fail(kind, "PUT", times=3)
    files.write("small", b"0123456789")
    assert files.read("small") == b"0123456789" and not proxy.left()


@pytest.mark.full
@pytest.mark.parametrize("kind", [500, 503, 429, "reset", "lost", "half-answer", "stall"])
def test_reads_outlive_what_may_pass(
    files: Filesystem, proxy: Proxy, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    files.upload(large, "large")
    monkeypatch.setattr(s3, "SILENCE_S", 0.5)
    again = Filesystem(files.root, files.storage_options)
    for method in ("HEAD", "GET"):
        if kind in ("half-answer", "stall") and method == "HEAD":
            continue  # has no body
        proxy.fail(kind, method, times=2)
    again.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    proxy.fail(kind, "list-type", times=2)
    assert again.list("") == ["large"]
    assert not proxy.left()


@pytest.mark.full
def test_a_server_that_stops_reading_is_given_up_and_asked_again(
    files: Filesystem, proxy: Proxy, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "REQUEST_S", 3.0)
    proxy.fail("deaf", "partNumber=1")
    files.upload(large, "large")
    assert files.size("large") == LARGE and asked(proxy, "partNumber=1") == 2


@pytest.mark.parametrize("kind", ["lost", 409, 503, "half-request"])
def test_a_commit_is_made_once_whatever_happens_to_its_answer(
    files: Filesystem,
    proxy: Proxy,
    shard: Path,  # noqa: F811
    kind: Any,
) -> None:
    units = Units(files, "features", PRINT)
    proxy.fail(kind, "PUT", times=2, skip=1)  # the shard goes first
    assert units.commit("u", shard, [])
    assert asked(proxy, "commits/u.json") >= 4  # looked for, and tried three times
    assert files.list("features") == [f"features/{PRINT}/commits/u.json", units.read_commit("u").shard]
    assert not units.commit("u", shard, [])


def test_the_check_outlives_a_lost_answer_and_does_not_wait_long_for_a_wrong_endpoint(
    files: Filesystem, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.fail("lost", "PUT", times=2)
    files.check()
    monkeypatch.setattr("eagle3_ray.store.filesystem.START_PATIENCE_S", 1.0)
    nowhere = Filesystem(files.root, {**files.storage_options, "endpoint_url": "http://127.0.0.1:9"})
    start = time.monotonic()
    with pytest.raises(StoreError, match="store.root is .*endpoint_url='http://127.0.0.1:9'"):
        nowhere.check()
    assert time.monotonic() - start < 5


def test_an_upload_that_was_completed_unheard_is_seen_to_be_there(files: Filesystem, proxy: Proxy, large: Path) -> None:
    proxy.fail("lost", "POST", skip=1)
    proxy.fail(404, "POST", skip=1)  # the server no longer knows what it completed
    files.upload(large, "large")
    assert files.read("large") == large.read_bytes() and not proxy.left()
    proxy.fail(404, "POST", times=10, skip=1)
    with pytest.raises(StoreError, match="cannot upload to"):  # nor does it know one that it did not complete
        files.upload(large, "other")
    assert files.list("") == ["large"] and unfinished(files) == []


@pytest.mark.full
def test_a_server_killed_in_mid_upload_and_started_again_is_survived(
    files: Filesystem, proxy: Proxy, server: Server, large: Path
) -> None:
    proxy.fail(server.restart, "partNumber=3")
    files.upload(large, "large")
    assert files.read("large") == large.read_bytes()
    assert files.list("") == ["large"] and unfinished(files) == []


@pytest.mark.full
def test_what_does_not_pass_ends_in_an_error_and_leaves_nothing(
    files: Filesystem, proxy: Proxy, large: Path, tmp_path: Path
) -> None:
    files.patience_s = 3.0
    proxy.fail(503, "partNumber=2", times=10**6)
    with pytest.raises(StoreError, match=f"store.root is '{files.root}': cannot upload to .*large .*storage_options"):
        files.upload(large, "large")
    assert asked(proxy, "partNumber=2") > 1
    assert files.list("") == [] and not files.exists("large") and unfinished(files) == []
    files.write("small", bytes(100))
    proxy.fail("half-answer", "GET", times=10**6)
    with pytest.raises(StoreError, match="cannot download"):
        files.download("small", tmp_path / "back")
    assert not list(tmp_path.glob("*back*")) and not list(tmp_path.glob("*.tmp"))


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize("status", [403, 507])
def test_a_refusal_is_not_repeated_and_the_upload_is_given_up(
    files: Filesystem, proxy: Proxy, large: Path, status: int
) -> None:
    proxy.fail(status, "partNumber=2", times=10)
    with pytest.raises(StoreError, match="store.root is"):
        files.upload(large, "large")
    assert asked(proxy, "partNumber=2") == 1
    assert files.list("") == [] and unfinished(files) == []


def test_a_wrong_secret_and_a_missing_bucket_are_asked_for_once(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    wrong = through(proxy, server, secret=uuid4().hex)
    none = through(proxy, server, bucket="no-such-bucket")
    for files, word in ((wrong, "Permission"), (none, "bucket does not exist")):
        proxy.seen.clear()
        with pytest.raises(StoreError, match=f"store.root is .*{word}"):
            files.check()
        assert len(proxy.seen) == 1
    proxy.seen.clear()
    with pytest.raises(StoreError, match="Permission"):
        wrong.download("a", tmp_path / "a")
    assert len(proxy.seen) == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A write beyond `size` fails as it does on a full disk, but for the error's number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_by_its_setting_and_keeps_no_piece(
    files: Filesystem, proxy: Proxy, large: Path, tmp_path: Path
) -> None:
    files.upload(large, "large")
    local, copy = Filesystem(str(tmp_path / "root")), tmp_path / "copies" / "large"
    proxy.seen.clear()
    with largest_file(2**20):
        with pytest.raises(StoreError, match=f"store.scratch_dir has no room in {copy.parent} .*File too large"):
            files.download("large", copy)
        with pytest.raises(StoreError, match=f"store.root is '{tmp_path}/root': cannot upload.*File too large"):
            local.upload(large, "large")
        with pytest.raises(StoreError, match=f"store.scratch_dir has no room in {tmp_path}"), room_in(tmp_path):
            (tmp_path / "staged").write_bytes(bytes(2**21))
    with pytest.raises(StoreError, match="No space left on device"), room_in(tmp_path), open("/dev/full", "wb") as full:
        full.write(b"x")
    assert asked(proxy, "GET") == 0 and os.listdir(copy.parent) == os.listdir(local.root) == []


# ---------------------------------------------------------------- damage


def test_a_body_damaged_on_its_way_up_is_refused_by_the_server(files: Filesystem, proxy: Proxy, large: Path) -> None:
    files.patience_s = 0
    for key, where in (("large", "partNumber=2"), ("small", "PUT")):
        proxy.fail("flip-request", where)
        with pytest.raises(StoreError, match="did not match what we received"):
            files.upload(large, key) if key == "large" else files.write(key, b"0123456789")
        assert files.list("") == [] and unfinished(files) == []


def test_a_shard_damaged_on_its_way_down_is_fetched_again_and_never_used(
    files: Filesystem,
    proxy: Proxy,
    shard: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    units = Units(files, "features", PRINT)
    units.commit("u", shard, [])
    commit = units.read_commit("u")
    proxy.fail("flip-answer", f"GET /{files.root.removeprefix('s3://')}/{commit.shard}")
    copy = units.fetch(commit, Cache(tmp_path / "cache"))
    assert (
        copy.read_bytes() == shard.read_bytes() and asked(proxy, commit.shard) == 6
    )  # a PUT, a HEAD, and HEAD and GET twice
    shutil.rmtree(tmp_path / "cache")
    proxy.fail("flip-answer", "GET", times=2)
    with pytest.raises(StoreError, match="has the sha256 .*its commit says"):
        units.fetch(commit, Cache(tmp_path / "cache"))


# ---------------------------------------------------------------- means


def test_no_more_of_a_file_is_in_memory_than_the_parts_on_their_way(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    monkeypatch.setattr(s3, "PARTS_AT_ONCE", 2)
    direct = Filesystem(f"s3://{server.bucket}/memory", server.storage_options)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(20 * PART)
    tracemalloc.start()
    try:
        direct.upload(tmp_path / "sparse", "sparse")
        direct.download("sparse", tmp_path / "back")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10 * PART  # botocore and aiohttp each keep a copy of a part that is sent, for a while
    assert (tmp_path / "back").stat().st_size == 20 * PART


def test_without_exclusive_creation_create_looks_first(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = s3.S3.put
    monkeypatch.setattr(s3.S3, "put", lambda self, url, data, create=False: put(self, url, data))  # as some servers do
    files = through(proxy, server)
    with pytest.raises(StoreError, match="create-if-absent.*store.exclusive_create=false"):
        files.check()
    weaker = Filesystem(files.root, files.storage_options, exclusive=False)
    weaker.check()
    proxy.headers.clear()
    assert weaker.create("key", b"first") and not weaker.create("key", b"second")
    assert weaker.read("key") == b"first"
    assert not any("If-None-Match" in headers for headers in proxy.headers)


def test_every_body_has_its_checksum_and_no_shared_chunking(files: Filesystem, proxy: Proxy, large: Path) -> None:
    files.upload(large, "large")
    files.write("small", b"x")
    bodies = [h for request, h in zip(proxy.seen, proxy.headers, strict=True) if re.match("PUT", request)]
    assert len(bodies) == 5 and all("Content-MD5" in headers for headers in bodies)
    assert not any("aws-chunked" in headers.get("Content-Encoding", "") for headers in bodies)
