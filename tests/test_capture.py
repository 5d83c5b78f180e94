"""Boundaries, layer ids and fingerprints: no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, compose

from eagle3_ray.capture import (
    capture_spec,
    check_boundaries,
    describe_target,
    engine_args,
    target_config,
)
from eagle3_ray.config import ConfigError
from eagle3_ray.engines.sglang import ask_layer_ids, engine_environment
from eagle3_ray.run import check_values, open_run
from eagle3_ray.strict_json import fingerprint


@pytest.mark.parametrize(
    ("boundaries", "reason"),
    [
        ([], "two or more"),
        ([2], "two or more"),
        ([-1, 2], "outside"),
        ([2, 30], "boundaries 0 to 29"),  # the last layer's output
        ([2, 30, 58], "30 is outside"),  # a smaller target given those of Kimi-K2.5
        ([2, 2, 5], "not strictly ascending"),
        ([5, 2], "not strictly ascending"),
    ],
)
def test_wrong_boundaries_are_refused_by_name(boundaries: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"capture.boundaries: .*{reason}"):
        check_boundaries(boundaries, layers=30)


def test_the_default_boundaries_are_low_middle_and_high() -> None:
    model = {"num_hidden_layers": 61, "hidden_size": 7168}
    spec = capture_spec(compose(), model)
    assert spec.boundaries == (2, 30, 58)
    assert spec.row_bytes == 57344  # FACTS: 4 states of 7,168 in bf16
    assert capture_spec(compose("capture.dtype=float32"), model).row_bytes == 2 * 57344
    assert capture_spec(compose("capture.dtype=float8_e4m3"), model).row_bytes == 3 * 7168 + 3 * 4 + 2 * 7168


@pytest.mark.parametrize(
    ("name", "value"),
    [(f"{group}.dtype", "float8_e4m3") for group in ("engine", "train", "evaluate")]
    + [("capture.dtype", "float16"), ("store.compression", "gzip")],
)
def test_a_precision_or_compression_that_is_none_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: '{value}' is none of"):
        check_values(compose(f"{name}={value}"))


def test_a_target_too_small_for_the_default_boundaries_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capture.boundaries: \[2, 2, 1\] is not strictly ascending"):
        capture_spec(compose(), {"num_hidden_layers": 4, "hidden_size": 64})


def test_layer_ids_are_the_target_class_own(tiny_llama_folder: Path) -> None:
    config = compose(f"target.path={tiny_llama_folder}")
    assert ask_layer_ids(config, [1, 3, 5]) == [0, 2, 4]  # Llama: boundary k is its id k-1


# Targets of 61 layers, as Kimi-K2.5 has, by what SGLang needs to know which class and how many
KIMI = ["KimiK25ForConditionalGeneration"]
CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_k25": {"text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61}, "architectures": KIMI},
    "deepseek_v3": {"num_hidden_layers": 61, "architectures": ["DeepseekV3ForCausalLM"]},
    "llama": {"num_hidden_layers": 61, "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"num_hidden_layers": 61, "architectures": ["Qwen3ForCausalLM"]},
}
# boundaries, and the ids that get them; None where the class has none
WANTED: list[tuple[str, list[int], list[int] | None]] = [
    ("kimi_k25", [2, 30, 58], [1, 29, 57]),  # a first id of 1 adds 1 to all
    ("kimi_k25", [1, 29, 57], None),  # so nothing begins at boundary 1
    ("kimi_k25", [3, 30, 60], [3, 30, 60]),
    ("kimi_k25", [0, 30, 60], [0, 30, 60]),
    ("deepseek_v3", [2, 30, 58], [1, 29, 57]),
    ("deepseek_v3", [1, 29, 57], None),
    ("llama", [2, 30, 58], [1, 29, 57]),
    ("llama", [1, 29, 57], [0, 28, 56]),
    ("llama", [3, 30, 60], [2, 29, 59]),
    ("llama", [0, 30, 60], None),
    ("qwen3", [2, 30, 58], [1, 29, 57]),
    ("qwen3", [0, 30, 60], None),
]
# ids, as a drafter's config carries them, and the boundaries that they mean
GIVEN = [
    ("kimi_k25", [1, 29, 57], [2, 30, 58]),
    ("kimi_k25", [2, 30, 58], [2, 30, 58]),
    ("llama", [1, 29, 57], [2, 30, 58]),
    ("llama", [2, 30, 58], [3, 31, 59]),  # Kimi's ids on a Llama are other states
]
ASK = """
import json, sys
from pathlib import Path
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils.hf_transformers_utils import get_config
from eagle3_ray.capture import layers_to_capture, sglang_layer_ids
from eagle3_ray.config import ConfigError
from eagle3_ray.strict_json import fingerprint

def ids(target, boundaries):
    try:
        return sglang_layer_ids(Path(target), tuple(boundaries))
    except ConfigError as error:
        return str(error)

def boundaries(target, ids):
    return layers_to_capture(ModelRegistry, get_config(target, trust_remote_code=False), ids)

wanted, given = json.loads(sys.argv[1])
print(json.dumps([[ids(*question) for question in wanted], [boundaries(*question) for question in given]]))
"""


def test_each_class_of_targets_is_asked_for_its_own_layer_ids(tmp_path: Path) -> None:
    """All questions in one process: the import of sglang is what takes long."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name} | config))
    questions = [[(name, asked) for name, asked, _ in table] for table in (WANTED, GIVEN)]
    ended = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        env=engine_environment(compose().hardware, tmp_path / "scratch"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted, given = json.loads(ended.stdout.splitlines()[-1])
    for (name, boundaries, ids), answer in zip(WANTED, wanted, strict=True):
        refusal = f"capture.boundaries: {boundaries} cannot be had from {CONFIGS[name]['architectures']}"
        assert answer == ids if ids else str(answer).startswith(refusal), (name, boundaries, answer)
    assert given == [boundaries for _, _, boundaries in GIVEN]


def run_for(folder: Path, store: Path, *overrides: str):
    return open_run(compose(f"target.path={folder}", f"store.root={store}", *overrides))


# What each setting moves: the responses' fingerprint (and with it the features'), the features' alone, or neither
RESPONSES = ["sampling.max_new_tokens=5", "sampling.temperature=0.5", "sampling.top_p=0.9", "sampling.top_k=7"]
RESPONSES += ["sampling.seed=1", "+target.chat_template_kwargs.thinking=true"]
FEATURES = ["capture.boundaries=[1,2,3]", "capture.dtype=float32", "engine.dtype=bfloat16", "hardware.tp_size=2"]
RESPONSES += ["+engine.args.context_length=1024"]
FEATURES += ["+engine.args.decode_attention_backend=torch_native", "+hardware.env.NCCL_ALGO=Ring"]
FEATURES += ["engine.version=0.5.22", "+engine.args.kv_cache_dtype=fp8_e4m3", "engine=transformers"]
FEATURES += ["+hardware.capture_args.attention_backend=intel_amx", "hardware=gpu1"]
FEATURES += ["+target.args.kv_cache_dtype=fp8_e4m3", "capture.dtype=float8_e4m3"]
NEITHER = ["hardware.args.mem_fraction_static=0.3", "hardware.max_inflight=3", "store.shard_bytes=1000"]
NEITHER += ["store.exclusive_create=false", "store.scratch_dir=/tmp", "store.cache_bytes=1000000000"]
NEITHER += ["+hardware.env.HF_TOKEN=secret"]
NEITHER += ["store.compression=zstd"]


@pytest.mark.parametrize("override", RESPONSES + FEATURES + NEITHER)
def test_a_setting_moves_exactly_the_fingerprints_it_decides(
    tiny_llama_folder: Path, tmp_path: Path, override: str
) -> None:
    before, after = run_for(tiny_llama_folder, tmp_path), run_for(tiny_llama_folder, tmp_path, override)
    responses = before.responses("corpus")[0].folder != after.responses("corpus")[0].folder
    features = before.features("corpus")[0].folder != after.features("corpus")[0].folder
    assert (responses, features) == (override in RESPONSES, override in RESPONSES + FEATURES)


def test_a_store_with_the_weaker_promise_is_announced(
    tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_for(tiny_llama_folder, tmp_path)
    assert "exclusive_create" not in capsys.readouterr().out
    run = run_for(tiny_llama_folder, tmp_path, "store.exclusive_create=false")
    assert not run.files.exclusive
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "exclusive_create" in line]
    assert line.startswith("warning: store.exclusive_create=false")


def test_the_targets_arguments_win_over_the_hardwares_and_engine_args_over_both() -> None:
    overrides = ["+hardware.args.page_size=1", "+target.args.page_size=2", "+engine.args.page_size=3"]
    sizes = [engine_args(compose(*overrides[: n + 1]), "capture")["page_size"] for n in range(3)]
    assert sizes == [1, 2, 3]


def test_another_corpus_is_another_set_of_responses(tiny_llama_folder: Path, tmp_path: Path) -> None:
    run = run_for(tiny_llama_folder, tmp_path)
    assert run.responses("one")[0].folder != run.responses("two")[0].folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_changed_target_file_is_another_target(tiny_llama_folder: Path, tmp_path: Path, name: str) -> None:
    config = compose(f"target.path={tiny_llama_folder}")
    for file in tiny_llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = describe_target(config.target, tmp_path)
    data = (tmp_path / name).read_bytes()
    for at in tensor_middles(data) if name == "model.safetensors" else [len(data) - 1]:
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / name).write_bytes(changed)
        assert fingerprint(describe_target(config.target, tmp_path)) != fingerprint(before)


def tensor_middles(data: bytes) -> list[int]:
    """The middle byte of every tensor in a safetensors file: the digest samples there."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    spans = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return [8 + length + (begin + end) // 2 for begin, end in spans]


def test_a_folder_without_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target.path"):
        target_config(tmp_path)


def test_the_library_imports_without_sglang_hydra_or_cuda() -> None:
    """Every module but the two that run inside SGLang's processes."""
    code = """
import importlib, pkgutil, sys
for name in ("sglang", "hydra", "omegaconf"):
    sys.modules[name] = None  # an import of it fails
import eagle3_ray
for module in pkgutil.walk_packages(eagle3_ray.__path__, "eagle3_ray."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""})


def test_extraction_starts_without_transformers_models() -> None:
    """They cost the driver and each actor seconds of every start, and a restart after a death is one."""
    code = "import sys, ray_jobs.extract; assert 'transformers' not in sys.modules and 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
