"""The same contract on a real S3 server, and what only S3 can do wrong."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from seaweed import Server, serve
from test_published import LAYOUTS, MODEL, publish
from test_store import (  # noqa: F401
    PRINT,
    shard,
    test_a_commit_whose_answer_was_lost_keeps_its_shard,
    test_a_committed_unit_is_read_back_whole,
    test_a_crash_between_shard_and_commit_leaves_nothing_visible,
    test_a_damaged_shard_is_refused_at_the_first_read,
    test_a_listing_holds_the_folders_keys_and_is_never_stale,
    test_a_missing_object_is_seen_as_missing,
    test_a_root_where_two_writers_win_is_refused,
    test_a_sound_root_passes_the_check_and_keeps_nothing_of_it,
    test_an_object_reads_as_it_was_written,
    test_another_description_under_the_same_fingerprint_is_refused_by_its_lines,
    test_creation_has_one_winner_among_processes,
    test_creation_has_one_winner_among_threads,
    test_of_many_attempts_at_a_unit_one_is_kept_and_the_others_leave_nothing,
    test_one_sample_is_read_from_the_store_itself_and_checked,
)
from test_tensors import target

from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.conversations import read_records
from eagle3_ray.drafter.published import Published
from eagle3_ray.drafter.target import check_weights, load_pieces
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError
from eagle3_ray.store.overview import find
from eagle3_ray.store.s3 import S3
from eagle3_ray.store.verify import verify
from eagle3_ray.strict_json import fingerprint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def files(server: Server) -> Filesystem:
    return Filesystem(f"s3://{server.bucket}/{uuid4().hex}/root", server.storage_options)


def test_a_bucket_may_be_the_root(server: Server) -> None:
    files = Filesystem(f"s3://{server.bucket}/", server.storage_options)
    files.write("top/key", b"x")
    assert files.url("top/key") == f"s3://{server.bucket}/top/key"
    assert files.list("top") == ["top/key"] and "top/key" in files.list("")


def test_a_connection_is_not_pickled(files: Filesystem) -> None:
    unused = pickle.dumps(files)
    files.write("key", b"x")
    assert pickle.dumps(files) == unused
    assert pickle.loads(unused).read("key") == b"x"


def test_a_wrong_secret_is_refused_without_being_shown(server: Server) -> None:
    secret = uuid4().hex
    files = Filesystem(f"s3://{server.bucket}/root", {**server.storage_options, "secret": secret})
    for use in (files.check, lambda: files.list("a"), lambda: files.create("a", b"x"), lambda: files.exists("a")):
        with pytest.raises(StoreError, match="store.root is .*Permission.*store.storage_options sets") as refused:
            use()
        assert secret not in "".join(traceback.format_exception(refused.value))


def test_a_secret_that_an_error_repeats_is_blotted_out() -> None:
    options = {"client_kwargs": {"aws_secret_access_key": "hush-hush"}}
    files = Filesystem("s3://bucket/root", options)
    with pytest.raises(StoreError) as refused, files._errors("read", "key"):
        raise ValueError(f"client got {options['client_kwargs']['aws_secret_access_key']}")
    shown = "".join(traceback.format_exception(refused.value))
    assert "client got ***" in shown and "got hush-hush" not in shown


def test_a_setting_that_fsspec_does_not_know_is_named(tmp_path: Path) -> None:
    files = Filesystem("s3://bucket/root", {"endpoint": "http://127.0.0.1:1"})
    for use in (files.check, lambda: files.download("a", tmp_path / "a"), lambda: files.list("a")):
        with pytest.raises(StoreError, match="store.storage_options sets endpoint$"):
            use()


def test_a_missing_bucket_is_refused_and_not_made(server: Server) -> None:
    files = Filesystem("s3://no-such-bucket/root", server.storage_options)
    for use in (files.check, lambda: files.list("a"), files.check):
        with pytest.raises(StoreError, match="store.root is 's3://no-such-bucket/root'.*bucket does not exist"):
            use()


def test_credentials_come_from_the_usual_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.storage_options["secret"])
    files = Filesystem(f"s3://{server.bucket}/environment", {"endpoint_url": server.endpoint})
    files.check()


@pytest.mark.parametrize("where", ["{victim}", "../{name}", "features/x/../../../{name}"])
def test_a_commit_cannot_name_a_file_of_the_readers_machine(
    files: Filesystem,
    shard: Path,  # noqa: F811
    tmp_path: Path,
    where: str,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    about = {"boundaries": [2, 4, 6], "dtype": "bfloat16"}
    units = Units(files, "features", fingerprint(about))
    units.describe(about)
    units.commit("u", shard, [])
    commit = asdict(units.read_commit("u")) | {"shard": where.format(victim=victim, name=victim.name)}
    files.write_json(f"{units.folder}/commits/u.json", commit)
    with pytest.raises(Damaged, match="u.json is not the commit of unit u: its shard is"):
        units.commits()
    with pytest.raises(StoreError, match="cannot be the key"):
        units.fetch(Commit(**commit), Cache(tmp_path / "cache"))
    (fault,) = verify(find(files), tmp_path)
    assert fault.unit == f"{units.folder}: u" and victim.read_text() == "untouched"


def test_a_shard_is_downloaded_once_and_a_damaged_copy_again(
    files: Filesystem,
    shard: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units = Units(files, "features", PRINT)
    units.commit("u", shard, [])
    commit, downloads, download = units.read_commit("u"), [], files.download

    def count(key: str, local_path: Path) -> None:
        downloads.append(key)
        download(key, local_path)

    monkeypatch.setattr(files, "download", count)
    copy = units.fetch(commit, Cache(tmp_path / "cache"))
    assert units.fetch(commit, Cache(tmp_path / "cache")) == copy and len(downloads) == 1
    monkeypatch.setattr("eagle3_ray.store.commits._verified", set())  # another process finds the copy damaged
    copy.write_bytes(bytes(commit.size))
    assert units.fetch(commit, Cache(tmp_path / "cache")).read_bytes() == shard.read_bytes() and len(downloads) == 2
    copy.unlink()  # someone made room
    assert units.fetch(commit, Cache(tmp_path / "cache")).read_bytes() == shard.read_bytes() and len(downloads) == 3


def test_a_large_shard_goes_up_and_comes_down_in_parts(files: Filesystem, tmp_path: Path) -> None:
    data = bytes(range(256)) * 2**10 * 404  # 101 MiB: beyond what s3fs sends as one request
    (tmp_path / "large").write_bytes(data)
    files.upload(tmp_path / "large", "large")
    assert files.size("large") == len(data)
    files.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_prompts_are_read_from_a_bucket(server: Server, files: Filesystem) -> None:
    for i in range(2):
        files.write(f"prompts/{i}.jsonl", b'{"prompt": "%d"}\n' % i)
    for name, found in (("0.jsonl", ["0"]), ("*.jsonl", ["0", "1"])):
        records = read_records(PromptsConfig(source=files.url(f"prompts/{name}")), server.storage_options)
        assert [record["prompt"] for record in records] == found
    with pytest.raises(ConfigError, match="prompts.source: no file"):
        list(read_records(PromptsConfig(source=files.url("prompts/no.jsonl")), server.storage_options))


def test_of_a_target_in_a_bucket_the_wanted_bytes_alone_are_read(
    files: Filesystem, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pieces of 200 bytes or less in a file of 2 MB, cut into requests of 50 bytes."""
    config = target(tmp_path / "target")
    for path in (tmp_path / "target").iterdir():
        files.upload(path, path.name)
    read: list[int] = []
    get = S3.get

    def counted(self: S3, url: str, start: int | None = None, end: int | None = None) -> bytes:
        data = get(self, url, start, end)
        if url.endswith("/model.safetensors"):
            read.append(len(data))
        return data

    monkeypatch.setattr(S3, "get", counted)
    monkeypatch.setattr("eagle3_ray.store.tensors.PIECE_BYTES", 50)
    config.weights = files.root
    here, there = (
        load_pieces(replace(config, weights=None), torch.float32),
        load_pieces(config, torch.float32, server.storage_options),
    )
    for name in ("embedding", "head", "norm"):
        assert torch.equal(getattr(here, name), getattr(there, name))
    header = 8 + int.from_bytes((tmp_path / "target" / "model.safetensors").read_bytes()[:8], "little")
    assert sum(read) == header + 160 + 160 + 16
    check_weights(config, server.storage_options)
    config.weights = f"{files.root}/nowhere"
    with pytest.raises(ConfigError, match="target.weights: 's3://.*/nowhere': .*config.json"):
        load_pieces(config, torch.float32, server.storage_options)


def test_a_published_drafter_lies_in_a_bucket(files: Filesystem, server: Server, tmp_path: Path) -> None:
    settings = publish(tmp_path, *LAYOUTS["speculators"])
    with pytest.raises(ConfigError, match="drafter.start_from: 's3://"):
        Published(replace(settings, start_from=files.root), MODEL, 3, server.storage_options)
    for path in tmp_path.iterdir():
        files.upload(path, path.name)
    there = Published(replace(settings, start_from=files.root), MODEL, 3, server.storage_options)
    for name, tensor in Published(settings, MODEL, 3).weights().items():
        assert torch.equal(there.weights()[name], tensor), name
