"""Exported features, read back by readers written from what the other trainers document."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from stores import HIDDEN, TARGET, fill
from torch import Tensor
from torch.nn.functional import rms_norm

from eagle3_ray.capture import describe_target
from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.layouts import SpecForge, export_features
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.overview import Folder, find
from eagle3_ray.store.shards import Features, ShardReader, target_rows
from eagle3_ray.store.verify import whole_shard
from eagle3_ray.strict_json import fingerprint

NORM = torch.linspace(0.5, 3.0, HIDDEN)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target's folder, as far as an export looks at it."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.norm.weight": NORM, "lm_head.weight": torch.zeros(4, HIDDEN)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def features(target: Path, tmp_path: Path) -> Units:
    description = TARGET | {"weights": describe_target(TargetConfig("t", str(target)), target)["weights"]}
    files = Filesystem(str(tmp_path / "root"))
    return fill(files, tmp_path, units=2, samples=3, target=description, norm=NORM)[1]


@pytest.fixture
def folder(features: Units) -> Folder:
    return find(features.files, features.folder)[0]


def samples_of(features: Units) -> list[Features]:
    """In the order of the commits."""
    found = []
    for commit in features.commits():
        reader = ShardReader(features.files.url(commit.shard), features.folder.rpartition("/")[2])
        found += [reader.features(i) for i in range(len(reader))]
    return found


def rows_read(mask: Tensor, before: int, steps: int = 7) -> set[int]:
    """The rows of the last hidden state that training reads for its loss: slot i at step k reads row i+1+k, where the
    mask is set `before` rows before that row."""
    slots = itertools.product(range(len(mask) - 1), range(steps))
    return {i + 1 + k for i, k in slots if i + 1 + k < len(mask) and mask[i + 1 + k - before]}


def test_specforge_gets_a_file_of_tensors_a_sample(features: Units, folder: Folder, tmp_path: Path) -> None:
    assert export_features(folder, tmp_path / "out", "specforge", None)["samples"] == 6
    found = sorted((tmp_path / "out").rglob("*.ckpt"))
    assert found == [tmp_path / "out" / "rows_0-2000" / f"data_{i}.ckpt" for i in range(6)]
    for path, sample in zip(found, samples_of(features), strict=True):
        data = torch.load(path, weights_only=True)
        tokens = len(sample.input_ids)
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in data.items()} == {
            "input_ids": (torch.int64, (tokens,)),
            "loss_mask": (torch.int64, (tokens,)),
            "hidden_state": (torch.bfloat16, (1, tokens, HIDDEN)),
            "aux_hidden_state": (torch.bfloat16, (1, tokens, 3 * HIDDEN)),
        }
        assert torch.equal(data["input_ids"], sample.input_ids.long())
        assert torch.equal(data["aux_hidden_state"][0], sample.aux)
        assert torch.equal(data["hidden_state"][0, sample.last_rows], sample.last_hidden)
        read = rows_read(data["loss_mask"], before=1)
        assert read == set(sample.last_rows.tolist()) and data["hidden_state"][0, sorted(read)].any(-1).all()
        assert path.stat().st_size < 4096 + 100 * tokens  # no whole shard behind a slice


def test_an_answer_may_begin_with_the_first_token_and_a_slice_is_saved_alone(tmp_path: Path) -> None:
    mask, states = torch.ones(4, dtype=torch.bool), torch.randn(1000, 3 * HIDDEN).bfloat16()
    rows = target_rows(mask)  # 0, 1, 2
    SpecForge(tmp_path)(Features("a", torch.arange(4), mask, states[5:9], states[:3, :HIDDEN], rows), 2000)
    path = tmp_path / "rows_2000-4000" / "data_2000.ckpt"
    assert torch.load(path, weights_only=True)["loss_mask"].tolist() == [1, 1, 0, 0]
    assert path.stat().st_size < 5000


def test_speculators_gets_states_a_data_set_and_counts(
    features: Units, folder: Folder, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_features(folder, out, "speculators", str(target))
    rows = datasets.load_from_disk(str(out))
    samples = samples_of(features)
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len"] and len(rows) == len(samples) == 6
    assert list(rows.with_format(None)["seq_len"]) == [len(sample.input_ids) for sample in samples]
    said: list[int] = []
    for i, sample in enumerate(samples):
        data = load_file(out / "hidden_states" / f"hs_{i}.safetensors")
        assert {name: tensor.dtype for name, tensor in data.items()} == {
            "token_ids": torch.int64,
            "hidden_states": torch.bfloat16,
        }
        assert torch.equal(data["token_ids"], rows[i]["input_ids"]) and rows[i]["loss_mask"].dtype == torch.int64
        assert torch.equal(data["token_ids"], sample.input_ids.long())
        assert data["hidden_states"].shape == (len(sample.input_ids), 4, HIDDEN)
        assert torch.equal(data["hidden_states"][:, :-1].flatten(1), sample.aux)
        last = rms_norm(data["hidden_states"][:, -1].float(), [HIDDEN], NORM, 1e-6)  # as its training does
        torch.testing.assert_close(last[sample.last_rows], sample.last_hidden.float(), rtol=0.02, atol=0.02)
        assert data["hidden_states"].isfinite().all()
        read = rows_read(rows[i]["loss_mask"], before=0)
        assert read == set(sample.last_rows.tolist())
        said += sample.input_ids[sample.loss_mask].tolist()
    counts = torch.load(out / "token_freq.pt", weights_only=True)
    assert counts == {token: said.count(token) for token in set(said)}


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_an_export_goes_on_where_it_stopped(
    folder: Folder, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    export_features(folder, whole, layout, str(target))

    def stop(units: Units, commit: Commit, cache: Path) -> Any:
        if commit.unit == "000001-0000":
            raise KeyboardInterrupt
        return whole_shard(units, commit, cache)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("eagle3_ray.layouts.whole_shard", stop)
        export_features(folder, out, layout, str(target))
    fetched: list[str] = []

    def count(units: Units, commit: Commit, cache: Path) -> Any:
        fetched.append(commit.unit)
        return whole_shard(units, commit, cache)

    monkeypatch.setattr("eagle3_ray.layouts.whole_shard", count)
    export_features(folder, out, layout, str(target))
    assert fetched == ["000001-0000"]
    made = [path for path in out.rglob("*") if path.suffix in (".ckpt", ".safetensors")]
    assert len(made) == 6 and all((whole / path.relative_to(out)).read_bytes() == path.read_bytes() for path in made)
    export_features(folder, out, layout, str(target))  # nothing left to do


def test_a_folder_holds_one_export(folder: Folder, features: Units, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_features(folder, out, "specforge", None)
    with pytest.raises(ConfigError, match="to: .* holds an export of other features or other commits"):
        export_features(folder, out, "speculators", str(target))
    features.files.delete(f"{features.folder}/commits/000001-0000.json")
    with pytest.raises(ConfigError, match="to: .* holds an export of other features or other commits"):
        export_features(find(features.files, features.folder)[0], out, "specforge", None)
    with pytest.raises(ConfigError, match="to: .* is not empty and no export"):
        export_features(find(features.files, features.folder)[0], target, "specforge", None)


def test_what_a_layout_cannot_say_is_refused(
    folder: Folder, features: Units, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="target_path: speculators"):
        export_features(folder, tmp_path / "out", "speculators", None)
    other = tmp_path / "other"
    shutil.copytree(target, other)
    save_file({"model.norm.weight": 2 * NORM}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="target_path: .*other' has the weights"):
        export_features(folder, tmp_path / "out", "speculators", str(other))
    with monkeypatch.context() as patch:
        patch.setattr("eagle3_ray.layouts.load_norm", lambda target: NORM + 1)  # as if the norm were (1 + weight)
        with pytest.raises(ConfigError, match="layout: sample .* not 1"):
            export_features(folder, tmp_path / "out", "speculators", str(target))
    about = features.description() | {"boundaries": [2, 4]}
    del about["shard_bytes"]
    two = Units(features.files, "features", fingerprint(about))
    two.describe(about)
    with pytest.raises(ConfigError, match="layout: SpecForge trains on three"):
        export_features(Folder(two, two.fingerprint), tmp_path / "two", "specforge", None)
