"""Every shape of the drafter against an independent one that runs token by token, and what SGLang reads of each."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference_drafter
import torch
from safetensors.torch import load_file, save_file
from test_drafter import golden, golden_batch, golden_drafter
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.attention import attend, eager
from eagle3_ray.drafter.checkpoint import export, load
from eagle3_ray.drafter.mla import LatentAttention
from eagle3_ray.drafter.model import Batch, Drafter, valid_slots
from eagle3_ray.drafter.shape import drafter_config, read_config
from eagle3_ray.drafter.target import TargetPieces, initialise

VOCAB, DRAFT_VOCAB, BOUNDARIES = 97, 41, 3
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}
TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = TARGET | LATENT | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the target's config, the settings
    "plain": (TARGET, {}),
    "theta 1e6": (TARGET | {"rope_theta": 1e6}, {}),
    "head_dim apart": (TARGET, {"head_dim": 12, "num_key_value_heads": 1}),
    "norm_output": (TARGET, {"norm_output": True}),
    "norm_before_fc": (TARGET, {"norm_before_fc": True}),
    "fc_norm": (TARGET, {"fc_norm": True}),
    "all norms": (TARGET, {"norm_before_fc": True, "fc_norm": True, "norm_output": True}),
    "two layers": (TARGET, {"num_hidden_layers": 2}),
    "three layers, yarn": (TARGET | {"rope_scaling": YARN}, {"num_hidden_layers": 3, "norm_output": True}),
    "own width": (TARGET, {"hidden_size": 48, "fc_norm": True}),
    "mla": (DEEPSEEK, {"attention": "mla"}),
    "mla, plain rope": (TARGET | LATENT, {"attention": "mla"}),
    "mla 3.1": (DEEPSEEK, {"attention": "mla", "fc_norm": True, "norm_output": True}),
    "mla, own width": (DEEPSEEK, {"attention": "mla", "hidden_size": 48, "num_attention_heads": 3}),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def drafter_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Drafter:
    """Random weights, large enough for every part to matter, and norms that differ from 1."""
    target, settings = SHAPES[name]
    config = drafter_config(DrafterConfig(**settings), target, BOUNDARIES, DRAFT_VOCAB)
    drafter = Drafter(config, torch.arange(DRAFT_VOCAB) * 2)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return drafter.to(dtype)


def documents(lengths: tuple[int, ...] = (17, 12), seed: int = 1) -> Batch:
    """Documents end to end; the first has two responses."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= 3 for length in lengths])
    mask[6] = False
    return Batch(
        ids=tuple(map(str, lengths)),
        lengths=lengths,
        input_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        loss_mask=mask,
        aux=torch.randn(total, BOUNDARIES * 32, dtype=torch.float64, generator=generator),
        last_hidden=torch.empty(0, 32),
        last_rows=torch.empty(0, dtype=torch.int64),
    )


def served(drafter: Drafter, batch: Batch, slots: list[Tensor]) -> list[Tensor]:
    """`reference_drafter.drafts` of every document, at the slots of each step: [n_k, H]."""
    weights, config = dict(drafter.named_parameters()), drafter.config.to_dict()
    bounds, out = batch.bounds().tolist(), []
    for start, end in zip(bounds, bounds[1:], strict=False):
        inside = [[int(s) - start for s in here if start <= s < end] for here in slots]
        ids, aux = batch.input_ids[start:end], batch.aux[start:end]
        out.append(reference_drafter.drafts(weights, config, ids, aux, inside))
    return [torch.cat(pieces) for pieces in zip(*out, strict=True)]


# ---------------------------------------------------------------- training is serving


@every_shape
def test_outputs_and_gradients_are_those_of_serving_in_fp64(name: str):
    """Seven steps of two packed documents, through the fast attention and the eager one."""
    drafter, batch = drafter_of(name), documents()
    slots = valid_slots(batch, 7)
    assert 0 < len(slots[6]) < len(slots[0])
    parameters = {n: p for n, p in drafter.named_parameters() if p.requires_grad and n != "lm_head.weight"}
    results = []
    for states in (served(drafter, batch, slots), drafter(batch, slots), drafter(batch, slots, eager)):
        loss = sum((state**3).sum() for state in states)
        assert isinstance(loss, Tensor)
        results.append((states, torch.autograd.grad(loss, list(parameters.values()))))
    (expected, expected_grads), *ours = results
    for states, grads in ours:
        for got, wanted in zip(states, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)
        for parameter, got, wanted in zip(parameters, grads, expected_grads, strict=True):
            assert wanted.abs().max() > 0, parameter
            torch.testing.assert_close(got, wanted, atol=1e-8, rtol=1e-7, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["plain", "three layers, yarn", "mla"])
def test_a_document_is_the_same_alone_and_packed_behind_others(name: str):
    drafter, packed = drafter_of(name), documents((13, 10, 8))
    everywhere = [torch.arange(31)] * 3
    whole = drafter(packed, everywhere)
    cut = slice(23, 31)
    alone = Batch(("8",), (8,), packed.input_ids[cut], packed.loss_mask[cut], packed.aux[cut], *[torch.empty(0)] * 2)
    for step, state in enumerate(drafter(alone, [torch.arange(8)] * 3)):
        torch.testing.assert_close(state, whole[step][cut], atol=1e-12, rtol=1e-12)


def test_golden_rows_packed_in_either_order_give_the_golden_logits():
    tensors, shape = golden()
    drafter, batch = golden_drafter(), golden_batch()
    length = batch.lengths[0]
    order = torch.cat([torch.arange(length, 2 * length), torch.arange(length)])  # [N]: row 1, then row 0
    turned = Batch(
        ("1", "0"), batch.lengths, batch.input_ids[order], batch.loss_mask[order], batch.aux[order],
        batch.last_hidden[order], batch.last_rows,
    )  # fmt: skip
    for packed, rows in ((batch, [0, 1]), (turned, [1, 0])):
        slots = valid_slots(packed, shape["steps"])
        for step, state in enumerate(drafter(packed, slots)):
            expected = tensors[f"expected.logits.{step}"][rows].flatten(0, 1)[slots[step]]
            torch.testing.assert_close(drafter.lm_head(state), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", ["yarn", "default"])
def test_latent_attention_is_that_of_transformers_with_a_cache(rope: str):
    """Transformers' DeepSeek-V3 attention, fed one token at a time."""
    drafter = drafter_of("mla" if rope == "yarn" else "mla, plain rope")
    ours: LatentAttention = drafter.midlayer.self_attn  # type: ignore[assignment]
    config = read_config(drafter.config.to_dict())
    config.hidden_size, config._attn_implementation = 64, "eager"  # its input is embedding and hidden state
    theirs = DeepseekV3Attention(config, 0).double().eval()
    theirs.o_proj = torch.nn.Identity()
    weights = {n: w for n, w in ours.state_dict().items() if not n.startswith("o_proj")}
    theirs.load_state_dict(weights)
    tables, cache = DeepseekV3RotaryEmbedding(config), DynamicCache()
    x = torch.randn(1, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = [theirs(x[:, t : t + 1], tables(x, torch.tensor([[t]])), None, cache)[0][0, 0] for t in range(9)]
        places = torch.arange(9)
        key, value = ours.key_value(x[0], places)
        got = attend(ours.query(x[0], places), places, key, value, [], torch.tensor([0, len(places)]))
    torch.testing.assert_close(got, torch.stack(outputs), atol=2e-6, rtol=0)  # its softmax is in float32


# ---------------------------------------------------------------- settings


def names(**settings: Any) -> set[str]:
    target = DEEPSEEK if settings.get("attention") == "mla" else TARGET
    config = drafter_config(DrafterConfig(**settings), target, BOUNDARIES, DRAFT_VOCAB)
    return set(Drafter(config, torch.arange(DRAFT_VOCAB)).state_dict())


def test_a_setting_changes_the_names_that_sglang_loads():
    plain = names()
    assert names(norm_before_fc=True) - plain == {"input_norm.weight"}
    assert names(fc_norm=True) - plain == {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
    two = names(num_hidden_layers=2)
    assert not any(name.startswith("midlayer") for name in two)
    first = {name.replace("midlayer", "layers.0") for name in plain if name.startswith("midlayer")}
    second = {name.replace(".0.", ".1.") for name in first} - {"layers.1.input_layernorm.weight"}
    assert {name for name in two if name.startswith("layers")} == first | second
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert names(hidden_size=48) == names(intermediate_size=48) == plain  # these change widths alone
    latent = {name for name in names(attention="mla") if ".self_attn." in name}
    assert latent == {f"midlayer.self_attn.{part}.weight" for part in parts}


def test_a_drafter_of_another_width_trains_its_own_embedding():
    same, other = drafter_of("plain"), drafter_of("own width")
    assert not same.embed_tokens.weight.requires_grad
    assert other.embed_tokens.weight.requires_grad
    assert other.embed_tokens.weight.shape == (VOCAB, 48)
    assert other.fc.weight.shape == (48, BOUNDARIES * 32)
    pieces = TargetPieces(torch.randn(VOCAB, 32), torch.randn(VOCAB, 32), torch.rand(32))
    initialise(other, pieces, seed=0)
    assert other.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["fc_norm", "norm_before_fc", "two layers", "mla 3.1"])
def test_every_shape_starts_as_the_target_without_its_upper_layers(name: str):
    drafter, batch = drafter_of(name), documents()
    generator = torch.Generator().manual_seed(0)
    table, head = torch.randn(2, VOCAB, 32, generator=generator)
    initialise(drafter, TargetPieces(table, head, torch.rand(32, generator=generator) + 1), seed=0)
    drafter.double()
    state = drafter(batch, [torch.arange(29)])[0]
    top = batch.aux[:, -32:]
    expected = top / top.pow(2).mean(-1, keepdim=True).sqrt() * drafter.norm.weight  # norms before fc only scale it
    torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("target", "settings", "named"),
    [
        (TARGET, {"attention": "mha"}, "drafter.attention: 'mha'"),
        (TARGET, {"attention": "mla"}, "drafter.attention: 'mla' .* no q_lora_rank"),
        (DEEPSEEK | {"q_lora_rank": None}, {"attention": "mla"}, "drafter.attention: 'mla' .* no q_lora_rank"),
        (DEEPSEEK, {"attention": "mla", "num_hidden_layers": 2}, "drafter.num_hidden_layers: 2"),
        (DEEPSEEK, {"attention": "mla", "norm_before_fc": True}, "drafter.norm_before_fc: True"),
        (DEEPSEEK, {"attention": "mla", "head_dim": 16}, "drafter.head_dim: 16"),
        (DEEPSEEK, {"attention": "mla", "num_key_value_heads": 2}, "drafter.num_key_value_heads: 2"),
        (TARGET, {"num_hidden_layers": 0}, "drafter.num_hidden_layers: 0"),
        (TARGET, {"hidden_size": 96}, "drafter.hidden_size: 96"),
        (TARGET, {"hidden_size": 30}, "drafter.num_attention_heads: 4 .* 30"),
    ],
)
def test_a_shape_that_sglang_does_not_serve_is_refused(target: dict[str, Any], settings: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        drafter_config(DrafterConfig(**settings), target, BOUNDARIES, DRAFT_VOCAB)


def test_a_gqa_drafter_of_a_latent_target_has_the_width_of_its_values():
    """DeepSeek's config.json may have a head_dim, that of RoPE alone."""
    target = DEEPSEEK | {"head_dim": 4}
    assert drafter_config(DrafterConfig(), target, BOUNDARIES, DRAFT_VOCAB).head_dim == DEEPSEEK["v_head_dim"]
    assert drafter_config(DrafterConfig(head_dim=6), target, BOUNDARIES, DRAFT_VOCAB).head_dim == 6


# ---------------------------------------------------------------- export


@every_shape
def test_every_shape_survives_export(name: str, tmp_path: Path):
    drafter, batch = drafter_of(name, torch.float32), documents()
    batch.aux = batch.aux.float()
    export(tmp_path, drafter, layer_ids=[1, 3, 4], dtype="float32")
    loaded, slots = load(tmp_path), valid_slots(batch, 3)
    assert all(torch.equal(a, b) for a, b in zip(drafter(batch, slots), loaded(batch, slots), strict=True))
    config, settings = json.loads((tmp_path / "config.json").read_text()), SHAPES[name][1]
    for flag in ("norm_before_fc", "fc_norm", "norm_output"):
        assert config[flag] is settings.get(flag, False)
    assert config["num_hidden_layers"] == settings.get("num_hidden_layers", 1)
    assert (config["hidden_size"], config["target_hidden_size"]) == (settings.get("hidden_size", 32), 32)
    mla = settings.get("attention") == "mla"
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"]
    assert config["model_type"] == ("deepseek_v3" if mla else "llama")
    if mla:
        assert {key: config[key] for key in LATENT} == LATENT
        assert (config["rope_interleave"], config["num_nextn_predict_layers"]) == (True, 1)  # its layers, to SGLang


@pytest.mark.parametrize(
    ("name", "flag", "value", "said"),
    [
        ("norm_before_fc", "norm_before_fc", False, "input_norm.weight is among the weights.*norm_before_fc is False"),
        ("plain", "norm_before_fc", True, "input_norm.weight is missing .*norm_before_fc is True"),
        ("fc_norm", "fc_norm", False, "fc_norm.0.weight is among the weights.*fc_norm is False"),
        ("plain", "fc_norm", True, "fc_norm.0.weight is missing .*fc_norm is True"),
        ("two layers", "num_hidden_layers", 1, "num_hidden_layers is 1"),
        ("plain", "num_hidden_layers", 2, "num_hidden_layers is 2"),
        ("plain", "intermediate_size", 48, r"mlp.gate_proj.weight is \[40, 32\]; config.json asks for \[48, 32\]"),
    ],
)
def test_flags_and_weights_that_differ_are_refused(name: str, flag: str, value: Any, said: str, tmp_path: Path):
    export(tmp_path, drafter_of(name, torch.float32), layer_ids=[1, 3, 4], dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {flag: value}))
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_a_weight_that_no_flag_asks_for_is_refused(tmp_path: Path):
    export(tmp_path, drafter_of("plain", torch.float32), layer_ids=[1, 3, 4], dtype="float32")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "fc.bias": torch.zeros(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="fc.bias is among the weights"):
        load(tmp_path)


class Recorded(SimpleNamespace):
    """Stands for a model in SGLang's `load_weights`: has named parameters, and keeps what reaches them."""

    def __init__(self, parameters: list[str]) -> None:
        super().__init__(loaded={})
        self._names = parameters

    def named_parameters(self):
        for name in self._names:

            def loader(_: Any, tensor: Tensor, shard: Any = None, name: str = name) -> None:
                self.loaded[name, shard] = tensor

            yield name, SimpleNamespace(weight_loader=loader)

    def post_load_weights(self) -> None:
        pass


@pytest.mark.parametrize("name", ["all norms", "two layers", "mla 3.1"])
def test_sglang_finds_a_place_for_every_exported_tensor(name: str, tmp_path: Path):
    """By SGLang's own `load_weights`; q/k/v, gate/up and the two latent projections are one parameter there."""
    llama = pytest.importorskip("sglang.srt.models.llama_eagle3")
    kimi = pytest.importorskip("sglang.srt.models.kimi_k25_eagle3")
    drafter = drafter_of(name, torch.float32)
    export(tmp_path, drafter, layer_ids=[1, 3, 4], dtype="float32")
    weights = load_file(tmp_path / "model.safetensors")
    mla, several = name.startswith("mla"), name == "two layers"
    layers = ["layers.0", "layers.1"] if several else ["midlayer" if mla else "layers.0"]
    parts = ["hidden_norm", "post_attention_layernorm", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{p}" for p in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")] if mla else []
    parts += ["self_attn.fused_qkv_a_proj_with_mqa" if mla else "self_attn.qkv_proj"]
    places = [f"model.{layer}.{part}" for layer in layers for part in parts] + [f"model.{layers[0]}.input_layernorm"]
    places += [f"model.{part}" for part in ("embed_tokens", "fc", "norm")] + ["lm_head"]
    places += ["model.input_norm"] if name == "all norms" else []
    places += [] if several else [f"model.fc_norm.{i}" for i in range(3)]
    model = Recorded([f"{place}.weight" for place in places])
    cls = kimi.Eagle3DeepseekV2ForCausalLM if mla else llama.LlamaForCausalLMEagle3
    cls.load_weights(model, weights.items())
    assert {place for place, _ in model.loaded} == {f"{place}.weight" for place in places}
    assert len(model.loaded) == len(weights) - 2 - mla  # all but d2t and t2d
    assert torch.equal(model.hot_token_id, drafter.draft_ids)
    if mla:
        fused = model.loaded["model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight", None]
        halves = [weights[f"midlayer.self_attn.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        assert torch.equal(fused, torch.cat(halves))


def test_sglang_puts_the_target_s_embedding_in_place_of_any(monkeypatch: pytest.MonkeyPatch):
    """By the method of its own class that its EAGLE-3 worker calls once the drafter is loaded."""
    llama = pytest.importorskip("sglang.srt.models.llama")
    monkeypatch.setattr(llama, "current_platform", SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None))
    for width, replaced in ((32, True), (48, False)):
        table = torch.nn.Embedding(VOCAB, width)
        config = SimpleNamespace(hidden_size=width, target_hidden_size=32)
        model = SimpleNamespace(config=config, model=SimpleNamespace(embed_tokens=table))
        before, theirs = table.weight, torch.nn.Parameter(torch.randn(VOCAB, 32))
        llama.LlamaForCausalLM.set_embed(model, theirs)
        assert table.weight is (theirs if replaced else before)


# ---------------------------------------------------------------- RoPE in SGLang


@pytest.mark.parametrize(
    "scaling",
    [YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}, None]
    + [{"type": "linear", "factor": 4.0}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}],
)
def test_rope_and_scale_of_an_mla_drafter_are_the_same_in_sglang(scaling: Any, monkeypatch: pytest.MonkeyPatch):
    factory = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory")
    model_config = pytest.importorskip("sglang.srt.configs.model_config")
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)  # else it looks for vllm's kernel
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.rope_variant.get_device", lambda: "cpu")
    target = TARGET | LATENT | {"rope_scaling": scaling}
    config = drafter_config(DrafterConfig(attention="mla"), target, BOUNDARIES, DRAFT_VOCAB)
    ours = Drafter(config, torch.arange(DRAFT_VOCAB)).midlayer.self_attn
    assert isinstance(ours, LatentAttention)
    rope = config.to_dict()["rope_parameters"]
    # As Eagle3MLADecoderLayer and DeepseekV2AttentionMLA ask for it
    stretched = None if rope["rope_type"] == "default" else rope | {"rope_type": "deepseek_yarn"}
    theirs = factory.get_rope(8, 8, 512, rope["rope_theta"], False, stretched, torch.float32)
    positions = torch.tensor([0, 1, 17, 63, 64, 300])
    x = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(0))
    turned, _ = theirs.forward_native(positions, x.clone(), x.clone())
    torch.testing.assert_close(ours._rotate(x, positions), turned, atol=2e-4, rtol=1e-4)
    scale = model_config.compute_mla_mscale_scaling(stretched, 1.0) if stretched else 1.0
    assert ours.sharpness == pytest.approx(scale, rel=1e-6)
