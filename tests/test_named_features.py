"""features.folder: features that other settings captured are found by their folder, and taken as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import compose
from stores import sample

from eagle3_ray.config import ConfigError
from eagle3_ray.extract import ExtractError, extract, extracted
from eagle3_ray.prepare import Corpus, prepare
from eagle3_ray.proof import choose, differing
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.shards import Response, write_features, write_responses
from eagle3_ray.strict_json import fingerprint


@pytest.fixture
def opened(tiny_llama_folder: Path, tmp_path: Path):
    """Opens a run of two prompts on the store in a folder of `tmp_path`."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')

    def run(store: str, *overrides: str) -> tuple[Run, Corpus]:
        given = [
            f"target.path={tiny_llama_folder}",
            f"store.root={tmp_path / store}",
            f"prompts.source={tmp_path}/p.jsonl",
        ]
        opened = open_run(compose(*given, *overrides))
        return opened, prepare(opened, opened.config.prompts)

    return run


@pytest.fixture
def captured(opened: Any, tmp_path: Path) -> str:
    """What engine version 0.5.22 left in the store `old`, copied to the store `new`: the features' folder."""
    run, corpus = opened("old", "engine.version=0.5.22", "capture.boundaries=[1,3,4]", "store.shard_bytes=12345")
    (responses, about), (features, description) = run.responses(corpus.fingerprint), run.features(corpus.fingerprint)
    responses.describe(about)
    features.describe(description | {"shard_bytes": 12345})
    one = sample("a", 8)
    index = [{"id": one.id, "domain": "chat", "tokens": 8, "generated": 6, "targets": len(one.last_rows)}]
    index[0]["finish_reasons"] = ["stop"]
    answer = Response(one.id, one.input_ids, one.loss_mask, ["stop"], "chat", 0)
    write_responses(tmp_path / "shard", [answer], responses.folder.rpartition("/")[2])
    responses.commit(corpus.units[0], tmp_path / "shard", index, failed=[])
    write_features(tmp_path / "shard", [one], features.folder.rpartition("/")[2])
    features.commit(f"{corpus.units[0]}-0000", tmp_path / "shard", index, failed=[], engine={})
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    return features.folder


def test_features_of_another_engine_version_are_found_by_their_folder(opened: Any, captured: str) -> None:
    run, corpus = opened("new", "capture.boundaries=[1,3,4]")
    with pytest.raises(StoreError, match="nothing is stored here yet"):
        run.features(corpus.fingerprint)[0].description()
    with pytest.raises(ExtractError, match="1 of 1 units are not extracted"):
        extracted(run, corpus)
    for name in (captured, captured.removeprefix("features/")):
        run, corpus = opened("new", f"features.folder={name}")
        features, description = run.features(corpus.fingerprint)
        assert features.folder == captured and description["engine_version"] == "0.5.22"
        assert differing(run.config, description)["engine_version"] == ["0.5.22", "0.5.23"]
        assert [one.id for one in choose(run, features)] == ["a"]
        found, (commit,) = extracted(run, corpus)
        assert found.folder == captured and commit.samples[0]["id"] == "a"


def test_what_was_captured_takes_the_place_of_the_settings(opened: Any, captured: str) -> None:
    run, corpus = opened("new", f"features.folder={captured}", "capture.dtype=float32", "sampling.max_new_tokens=7")
    assert (run.spec.boundaries, run.spec.dtype, run.config.store.shard_bytes) == ((1, 3, 4), "bfloat16", 12345)
    responses, _ = run.responses(corpus.fingerprint)  # those that the features name, of 80 new tokens
    assert responses.folder == f"responses/{run.features(corpus.fingerprint)[1]['responses']}"
    assert len(responses.commits()) == 1
    other, same = opened("old", "engine.version=0.5.22", "capture.boundaries=[1,3,4]")
    assert run.drafter(run.features("")[0]) == other.drafter(other.features(same.fingerprint)[0])
    with pytest.raises(ConfigError, match=r"capture.boundaries: \[2, 3, 4\], but features.folder=.* at \[1, 3, 4\]"):
        opened("new", f"features.folder={captured}", "capture.boundaries=[2,3,4]")


def test_a_folder_of_another_target_is_refused(opened: Any, captured: str, tmp_path: Path) -> None:
    files = Filesystem(str(tmp_path / "new"))
    description = files.read_json(f"{captured}/description.json")
    description["target"]["weights"]["model.safetensors"] = "0" * 64
    description["target"]["files"].pop("config.json")
    other = Units(files, "features", fingerprint({k: v for k, v in description.items() if k != "shard_bytes"}))
    other.describe(description)
    with pytest.raises(ConfigError, match=rf"features.folder: '{other.folder}' is of another target than ") as refused:
        opened("new", f"features.folder={other.folder}")
    assert str(refused.value).endswith(": files.config.json, weights.model.safetensors differ")


def test_nothing_is_extracted_into_a_named_folder(opened: Any, captured: str) -> None:
    run, corpus = opened("new", f"features.folder={captured}")
    with pytest.raises(ConfigError, match=f"features.folder: '{captured}' is extracted"):
        extract(run, corpus)
    with pytest.raises(ConfigError, match="features.folder: 'a' with features.path='/b'; one of the two"):
        opened("new", "features.folder=a", "features.path=/b")
