"""A drafter in vLLM's and speculators' layouts, read back by those tools' own rules: the same logits, or a refusal.

The reader below is written from the sources that eagle3_ray/drafter/formats.py names, in fp64, without a cache, and
with no code of eagle3_ray. Neither tool has been run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose
from safetensors.torch import load_file
from test_card import trained
from test_drafter_shapes import drafter_of as random_drafter
from torch import Tensor
from transformers import LlamaConfig

from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.formats import config_json, refusals, write_weights
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.export import export, export_with
from eagle3_ray.run import open_run

T, H, V, LAYERS, STEPS = 11, 32, 96, 8, 3
BOUNDARIES = [2, 4, 5]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LLAMA3 |= {"original_max_position_embeddings": 16}
TARGET: dict[str, Any] = {"hidden_size": H, "intermediate_size": 48, "vocab_size": V, "num_attention_heads": 4}
TARGET |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
ROPES = {"default": {"rope_type": "default", "rope_theta": 1e3}, "llama3": LLAMA3}
SERVED = {"target": "org/target", "architectures": ["Qwen3ForCausalLM"], "num_steps": 4}


def made(rope: str = "default", draft_vocab: int = 40, **settings: Any) -> Drafter:
    config = drafter_config(DrafterConfig(**settings), TARGET | {"rope_parameters": ROPES[rope]}, 3, draft_vocab)
    drafter = Drafter(config, torch.arange(draft_vocab) * (V // draft_vocab)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return drafter


# ---------------------------------------------------------------- what those tools do with a folder


def write(
    folder: Path, drafter: Drafter, boundaries: list[int], form: str, dtype: str, embedding: bool, served: dict
) -> None:
    config = config_json(drafter.config, boundaries, form, dtype, served)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", drafter, form, dtype, embedding)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A speculators config as vLLM takes it: the layer's own config, and a few keys from above."""
    if "speculators_model_type" not in config:
        return config
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    above = {name: config.get(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    return (
        config["transformer_layer_config"] | above | {"norm_before_residual": config.get("norm_before_residual", True)}
    )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """x [n, h, d], halves side by side."""
    size = x.shape[-1]
    frequencies = [rope["rope_theta"] ** (-2 * i / size) for i in range(size // 2)]
    if rope["rope_type"] == "llama3":
        before, low, high = (
            rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        for i, frequency in enumerate(frequencies):
            turns = before / (2 * math.pi / frequency)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequencies[i] = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
    angles = positions[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)  # [n, 1, d/2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def layer(w: dict[str, Tensor], c: dict[str, Any], embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """vLLM's first layer over a whole sequence, [n, H] each -> the state before the last norm [n, H]."""
    eps, heads, groups, size = (
        c[k] for k in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    normed = norm(hidden, w["layers.0.hidden_norm.weight"], eps)
    residual = normed if c["norm_before_residual"] else hidden
    x = torch.cat([norm(embeds, w["layers.0.input_layernorm.weight"], eps), normed], dim=-1)  # [n, 2H]
    q, k, v = (x @ w[f"layers.0.self_attn.{p}_proj.weight"].T for p in "qkv")
    q = rotated(q.view(-1, heads, size), positions, c["rope_parameters"])
    k = rotated(k.view(-1, groups, size), positions, c["rope_parameters"]).repeat_interleave(heads // groups, dim=1)
    v = v.view(-1, groups, size).repeat_interleave(heads // groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    hidden = residual + attended @ w["layers.0.self_attn.o_proj.weight"].T
    x = norm(hidden, w["layers.0.post_attention_layernorm.weight"], eps)
    gate, up = (x @ w[f"layers.0.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return hidden + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T


def drafted(folder: Path, ids: Tensor, streams: Tensor, slot: int, embedding: Tensor) -> list[Tensor]:
    """The logits over the target's vocabulary of each draft step at one slot, with the sequence's own tokens.

    streams [L, T, Ht]: the residual stream before each of the target's layers, which is what an id k asks for.
    """
    c = flat(json.loads((folder / "config.json").read_text()))
    w = {k.replace("midlayer.", "layers.0."): v.double() for k, v in load_file(folder / "model.safetensors").items()}
    table = w.get("embed_tokens.weight", embedding)
    taken = torch.cat([streams[k] for k in c["eagle_aux_hidden_state_layer_ids"]], dim=-1)  # [T, 3Ht]
    hidden, logits = taken[: slot + 1] @ w["fc.weight"].T, []
    for step in range(STEPS):
        tokens, positions = ids[1 : slot + 2 + step], torch.arange(slot + 1 + step)
        before = layer(w, c, table[tokens], hidden, positions)
        said = w["lm_head.weight"] @ norm(before[-1], w["norm.weight"], c["rms_norm_eps"])  # [Vd]
        offsets = w["d2t"].long() if "d2t" in w else torch.zeros(len(said), dtype=torch.int64)
        logits.append(
            torch.full([V], -math.inf, dtype=torch.float64).scatter(0, torch.arange(len(said)) + offsets, said)
        )
        hidden = torch.cat([hidden, before[-1:]])  # fed back as it was before the norm
    return logits


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"rope": "llama3"}, {"draft_vocab": V}, {"hidden_size": 48, "head_dim": 12}],
    ids=["plain", "llama3", "whole vocabulary", "own width"],
)
@pytest.mark.parametrize("embedding", [True, False])
@torch.no_grad()
def test_the_folder_means_our_drafter_there(
    form: str, settings: dict[str, Any], embedding: bool, tmp_path: Path
) -> None:
    drafter = made(**settings)
    if drafter.own_embedding and form == "speculators":
        with pytest.raises(ValueError, match=f"{form} would take this drafter otherwise"):
            write(tmp_path, drafter, BOUNDARIES, form, "float64", embedding, SERVED)
        return
    if drafter.own_embedding and not embedding:
        return  # check_export refuses it
    write(tmp_path, drafter, BOUNDARIES, form, "float64", embedding, SERVED)
    assert ("embed_tokens.weight" in load_file(tmp_path / "model.safetensors")) == embedding
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, V, (T,), generator=generator)
    streams = torch.randn(LAYERS, T, H, generator=generator, dtype=torch.float64)
    aux = torch.cat([streams[k] for k in BOUNDARIES], dim=-1)
    nothing = torch.empty(0)
    batch = Batch(("a",), (T,), ids, torch.ones(T).bool(), aux, nothing, nothing)
    for slot in (0, 6):
        ours = drafter(batch, [torch.tensor([slot])] * STEPS)
        theirs = drafted(tmp_path, ids, streams, slot, drafter.embed_tokens.weight)
        for mine, logits in zip(ours, theirs, strict=True):
            assert int(logits.isfinite().sum()) == len(drafter.draft_ids)
            torch.testing.assert_close(logits[drafter.draft_ids], drafter.lm_head(mine)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rope", ROPES)
def test_older_and_newer_words_for_rope_say_the_same(rope: str, tmp_path: Path) -> None:
    write(tmp_path, made(rope), BOUNDARIES, "vllm", "bfloat16", True, SERVED)
    config = json.loads((tmp_path / "config.json").read_text())
    assert LlamaConfig(**config).rope_parameters == ROPES[rope]
    del config["rope_parameters"]
    assert LlamaConfig(**config).rope_parameters == ROPES[rope]


REFUSED = [
    ({"fc_norm": True}, BOUNDARIES, "drafter.fc_norm=True"),
    ({"norm_output": True}, BOUNDARIES, "drafter.norm_output=True"),
    ({"norm_before_fc": True}, BOUNDARIES, "drafter.norm_before_fc=True"),
    ({"num_hidden_layers": 2}, BOUNDARIES, "drafter.num_hidden_layers=2"),
    ({}, [2, 4], "capture.boundaries=[2, 4]: its fc reads 3 states"),
    ({}, [0, 2, 4], "capture.boundaries=[0, 2, 4]"),
]


@pytest.mark.parametrize(("settings", "boundaries", "words"), REFUSED)
def test_what_would_be_taken_otherwise_is_refused(settings: dict[str, Any], boundaries: list[int], words: str) -> None:
    rope = {"rope_parameters": ROPES["default"]}
    config = drafter_config(DrafterConfig(**settings), TARGET | rope, len(boundaries), 40)
    for form in ("vllm", "speculators"):
        (found,) = refusals(config, boundaries, form)
        assert words in found


def test_other_rope_and_latent_attention_are_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    config = drafter_config(DrafterConfig(), TARGET | {"rope_parameters": yarn}, 3, 40)
    assert refusals(config, BOUNDARIES, "vllm") == ["RoPE of the type 'yarn', none of default, llama3"]
    assert "drafter.attention='mla'" in refusals(random_drafter("mla").config, BOUNDARIES, "vllm")[0]


def test_a_format_that_cannot_be_exact_is_refused_before_any_engine_starts(smollm2: Path, tmp_path: Path) -> None:
    settings = [f"target.path={smollm2}", f"store.root={tmp_path}", "export.format=vllm"]
    assert open_run(compose(*settings, "drafter.fc_norm=false")).config.export.format == "vllm"
    with pytest.raises(ConfigError, match="export.format: 'vllm' would take this drafter otherwise: drafter.fc_norm"):
        open_run(compose(*settings))


def test_the_format_lies_beside_the_folder_for_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, features, _ = trained(tmp_path)
    monkeypatch.setattr("eagle3_ray.export.target_config", lambda _: {"architectures": ["LlamaForCausalLM"]})
    done = export_with(run, features, "d", [1, 3, 5])
    before = {key: run.files.sha256(key) for key in run.files.list("d/export")}
    for form in ("vllm", "speculators"):
        run.config.export.format = form
        assert export(run, features, "d") == done | {"also": run.files.url(f"d/export-{form}")}
        config = json.loads(run.files.read(f"d/export-{form}/config.json"))
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # SGLang's are [1, 3, 5]
    steps = run.config.evaluate.num_steps = 2
    export(run, features, "d")
    config = json.loads(run.files.read("d/export-speculators/config.json"))["speculators_config"]
    assert config["proposal_methods"][0]["speculative_tokens"] == steps
    assert not config["verifier"]["name_or_path"].startswith("/")  # no folder of this machine
    run.config.export.format = "sglang"
    assert export(run, features, "d") == done == run.read_json("d/export.json")
    assert {key: run.files.sha256(key) for key in run.files.list("d/export")} == before
    run.config.export.embedding, run.config.export.format = "none", "vllm"
    export_with(run, features, "d", [1, 3, 5])
    assert not run.files.exists("d/export-vllm/config.json")  # it was of the other setting
    export(run, features, "d")
    weights = tmp_path / "store" / "d" / "export-vllm" / "model.safetensors"
    assert "embed_tokens.weight" not in load_file(weights)
