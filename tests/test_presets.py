"""The presets in conf/target and conf/hardware: SGLang takes every value, and picks what their comments say.

Nothing here has a GPU. SGLang is told what machine it is on (`override_platform`, for its own tests), and resolves the
arguments of each target on each hardware as it would there, from the target's real config.json, without weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, compose

from eagle3_ray.capture import capture_spec, text_config
from eagle3_ray.config import ConfigError
from eagle3_ray.engines.sglang import server_args
from eagle3_ray.run import check_values

# ---------------------------------------------------------------- the targets' config.json, as far as SGLang reads it


def deepseek(**own: Any) -> dict[str, Any]:
    """What DeepSeek-V3 and Kimi-K2.5's language model have in common."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        **own,
    }


def yarn(factor: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def kimi(quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "quantization_config": quantization,
        "vision_config": {"patch_size": 14},
        "text_config": deepseek(
            first_k_dense_replace=1,
            num_attention_heads=64,
            num_key_value_heads=64,
            n_routed_experts=384,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            num_nextn_predict_layers=0,
            max_position_embeddings=262144,
            rope_theta=50000.0,
            rope_scaling=yarn(64.0),
            vocab_size=163840,
            quantization_config=quantization,
        ),
    }


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}


def dense(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16", **own}


TARGETS: dict[str, dict[str, Any]] = {
    "kimi_k25": kimi(INT4),
    "kimi_k25_nvfp4": kimi(NVFP4),
    "deepseek_v3": deepseek(
        first_k_dense_replace=3,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        max_position_embeddings=163840,
        rope_theta=10000,
        rope_scaling=yarn(40),
        vocab_size=129280,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "gpt_oss_120b": dense(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=36,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=131072,
        vocab_size=201088,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "qwen3_8b": dense(
        "Qwen3ForCausalLM",
        "qwen3",
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        vocab_size=151936,
    ),
    "qwen3_30b_a3b": dense(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_hidden_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        vocab_size=151936,
    ),
    "llama31_8b": dense(
        "LlamaForCausalLM",
        "llama",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        vocab_size=128256,
    ),
}

# ---------------------------------------------------------------- the machines

NO_GPU = (
    "is_hip",
    "is_sm90",
    "is_hopper_with_cuda_12_3",
    "is_sm100",
    "is_sm110",
    "is_sm120",
    "is_blackwell",
    "has_amx",
)


def platform(*true: str, sm: int) -> dict[str, Any]:
    facts = dict.fromkeys(NO_GPU, False) | {"is_cuda": True, "has_flashinfer": True, "device_sm": sm}
    return facts | {"is_sm100_or_sm110": "is_sm100" in true} | dict.fromkeys(true, True)


HOPPER = platform("is_sm90", "is_hopper_with_cuda_12_3", sm=90)
MACHINES = {  # hardware: what SGLang sees of one GPU, and its memory in MiB
    "gpu1": (HOPPER, 81559),
    "gpu8": (HOPPER, 143771),
    "b200x8": (platform("is_sm100", "is_blackwell", sm=100), 183359),
    "rtx6000x8": (platform("is_sm120", "is_blackwell", sm=120), 97887),
    "two_nodes": (HOPPER, 81559),
}

# What SGLang must make of each target on each hardware that it fits on: prefill and decode attention, MoE kernels
FITTING = {
    ("gpu1", "qwen3_8b"): ("fa3", "auto"),
    ("gpu1", "qwen3_30b_a3b"): ("fa3", "auto"),
    ("gpu1", "llama31_8b"): ("fa3", "auto"),
    ("gpu1", "gpt_oss_120b"): ("fa3", None),  # None: whether triton_kernels is installed decides
    ("gpu8", "kimi_k25"): ("fa3", "auto"),
    ("gpu8", "deepseek_v3"): ("fa3", "auto"),
    ("b200x8", "kimi_k25"): ("trtllm_mla", "flashinfer_trtllm"),
    ("b200x8", "kimi_k25_nvfp4"): ("trtllm_mla", "flashinfer_trtllm"),
    ("b200x8", "deepseek_v3"): ("trtllm_mla", "flashinfer_trtllm"),
    ("rtx6000x8", "kimi_k25"): ("flashinfer", "auto"),
    ("rtx6000x8", "kimi_k25_nvfp4"): ("flashinfer", "flashinfer_cutlass"),
    ("two_nodes", "kimi_k25"): ("fa3", "auto"),
    ("two_nodes", "deepseek_v3"): ("fa3", "auto"),
}

# What SGLang would do without a preset's value: the comment beside that value says so
WITHOUT = {
    ("b200x8", "kimi_k25", "target.args.cuda_graph_backend_prefill=null"): ("prefill_graph", "breakable"),
    ("b200x8", "kimi_k25", "hardware.args.chunked_prefill_size=null"): ("chunked_prefill_size", 16384),
    ("b200x8", "kimi_k25", "hardware.args.mem_fraction_static=null"): ("mem_fraction_static", 0.855),
    ("rtx6000x8", "kimi_k25", "hardware.args.attention_backend=null"): ("prefill", "triton"),
    ("rtx6000x8", "kimi_k25_nvfp4", "target.args.quantization=null"): ("moe_runner_backend", "auto"),
}

# What must be refused, or this file tests nothing
FAULTS = {
    "+engine.args.no_such_argument=1": "no_such_argument",
    "+engine.args.moe_runner_backend=no_such_backend": "moe_runner_backend: 'no_such_backend'",
    "+engine.args.kv_cache_dtype=no_such_dtype": "kv_cache_dtype: 'no_such_dtype'",
}


def case(folder: Path, hardware: str, target: str, *overrides: str) -> dict[str, Any]:
    """The arguments of an engine that captures, and the machine for which SGLang shall resolve them."""
    config = compose(f"target={target}", f"hardware={hardware}", f"target.path={folder / target}", *overrides)
    check_values(config)
    facts, memory = MACHINES[hardware]
    args = server_args(config, folder / target, "capture") | {"nnodes": config.hardware.nodes_per_engine}
    spec = capture_spec(config, text_config(TARGETS[target]))
    return {"args": args, "platform": facts, "memory": memory, "boundaries": spec.boundaries}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SGLang's word on every case, in one process."""
    folder = tmp_path_factory.mktemp("targets")
    for name, config in TARGETS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    cases = {f"{hardware} {target}": case(folder, hardware, target) for hardware, target in FITTING}
    cases |= {without: case(folder, hardware, target, without) for hardware, target, without in WITHOUT}
    cases |= {fault: case(folder, "b200x8", "kimi_k25", fault) for fault in FAULTS}
    (folder / "cases").write_text(json.dumps(cases))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "resolve_presets.py"), str(folder / "cases"), str(folder / "results")],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads((folder / "results").read_text())


@pytest.mark.parametrize(("hardware", "target"), FITTING, ids=[f"{h}-{t}" for h, t in FITTING])
def test_sglang_takes_a_target_on_its_hardware_and_picks_its_kernels(
    resolved: dict[str, Any], hardware: str, target: str
) -> None:
    result = resolved[f"{hardware} {target}"]
    assert "error" not in result
    settings = result["settings"]
    attention, moe = FITTING[hardware, target]
    assert (settings["prefill"], settings["decode"]) == (attention, attention)
    assert moe is None or settings["moe_runner_backend"] == moe
    if target.startswith("kimi"):
        assert settings["prefill_graph"] == "disabled"
        assert settings["kv_cache_dtype"] == ("bf16" if hardware == "rtx6000x8" else "auto")


def test_the_boundaries_of_the_large_targets_have_layer_ids(resolved: dict[str, Any]) -> None:
    assert resolved["b200x8 kimi_k25"]["layer_ids"] == [1, 29, 57]  # boundaries 2, 30, 58
    assert resolved["b200x8 deepseek_v3"]["layer_ids"] == [1, 29, 57]
    assert resolved["gpu1 gpt_oss_120b"]["layer_ids"] == [1, 17, 32]  # boundaries 2, 18, 33


@pytest.mark.parametrize(("hardware", "target", "without"), WITHOUT)
def test_sglang_would_do_what_the_comment_says_without_the_value(
    resolved: dict[str, Any], hardware: str, target: str, without: str
) -> None:
    setting, value = WITHOUT[hardware, target, without]
    assert resolved[without]["settings"][setting] == value


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_name_or_value_is_refused(resolved: dict[str, Any], fault: str) -> None:
    assert FAULTS[fault] in resolved[fault].get("error", "")


def test_every_preset_is_asked_about() -> None:
    targets = {path.stem for path in (ROOT / "conf" / "target").glob("*.yaml")}
    hardware = {path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml")}
    assert targets - {"smollm2", "local"} == {target for _, target in FITTING}  # those two run, in other tests
    assert hardware - {"cpu"} == {name for name, _ in FITTING}


def test_only_kimi_trusts_code_of_its_repository() -> None:
    trusting = {target for target in TARGETS if compose(f"target={target}").target.trust_remote_code}
    assert trusting == {"kimi_k25", "kimi_k25_nvfp4"}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("hardware.tp_size=15", "hardware.tp_size: 15"),
        ("hardware.gpus_per_actor=8", "hardware.gpus_per_actor: 8"),
        ("hardware.num_actors=2", "hardware.num_actors: 2"),
        ("hardware.nodes_per_engine=0", "hardware.nodes_per_engine: 0"),
        ("hardware.nodes_per_engine=1", "hardware.gpus_per_actor: 0"),
    ],
)
def test_an_engine_over_nodes_that_cannot_be_placed_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_values(compose("target=kimi_k25", "hardware=two_nodes", override))


# ---------------------------------------------------------------- reasons

# A page, a file, a sum that comes out, or the word (un)measured
SOURCE = re.compile(
    r"https?://|\w\.(py|md|yaml|json)\b|\b(un)?measured\b|= [\d.,]+ (GiB|MiB|GB|MB|tokens|ranks)\b", re.I
)


def without_source(text: str) -> list[str]:
    """The value lines that name no source, on the line itself or in the comment right above it."""
    faults, above = [], ""
    for line in text.splitlines():
        if line.strip().startswith("#"):
            above += line
            continue
        value, _, comment = line.partition(" #")
        key, _, given = value.partition(":")
        if given.strip() and key != "name" and not SOURCE.search(above + comment):
            faults.append(line)
        above = ""
    return faults


PRESETS = [*(ROOT / "conf" / "target").glob("*.yaml"), *(ROOT / "conf" / "hardware").glob("*.yaml")]


@pytest.mark.parametrize("path", PRESETS, ids=[f"{path.parent.name}-{path.stem}" for path in PRESETS])
def test_every_value_of_a_preset_names_its_source(path: Path) -> None:
    assert without_source(path.read_text()) == []


def test_a_value_without_a_source_is_seen() -> None:
    assert without_source("# from x.py\na: 1\nb: 2\n") == ["b: 2"]
    assert without_source("a: 1 # because\nargs:\n  b: 2 # unmeasured\n") == ["a: 1 # because"]
