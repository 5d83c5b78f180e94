"""The model card tells the store's own figures, and a launch command that SGLang's parser takes as it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose
from safetensors.torch import load_file, save_file
from test_train import DESCRIPTION, FEATURES, TARGET, V, pieces, sample, stage

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.card import launch_command, publish_card
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import GQA, MLA, read_config
from eagle3_ray.drafter.target import initialise
from eagle3_ray.export import ExportError, export, export_with
from eagle3_ray.run import Run
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Damaged
from eagle3_ray.train.loop import Training
from eagle3_ray.train.nonfinite import NonFiniteError
from eagle3_ray.train.start import frozen_start


def trained(root: Path) -> tuple[Run, Units, dict[str, Any]]:
    """A run with a drafter of no training at `d`, as ray_jobs.train leaves it, and its summary."""
    config, features = stage(root, heldout=5)
    config.engine.version, config.engine.dtype, config.hardware.device = "0.5.23", "float32", "cpu"
    config.prompts.source, config.drafter.draft_vocab_size = str(root / "prompts.jsonl"), 12
    features.describe(DESCRIPTION)
    start = frozen_start(config, features, DESCRIPTION, "d")
    drafter = Drafter(read_config(start["drafter"]), torch.tensor(start["draft_ids"]))
    initialise(drafter, pieces(), seed=0)
    training = Training(config.train, drafter, pieces().head, torch.device("cpu"))
    held = [sample(int(unit[1:]) + i) for unit, i in start["heldout"]]
    walked = training.accept_length(held, 3)
    summary = {name: start[name] for name in ("coverage", "coverage_by_domain", "samples")}
    summary |= {
        "steps": 0,
        "consumed": 0,
        "heldout": {"samples": 5, "draft_steps": 3, "before": walked, "after": walked},
    }
    files = features.files
    (root / "w").mkdir()
    save_file(training.weights(), root / "w" / "model.safetensors")
    files.upload(root / "w" / "model.safetensors", "d/weights/model.safetensors")
    files.write("d/weights/config.json", json.dumps(start["drafter"]).encode())
    files.write("d/summary.json", json.dumps(summary).encode())
    numbers = {"tokens_captured": 12345, "tokens_generated": 6789}
    files.write(f"{features.folder}/summary.json", json.dumps(numbers).encode())
    return Run(config, files, TARGET, {}, CaptureSpec((2, 4, 6), 16, "float32")), features, summary


def card_of(run: Run) -> str:
    return run.files.read("d/export/README.md").decode()


def test_the_card_tells_what_the_store_holds(tmp_path: Path):
    run, features, summary = trained(tmp_path)
    exported = export_with(run, features, "d", [1, 3, 5])
    card = card_of(run)
    assert card.startswith("---\nlibrary_name: sglang\n")
    ids = torch.tensor(json.loads(run.files.read("d/start.json"))["draft_ids"])
    shares = {}
    for domain, parity in (("even", 0), ("odd", 1)):
        said = torch.cat([s.input_ids[s.loss_mask] for s in map(sample, range(parity, 30, 2))])
        shares[domain] = torch.isin(said, ids).double().mean().item()
    assert 0.2 < shares["even"] < 0.9 and shares["even"] != shares["odd"]
    assert f"(even {100 * shares['even']:.2f}%, odd {100 * shares['odd']:.2f}%)" in card
    weights = load_file(tmp_path / "store" / "d" / "export" / "model.safetensors")
    count = sum(t.numel() for name, t in weights.items() if name not in ("embed_tokens.weight", "d2t", "t2d"))
    assert exported["parameters"] == {"trained": count, "own_embedding": False}
    assert f"| {count:,} trained, in float32; the embedding is a copy of the target's |" in card
    walked = summary["heldout"]["after"]
    assert f"{walked['accept_length']:.3f} before the first training step" in card
    assert f"a drafter that is never right has\n{walked['never_right']:.3f}." in card
    assert "Walked over 5 samples that were not trained on" in card
    assert "has no flag" not in card
    told = [
        "`LlamaForCausalLMEagle3`, 1 layer, hidden size 16",
        f"12 of {V} tokens",
        "30, 12,345 tokens, 6,789 of them the target's answers",
        f"| capture fingerprint | `{FEATURES}` |",
        "| boundaries | 2, 4, 6 (",
        "| layer ids | 1, 3, 5, as",
        "| captured by | sglang 0.5.23, float32 |",
        "| prompts | prompts.jsonl |",
        "In serving it was not measured yet",
        "--speculative-draft-model-path .",
    ]
    for text in told:
        assert text in card, text
    assert str(tmp_path) not in card  # nothing of this machine
    assert "None" not in card and "{" not in card


def test_an_evaluation_comes_into_the_card_and_an_equal_card_is_left_alone(tmp_path: Path):
    run, features, _ = trained(tmp_path)
    run.config.target.args["enable_multimodal"] = False
    exported = export_with(run, features, "d", [1, 3, 5])
    assert "serves with enable_multimodal set to false, for which SGLang has no flag" in card_of(run)
    row = {"conversations": 6, "completion_tokens": 90, "verify_steps": 60, "accept_length": 1.5}
    told = {"accept_length_ci95": [1.4, 1.61], "tokens_per_verify_step": 1.25, "distinct_bigram_share": 0.876}
    suites = {"gsm8k": row | told | {"identical_share": 1.0}}
    evaluation = row | {"engine_version": "0.5.23", "by_domain": {"maths": row | {"accept_length": None}}}
    evaluation |= {"by_suite": suites}
    publish_card(run, features, "d", exported, evaluation)
    card = card_of(run)
    assert "draft tokens, greedy, on" in card
    assert "on\n6 held-out conversations (90 completion tokens in 60 verify steps):\naccept length 1.500." in card
    assert "| maths | 6 | none |" in card
    assert "not measured yet" not in card
    assert "| suite |" not in card
    run.config.evaluate.temperature = 0.7
    publish_card(run, features, "d", exported, evaluation)
    assert "draft tokens, temperature 0.7, on" in card_of(run)
    run.config.evaluate.temperature = 0.0
    publish_card(run, features, "d", exported, evaluation | {"by_suite": suites | {"mine": suites["gsm8k"]}})
    assert "| mine | 6 | 1.500 | 1.40 to 1.61 | 1.250 | 87.6% | 100.0% |" in card_of(run)
    publish_card(run, features, "d", exported, evaluation)
    path = tmp_path / "store" / "d" / "export" / "README.md"
    before = path.stat().st_mtime_ns
    publish_card(run, features, "d", exported, evaluation)
    assert path.stat().st_mtime_ns == before


def test_another_embedding_setting_is_another_export(tmp_path: Path):
    run, features, _ = trained(tmp_path)
    whole = export_with(run, features, "d", [1, 3, 5])
    assert export(run, features, "d") == whole  # there already: SGLang is not asked
    run.config.export.embedding = "none"
    part = export_with(run, features, "d", [1, 3, 5])
    assert whole["bytes"] - part["bytes"] >= 4 * V * 16
    assert whole["parameters"] == part["parameters"]
    assert "embed_tokens.weight" not in load_file(tmp_path / "store" / "d" / "export" / "model.safetensors")
    assert "the embedding is left out: SGLang takes the target's" in card_of(run)
    assert export(run, features, "d") == part == run.read_json("d/export.json")


def test_what_sglang_would_take_otherwise_is_not_uploaded(tmp_path: Path):
    run, features, _ = trained(tmp_path)
    run = dataclasses.replace(run, model=TARGET | {"vocab_size": V + 1})
    with pytest.raises(ExportError, match=f"vocab_size is {V}, the target's {V + 1}"):
        export_with(run, features, "d", [1, 3, 5])
    assert not run.files.exists("d/export.json") and not run.files.list("d/export")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path):
    """Trained so, or so for the dtype of the export alone."""
    run, features, _ = trained(tmp_path)
    place = tmp_path / "store" / "d" / "weights" / "model.safetensors"
    weights = load_file(place)

    def refusal(value: float, dtype: str) -> str:
        changed = {name: tensor.clone() for name, tensor in weights.items()}
        changed["fc.weight"][0, 0] = changed["lm_head.weight"][1, 1] = value
        save_file(changed, place)
        run.config.engine.dtype = dtype
        with pytest.raises((ExportError, NonFiniteError)) as refused:
            export_with(run, features, "d", [1, 3, 5])
        assert not run.files.exists("d/export.json") and not run.files.list("d/export")
        return str(refused.value)

    assert "2 of 15 tensors" in (said := refusal(float("nan"), "float32"))
    assert "are not finite: " in said and "fc.weight" in said and "lm_head.weight" in said
    said = refusal(3.4e38, "bfloat16")  # float32 holds it
    assert "exported in engine.dtype=bfloat16" in said and "(with 1 more) holds values that are not finite" in said


@pytest.mark.parametrize(
    ("losses", "refused", "words"),
    [
        ("[null]", ExportError, r"the last losses of the drafter at .*/d are .* train.lr=1e\+30"),
        ("[NaN, 2.0]", Damaged, "d/summary.json is not what was written: NaN is no JSON"),
        ("[Infinity]", Damaged, "d/summary.json is not what was written: Infinity is no JSON"),
    ],
)
def test_a_training_that_ended_in_no_loss_is_not_exported(
    tmp_path: Path, losses: str, refused: type[Exception], words: str
):
    run, features, summary = trained(tmp_path)
    whole = export_with(run, features, "d", [1, 3, 5])
    assert export(run, features, "d") == whole
    text = json.dumps({**summary, "settings": {"train": {"lr": 1e30}}}).removesuffix("}") + f', "loss": {losses}}}'
    run.files.write("d/summary.json", text.encode())  # as a training before train.on_nonfinite left it
    with pytest.raises(refused, match=words):
        export(run, features, "d")


# ---------------------------------------------------------------- the launch command


def parsed(command: str) -> tuple[dict[str, str], argparse.Namespace]:
    """The command's environment, and what SGLang's own parser makes of its flags."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    words = shlex.split(command.replace("\\\n", ""))
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "sglang.launch_server"]
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    server_args.ServerArgs.add_cli_args(parser)
    return dict(word.split("=", 1) for word in words[:start]), parser.parse_args(words[start + 3 :])


def command_of(*overrides: str, model: dict[str, Any] | None = None, architecture: str = GQA) -> str:
    config = compose(*overrides)
    return launch_command(Run(config, None, model or {}, {}, None), [architecture])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "hardware"),
    [("kimi_k25", "rtx6000x8"), ("kimi_k25_nvfp4", "b200x8"), ("deepseek_v3", "gpu8"), ("gpt_oss_120b", "gpu1")],
)
def test_every_preset_s_command_is_taken_by_sglang(target: str, hardware: str):
    overrides = ["evaluate.num_steps=4", "evaluate.num_draft_tokens=16", "evaluate.topk=4"]
    chosen = [f"target={target}", f"hardware={hardware}", *overrides]
    config = compose(*chosen)
    env, args = parsed(command_of(*chosen))
    assert args.model_path == config.target.path and args.speculative_draft_model_path == "."
    assert (args.speculative_algorithm, args.trust_remote_code) == ("EAGLE3", config.target.trust_remote_code)
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (4, 4, 16)
    assert (args.dtype, args.tp_size) == ("bfloat16", config.hardware.tp_size)
    deciding = config.hardware.args | config.hardware.serve_args | config.target.args
    for name in deciding.keys() - {"mem_fraction_static", "max_running_requests", "cuda_graph_max_bs_decode"}:
        seen = getattr(args, name)
        assert seen == deciding[name] or (seen is None and deciding[name] is False), name  # which has no flag
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_a_drafter_of_another_attention_than_the_target_s_has_a_backend_of_its_own():
    """SGLang's trtllm_mla, which it picks on a B200 for a target with latent attention, serves no GQA drafter."""
    backend, on_b200 = "--speculative-draft-attention-backend", ["target=kimi_k25", "hardware=b200x8"]
    latent = {"kv_lora_rank": 512}
    assert f"{backend} flashinfer" in command_of(*on_b200, model=latent)
    mine = f"+engine.args.{backend[2:].replace('-', '_')}=trtllm_mha"
    assert f"{backend} trtllm_mha" in command_of(*on_b200, mine, model=latent)
    assert backend not in command_of(*on_b200, model=latent, architecture=MLA)
    assert backend not in command_of("target=gpt_oss_120b", "hardware=gpu1")
    assert backend not in command_of(model=latent)


def test_the_command_has_the_user_s_own_arguments_and_no_secret():
    command = command_of(
        "+engine.args.kv_cache_dtype=fp8_e4m3",
        "+engine.args.api_key=hidden-one",
        "+engine.args.disable_radix_cache=true",
        "+engine.args.enable_dp_attention=false",
        "+engine.args.json_model_override_args='{\"a\": 1}'",
        "+engine.args.quantization_param_path=/home/me/scales.json",
        "+hardware.env.HF_TOKEN=hidden-two",
        "+hardware.env.NCCL_ALGO=Ring",
        "target.path=/home/me/models/tiny",
        "evaluate.dtype=bfloat16",
    )
    env, args = parsed(command)
    assert env == {"NCCL_ALGO": "Ring", "SGLANG_USE_CPU_ENGINE": "1"}
    assert (args.kv_cache_dtype, args.disable_radix_cache, args.enable_dp_attention) == ("fp8_e4m3", True, False)
    assert (args.model_path, args.quantization_param_path, args.dtype) == ("tiny", "scales.json", "bfloat16")
    assert json.loads(args.json_model_override_args) == {"a": 1}
    assert "hidden" not in command and "/home" not in command and "api" not in command
