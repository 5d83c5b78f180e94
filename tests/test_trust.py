"""A store that cannot be lied to: commits, keys and folders that are not what they are taken for."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from stores import fill

from eagle3_ray.config import StoreConfig
from eagle3_ray.store.cache import Cache, node_cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.copying import copy
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError, below
from eagle3_ray.store.overview import find
from eagle3_ray.store.verify import verify
from eagle3_ray.strict_json import loads

UNIT = "000000-0000"


@pytest.fixture
def features(tmp_path: Path) -> Units:
    """Four units of three samples."""
    return fill(Filesystem(str(tmp_path / "root")), tmp_path, units=4)[1]


def commit_path(features: Units, unit: str = UNIT) -> Path:
    return Path(features.files.url(f"{features.folder}/commits/{unit}.json"))


def plain(features: Units) -> None:
    """The unit's commit as it was written before there were checks."""
    commit_path(features).write_text(json.dumps(asdict(features.read_commit(UNIT))))


def rewrite(features: Units, **change: Any) -> None:
    """Change the unit's commit as one would who knows the format."""
    key = f"{features.folder}/commits/{UNIT}.json"
    features.files.write_json(key, features.files.read_json(key) | change)


# ---------------------------------------------------------------- commits


@pytest.mark.parametrize(
    "shard",
    [
        "{outside}",
        "../outside",
        "{folder}/shards/../../../../outside",
        "{folder}/shards/000001-0000.0123456789ab.safetensors",  # another unit's
        "features/0123456789abcdef/shards/000000-0000.0123456789ab.safetensors",  # another fingerprint's
        "{folder}/shards/000000-0000.x.safetensors",
        "{folder}/shards/000000-0000.0123456789ab.safetensors\n",
        "",
        7,
        None,
    ],
)
def test_a_commit_whose_shard_lies_elsewhere_is_refused(features: Units, tmp_path: Path, shard: Any) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    if isinstance(shard, str):
        shard = shard.format(outside=outside, folder=features.folder)
    rewrite(features, shard=shard)
    with pytest.raises(Damaged, match=f"{UNIT}.json is not the commit of unit {UNIT}: its shard is"):
        features.commits()
    (fault,) = verify(find(features.files))
    assert fault.unit == f"{features.folder}: {UNIT}"
    with pytest.raises(Damaged):
        copy(find(features.files), Filesystem(str(tmp_path / "copy")))
    assert outside.read_text() == "untouched"


def test_a_commit_under_another_units_name_is_refused(features: Units) -> None:
    plain(features)
    shutil.copy(commit_path(features), commit_path(features, "000000-0099"))
    with pytest.raises(Damaged, match=f"is not the commit of unit 000000-0099: it is that of unit '{UNIT}'"):
        features.commits()


def test_a_units_commit_in_anothers_place_is_refused(features: Units) -> None:
    plain(features)
    shutil.copy(commit_path(features), commit_path(features, "000001-0000"))
    with pytest.raises(Damaged, match="000001-0000.json is not the commit of unit 000001-0000"):
        features.commits()


def test_a_commit_that_leaves_out_samples_is_refused(features: Units, tmp_path: Path) -> None:
    commit = features.read_commit(UNIT)
    rewrite(features, samples=commit.samples[:1])
    with pytest.raises(Damaged, match="it has 3 samples, its commit lists 1"):
        features.open(features.read_commit(UNIT), Cache(tmp_path))


@pytest.mark.parametrize(("name", "value"), [("id", "other"), ("tokens", 5), ("targets", 0), ("generated", 1)])
def test_a_commit_that_lists_other_samples_is_refused(features: Units, tmp_path: Path, name: str, value: Any) -> None:
    samples = features.read_commit(UNIT).samples
    rewrite(features, samples=[samples[0] | {name: value}, *samples[1:]])
    with pytest.raises(Damaged, match=f"sample 0-0: {name} is .*, its commit says"):
        features.open(features.read_commit(UNIT), Cache(tmp_path)).features(0)


def test_a_sample_in_two_units_is_an_error_that_names_both(features: Units, tmp_path: Path) -> None:
    """Shard and commit are copied and made to fit: nothing but the ids tells."""
    commit = features.read_commit(UNIT)
    other = replace(commit, unit="000000-0099", shard=commit.shard.replace(UNIT, "000000-0099"))
    features.files.write(other.shard, features.files.read(commit.shard))
    assert features.create(other)
    with pytest.raises(Damaged, match=f"sample '0-0' is in the units {UNIT} and 000000-0099"):
        features.commits()
    (fault,) = verify(find(features.files))
    assert fault.reason == f"its sample '0-2' is in unit {UNIT} too"
    assert fault.delete == [str(commit_path(features)), str(commit_path(features, "000000-0099"))]
    with pytest.raises(Damaged, match="lists sample '0-0' twice"):
        rewrite(features, samples=[commit.samples[0], *commit.samples[:2]])
        features.commits()


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"size": True},
        {"size": "12"},
        {"sha256": "ab"},
        {"sha256": None},
        {"samples": {}},
        {"samples": [[]]},
        {"samples": [{"id": 1}]},
        {"facts": []},
        {"facts": {"failed": {"a": 1}}},
        {"facts": {"failed": [{"id": "a"}]}},
        {"more": 1},
    ],
)
def test_a_commit_that_says_nonsense_is_refused(features: Units, change: dict[str, Any]) -> None:
    rewrite(features, **change)
    with pytest.raises(Damaged, match=f"{UNIT}.json is not the commit of unit {UNIT}"):
        features.read_commit(UNIT)


def test_a_commit_that_was_edited_does_not_fit_its_check(features: Units) -> None:
    path = commit_path(features)
    path.write_text(path.read_text().replace('"maths"', '"mathe"'))
    with pytest.raises(Damaged, match="does not fit its check"):
        features.read_commit(UNIT)


def test_a_commit_from_before_there_were_checks_is_read(features: Units) -> None:
    commit = features.read_commit(UNIT)
    plain(features)
    assert "check" not in commit_path(features).read_text() and features.read_commit(UNIT) == commit


@pytest.mark.parametrize("name", ["note.txt", "000009-0000.json.bak", "deep/000009-0000.json", ".json"])
def test_what_is_no_commit_among_them_is_named(features: Units, name: str) -> None:
    features.files.write(f"{features.folder}/commits/{name}", b"{}")
    for look in (features.commits, lambda: find(features.files)):
        with pytest.raises(Damaged, match=f"{name} is no commit; remove it"):
            look()


def test_a_description_of_another_fingerprint_is_refused(features: Units) -> None:
    key = f"{features.folder}/description.json"
    features.files.write_json(key, features.files.read_json(key) | {"boundaries": [2, 4, 7]})
    with pytest.raises(Damaged, match="describes something else than its folder's name"):
        features.description()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_a_shard_that_is_no_file_of_its_bytes_is_refused(features: Units, tmp_path: Path, kind: str) -> None:
    commit = features.read_commit(UNIT)
    path = Path(features.files.url(commit.shard))
    path.unlink()
    (tmp_path / "secret").write_bytes(bytes(commit.size))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "secret")
    with pytest.raises(Damaged, match=r"is missing|has the sha256"):
        features.open(commit, Cache(tmp_path))


# ---------------------------------------------------------------- keys

UNFIT = ["..", "../x", "a/../../x", "a/..", "/etc/passwd", "a//b", "a/", "./a", "a/./b"]
UNFIT += ["a\nb", "a\0b", "a\x7f", "a\\b", "\ud800", "a" * 256, "/".join(["a" * 200] * 6)]


@pytest.mark.parametrize("key", UNFIT, ids=ascii)
def test_no_operation_takes_a_key_that_leaves_the_root(tmp_path: Path, key: str) -> None:
    files = Filesystem(str(tmp_path / "root"))
    (tmp_path / "x").write_text("untouched")
    operations: list[Callable[[], Any]] = [
        lambda: files.read(key),
        lambda: files.write(key, b""),
        lambda: files.create(key, b""),
        lambda: files.upload(tmp_path / "x", key),
        lambda: files.download(key, tmp_path / "y"),
        lambda: files.size(key),
        lambda: files.exists(key),
        lambda: files.delete(key),
        lambda: files.url(key),
        lambda: below(tmp_path, key),
        lambda: Cache(tmp_path / "cache").path(key),
    ]
    for operation in operations:
        with pytest.raises(StoreError, match="cannot be the key of an object"):
            operation()
    assert (tmp_path / "x").read_text() == "untouched" and sorted(os.listdir(tmp_path)) == ["x"]


@pytest.mark.parametrize("key", ["a", "a/b", "größe/日本", "a b", "...", "a..b", ".hidden", "a" * 255])
def test_other_keys_are_kept_as_they_are(tmp_path: Path, key: str) -> None:
    files = Filesystem(str(tmp_path / "root"))
    files.write(key, b"1")
    assert files.list("") == [key] and files.read(key) == b"1"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "[]",
        '"x"',
        "",
        "\x00",
        '{"a": 1',
        '{"check": 1}',
    ],
)
def test_what_is_no_sealed_json_is_damaged(tmp_path: Path, text: str) -> None:
    files = Filesystem(str(tmp_path))
    files.write("a.json", text.encode())
    with pytest.raises(Damaged, match="a.json is not what was written"):
        files.read_json("a.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"deep": -float("inf")}]])
def test_no_json_is_written_that_is_none(tmp_path: Path, value: Any) -> None:
    files = Filesystem(str(tmp_path))
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json("a.json", {"value": value})
    assert files.list("") == []


def test_sealed_json_is_read_back_and_any_other_value_is_not(tmp_path: Path) -> None:
    files, value = Filesystem(str(tmp_path)), {"b": (1, 2.5, "größe"), "a": {"x": None, "y": [True]}}
    files.write_json("a.json", value)
    assert files.read_json("a.json") == {"b": [1, 2.5, "größe"], "a": {"x": None, "y": [True]}}
    told = loads(files.read("a.json"))
    for change in ({"b": [1, 2.5, "grösse"]}, {"a": {"x": None, "y": [1]}}, {"c": 1}):
        files.write("a.json", json.dumps(told | change).encode())
        with pytest.raises(Damaged, match="does not fit its check"):
            files.read_json("a.json")
    files.write_json("a.json", value)
    files.write("b.json", files.read("a.json"))  # in another's place
    with pytest.raises(Damaged, match="does not fit its check"):
        files.read_json("b.json")


@pytest.mark.parametrize("name", [b"a\nb", b"\xff"])
def test_a_listing_with_a_name_that_is_no_key_is_an_error(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "runs").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/" + name)).write_bytes(b"")
    for look in (Filesystem(str(tmp_path)).list, Filesystem(str(tmp_path)).entries):
        with pytest.raises(StoreError, match="cannot be the key of an object"):
            look("runs")


# ---------------------------------------------------------------- this node's disk


def test_the_nodes_cache_is_made_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    cache = node_cache(StoreConfig(root="", scratch_dir=str(tmp_path)))
    before = os.umask(0)
    try:
        with cache.adding("features/a/shards/u", 1):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.folder.glob("*.lock")} == {0o600}


def test_a_cache_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    cache = node_cache(StoreConfig(root="", scratch_dir=str(tmp_path)))
    cache.folder.mkdir()
    cache.folder.chmod(0o755)  # as it was made before
    with cache.adding("features/a/shards/u", 1):
        pass
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("planted", ["a folder of another user", "a folder all may write into", "a link", "a file"])
def test_a_cache_that_another_user_planted_is_refused(tmp_path: Path, planted: str) -> None:
    cache = node_cache(StoreConfig(root="", scratch_dir=str(tmp_path)))
    victim = tmp_path / "victim"
    victim.mkdir()
    victim.chmod(0o700)
    (victim / "precious").write_text("untouched")
    if planted == "a link":
        cache.folder.symlink_to(victim)
    elif planted == "a file":
        cache.folder.write_text("")
    else:
        cache.folder.mkdir()
        for number in range(64):  # the lock files
            (cache.folder / f"{number:02}.lock").symlink_to(victim / "precious")
        cache.folder.chmod(0o777)
        if planted == "a folder of another user":
            if os.geteuid():
                pytest.skip("only root can give a folder away")
            cache.folder.chmod(0o755)
            os.chown(cache.folder, 12345, 12345)
    with pytest.raises(StoreError, match="store.scratch_dir: .* is no folder that is ours alone"), cache.adding("k", 1):
        pass
    assert (victim / "precious").read_text() == "untouched" and os.listdir(victim) == ["precious"]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.folder.mkdir(0o700)
    (tmp_path / "precious").write_text("untouched")
    for number in range(64):
        (cache.folder / f"{number:02}.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), cache.adding("k", 1):
        pass
    assert (tmp_path / "precious").read_text() == "untouched"
