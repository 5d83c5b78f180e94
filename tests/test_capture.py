"""Boundaries, layer ids and fingerprints: no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import compose

from eagle3_ray.capture import (
    capture_spec,
    check_boundaries,
    describe_target,
    engine_args,
    fingerprint,
    target_config,
)
from eagle3_ray.config import ConfigError
from eagle3_ray.engines.sglang import ask_layer_ids
from eagle3_ray.run import open_run


@pytest.mark.parametrize(
    ("boundaries", "reason"),
    [
        ([], "two or more"),
        ([2], "two or more"),
        ([-1, 2], "outside"),
        ([2, 30], "boundaries 0 to 29"),
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


def test_layer_ids_are_the_target_class_own(tiny_llama_folder: Path) -> None:
    config = compose(f"target.path={tiny_llama_folder}")
    assert ask_layer_ids(config, [1, 3, 5]) == [0, 2, 4]  # Llama: boundary k is its id k-1


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
FEATURES += ["+target.args.kv_cache_dtype=fp8_e4m3"]
NEITHER = ["hardware.args.mem_fraction_static=0.3", "hardware.max_inflight=3", "store.shard_bytes=1000"]


@pytest.mark.parametrize("override", RESPONSES + FEATURES + NEITHER)
def test_a_setting_moves_exactly_the_fingerprints_it_decides(
    tiny_llama_folder: Path, tmp_path: Path, override: str
) -> None:
    before, after = run_for(tiny_llama_folder, tmp_path), run_for(tiny_llama_folder, tmp_path, override)
    responses = before.responses("corpus")[0].folder != after.responses("corpus")[0].folder
    features = before.features("corpus")[0].folder != after.features("corpus")[0].folder
    assert (responses, features) == (override in RESPONSES, override in RESPONSES + FEATURES)


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
