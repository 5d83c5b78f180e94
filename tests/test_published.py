"""Published drafters as a start: every layout finds its place, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter_shapes import BOUNDARIES, DRAFT_VOCAB, SHAPES, VOCAB, documents, drafter_of
from torch import Tensor

from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.checkpoint import check_folder, export
from eagle3_ray.drafter.model import Drafter, valid_slots
from eagle3_ray.drafter.published import Published
from eagle3_ray.drafter.target import TargetPieces
from eagle3_ray.drafter.trained import read_another

H, V, VD, INNER = 16, 40, 12, 24
MODEL: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 99,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
IDS = torch.tensor([1, 2, 3, 5, 8, 13, 14, 20, 21, 30, 34, 39])  # [Vd]
T2D = torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)
LLAMA = {  # four heads of 6, one for keys and values: not the target's
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}


def layer() -> dict[str, Tensor]:
    """The decoder layer's tensors, all different."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input_layernorm": (H,),
        "hidden_norm": (H,),
        "post_attention_layernorm": (H,),
        "self_attn.q_proj": (24, 2 * H),
        "self_attn.k_proj": (6, 2 * H),
        "self_attn.v_proj": (6, 2 * H),
        "self_attn.o_proj": (H, 24),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
    }
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rest() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def named(prefix: str, middle: str) -> dict[str, Tensor]:
    tensors = {f"{middle}{name}": tensor for name, tensor in layer().items()} | rest()
    return {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}


OFFSETS = {"d2t": IDS - torch.arange(VD), "t2d": T2D}
EMBEDDING = {"embed_tokens.weight": torch.zeros(V, H)}
FLAT = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD}
NESTED = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": VD,
    "norm_before_residual": False,
    "transformer_layer_config": {**LLAMA, "model_type": "llama"},
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "specforge": (FLAT, named("", "midlayer.") | OFFSETS),
    "safeailab": ({**FLAT, "architectures": None}, named("", "midlayer.") | EMBEDDING | OFFSETS),
    "torchspec": (FLAT, named("", "layers.0.") | EMBEDDING | OFFSETS),
    "wrapped": (FLAT, {f"draft_model.{name}": t for name, t in (named("", "midlayer.") | OFFSETS).items()}),
    "below model": (FLAT, named("model.", "layers.0.") | OFFSETS),
    "speculators": (NESTED, named("", "layers.0.") | EMBEDDING | OFFSETS),
    "absolute ids": (FLAT, named("", "midlayer.") | {"d2t": IDS, "t2d": T2D}),
    "without t2d": (FLAT, named("", "midlayer.") | {"d2t": IDS - torch.arange(VD)}),
}


def publish(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> DrafterConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return DrafterConfig(draft_vocab_size=VD, vocabulary="start", start_from=str(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_drafter(tmp_path: Path, layout: str):
    published = Published(publish(tmp_path, *LAYOUTS[layout]), MODEL, num_aux=3)
    assert published.draft_ids().tolist() == IDS.tolist()
    drafter = Drafter(published.config, published.draft_ids())
    loaded = drafter.load_state_dict(published.weights(), strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["embed_tokens.weight"], [])
    state = drafter.state_dict()
    expected = {f"midlayer.{name}": tensor for name, tensor in layer().items()} | rest() | OFFSETS
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    config = published.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 6)
    assert (config.intermediate_size, config.rms_norm_eps, config.max_position_embeddings) == (INNER, 1e-6, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path):
    head = torch.randn(V, H)
    settings = publish(tmp_path, {**FLAT, "draft_vocab_size": None}, named("", "layers.0.") | {"lm_head.weight": head})
    settings.draft_vocab_size = V
    published = Published(settings, MODEL, num_aux=3)
    assert published.draft_ids().tolist() == list(range(V))
    assert torch.equal(published.weights()["lm_head.weight"], head)


def test_t2d_tells_offsets_from_ids_where_both_could_be(tmp_path: Path):
    spread = 2 * torch.arange(VD)  # as offsets they would name 0, 3, .. 33
    for ids in (spread, 3 * torch.arange(VD)):
        t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        tensors = named("", "midlayer.") | {"d2t": spread, "t2d": t2d}
        published = Published(publish(tmp_path, FLAT, tensors), MODEL, num_aux=3)
        assert published.draft_ids().tolist() == ids.tolist()
        assert torch.equal(published.weights()["t2d"], t2d)
        assert torch.equal(published.weights()["d2t"] + torch.arange(VD), ids)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in LAYOUTS["specforge"][1].items() if key != name}


GOOD = LAYOUTS["specforge"][1]
LONGROPE = {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}}


@pytest.mark.parametrize(
    ("config", "tensors", "settings", "message"),
    [
        (FLAT, without("fc.weight"), {}, "no tensor for fc.weight"),
        (FLAT, without("d2t"), {}, "no d2t, but 12 draft tokens for 40"),
        (FLAT, GOOD | {"midlayer.self_attn.q_norm.weight": torch.ones(6)}, {}, "self_attn.q_norm.weight has no place"),
        (FLAT, GOOD | {"layers.0.hidden_norm.weight": torch.ones(H)}, {}, "hidden_norm.weight has no place"),
        (FLAT, GOOD | {"fc.weight": torch.ones(H, 2 * H)}, {}, r"\[16, 32\], not \[16, 48\]; look at capture"),
        (FLAT, GOOD | {"d2t": torch.full((VD,), 3)}, {}, "its d2t names neither"),
        (FLAT, GOOD | {"d2t": IDS - torch.arange(VD) - 1}, {}, "its d2t names neither"),
        (FLAT, GOOD, {"draft_vocab_size": 20}, "drafter.draft_vocab_size: 20, but drafter.start_from has 12"),
        (FLAT, GOOD, {"head_dim": 8}, "drafter.head_dim: 8, but drafter.start_from has 6"),
        ({**FLAT, "norm_output": True}, GOOD, {}, "drafter.norm_output: False, but drafter.start_from has True"),
        ({**FLAT, "vocab_size": 41}, GOOD, {}, "its vocab_size is 41, the target's 40"),
        ({**FLAT, "hidden_size": 32}, GOOD, {}, "its hidden_size is 32, the target's 16"),
        ({**FLAT, "hidden_act": "gelu"}, GOOD, {}, "its hidden_act is 'gelu'"),
        ({**FLAT, **LONGROPE}, GOOD, {}, "its RoPE is of the type 'longrope'"),
        ({**NESTED, "norm_before_residual": True}, GOOD, {}, "norm_before_residual, which SGLang does not serve"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], settings: dict[str, Any], message: str
):
    chosen = publish(tmp_path, config, tensors)
    for name, value in settings.items():
        setattr(chosen, name, value)
    with pytest.raises(ConfigError, match=message):
        Published(chosen, MODEL, num_aux=3).draft_ids()


def test_a_pickle_is_refused_and_not_opened(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    with pytest.raises(ConfigError, match=r"drafter.start_from: .*never unpickled; convert it to safetensors"):
        Published(DrafterConfig(start_from=str(tmp_path)), MODEL, num_aux=3)


@pytest.mark.parametrize(("path", "message"), [("a/b", "must be an absolute path or s3"), ("/nowhere", "config.json")])
def test_a_place_that_cannot_be_read_is_named(path: str, message: str):
    with pytest.raises(ConfigError, match=f"drafter.start_from: '{path}': .*{message}"):
        Published(DrafterConfig(start_from=path), MODEL, num_aux=3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_no_start_and_are_told_of_what_is_served(tmp_path: Path, value: float):
    broken = {name: GOOD[name].clone() for name in ("fc.weight", "norm.weight")}
    broken["fc.weight"][3, 7] = broken["norm.weight"][0] = value
    settings = publish(tmp_path, FLAT, GOOD | broken)
    with pytest.raises(ConfigError, match="drafter.start_from: .* 2 of its tensors .* not finite: fc.weight, norm"):
        Published(settings, MODEL, num_aux=3).weights()
    assert at_path(tmp_path).weights()["fc.weight"].isfinite().sum() == 3 * H * H - 1
    faults = check_folder(tmp_path, MODEL | {"num_hidden_layers": 8})
    assert any("fc.weight (with 1 more) holds values that are not finite" in fault for fault in faults)


# ---------------------------------------------------------------- drafter.path


def at_path(folder: Path, model: dict[str, Any] = MODEL) -> Published:
    return Published(DrafterConfig(path=str(folder)), model, num_aux=3)


@pytest.mark.parametrize("name", SHAPES)
def test_a_drafter_to_serve_has_its_own_shape_whatever_the_settings_say(name: str, tmp_path: Path):
    """Of the target only the sizes are known that it must share; the settings are the default ones."""
    drafter, batch = drafter_of(name, torch.float32), documents()
    export(tmp_path, drafter, [1, 3, 4], "float32")
    config: Any = SimpleNamespace(drafter=DrafterConfig(path=str(tmp_path)), store=SimpleNamespace(storage_options={}))
    another = read_another(config, {"hidden_size": 32, "vocab_size": VOCAB}, BOUNDARIES)
    assert another.draft_ids.tolist() == [2 * i for i in range(DRAFT_VOCAB)]
    own = name.endswith("own width")
    assert ("embed_tokens.weight" in another.weights) == own
    embedding = torch.zeros(VOCAB, 32) if own else drafter.embed_tokens.weight.detach()
    rebuilt = another.drafter(TargetPieces(embedding, torch.zeros(VOCAB, 32), torch.ones(32)))
    batch.aux = batch.aux.float()
    slots = valid_slots(batch, 3)
    for ours, theirs in zip(rebuilt(batch, slots), drafter(batch, slots), strict=True):
        assert torch.equal(rebuilt.lm_head(ours), drafter.lm_head(theirs))


def test_what_sglang_passes_over_does_not_stop_a_drafter_to_serve(tmp_path: Path):
    more = {"midlayer.self_attn.q_norm.weight": torch.ones(6), "t2d": torch.ones(99).bool()}
    publish(tmp_path, FLAT, GOOD | more)
    published = at_path(tmp_path)
    assert published.draft_ids().tolist() == IDS.tolist()
    assert torch.equal(published.weights()["fc.weight"], GOOD["fc.weight"])
    assert "midlayer.self_attn.q_norm.weight" not in published.weights()


def test_older_words_for_norms_are_read(tmp_path: Path):
    norms = {f"aux_norm_{word}.weight": torch.full((H,), 2.0 + i) for i, word in enumerate(("low", "mid", "high"))}
    publish(tmp_path, {**FLAT, "use_aux_norm": True}, GOOD | norms)
    weights = at_path(tmp_path).weights()
    assert [float(weights[f"fc_norm.{i}.weight"][0]) for i in range(3)] == [2.0, 3.0, 4.0]


LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({**FLAT, "target_hidden_size": 32}, GOOD, "its hidden_size is 32, the target's 16"),
        (FLAT, without("fc.weight"), "no tensor for fc.weight"),
        (FLAT, GOOD | {"fc.weight": torch.ones(H, 2 * H)}, r"\[16, 32\], not \[16, 48\]; look at capture.boundaries"),
        (FLAT, without("d2t"), "no d2t, but 12 draft tokens for 40"),
        ({**FLAT, "attention_bias": True}, GOOD, "its attention_bias is True; SGLang serves it with biases"),
        ({**FLAT, **LONGROPE}, GOOD, "its RoPE is of the type 'longrope'"),
        ({**FLAT, "rope_scaling": {"rope_type": "linear"}}, GOOD, "makes no drafter: .*rope_parameters"),
        ({**FLAT, "hidden_size": 48, "target_hidden_size": 16, "num_attention_heads": 4}, GOOD, "for which SGLang"),
    ],
)  # fmt: skip
def test_a_drafter_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], message: str
):
    publish(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=f"drafter.path: .*{message}"):
        at_path(tmp_path).draft_ids()


def test_a_drafter_of_its_own_width_is_started_from_with_its_embedding(tmp_path: Path):
    export(tmp_path, drafter_of("own width", torch.float32), [1, 3, 4], "float32")
    settings = DrafterConfig(start_from=str(tmp_path), draft_vocab_size=DRAFT_VOCAB, fc_norm=True)
    started = Published(settings, MODEL | {"hidden_size": 32, "vocab_size": VOCAB}, num_aux=3)
    assert (started.config.hidden_size, started.config.target_hidden_size) == (48, 32)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(started.weights()["embed_tokens.weight"], stored["embed_tokens.weight"])


def test_an_mla_drafter_is_served_and_started_from(tmp_path: Path):
    export(tmp_path, drafter_of("mla", torch.float32), [1, 3, 4], "float32")
    model = MODEL | {"hidden_size": 32, "vocab_size": VOCAB}
    weights, stored = at_path(tmp_path, model).weights(), load_file(tmp_path / "model.safetensors")
    assert weights.keys() == stored.keys() - {"embed_tokens.weight"}
    settings = DrafterConfig(start_from=str(tmp_path), draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(ConfigError, match="drafter.attention: gqa, but drafter.start_from has mla"):
        Published(settings, model, num_aux=3)
    started = Published(dataclasses.replace(settings, attention="mla"), model, num_aux=3)
    assert started.config.to_dict() == at_path(tmp_path, model).config.to_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in started.weights().items())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | LINEAR))
    with pytest.raises(ConfigError, match="its RoPE is of the type 'linear', none of default, yarn"):
        at_path(tmp_path, model)
