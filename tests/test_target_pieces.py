"""The target's embedding, head and final norm, read by name out of its safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.drafter.target import load_pieces


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
    pieces = load_pieces(TargetConfig(name="t", path=str(tmp_path)), torch.float32)
    assert torch.equal(pieces.embedding, table)
    assert torch.equal(pieces.head, head if tied is False else table)
    assert torch.equal(pieces.norm, norm)


def test_a_missing_piece_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor for lm_head.weight"):
        load_pieces(TargetConfig(name="t", path=str(tmp_path)), torch.float32)
