"""Planted faults are called by their names, and clean drafters pass, on the real SGLang that serves them.

A family's store is made once; each case is a copy of it, damaged by plant_fault.py in a process of its own, and
`verify` sees only what lies there. All share one Ray, as their engines' starts take long enough; the command itself is
run in the first case and on other tools' states.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, compose
from safetensors.torch import load_file, save_file
from test_cli import command
from tiny_targets import tiny_deepseek_v3, tiny_kimi_k25, tiny_qwen3

from eagle3_ray.config import ClusterConfig
from eagle3_ray.export import export
from eagle3_ray.extract import extract, extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.train.trainer import train_drafter
from eagle3_ray.verify import verify
from ray_jobs.cluster import cluster

PROMPTS = ["Name a colour.", "What is two plus three?", "Write one line on rain.", "Who sings best?", "Say no.", "Why?"]
SMALL = ["prompts.unit_size=6", "sampling.max_new_tokens=24", "hardware.num_actors=1", "cluster.num_cpus=2"]
SMALL += ["drafter.draft_vocab_size=256", "train.steps=2", "capture.dtype=float32"]
BF16 = ["engine.dtype=bfloat16", "capture.dtype=bfloat16"]
EAGLE = ["+hardware.serve_args.speculative_algorithm=EAGLE"]
HALF = ["+hardware.serve_args.dtype=float16"]
PERMUTED = "boundaries are permuted in the features: {0} lies where {1} is said to, {1} lies where {0} is said to"
OWN_WIDTH = ["drafter.hidden_size=48", "drafter.num_attention_heads=4", "drafter.head_dim=12"]

# fault -> what the causes must say, each in one of them; of SmolLM2, whose boundaries are 2, 15 and 27
SMOLLM2: dict[str, str | list[str]] = {
    "ids one too high": "layer ids are off by one: boundary 3 where 2 was trained, 16 where 15",
    "ids one too low": "layer ids are off by one: boundary 1 where 2 was trained, 14 where 15",
    "one id apart": "other layer ids: boundary 17 where 15 was trained",
    "no eagle_config": "config.json has no eagle_config with layer ids",
    "other theta": "config.json: rope_parameters is",
    "other rope by the older key": "config.json: rope_scaling is {'rope_type': 'linear', 'factor': 4.0}: the RoPE that",
    "absolute d2t": "d2t holds the target's ids themselves",
    "other t2d": "t2d is [49216], trained was [49152]",
    "half precision": "config.json: dtype is float16, exported was float32; embed_tokens.weight (and 16",
    "weights in half precision": "embed_tokens.weight (and 16 more) is stored in float16, exported was float32",
    "torch_dtype of half precision": "config.json: torch_dtype is float16, exported was float32",
    "permuted": PERMUTED.format(2, 15),
    "rows shifted": "the features' rows are shifted: the state of token q lies in row q+1",
    "captured one too high": "the features' boundaries are off by one: 3 lies where 2 is said to",
    "another target": "the features are another target's",
    "before the norm": "the last hidden states lack the target's final norm",
    "mask shifted": "the loss mask is shifted: it begins at token",
    "other template": "another chat template or tokenizer: token 0 is",
    "other theta + permuted": ["config.json: rope_parameters is", PERMUTED.format(2, 15)],
    "ids one too low + mask shifted": ["layer ids are off by one: boundary 1 where 2", "the loss mask is shifted: it"],
}
TINY = {
    "ids one too high": "layer ids are off by one: boundary 3 where 2 was trained",
    "permuted": PERMUTED.format(2, 4),
    "absolute d2t": "d2t holds the target's ids themselves",
}
# To DeepSeek's class ids [1, 3, 5] and [2, 4, 6] are the same states, since a first id of 1 adds 1; [3, 5, 7] are not
LATENT = {"ids two too high": TINY["ids one too high"]} | {k: TINY[k] for k in ("permuted", "absolute d2t")}


@dataclass
class Case:
    """A finished store of one target, and how to verify a copy of it."""

    home: Path
    target: Path
    settings: list[str]

    def opened(self, home: Path, *more: str) -> Run:
        return open_run(compose(*self.settings, *more, f"store.root={home}"))

    def verify(self, home: Path, *more: str) -> dict[str, Any]:
        run = self.opened(home, *more)
        corpus = prepare(run, run.config.prompts)
        features, _ = run.features(corpus.fingerprint)
        return verify(run, corpus, features, run.drafter(features), anew=True)

    def damaged(self, fault: str, home: Path) -> Path:
        shutil.copytree(self.home, home)
        plant = [sys.executable, str(ROOT / "tests" / "plant_fault.py"), str(home), fault, str(self.target)]
        planted = subprocess.run(plant, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert planted.returncode == 0, planted.stderr[-4000:]
        return home


def make(folder: Path, target: Path, *settings: str) -> Case:
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = [f"target.path={target}", f"prompts.source={folder}/p.jsonl", *SMALL, *settings]
    case = Case(folder / "home", target, given)
    run = case.opened(case.home)
    corpus = prepare(run, run.config.prompts)
    extract(run, corpus)
    features, _ = extracted(run, corpus)
    drafter = run.drafter(features)
    train_drafter(run.config, features, features.description(), drafter)
    export(run, features, drafter)
    return case


@pytest.fixture(scope="module", autouse=True)
def shared_ray() -> Iterator[None]:
    with cluster(ClusterConfig(num_cpus=2)):
        yield


@pytest.fixture(scope="module")
def smollm2_case(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Case:
    return make(tmp_path_factory.mktemp("smollm2"), smollm2)


@pytest.fixture(scope="module", params=["qwen3", "deepseek", "kimi"])
def tiny_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Case:
    return tiny(request.param, tmp_path_factory.mktemp(request.param), smollm2)


def tiny(family: str, folder: Path, smollm2: Path, *settings: str) -> Case:
    make_target = {"qwen3": tiny_qwen3}.get(family, tiny_deepseek_v3)
    target = make_target(folder / "text", vocab=49152, layers=8)
    if family == "kimi":
        target, settings = tiny_kimi_k25(folder / "target", target), (*settings, "+engine.args.enable_multimodal=false")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copy(smollm2 / name, target)
    return make(folder, target, "capture.boundaries=[2,4,6]", *settings)


def assert_aligned(summary: dict[str, Any], limit: float) -> None:
    assert (summary["verdict"], summary["causes"]) == ("aligned", [])
    assert [min(range(3), key=row.__getitem__) for row in summary["matrix"]] == [0, 1, 2]
    for kind in ("prompt", "verify"):
        assert summary["rows"][kind] > 30
        assert max(summary["errors"][kind]["p95"]) < limit
    assert summary["drafts"]["same"] > 0.9
    assert [error < limit for error in summary["drafts"]["logits"]] == [True] * 3  # of the first three steps


@pytest.mark.engine
@pytest.mark.full
def test_a_clean_drafter_is_aligned(smollm2_case: Case, tmp_path: Path) -> None:
    home = shutil.copytree(smollm2_case.home, tmp_path / "home")

    def commanded() -> tuple[int, dict[str, Any]]:
        ended = command("verify", *smollm2_case.settings, home=home)
        found = sorted(home.glob("drafters/*/verifications/*/summary.json"), key=lambda path: path.stat().st_mtime_ns)
        assert found, ended.stderr[-4000:]
        summary = json.loads(found[-1].read_text())  # one for each state of the exported files
        assert f"verify: {summary['verdict']}" in ended.stdout
        assert all(cause in ended.stdout for cause in summary["causes"])
        return ended.returncode, summary

    code, summary = commanded()
    assert code == 0
    assert_aligned(summary, 1e-4)
    (config,) = home.glob("drafters/*/export/config.json")
    config.write_text(config.read_text().replace("100000.0", "10000.0"))  # RoPE's theta: an old verdict is no proof
    code, summary = commanded()
    assert (code, summary["verdict"]) == (1, "misaligned")


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("fault", SMOLLM2)
def test_a_planted_fault_is_called_by_its_name(fault: str, smollm2_case: Case, tmp_path: Path) -> None:
    summary = smollm2_case.verify(smollm2_case.damaged(fault, tmp_path / "home"))
    print(fault, summary["causes"])
    assert summary["verdict"] == "misaligned"
    words = SMOLLM2[fault]
    for said in [words] if isinstance(words, str) else words:
        assert any(said in cause for cause in summary["causes"]), summary["causes"]
    if "+" not in fault:
        assert len(summary["causes"]) <= 2, summary["causes"]


@pytest.mark.engine
@pytest.mark.full
def test_eagle_in_place_of_eagle3_is_called_by_its_name(smollm2_case: Case, tmp_path: Path) -> None:
    shutil.copytree(smollm2_case.home, tmp_path / "home")
    summary = smollm2_case.verify(tmp_path / "home", *EAGLE)
    assert summary["verdict"] == "misaligned"
    assert "speculative_algorithm is EAGLE, not EAGLE3: the drafter gets 576 numbers a token" in summary["causes"][0]


@pytest.mark.engine
@pytest.mark.full
def test_fp16_in_force_is_called_by_its_name(smollm2_case: Case, tmp_path: Path) -> None:
    shutil.copytree(smollm2_case.home, tmp_path / "home")
    summary = smollm2_case.verify(tmp_path / "home", *HALF)
    assert summary["verdict"] == "misaligned"
    for whose in ("target", "drafter"):
        assert f"the {whose} is served in float16, and float32 is what was trained for" in summary["causes"]


@pytest.mark.engine
@pytest.mark.full
def test_a_random_embedding_does_no_harm_where_sglang_serves_the_target_s(smollm2_case: Case, tmp_path: Path) -> None:
    summary = smollm2_case.verify(smollm2_case.damaged("random embedding", tmp_path / "home"))
    assert (summary["verdict"], summary["causes"]) == ("aligned", [])
    assert "embed_tokens.weight in the file is not the target's" in summary["warnings"][0]


@pytest.mark.engine
@pytest.mark.full
def test_a_random_embedding_is_called_by_its_name_where_it_is_served(tmp_path: Path, smollm2: Path) -> None:
    case = tiny("qwen3", tmp_path, smollm2, *OWN_WIDTH)
    shutil.copytree(case.home, tmp_path / "clean")
    assert_aligned(case.verify(tmp_path / "clean"), 1e-4)
    summary = case.verify(case.damaged("random embedding", tmp_path / "random"))
    assert summary["verdict"] == "misaligned"
    assert summary["causes"][:2] == [
        "embed_tokens.weight holds other values than were trained",
        "the drafter's embedding in force is not the one it was trained with",
    ]


@pytest.mark.engine
@pytest.mark.full
def test_in_bfloat16_a_clean_drafter_is_aligned_within_its_own_noise(smollm2: Path, tmp_path: Path) -> None:
    case = make(tmp_path, smollm2, *BF16)
    shutil.copytree(case.home, tmp_path / "clean")
    assert_aligned(case.verify(tmp_path / "clean"), 0.05)
    summary = case.verify(case.damaged("weights in half precision", tmp_path / "half"))
    assert summary["verdict"] == "misaligned"
    assert "is stored in float16, exported was bfloat16" in summary["causes"][0]
    shutil.copytree(case.home, tmp_path / "served in half")
    summary = case.verify(tmp_path / "served in half", *HALF)
    assert summary["verdict"] == "misaligned"
    assert "the drafter is served in float16, and bfloat16 is what was trained for" in summary["causes"]


@pytest.mark.engine
@pytest.mark.full
def test_answers_that_were_sampled_are_no_hindrance(smollm2: Path, tmp_path: Path) -> None:
    """The greedy answers of the proof leave the stored ones at once, which are no longer there to compare with."""
    case = tiny("qwen3", tmp_path, smollm2, "sampling.temperature=1.0")
    summary = case.verify(case.home)
    assert_aligned(summary, 1e-4)
    assert summary["rows"]["verify_stored"] < summary["rows"]["verify"]


@pytest.mark.engine
@pytest.mark.full
def test_other_targets_are_verified_too(tiny_case: Case, tmp_path: Path) -> None:
    shutil.copytree(tiny_case.home, tmp_path / "clean")
    assert_aligned(tiny_case.verify(tmp_path / "clean"), 1e-4)
    latent = json.loads((tiny_case.target / "config.json").read_text())["model_type"] != "qwen3"
    for number, (fault, words) in enumerate((LATENT if latent else TINY).items()):
        summary = tiny_case.verify(tiny_case.damaged(fault, tmp_path / str(number)))
        assert summary["verdict"] == "misaligned"
        assert any(words in cause for cause in summary["causes"]), (fault, summary["causes"])


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_what_another_tool_took_is_told(layout: str, smollm2_case: Case, tmp_path: Path) -> None:
    dump = [f"store.root={smollm2_case.home}", "action=export", f"to={tmp_path / 'dump'}", f"layout={layout}"]
    dump += [f"target_path={smollm2_case.target}"]
    written = command("store", *dump, home=tmp_path)
    assert written.returncode == 0, written.stderr[-2000:]
    given = [*smollm2_case.settings, f"features.path={tmp_path / 'dump'}", "verify.samples=3"]
    right = command("verify", *given, home=tmp_path / "home")
    assert (right.returncode, "verify: aligned" in right.stdout) == (0, True), right.stdout + right.stderr[-2000:]
    (summary,) = (tmp_path / "home" / "verifications").glob("*/summary.json")
    assert str(summary) in right.stdout
    kept = json.loads(summary.read_text())
    print(layout, {name: kept[name] for name in ("errors", "floor", "found", "last_hidden")})
    assert max(kept["errors"]["p95"]) < 3 * max(1e-6, *kept["floor"]["p95"])
    wrong = command("verify", *given, "capture.boundaries=[3,16,28]", home=tmp_path / "home")
    assert wrong.returncode == 1
    assert "the features' boundaries are off by one: 2 lies where 3 is said to, 15 lies where 16" in wrong.stdout


@pytest.mark.engine
@pytest.mark.full
def test_another_ones_drafter_is_verified_in_its_own_folder(tiny_case: Case, tmp_path: Path) -> None:
    if json.loads((tiny_case.target / "config.json").read_text())["model_type"] != "qwen3":
        pytest.skip("one family is enough")
    (export,) = tiny_case.home.glob("drafters/*/export")
    shutil.copytree(export, tmp_path / "theirs")
    shutil.copytree(tiny_case.home, tmp_path / "home")
    shutil.rmtree(tmp_path / "home" / "drafters")  # what training left is not there to be compared with
    assert_aligned(tiny_case.verify(tmp_path / "home", f"drafter.path={tmp_path / 'theirs'}"), 1e-4)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "home" / "drafters")
    summary = tiny_case.verify(tmp_path / "home", f"drafter.path={tmp_path / 'theirs'}")
    assert summary["verdict"] == "misaligned"
    assert "layer ids are off by one: boundary 3 where 2 was trained" in summary["causes"][0]


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize(("family", "shape"), [("qwen3", OWN_WIDTH), ("deepseek", ["drafter.attention=mla"])])
def test_another_ones_drafter_has_a_shape_of_its_own(
    family: str, shape: list[str], tmp_path: Path, smollm2: Path
) -> None:
    """Of another width or with latent attention, and of the whole vocabulary without a map; the settings are others."""
    case = tiny(family, tmp_path, smollm2, *shape)
    (theirs,) = case.home.glob("drafters/*/export")
    theirs = theirs.rename(tmp_path / "theirs")
    shutil.rmtree(case.home / "drafters")
    config, weights = json.loads((theirs / "config.json").read_text()), load_file(theirs / "model.safetensors")
    config["draft_vocab_size"] = config["vocab_size"]
    weights["lm_head.weight"] = torch.randn(config["vocab_size"], config["hidden_size"]) * 0.02
    del weights["d2t"], weights["t2d"]
    (theirs / "config.json").write_text(json.dumps(config))
    save_file(weights, theirs / "model.safetensors")
    default = replace(case, settings=[setting for setting in case.settings if setting not in shape])
    assert_aligned(default.verify(case.home, f"drafter.path={theirs}"), 1e-4)
