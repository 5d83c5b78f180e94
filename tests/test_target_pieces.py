"""The target's embedding, head and final norm, read by name out of its safetensors."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from eagle3_ray.capture import check_logits
from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.drafter.target import ZERO_CENTRED, load_head, load_norm, load_pieces


def at(folder: Path) -> TargetConfig:
    return TargetConfig(name="t", path=str(folder))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True, None], ids=["untied", "tied", "tied by default"])
def test_pieces_are_found_by_name(tmp_path: Path, prefix: str, sharded: bool, tied: bool | None):
    table, head, norm = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4)
    tensors = {f"{prefix}embed_tokens.weight": table, f"{prefix}norm.weight": norm}
    tensors |= {f"{prefix}layers.0.mlp.gate_proj.weight": torch.ones(2), "visual.norm.weight": torch.ones(2)}
    if tied is False:
        tensors["language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"] = head
    inner = {"vocab_size": 5, **({} if tied is None else {"tie_word_embeddings": tied})}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner} if "language" in prefix else inner))
    if sharded:
        files = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
        for name, file in files.items():
            save_file({name: tensors[name]}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    pieces = load_pieces(at(tmp_path), torch.float32)
    assert torch.equal(pieces.embedding, table)
    assert torch.equal(pieces.head, head if tied is False else table)
    assert torch.equal(pieces.norm, norm)


@pytest.mark.parametrize(
    ("config", "model"), [(Gemma3TextConfig, Gemma3ForCausalLM), (Qwen3NextConfig, Qwen3NextForCausalLM)]
)
def test_the_norm_is_what_the_target_multiplies_by(tmp_path: Path, config: Any, model: Any):
    """Of these classes it is 1 + weight."""
    sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    target = model(config(**sizes, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1))
    final = target.model.norm
    final.weight.data.normal_()
    target.save_pretrained(tmp_path)
    rows = torch.randn(5, 16)
    ours = torch.nn.functional.rms_norm(rows, (16,), load_pieces(at(tmp_path), torch.float32).norm, final.eps)
    torch.testing.assert_close(ours, final(rows))
    torch.testing.assert_close(load_norm(at(tmp_path)), 1 + final.weight.data)


@pytest.mark.parametrize("kind", sorted(ZERO_CENTRED - {"step3p5"}))  # Transformers has that one as a part of step3p7
def test_transformers_multiplies_by_one_more_for_each_such_class(kind: str):
    module = importlib.import_module(CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_"))
    norms = [c for name, c in vars(module).items() if name.endswith("RMSNorm") and c.__module__ == module.__name__]
    for norm in (made(4) for made in norms):
        norm.weight.data.zero_()
        torch.testing.assert_close(norm(torch.full((1, 4), 3.0)), torch.ones(1, 4))
    assert norms


def test_a_head_that_training_cannot_use_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    tensors = {"model.embed_tokens.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    quantised = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file(
        {**tensors, "model.layers.0.mlp.up_proj.weight": quantised, "lm_head.weight": torch.eye(2)},
        tmp_path / "model.safetensors",
    )
    assert torch.equal(load_head(at(tmp_path)), torch.eye(2))  # what lies beside it may be quantised
    save_file({**tensors, "lm_head.weight": quantised}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its lm_head.weight is quantised \(torch.float8_e4m3fn\)"):
        load_head(at(tmp_path))
    save_file(
        {**tensors, "lm_head.weight": torch.eye(2), "lm_head.bias": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match="its head has a bias"):
        load_head(at(tmp_path))


@pytest.mark.parametrize(("name", "value"), [("final_logit_softcapping", 30.0), ("logit_scale", 0.0625)])
def test_logits_that_are_not_the_head_s_alone_are_refused(name: str, value: float):
    check_logits({name: None})
    check_logits({"logit_scale": 1.0})
    with pytest.raises(ConfigError, match=f"target.path: its config.json has {name}={value}"):
        check_logits({name: value})


def test_a_missing_piece_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor for lm_head.weight"):
        load_pieces(at(tmp_path), torch.float32)
