"""The store on local disk. Tests that take `files` are the contract of any store: test_store_s3.py runs them on S3."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stores import listed

from eagle3_ray.store import filesystem
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.shards import (
    Features,
    Response,
    ShardReader,
    target_rows,
    write_features,
    write_responses,
)
from eagle3_ray.strict_json import fingerprint

PRINT = "f1ng3rpr1nt"


@pytest.fixture
def files(tmp_path: Path) -> Filesystem:
    return Filesystem(str(tmp_path / "root"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard that an actor has just written."""
    path = tmp_path / "new.safetensors"
    write_features(path, [_features("a", [0, 1, 1]), _features("b", [1, 1, 1, 1, 0])], PRINT)
    return path


def _features(name: str, mask: list[int], dtype: torch.dtype = torch.bfloat16, hidden: int = 8) -> Features:
    loss_mask = torch.tensor(mask, dtype=torch.bool)  # [T]
    rows = target_rows(loss_mask)  # [R]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return Features(
        id=name,
        input_ids=torch.randint(0, 2**31 - 1, (len(mask),), generator=generator).int(),  # [T]
        loss_mask=loss_mask,
        aux=torch.randn(len(mask), 3 * hidden, generator=generator).to(dtype),  # [T, 3H]
        last_hidden=torch.randn(len(rows), hidden, generator=generator).to(dtype),  # [R, H]
        last_rows=rows,
    )


def _same(got: Features | Response, expected: Features | Response) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return a == b

    return type(got) is type(expected) and all(equal(getattr(got, k), v) for k, v in vars(expected).items())


# The contract of any store


def test_an_object_reads_as_it_was_written(files: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("a/object", b"first")
    files.write("a/object", b"0123456789")
    assert files.read("a/object") == b"0123456789"
    assert files.read("a/object", 3) == b"3456789"
    assert files.read("a/object", 3, 5) == b"34"
    assert files.size("a/object") == 10
    monkeypatch.setattr(filesystem, "READ_BYTES", 4)
    assert files.sha256("a/object") == hashlib.sha256(b"0123456789").hexdigest()
    (tmp_path / "local").write_bytes(b"uploaded")
    files.upload(tmp_path / "local", "b/object")
    files.download("b/object", tmp_path / "new folder" / "back")
    assert (tmp_path / "new folder" / "back").read_bytes() == b"uploaded"
    assert os.listdir(tmp_path / "new folder") == ["back"]


def test_a_missing_object_is_seen_as_missing(files: Filesystem, tmp_path: Path) -> None:
    files.write("a/b/object", b"")
    assert files.exists("a/b/object") and not files.exists("a/b/other") and not files.exists("a/b")
    for look in (files.read, files.size, lambda key: files.download(key, tmp_path / "x")):
        with pytest.raises(FileNotFoundError):
            look("a/b/other")
    assert not (tmp_path / "x").exists()
    files.delete("a/b/other")
    files.delete("a/b/object")
    assert not files.exists("a/b/object")


def test_a_listing_holds_the_folders_keys_and_is_never_stale(files: Filesystem) -> None:
    assert files.list("a") == []
    for key in ("a/2", "a/1", "a/deep/er/3", "ab/4", "5", "a/left.tmp"):
        files.write(key, b"")
    assert files.list("a") == files.list("a/") == ["a/1", "a/2", "a/deep/er/3"]
    assert files.list("") == ["5", "a/1", "a/2", "a/deep/er/3", "ab/4"]
    assert files.list("a/1") == files.list("none") == []
    other = pickle.loads(pickle.dumps(files))  # as another machine has it
    other.write("a/6", b"")
    other.write("a/2", b"longer")
    other.delete("a/1")
    assert files.exists("a/6") and files.size("a/2") == 6 and not files.exists("a/1")
    assert files.list("a") == ["a/2", "a/6", "a/deep/er/3"]


def test_creation_has_one_winner_among_threads(files: Filesystem) -> None:
    contents = [f"thread {i} ".encode() * 1000 for i in range(16)]
    for key in ("k/0", "k/1", "k/2"):
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(files.create, [key] * 16, contents))
        assert won.count(True) == 1
        assert files.read(key) == contents[won.index(True)]
    assert files.list("k") == ["k/0", "k/1", "k/2"]


def test_creation_has_one_winner_among_processes(files: Filesystem) -> None:
    keys, contents = [f"k/{i:02}" for i in range(30)], [b"first", b"second", b"third", b"fourth"]
    jobs = [(key, content) for content in contents for key in keys]  # a process takes one content, and every key
    files.list("")  # with the connection open, to see that it is not handed to the processes
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        won = list(pool.map(files.create, *zip(*jobs, strict=True), chunksize=len(keys)))
    winners = [job for job, first in zip(jobs, won, strict=True) if first]
    assert sorted(key for key, _ in winners) == keys
    assert all(files.read(key) == content for key, content in winners)


def test_a_sound_root_passes_the_check_and_keeps_nothing_of_it(files: Filesystem) -> None:
    files.check()
    assert files.list("") == []
    if files.local:
        assert os.listdir(files.root) == []


def test_a_root_where_two_writers_win_is_refused(files: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    create = files.create
    for bad in (lambda key, data: not files.write(key, data), lambda key, data: create(key, data) or True):
        monkeypatch.setattr(files, "create", bad)
        with pytest.raises(StoreError, match="store.root.*create-if-absent"):
            files.check()


def test_a_committed_unit_is_read_back_whole(files: Filesystem, shard: Path, tmp_path: Path) -> None:
    units = Units(files, "features", PRINT)
    assert units.committed() == units.commits() == []
    samples = listed([_features("a", [0, 1, 1]), _features("b", [1, 1, 1, 1, 0])], "math")
    assert units.commit("u-2", shard, samples, seconds=1.5)
    assert units.commit("u-1", shard, [])
    assert units.committed() == ["u-1", "u-2"]
    first, second = pickle.loads(pickle.dumps(units)).commits()
    assert (first.unit, first.samples) == ("u-1", [])
    assert (second.unit, second.samples, second.facts) == ("u-2", samples, {"seconds": 1.5})
    assert second == units.read_commit("u-2") and second.size == shard.stat().st_size
    reader = units.open(second, Cache(tmp_path / "cache"))
    assert len(reader) == 2 and _same(reader.features(1), _features("b", [1, 1, 1, 1, 0]))
    assert Units(files, "features", "other").committed() == Units(files, "responses", PRINT).committed() == []


def test_one_sample_is_read_from_the_store_itself_and_checked(files: Filesystem, shard: Path) -> None:
    units = Units(files, "features", PRINT)
    units.commit("u", shard, [])
    key = units.read_commit("u").shard
    assert _same(ShardReader(key, PRINT, files).features(1), _features("b", [1, 1, 1, 1, 0]))
    data = bytearray(files.read(key))
    data[-1] ^= 1
    files.write(key, bytes(data))
    with pytest.raises(StoreError, match=f"{files.url(key)}: the bytes of its sample 1 "):
        ShardReader(key, PRINT, files).features(1)
    files.write(key, bytes(data[:-1]))
    with pytest.raises(StoreError, match="ends before its sample 1 does"):
        ShardReader(key, PRINT, files).features(1)
    files.delete(key)
    with pytest.raises(StoreError, match=f"{files.url(key)} cannot be opened"):
        ShardReader(key, PRINT, files)


def test_of_many_attempts_at_a_unit_one_is_kept_and_the_others_leave_nothing(
    files: Filesystem, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = Units(files, "features", PRINT)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: units.commit("u", shard, [], attempt=i), range(8)))
    assert won.count(True) == 1
    (commit,) = units.commits()
    assert commit.facts == {"attempt": won.index(True)}
    assert files.list(f"features/{PRINT}/shards") == [commit.shard]
    monkeypatch.setattr(files, "upload", lambda path, key: pytest.fail("a finished unit was uploaded again"))
    assert not units.commit("u", shard, [], attempt=9)


def test_a_crash_between_shard_and_commit_leaves_nothing_visible(
    files: Filesystem, shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(key: str, data: bytes) -> bool:
        raise KeyboardInterrupt

    units = Units(files, "features", PRINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "create", crash)
        units.commit("u", shard, [])
    assert len(files.list("features")) == 1  # the shard is whole, but
    assert units.committed() == units.commits() == []
    assert units.commit("u", shard, [])
    assert units.fetch(units.read_commit("u"), Cache(tmp_path / "cache")).read_bytes() == shard.read_bytes()


def test_a_commit_whose_answer_was_lost_keeps_its_shard(
    files: Filesystem, shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, units = files.create, Units(files, "features", PRINT)
    monkeypatch.setattr(files, "create", lambda key, data: create(key, data) and create(key, data))
    assert units.commit("u", shard, [])
    assert units.fetch(units.read_commit("u"), Cache(tmp_path / "cache")).exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_refused_at_the_first_read(
    files: Filesystem, shard: Path, tmp_path: Path, damage: str
) -> None:
    units = Units(files, "features", PRINT)
    units.commit("u", shard, [])
    commit = units.read_commit("u")
    data = bytearray(files.read(commit.shard))
    data[len(data) // 2] ^= 1
    if damage == "missing":
        files.delete(commit.shard)
    else:
        files.write(commit.shard, bytes(data) if damage == "flipped" else bytes(data[:-1]))
    for _ in range(2):
        with pytest.raises(StoreError, match=f"{commit.shard} (has|is missing).*commits/u.json"):
            units.fetch(commit, Cache(tmp_path / "cache"))


def test_another_description_under_the_same_fingerprint_is_refused_by_its_lines(files: Filesystem) -> None:
    description = {"target": "kimi", "sampling": {"seed": 0, "top_p": 1.0}, "boundaries": (2, 30, 58)}
    units = Units(files, "responses", fingerprint(description))
    with pytest.raises(StoreError, match="nothing is stored"):
        units.description()
    units.describe(description)
    units.describe(dict(reversed(description.items())))
    with pytest.raises(StoreError) as refused:
        units.describe({**description, "sampling": {"seed": 1, "top_p": 1.0}, "extra": {"x": "y"}})
    assert str(refused.value).splitlines()[1:] == [
        '  extra.x: stored none, now "y"',
        "  sampling.seed: stored 0, now 1",
    ]
    assert units.description() == {**description, "boundaries": [2, 30, 58]}


# Local disk


@pytest.mark.parametrize("root", ["", "relative/store", "./store", "s3://", "s3:///"])
def test_a_root_that_is_neither_absolute_nor_a_url_is_refused(root: str) -> None:
    with pytest.raises(StoreError, match="store.root"):
        Filesystem(root)


def test_a_root_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Filesystem("~/store/").write("key", b"x")
    assert (tmp_path / "store" / "key").read_bytes() == b"x"
    assert Filesystem(f"file://{tmp_path}/store").read("key") == b"x"


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")  # root may write anywhere, but not below a file
    with pytest.raises(StoreError, match=f"store.root is '{tmp_path}/file/store'"):
        Filesystem(str(tmp_path / "file" / "store")).check()


def test_a_write_that_breaks_off_leaves_the_object_as_it_was(
    files: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            file.write(data[:1])
        raise OSError("disk full")

    files.write("a/object", b"whole")
    monkeypatch.setattr(Path, "write_bytes", full)
    for put in (files.write, files.create):
        with pytest.raises(StoreError, match="disk full"):
            put("a/object" if put == files.write else "a/other", b"torn")
    assert files.read("a/object") == b"whole"
    assert os.listdir(f"{files.root}/a") == ["object"]


def test_files_that_a_killed_writer_left_are_invisible(files: Filesystem, shard: Path, tmp_path: Path) -> None:
    def die(source: object, target: object) -> None:
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(
        target=lambda: (setattr(os, "link", die), files.create(f"features/{PRINT}/commits/u.json", b"{}"))
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    (left,) = os.listdir(f"{files.root}/features/{PRINT}/commits")
    assert left.endswith(".tmp")
    units = Units(files, "features", PRINT)
    assert files.list("") == units.committed() == units.commits() == []
    assert units.commit("u", shard, [])


def test_a_verified_shard_is_hashed_once_a_process_and_measured_each_time(
    files: Filesystem, shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = Units(files, "features", PRINT)
    units.commit("u", shard, [])
    commit = units.read_commit("u")
    path = units.fetch(commit, Cache(tmp_path))
    assert path == Path(files.url(commit.shard))
    monkeypatch.setattr("eagle3_ray.store.commits._sha256", lambda path: pytest.fail("hashed again"))
    assert Units(files, "features", PRINT).fetch(commit, Cache(tmp_path)) == path
    os.truncate(path, commit.size - 1)
    with pytest.raises(StoreError, match=f"has {commit.size - 1} bytes, its commit says {commit.size}"):
        units.fetch(commit, Cache(tmp_path))


@pytest.mark.parametrize("unit", ["", "a/b", "a b", "ü", "a\n", ".", "..", ".a", "a" * 101])
def test_a_unit_with_an_unfit_name_is_refused(files: Filesystem, shard: Path, unit: str) -> None:
    with pytest.raises(StoreError, match="cannot name"):
        Units(files, "features", PRINT).commit(unit, shard, [])


def test_commits_are_json_that_a_person_can_read(files: Filesystem, shard: Path) -> None:
    Units(files, "features", PRINT).commit("u", shard, listed([_features("größe", [1, 1])]), b=1, a=2)
    text = files.read(f"features/{PRINT}/commits/u.json").decode()
    assert "größe" in text and text.count("\n") > 5
    assert list(json.loads(text)) == ["check", "facts", "samples", "sha256", "shard", "size", "unit"]


# Shards


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_sample_of_a_shard_equals_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    masks = [[0, 0, 1, 1, 1], [], [0, 1, 0], [1, 1, 0, 1, 1, 1], [0], [0, 1, 1, 0, 0, 0, 0]]
    samples = [_features(f"sample {i}", mask, dtype) for i, mask in enumerate(masks)]
    write_features(tmp_path / "shard", samples, PRINT)
    reader = ShardReader(tmp_path / "shard", PRINT)
    assert len(reader) == 6
    for i in (3, 0, 5, 1, 4, 2):
        assert _same(reader.features(i), samples[i])
    with pytest.raises(IndexError):
        reader.features(6)


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    samples = [_features("a", [0, 1, 1]), _features("b", [1, 1, 1, 1, 0])]
    for name in ("f", "fi", PRINT):  # the header's length is a multiple of 8, so that the tensors are aligned
        write_features(tmp_path / "shard", samples, name)
        assert int.from_bytes((tmp_path / "shard").read_bytes()[:8], "little") % 8 == 0
    tensors = load_file(tmp_path / "shard")
    assert tensors["offsets"].tolist() == [0, 3, 8]
    assert tensors["target_offsets"].tolist() == [0, 1, 4]
    assert tensors["last_rows"].tolist() == [1, 3, 4, 5]
    assert torch.equal(tensors["aux"], torch.cat([samples[0].aux, samples[1].aux]))
    assert torch.equal(tensors["last_hidden"], torch.cat([samples[0].last_hidden, samples[1].last_hidden]))
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "offsets": "torch.int64",
        "target_offsets": "torch.int64",
        "crc32": "torch.int64",
        "input_ids": "torch.int32",
        "loss_mask": "torch.uint8",
        "aux": "torch.bfloat16",
        "last_hidden": "torch.bfloat16",
        "last_rows": "torch.int64",
    }


def test_views_and_transposed_states_are_written_by_value(tmp_path: Path) -> None:
    sample = _features("a", [1, 1, 1, 1])
    states = sample.aux.clone()
    sample.aux = states.t().contiguous().t()
    sample.last_hidden = torch.cat([sample.last_hidden, sample.last_hidden], 1)[:, :8]
    write_features(tmp_path / "shard", [sample], PRINT)
    assert torch.equal(ShardReader(tmp_path / "shard", PRINT).features(0).aux, states)
    assert torch.equal(ShardReader(tmp_path / "shard", PRINT).features(0).last_hidden, sample.last_hidden)


def test_responses_come_back_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    def response(name: str, mask: list[int], **known: object) -> Response:
        features = _features(name, mask)
        return Response(name, features.input_ids, features.loss_mask, **known)  # type: ignore[arg-type]

    responses = [
        response("a", [0, 1, 1], finish_reasons=["stop", "length"], domain="ä", seed=2**40),
        response("b", [], finish_reasons=[]),
        response("c", [0, 1], finish_reasons=["stop"]),
    ]
    write_responses(tmp_path / "shard", responses, PRINT)
    reader = ShardReader(tmp_path / "shard", PRINT)
    assert len(reader) == 3 and all(_same(reader.response(i), responses[i]) for i in (2, 0, 1))
    with pytest.raises(StoreError, match="no features"):
        reader.features(0)


def test_a_shard_may_have_no_samples(tmp_path: Path) -> None:
    write_responses(tmp_path / "responses", [], PRINT)
    write_features(tmp_path / "features", [], PRINT)
    assert len(ShardReader(tmp_path / "responses", PRINT)) == len(ShardReader(tmp_path / "features", PRINT)) == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda s: setattr(s, "aux", s.aux[:-1]), "4 tokens, but 3 rows of aux"),
        (lambda s: setattr(s, "loss_mask", s.loss_mask[1:]), "4 tokens, but 3 rows of loss_mask"),
        (lambda s: setattr(s, "last_hidden", s.last_hidden[1:]), "3 last_rows, but 2 of last_hidden"),
        (lambda s: setattr(s, "last_rows", s.last_rows + 2), "not ascending within its 4 tokens"),
        (lambda s: setattr(s, "last_rows", s.last_rows - 1), "not ascending within its 4 tokens"),
        (lambda s: setattr(s, "last_rows", s.last_rows.flip(0)), "not ascending within its 4 tokens"),
        (lambda s: setattr(s, "aux", s.aux.float()), "aux differs from sample to sample"),
        (lambda s: setattr(s, "aux", s.aux[:, 1:]), "aux differs from sample to sample"),
    ],
)
def test_a_sample_whose_rows_do_not_match_is_not_written(tmp_path: Path, fault: object, words: str) -> None:
    sample = _features("b", [1, 1, 1, 1])
    fault(sample)  # type: ignore[operator]
    with pytest.raises(StoreError, match=words):
        write_features(tmp_path / "shard", [_features("a", [0, 1, 1]), sample], PRINT)
    assert not (tmp_path / "shard").exists()


def test_a_shard_of_another_fingerprint_or_format_is_refused(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=f"fingerprint '{PRINT}', this run reads 'other'"):
        ShardReader(shard, "other")
    for data in (b"", b"not a shard at all", shard.read_bytes()[:-1]):
        (tmp_path / "broken").write_bytes(data)
        with pytest.raises(StoreError, match="broken cannot be opened"):
            ShardReader(tmp_path / "broken", PRINT)
    monkeypatch.setattr("eagle3_ray.store.layout.FORMAT", "3")
    with pytest.raises(StoreError, match="format '2', this run reads '3'"):
        ShardReader(shard, PRINT)


def test_target_rows_are_those_that_the_valid_slots_need() -> None:
    def needed(mask: list[int]) -> list[int]:
        """From the definition: slot i counts at step k when x_{i+1}..x_{i+2+k} are response; its target is at i+1+k."""
        rows = set()
        for i in range(-1, len(mask)):  # -1: a response may begin with the first token
            for k in range(len(mask)):
                if i + 2 + k < len(mask) and all(mask[i + 1 : i + 3 + k]):
                    rows.add(i + 1 + k)
        return sorted(rows)

    for mask in ([], [1], [0, 0], [0, 1, 0], [0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 0, 1]):
        assert target_rows(torch.tensor(mask, dtype=torch.bool)).tolist() == needed(mask)
