"""Each stage by its own command, on the reference engine: one hands on to the next through the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import command


@pytest.mark.full
def test_stages_run_alone_and_in_order(tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(6)))
    settings = ["engine=transformers", f"target.path={tiny_llama_folder}", f"prompts.source={tmp_path}/p.jsonl"]
    settings += ["prompts.unit_size=4", "sampling.max_new_tokens=8", "train.steps=2", "drafter.draft_vocab_size=64"]
    settings += [f"evaluate.source={tmp_path}/p.jsonl", "cluster.num_cpus=2"]
    home = tmp_path / "home"

    too_early = command("train", *settings, home=home)
    assert too_early.returncode == 1
    assert "2 of 2 units are not extracted; run ray_jobs.extract first" in too_early.stderr

    extracted = command("extract", *settings, home=home)
    assert extracted.returncode == 0, extracted.stderr[-3000:]
    (summary,) = (json.loads(path.read_text()) for path in home.glob("features/*/summary.json"))
    assert (summary["samples"], summary["failed"]) == (6, 0)
    assert summary["engines"][0]["engine"] == "eagle3_ray.engines.transformers.TransformersEngine"

    not_trained = command("export", *settings, home=home)
    assert not_trained.returncode == 2
    assert "run ray_jobs.train first" in not_trained.stderr

    trained = command("train", *settings, home=home)
    assert trained.returncode == 0, trained.stderr[-3000:]
    exported = command("export", *settings, home=home)
    assert exported.returncode == 0, exported.stderr[-3000:]
    (folder,) = home.glob("drafters/*/export")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # boundaries 2, 4, 5 of a Llama

    for stage in ("evaluate", "pipeline"):  # never quietly on another engine than the one that serves
        refused = command(stage, *settings, home=home)
        assert refused.returncode == 2
        assert "engine.name" in refused.stderr
    no_summary = command("report", *settings, home=home)
    assert no_summary.returncode == 2
    assert "run ray_jobs.pipeline first" in no_summary.stderr


@pytest.mark.full
def test_an_elastic_pool_makes_do_with_the_room_there_is(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Three actors may be, two fit."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(12)))
    settings = ["engine=transformers", f"target.path={tiny_llama_folder}", f"prompts.source={tmp_path}/p.jsonl"]
    settings += ["prompts.unit_size=2", "sampling.max_new_tokens=8", "cluster.num_cpus=2", "hardware.num_actors=3"]
    extracted = command("extract", *settings, "hardware.min_actors=1", home=tmp_path / "home")
    assert extracted.returncode == 0, extracted.stderr[-3000:]
    (summary,) = (json.loads(path.read_text()) for path in (tmp_path / "home").glob("features/*/summary.json"))
    assert (summary["samples"], summary["failed"]) == (12, 0)
    assert 1 <= summary["engine_starts"] <= 2
