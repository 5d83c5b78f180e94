"""Single tensors of a folder or a bucket: their bytes, and no others."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.drafter.target import check_weights, load_pieces
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError
from eagle3_ray.store.tensors import Tensors, read_tensors, write_tensors

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(70_000).to(torch.bfloat16),
    "c": torch.tensor([True, False, True]),
    "d": torch.empty(0, 4),
    "e": torch.tensor(7, dtype=torch.int64),
}


class Counted(Filesystem):
    """Counts the bytes that it reads of each file."""

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = super().read(key, start, end)
        vars(self).setdefault("seen", {}).setdefault(key, []).append(len(data))
        return data


def write(folder: Path, files: dict[str, str]) -> None:
    """TENSORS in files: tensor -> file; with an index where that is not a single one."""
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in files if files[name] == file}, folder / file)
    if set(files.values()) != {"model.safetensors"}:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("sharded", [False, True])
def test_each_tensor_is_read_as_it_was_written(tmp_path: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eagle3_ray.store.tensors.PIECE_BYTES", 1000)
    write(tmp_path, {name: f"{name}.safetensors" if sharded else "model.safetensors" for name in TENSORS})
    tensors = Tensors(Filesystem(str(tmp_path)))
    assert set(tensors.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read = tensors.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name


def test_only_headers_and_the_wanted_bytes_are_read(tmp_path: Path):
    write(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "2.safetensors"})
    files = Counted(str(tmp_path))
    assert torch.equal(Tensors(files).read("a"), TENSORS["a"])
    header = int.from_bytes((tmp_path / "1.safetensors").read_bytes()[:8], "little")
    assert vars(files)["seen"]["1.safetensors"] == [8, header, 48]
    assert "2.safetensors" not in vars(files)["seen"]


def test_damaged_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        Tensors(Filesystem(str(tmp_path)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(StoreError, match="model.safetensors is no safetensors file"):
        Tensors(Filesystem(str(tmp_path)))
    save_file({"a": TENSORS["a"]}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StoreError, match="ends before its tensor a does"):
        Tensors(Filesystem(str(tmp_path))).read("a")
    write(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"z": "1.safetensors"}}))
    with pytest.raises(StoreError, match="holds no z"):
        Tensors(Filesystem(str(tmp_path))).read("z")


@pytest.mark.parametrize(
    "header",
    ["[]", '{"a": 1}', '{"a": {}}', "[" * 100_000]
    + ['{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}']
    + ['{"a": {"dtype": "F32", "shape": [1], "data_offsets": [9, 4]}}']
    + ['{"a": {"dtype": 7, "shape": [], "data_offsets": [0]}}'],
)
def test_a_header_that_is_none_is_told_in_a_sentence(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(StoreError, match="model.safetensors is no safetensors file"):
        Tensors(Filesystem(str(tmp_path)))


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_told_in_a_sentence(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StoreError, match="model.safetensors.index.json is no index of safetensors files"):
        Tensors(Filesystem(str(tmp_path)))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(StoreError, match="cannot be the key of an object"):
        Tensors(Filesystem(str(tmp_path)))


# ---------------------------------------------------------------- files of our own


def test_own_tensors_are_read_back_with_their_metadata(tmp_path: Path) -> None:
    files = Filesystem(str(tmp_path))
    tensors = {**TENSORS, "scalar": torch.tensor(3.0), "none": torch.empty(0), "mask": torch.tensor([True, False])}
    write_tensors(files, "state/1", tensors, {"step": "7"})
    found, metadata = read_tensors(files, "state/1")
    assert metadata == {"step": "7"} and found.keys() == tensors.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items())
    save_file(TENSORS, tmp_path / "old", {"step": "8"})  # from before there were digests
    assert read_tensors(files, "old")[1] == {"step": "8"}
    with pytest.raises(FileNotFoundError):
        read_tensors(files, "missing")


@pytest.mark.parametrize("seed", range(20))
def test_own_tensors_that_were_damaged_are_refused(tmp_path: Path, seed: int) -> None:
    files, draw = Filesystem(str(tmp_path)), random.Random(seed)
    write_tensors(files, "state", TENSORS, {"step": "7"})
    data = files.read("state")
    at = draw.randrange(len(data))
    damaged = [data[:at], data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]]
    for content in (*damaged, data.replace(b'"7"', b'"8"')):
        files.write("state", content)
        with pytest.raises(Damaged, match="state is not what was written: "):
            read_tensors(files, "state")


# ---------------------------------------------------------------- target.weights


def target(folder: Path, norm: float = 1.0) -> TargetConfig:
    """Pieces of a few bytes among layers of 2 MB."""
    folder.mkdir(exist_ok=True)
    table = torch.arange(40, dtype=torch.float32).view(10, 4)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": -table, "model.norm.weight": norm * torch.ones(4)}
    tensors |= {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(512, 512) for i in range(2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, "tie_word_embeddings": False}))
    return TargetConfig("t", str(folder))


def test_pieces_come_from_target_weights_where_it_is_set(tmp_path: Path):
    config = target(tmp_path / "a")
    target(tmp_path / "b", norm=2.0)
    config.weights = str(tmp_path / "b")
    assert torch.equal(load_pieces(config, torch.float32).norm, torch.full((4,), 2.0))
    with pytest.raises(ConfigError, match="target.weights: '.*/b': its norm.weight is not that of target.path='.*/a'"):
        check_weights(config)
    config.weights = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="target.weights: '.*/nowhere': .*config.json"):
        check_weights(config)
    config.weights = str(tmp_path / "a")
    check_weights(config)


def test_a_head_of_another_shape_is_not_the_targets(tmp_path: Path):
    config = target(tmp_path / "a")
    other = target(tmp_path / "b")
    save_file(
        {"embed_tokens.weight": torch.ones(10, 4), "lm_head.weight": torch.ones(11, 4), "norm.weight": torch.ones(4)},
        tmp_path / "b" / "model.safetensors",
    )
    config.weights = other.path
    with pytest.raises(ConfigError, match=r"its lm_head.weight is \('F32', \(11, 4\)\), that of target.path .*10, 4"):
        check_weights(config)
