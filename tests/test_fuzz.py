"""A small store, mutated in 2,000 ways: each is refused with an error of ours, or changes no value.

Some of the mutations are made by one who knows the format: checks, checksums and sizes are made to fit again. Values
may then be others, but what is read still has the shape of a sample, and nothing but an error of ours is raised.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import fill

from eagle3_ray.attempts import Attempts
from eagle3_ray.config import ConfigError
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.copying import copy
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.garbage import garbage
from eagle3_ray.store.overview import details, find, table
from eagle3_ray.store.shards import Features, Response, ShardReader, target_rows
from eagle3_ray.store.transcode import destination, transcode
from eagle3_ray.store.verify import verify
from eagle3_ray.strict_json import sealed, unsealed

OURS = (StoreError, ConfigError)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses, features as they are, and the same in fp8, compressed."""
    folder = tmp_path_factory.mktemp("sound")
    root = folder / "root"
    _, features = fill(Filesystem(str(root)), folder, samples=2)
    smaller = destination(features, features.files, "float8_e4m3")
    transcode(features, smaller, "zstd", Cache(folder / "cache"), folder)
    attempts = Attempts(features, "000009-0000")
    attempts.crashed(attempts.begin([1, 2]), [1], "died")
    features.files.write_json(f"{features.folder}/summary.json", {"samples": 4})
    return root


def values(root: Path, cache: Path) -> dict[str, Any]:
    """All that the store says, by name, read in every way there is."""
    files = Filesystem(str(root))
    folders = find(files)
    list(table(folders))
    found: dict[str, Any] = {}
    for folder in folders:
        units = folder.units
        list(details(folder))
        found[folder.name] = units.description()
        for name in ("engine", "summary"):
            if files.exists(f"{folder.name}/{name}.json"):
                found[f"{folder.name}/{name}"] = files.read_json(f"{folder.name}/{name}.json")
        attempts = Attempts(units, "000009-0000")
        found[f"{folder.name}/attempts"] = {"tried": attempts.crashes, "next": attempts.next_group([1, 2, 3])}
        for commit in units.commits():
            found[f"{folder.name}/{commit.unit}"] = asdict(commit)
            readers = (
                units.open(commit, Cache(cache)),
                ShardReader(commit.shard, units.fingerprint, files, commit.samples),
            )
            for number, reader in enumerate(readers):
                for i in range(len(reader)):
                    sample = reader.response(i) if units.kind == "responses" else reader.features(i)
                    found[f"{folder.name}/{commit.unit}/{i}/{number}"] = sample
    garbage(files, time.time() + 60)
    for fault in verify(folders, cache):
        raise StoreError(fault.reason)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (Features, Response)):
        return type(one) is type(other) and all(same(value, vars(other)[name]) for name, value in vars(one).items())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())
    return one == other


def well_formed(sample: Any) -> bool:
    if isinstance(sample, Response):
        return len(sample.input_ids) == len(sample.loss_mask) and sample.loss_mask.dtype == torch.bool
    if isinstance(sample, Features):
        tokens, rows = len(sample.input_ids), len(sample.last_rows)
        shapes = len(sample.loss_mask) == len(sample.aux) == tokens and len(sample.last_hidden) == rows
        return shapes and torch.equal(sample.last_rows, target_rows(sample.loss_mask))
    return isinstance(sample, dict)


# ---------------------------------------------------------------- mutations

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**200, 1.5, "", "a", "..", "/etc/passwd", "../" * 9, "\0"]
ODD += [[], {}, [[]], "x" * 5000, {"deep": 1}, [1, 2]]


def damage(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """What disks, networks and hands do to a file."""
    kind = draw.choice(["flip", "flip", "flip", "cut", "lose", "double", "zero", "append", "other", "digit"])
    at, length = draw.randrange(len(data) + 1), draw.choice([1, 2, 8, 100])
    if kind == "flip" and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "digit":
        places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
        if places:
            at = draw.choice(places)
            return data[:at] + str(draw.randrange(10)).encode() + data[at + 1 :]
    return {
        "cut": data[:at],
        "lose": data[:at] + data[at + length :],
        "double": data[:at] + data[at : at + length] + data[at:],
        "zero": data[:at] + bytes(length) + data[at + length :],
        "other": draw.choice(others),
    }.get(kind, data + draw.randbytes(length))


def edited(value: Any, draw: random.Random) -> Any:
    """The JSON value with one of its inner values, members or names changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != name}
        if draw.random() < 0.1:
            return {(f"{k}s" if k == name else k): v for k, v in value.items()}
        return {k: edited(v, draw) if k == name else v for k, v in value.items()}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value[:at] + value[at + 1 :] if draw.random() < 0.5 else [*value, value[at]]
        return [edited(v, draw) if i == at else v for i, v in enumerate(value)]
    return draw.choice(ODD)


def forged_json(data: bytes, key: str, draw: random.Random) -> bytes:
    changed = edited(unsealed(json.loads(data), key), draw)
    return json.dumps(sealed(changed, key) if isinstance(changed, dict) else changed).encode()


def forged_shard(data: bytes, draw: random.Random) -> bytes:
    """Another header, index or content, under checksums that fit."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    begin, end = header["crc32"]["data_offsets"]
    kind = draw.choice(["header", "metadata", "index", "content"])
    if kind == "header":
        header = edited(header, draw)
    elif kind == "metadata":
        about = header["__metadata__"]
        name = draw.choice(["samples", "compressed", "fingerprint", "format"])
        if name in ("samples", "compressed"):
            about[name] = json.dumps(edited(json.loads(about[name]), draw))
        else:
            about[name] = edited(about[name], draw)
    elif kind == "index" and begin >= 8:
        at = 8 * draw.randrange(begin // 8)
        body[at : at + 8] = draw.choice([-1, 0, 1, 7, 2**40, 2**62]).to_bytes(8, "little", signed=True)
    elif end < len(body):
        at = draw.randrange(end, len(body))
        body[at] ^= 1 << draw.randrange(8)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text + bytes(body[:begin])
    body[end - 8 : end] = zlib.crc32(prefix).to_bytes(8, "little")
    return prefix + bytes(body[begin:])


def refit(root: Path, shard: Path) -> None:
    """The commit of a shard that was changed says its new size and sha256."""
    unit = shard.name.partition(".")[0]
    key = str((shard.parent.parent / "commits" / f"{unit}.json").relative_to(root))
    data, files = shard.read_bytes(), Filesystem(str(root))
    told = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files.write_json(key, files.read_json(key) | told)


def outside(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "root"}


@pytest.mark.parametrize("seed", range(20))
def test_a_mutated_store_is_refused_or_says_the_same(sound: Path, tmp_path: Path, seed: int, capfd) -> None:
    draw = random.Random(seed)
    root, cache = tmp_path / "root", tmp_path / "cache"
    shutil.copytree(sound, root)
    cache.mkdir()
    before, there = values(root, cache), outside(tmp_path)
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in paths}
    refused = 0
    for number in range(100):
        path = draw.choice(paths)
        forged = draw.random() < 0.4
        is_shard = path.suffix == ".safetensors"
        if forged:
            if is_shard:
                path.write_bytes(forged_shard(contents[path], draw))
                refit(root, path)
            else:
                path.write_bytes(forged_json(contents[path], str(path.relative_to(root)), draw))
        else:
            path.write_bytes(damage(contents[path], draw, list(contents.values())))
        try:
            after = values(root, cache)
            if number % 10 == 0:
                copy(find(Filesystem(str(root))), Filesystem(str(tmp_path / "root" / "copy")))
        except OURS:
            refused += 1
        else:
            if forged:
                assert all(map(well_formed, after.values())), path
            else:
                assert after.keys() == before.keys() and all(same(after[k], before[k]) for k in before), path
        shutil.rmtree(root / "copy", ignore_errors=True)
        for changed, data in contents.items():
            if changed.read_bytes() != data:
                changed.write_bytes(data)
        assert outside(tmp_path) == there
    assert refused > 60
    capfd.readouterr()
