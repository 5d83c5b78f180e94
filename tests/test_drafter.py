"""The drafter against the golden step, its fast paths against their definitions, and what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.attention import attend, eager
from eagle3_ray.drafter.checkpoint import export, load
from eagle3_ray.drafter.loss import (
    Metrics,
    Targets,
    target_argmax,
    targets,
    ttt_loss,
    walk,
)
from eagle3_ray.drafter.model import Batch, Drafter, valid_slots
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import TargetPieces, initialise

GOLDEN = Path(__file__).parent / "data" / "eagle3_ttt.safetensors"


def golden() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(GOLDEN, "pt") as file:
        shape = json.loads(file.metadata()["config"])
    return load_file(GOLDEN), shape


def golden_drafter(**settings: Any) -> Drafter:
    tensors, shape = golden()
    target = {
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["inter"],
        "vocab_size": shape["vocab"],
        "rms_norm_eps": shape["eps"],
        "rope_theta": shape["theta"],
        "max_position_embeddings": 512,
    }
    d2t = tensors["d2t"]
    config = drafter_config(DrafterConfig(**settings), target, num_aux=3, draft_vocab_size=len(d2t))
    drafter = Drafter(config, d2t + torch.arange(len(d2t)))
    prefix = "weights."
    weights = {
        name[len(prefix) :].removeprefix("model.").replace("layers.0", "midlayer"): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    drafter.load_state_dict({**weights, "d2t": d2t, "t2d": tensors["t2d"]})
    return drafter


def golden_batch() -> Batch:
    """Both rows end to end, with the last hidden state at every token."""
    tensors, _ = golden()
    rows, length = tensors["input_ids"].shape
    return Batch(
        ids=tuple(map(str, range(rows))),
        lengths=(length,) * rows,
        input_ids=tensors["input_ids"].flatten(),
        loss_mask=tensors["loss_mask"].flatten(),
        aux=tensors["aux"].flatten(0, 1),
        last_hidden=tensors["last_hidden"].flatten(0, 1),
        last_rows=torch.arange(rows * length),
    )


def golden_loss(drafter: Drafter, steps: int = 4, **kind: Any) -> tuple[Tensor, Metrics, Tensor, Targets]:
    head = golden()[0]["target_lm_head"]
    batch = golden_batch()
    goal = targets(batch, target_argmax(batch.last_hidden, head), drafter, steps)
    return *ttt_loss(drafter, batch, goal, head[drafter.draft_ids], goal.count(), **kind), goal


# ---------------------------------------------------------------- the golden step


def test_logits_at_every_slot_equal_the_golden_ones():
    tensors, shape = golden()
    drafter, batch = golden_drafter(), golden_batch()
    everywhere = [torch.arange(len(batch.input_ids))] * shape["steps"]
    for step, state in enumerate(drafter(batch, everywhere)):
        logits = drafter.lm_head(state).view(2, -1, shape["draft_vocab"])
        torch.testing.assert_close(logits, tensors[f"expected.logits.{step}"], atol=1e-4, rtol=0)


def test_logits_at_valid_slots_alone_equal_the_golden_ones():
    tensors, shape = golden()
    drafter, batch = golden_drafter(), golden_batch()
    slots = valid_slots(batch, shape["steps"])
    for step, state in enumerate(drafter(batch, slots)):
        expected = tensors[f"expected.logits.{step}"].flatten(0, 1)[slots[step]]
        torch.testing.assert_close(drafter.lm_head(state), expected, atol=1e-4, rtol=0)


def test_valid_slots_equal_the_golden_ones():
    tensors, shape = golden()
    for step, slots in enumerate(valid_slots(golden_batch(), shape["steps"])):
        assert slots.tolist() == tensors[f"expected.valid.{step}"].flatten().nonzero()[:, 0].tolist()


def test_loss_and_accuracies_equal_the_golden_ones():
    tensors, _ = golden()
    loss, metrics, _, _ = golden_loss(golden_drafter())
    torch.testing.assert_close(loss, tensors["expected.loss"].mean(), atol=1e-4, rtol=0)
    for name, values in metrics.means().items():
        expected = tensors["expected." + name]
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def test_step_decay_weighs_the_golden_steps():
    expected = golden()[0]["expected.loss"]
    loss, metrics, _, _ = golden_loss(golden_drafter(), step_decay=0.5)
    weights = torch.tensor([1, 0.5, 0.25, 0.125])
    torch.testing.assert_close(loss, (weights * expected).sum() / weights.sum(), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(metrics.means()["loss"]), expected, atol=1e-4, rtol=0)  # these stay plain


# ---------------------------------------------------------------- fast paths against their definitions


def test_whole_drafter_with_fast_attention_equals_eager_in_fp64():
    drafter, batch = golden_drafter().double(), golden_batch()
    batch.aux = batch.aux.double()
    slots = valid_slots(batch, 4)
    grads = []
    for attention in (attend, eager):
        drafter.zero_grad()
        sum((state**3).sum() for state in drafter(batch, slots, attention)).backward()
        grads.append({name: p.grad for name, p in drafter.named_parameters() if p.grad is not None})
    assert grads[0].keys() == {name for name, p in drafter.named_parameters() if p.requires_grad} - {"lm_head.weight"}
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-10, rtol=1e-10)


def test_context_after_a_slot_and_other_samples_change_nothing():
    drafter, batch = golden_drafter(), golden_batch()
    slots = [torch.tensor([4, 21])] * 4
    before = drafter(batch, slots)
    batch.aux[5:19] += 1.0  # behind slot 4, in its sample; slot 21 is in the other one
    batch.input_ids[9:19] += 1
    for old, new in zip(before, drafter(batch, slots), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("kind", [{}, {"kind": "lk_alpha"}, {"kind": "lk_lambda", "step_decay": 0.7}], ids=str)
def test_micro_batches_add_up_to_the_whole(kind: dict[str, Any]):
    drafter, whole = golden_drafter(), golden_batch()
    head = golden()[0]["target_lm_head"]
    loss, metrics, prefix, _ = golden_loss(drafter, **kind)
    halves = []
    for row in range(2):
        cut = slice(19 * row, 19 * (row + 1))
        tensors = (whole.input_ids[cut], whole.loss_mask[cut], whole.aux[cut], whole.last_hidden[cut])
        half = Batch(("x",), (19,), *tensors, torch.arange(19))
        halves.append((half, targets(half, target_argmax(half.last_hidden, head), drafter, 4)))
    counts = sum(goal.count() for _, goal in halves)
    assert isinstance(counts, Tensor)
    parts = [ttt_loss(drafter, half, goal, head[drafter.draft_ids], counts, **kind) for half, goal in halves]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    torch.testing.assert_close((parts[0][1] + parts[1][1]).stacked(), metrics.stacked(), atol=0, rtol=1e-5)
    assert torch.equal(torch.cat([parts[0][2], parts[1][2]]), prefix)


# ---------------------------------------------------------------- accuracies


def told(goal: Targets, drafts: dict[int, list[bool]]) -> tuple[Metrics, list[int]]:
    """The accuracies of the golden batch when slot i is right at the steps that `drafts[i]` says, and else wrong."""
    drafter, batch = golden_drafter(), golden_batch()
    said = {}  # the draft id that is said at (step, slot)
    for step, (slots, rows) in enumerate(zip(goal.slots, goal.rows, strict=True)):
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            wrong = not drafts.get(slot, [False] * 4)[step]
            said[step, slot] = (int(goal.draft[row]) + wrong) % 41
    drafter.lm_head.weight.data = torch.eye(41, 64) * 100

    def states(_: Batch, slots: list[Tensor]) -> list[Tensor]:
        return [torch.eye(64)[[said[step, slot] for slot in here.tolist()]] for step, here in enumerate(slots)]

    drafter.forward = states  # type: ignore[assignment]
    head = golden()[0]["target_lm_head"][drafter.draft_ids]
    _, metrics, prefix = ttt_loss(drafter, batch, goal, head, goal.count())
    return metrics, prefix.tolist()


def test_accuracies_count_hits_and_unbroken_hits():
    _, _, _, goal = golden_loss(golden_drafter())
    goal.draft = torch.arange(len(goal.draft)) % 41  # no target is out of vocabulary
    metrics, prefix = told(goal, {4: [True] * 4, 6: [True, False, True, False]})
    assert metrics.hits.tolist() == [2, 1, 2, 1]
    assert metrics.prefix_hits.tolist() == [2, 1, 1, 1]
    assert metrics.slots.tolist() == metrics.count.tolist() == [len(slots) for slots in goal.slots]
    assert (prefix[4], prefix[6], sum(prefix)) == (4, 1, 5)
    assert metrics.means()["prefix_accuracy"][2] == 1 / len(goal.slots[2])


def test_an_out_of_vocabulary_target_has_no_loss_and_is_a_miss():
    drafter = golden_drafter()
    _, metrics, _, goal = golden_loss(drafter)
    outside = [int((goal.draft[rows] < 0).sum()) for rows in goal.rows]
    assert sum(outside) > 0
    assert metrics.count.tolist() == [len(s) - n for s, n in zip(goal.slots, outside, strict=True)]
    right, _ = told(goal, {slot: [True] * 4 for slot in range(38)})
    assert right.hits.tolist() == metrics.count.tolist()  # even a drafter that is always right misses those


def test_walk_by_hand():
    # tokens  0 1 | 2 3 4 5 6 7 | 8 | 9 10 11: two answers, x_2..x_7 and x_9..x_11
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    hits = torch.tensor([0, 2, 9, 9, 1, 9, 0, 0, 0, 9, 0, 0])
    # x_2 from prefill. Slot 1: 2 hits + bonus = x_3 x_4 x_5, on to slot 4: 1 hit + bonus = x_6 x_7, done.
    # x_9 from prefill. Slot 8: no hit, bonus = x_10. Slot 9: hits end with the answer: x_11, done.
    assert walk(hits, mask, num_steps=3) == (6 + 3, 2 + 2)
    # One draft a step. Slot 1: x_3 x_4. Slot 3: x_5 x_6. Slot 5: x_7.
    assert walk(hits, mask, num_steps=1) == (6 + 3, 3 + 2)
    assert walk(hits, torch.zeros(12).bool(), num_steps=3) == (0, 0)
    assert walk(torch.zeros(3).long(), torch.tensor([0, 1, 0]).bool(), 3) == (1, 0)  # prefill's own token was all


# ---------------------------------------------------------------- settings


def test_norm_output_feeds_back_the_normed_state():
    plain, normed = golden_drafter(), golden_drafter(norm_output=True)
    batch = golden_batch()
    slots = valid_slots(batch, 3)
    a, b = plain(batch, slots), normed(batch, slots)
    assert torch.equal(a[0], b[0])
    assert not torch.allclose(a[1], b[1], atol=1e-2)
    assert (plain.config.norm_output, normed.config.norm_output) == (False, True)


TARGET: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
}


def test_shape_follows_the_target_or_the_setting():
    config = drafter_config(DrafterConfig(), TARGET, num_aux=3, draft_vocab_size=50)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 3, 128)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-6, 5e5)
    changed = DrafterConfig(intermediate_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=20)
    drafter = Drafter(drafter_config(changed, TARGET, num_aux=4, draft_vocab_size=50), torch.arange(50))
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == (160, 192)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (40, 192)
    assert shapes["midlayer.mlp.up_proj.weight"] == (64, 96)
    assert shapes["fc.weight"] == (96, 4 * 96)


@pytest.mark.parametrize(
    ("settings", "num_aux", "named"),
    [
        (DrafterConfig(num_attention_heads=7), 3, "drafter.num_attention_heads: 7"),
        (DrafterConfig(num_key_value_heads=4), 3, "drafter.num_key_value_heads: 4"),
        (DrafterConfig(head_dim=15), 3, "drafter.head_dim: 15"),
        (DrafterConfig(), 1, "capture.boundaries: 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings: DrafterConfig, num_aux: int, named: str):
    with pytest.raises(ConfigError, match=named):
        drafter_config(settings, TARGET, num_aux, draft_vocab_size=50)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": 1024},
        YARN,
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 3.0},
        {"rope_type": "default", "mrope_section": [2, 3, 3]},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        {"full_attention": {"rope_type": "default", "rope_theta": 7e4}, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=lambda s: (s or {}).get("type") or (s or {}).get("rope_type", "none"),
)
def test_rope_of_the_exported_config_is_the_same_in_sglang(
    scaling: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
):
    factory = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory")
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)  # else it looks for vllm's kernel
    config = drafter_config(DrafterConfig(), {**TARGET, "rope_scaling": scaling}, num_aux=3, draft_vocab_size=50)
    drafter = Drafter(config, torch.arange(50))
    positions = torch.tensor([0, 1, 17, 255, 300, 3000])
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    rope_parameters = config.to_dict()["rope_parameters"]
    # As sglang.srt.models.llama.LlamaAttention asks for it
    rope = factory.get_rope(
        config.head_dim,
        rotary_dim=config.head_dim,
        max_position=config.max_position_embeddings,
        base=rope_parameters["rope_theta"],
        rope_scaling=rope_parameters,
        dtype=torch.float32,
    )
    served, _ = rope.forward_native(positions, x.clone(), x.clone())
    trained = drafter.midlayer.self_attn._rotate(x, positions).flatten(1)
    torch.testing.assert_close(trained, served.view(6, 96), atol=2e-4, rtol=1e-4)


def test_rope_types_that_are_left_out_are_read_in_two_ways(monkeypatch: pytest.MonkeyPatch):
    factory = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory")
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))

    def served(scaling: dict[str, Any], positions: list[int]) -> Tensor:
        rope = factory.get_rope(16, 16, 4096, 1e4, True, {"rope_theta": 1e4, **scaling}, torch.float32)
        turn = getattr(rope, "forward_native", rope.forward)
        return turn(torch.tensor(positions), x.clone(), x.clone())[0].flatten()

    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    config = LlamaConfig(head_dim=16, max_position_embeddings=4096, rope_parameters={"rope_theta": 1e4, **dynamic})
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.tensor([[1, 100]]))
    trained = (x * cos[0] + rotate_half(x) * sin[0]).flatten()
    torch.testing.assert_close(trained, served({"rope_type": "default"}, [1, 100]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(trained, served(dynamic, [1, 100]), atol=1e-2)

    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope["original_max_position_embeddings"] = 1024
    alone, beside_a_long_one = (served(longrope, [100, other])[:16] for other in (100, 2000))
    assert not torch.allclose(alone, beside_a_long_one, atol=1e-2)


# ---------------------------------------------------------------- a new drafter


def test_initial_drafter_is_the_target_without_its_upper_layers():
    drafter, batch = golden_drafter(), golden_batch()
    tensors, _ = golden()
    table, head, norm = tensors["weights.model.embed_tokens.weight"], tensors["target_lm_head"], torch.rand(64) + 1
    initialise(drafter, TargetPieces(table, head, norm), seed=1)
    logits = drafter.lm_head(drafter(batch, [torch.arange(38)])[0])
    top = torch.nn.functional.rms_norm(batch.aux[:, -64:], (64,), norm, 1e-5)
    torch.testing.assert_close(logits, (top @ head.T)[:, drafter.draft_ids], atol=1e-4, rtol=1e-4)
    again = golden_drafter()
    initialise(again, TargetPieces(table, head, norm), seed=2)
    up = "midlayer.mlp.up_proj.weight"
    assert not torch.equal(drafter.state_dict()[up], again.state_dict()[up])


def test_fc_and_lm_head_start_as_their_settings_say():
    drafter, batch = golden_drafter(), golden_batch()
    table, head = golden()[0]["weights.model.embed_tokens.weight"], golden()[0]["target_lm_head"]
    pieces = TargetPieces(table, head, torch.rand(64) + 1)
    boundaries = batch.aux.view(-1, 3, 64)  # [N, 3, H]
    initialise(drafter, pieces, 1, DrafterConfig(initial_fc="average"))
    torch.testing.assert_close(drafter.fc(batch.aux), boundaries.mean(1), atol=1e-5, rtol=1e-5)
    initialise(drafter, pieces, 1, DrafterConfig(initial_fc="random"))
    assert drafter.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(drafter.lm_head.weight, head[drafter.draft_ids])
    initialise(drafter, pieces, 1, DrafterConfig(initial_lm_head="random"))
    assert drafter.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    torch.testing.assert_close(drafter.fc(batch.aux), boundaries[:, 2])


# ---------------------------------------------------------------- export


def test_export_and_load_give_the_same_drafter(tmp_path: Path):
    drafter = golden_drafter(norm_output=True)
    export(tmp_path, drafter, layer_ids=[1, 3, 4], dtype="float32")
    loaded = load(tmp_path)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    batch = golden_batch()
    slots = valid_slots(batch, 3)
    assert all(torch.equal(a, b) for a, b in zip(drafter(batch, slots), loaded(batch, slots), strict=True))


def test_export_says_what_sglang_reads(tmp_path: Path):
    export(tmp_path, golden_drafter(), layer_ids=[1, 3, 4], dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    assert (config["tie_word_embeddings"], config["draft_vocab_size"], config["vocab_size"]) == (False, 41, 97)
    assert (config["target_hidden_size"], config["num_aux_hidden_states"]) == (64, 3)
    assert (config["norm_output"], config["dtype"], config["num_hidden_layers"]) == (False, "bfloat16", 1)
    weights = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16, torch.int64, torch.bool}
    with pytest.raises(ValueError, match="2 layer ids for 3 boundaries"):
        export(tmp_path, golden_drafter(), layer_ids=[1, 3], dtype="bfloat16")


def test_sglang_loads_every_exported_tensor(tmp_path: Path):
    """By SGLang's own `load_weights`, onto parameters that only record what reaches them."""
    eagle3 = pytest.importorskip("sglang.srt.models.llama_eagle3")
    export(tmp_path, golden_drafter(), layer_ids=[1, 3, 4], dtype="float32")
    weights = load_file(tmp_path / "model.safetensors")
    loaded: dict[tuple[str, Any], Tensor] = {}

    class Parameter:
        def __init__(self, name: str) -> None:
            self.name = name

        def weight_loader(self, _: Parameter, tensor: Tensor, shard: Any = None) -> None:
            loaded[self.name, shard] = tensor

    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_up_proj", "mlp.down_proj"]
    names = [f"model.layers.0.{name}.weight" for name in layer]
    names += ["model.embed_tokens.weight", "model.fc.weight", "model.norm.weight", "lm_head.weight"]
    model = SimpleNamespace(named_parameters=lambda: [(name, Parameter(name)) for name in names])
    eagle3.LlamaForCausalLMEagle3.load_weights(model, weights.items())
    assert {name for name, _ in loaded} == set(names)
    assert len(loaded) == len(weights) - 2  # all but d2t and t2d
    assert torch.equal(model.hot_token_id, golden_drafter().draft_ids)
