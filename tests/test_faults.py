"""What SGLang would ignore in a drafter's folder is called by its name: each fault is planted in an exported one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter_shapes import DEEPSEEK, DRAFT_VOCAB, SHAPES, VOCAB, documents, drafter_of
from torch import Tensor

from eagle3_ray.config import ConfigError, DrafterConfig, ExportConfig, check_export
from eagle3_ray.drafter.checkpoint import check_folder, export, load
from eagle3_ray.drafter.model import valid_slots

LAYERS = {"num_hidden_layers": 6}
IDS = torch.arange(DRAFT_VOCAB) * 2  # [Vd]: the exported drafters' vocabulary
ZEROS = torch.zeros(32)


def exported(folder: Path, name: str = "plain", dtype: str = "float32") -> Path:
    export(folder, drafter_of(name, torch.float32), [1, 3, 4], dtype)
    return folder


def change(folder: Path, config: dict[str, Any], edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Plant values in config.json (None takes a key away), and edit the weights."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    values = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    tensors = load_file(weights)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)


def as_it_is(tensors: dict[str, Tensor]) -> None:
    pass


def put(**values: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in values.items()})


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(names)]:
            del tensors[name]

    return edit


def cast(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].half()


def broken(*names: str) -> Callable[[dict[str, Tensor]], None]:
    """One infinity in the middle of each tensor, and its opposite where there is room."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in names:
            flat = tensors[name].flatten()
            flat[len(flat) // 2], flat[0] = torch.inf, -torch.inf

    return edit


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def eagle(**values: Any) -> dict[str, Any]:
    return {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True} | values,
        "num_aux_hidden_states": None,
    }


def marked(ids: Tensor, size: int = VOCAB) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)  # [V]


BIAS = put(midlayer__self_attn__q_proj__bias=ZEROS)
WIDE = "fc.weight is [32, 96]; config.json asks for [32, 64] for 2 layers of 32"
FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], None], list[str]]] = {
    # the drafter's shape, planted in config.json, planted in the weights, a part of each fault, in order
    "norm_before_fc without weights": (
        "plain",
        {"norm_before_fc": True},
        as_it_is,
        ["input_norm.weight is missing from the weights, but config.json's norm_before_fc is True"],
    ),
    "norm_before_fc's weights without flag": (
        "norm_before_fc",
        {"norm_before_fc": False},
        as_it_is,
        ["input_norm.weight is among the weights, but config.json's norm_before_fc is False"],
    ),
    "fc_norm without weights": (
        "plain",
        {"fc_norm": True},
        as_it_is,
        ["fc_norm.0.weight is missing from the weights (with 2 more), but config.json's fc_norm is True"],
    ),
    "fc_norm's weights without flag": (
        "fc_norm",
        {"fc_norm": False},
        as_it_is,
        ["fc_norm.0.weight is among the weights (with 2 more), but config.json's fc_norm is False"],
    ),
    "layers without weights": (
        "two layers",
        {"num_hidden_layers": 3},
        as_it_is,
        ["layers.2.hidden_norm.weight is missing from the weights (with 8 more), but config.json's num_hidden_layers"],
    ),
    "fc bias without flag": (
        "plain",
        {},
        put(fc__bias=ZEROS),
        ["fc.bias is among the weights, but config.json's bias is None"],
    ),
    "bias without weights": (
        "mla",
        {"bias": True},
        as_it_is,
        ["fc.bias is missing from the weights, but config.json's bias is True"],
    ),
    "attention bias": (
        "plain",
        {},
        BIAS,
        ["midlayer.self_attn.q_proj.bias is among the weights, but SGLang's EAGLE-3 layer has no bias there"],
    ),
    "attention_bias without weights": (
        "plain",
        {"attention_bias": True},
        as_it_is,
        ["midlayer.self_attn.o_proj.bias is missing from the weights, but config.json's attention_bias is True"],
    ),
    "a name that SGLang has not": (
        "plain",
        {},
        renamed("norm.weight", "draft_model.norm.weight"),
        ["draft_model.norm.weight is among the weights, but", "norm.weight is missing"],
    ),
    "norm_before_residual": (
        "plain",
        {"norm_before_residual": True},
        as_it_is,
        ["norm_before_residual is True; SGLang has no such thing"],
    ),
    "norm_before_fc of mla": (
        "mla",
        {"norm_before_fc": True},
        as_it_is,
        ["norm_before_fc is True; SGLang's Eagle3DeepseekV2ForCausalLM has no such thing"],
    ),
    "another class": (
        "plain",
        {"architectures": ["LlamaForCausalLM"]},
        as_it_is,
        ["architectures is ['LlamaForCausalLM']; SGLang serves"],
    ),
    "no eagle_config": (
        "plain",
        {"eagle_config": None},
        as_it_is,
        ["eagle_config is None; SGLang would choose layers itself"],
    ),
    "no layer ids": (
        "plain",
        {"eagle_config": {"use_aux_hidden_state": True}},
        as_it_is,
        ["eagle_config.eagle_aux_hidden_state_layer_ids is None; SGLang would choose"],
    ),
    "layer ids in another order": (
        "plain",
        eagle(eagle_aux_hidden_state_layer_ids=[4, 1, 3]),
        as_it_is,
        ["eagle_aux_hidden_state_layer_ids is [4, 1, 3], not strictly ascending"],
    ),
    "a layer the target has not": (
        "plain",
        eagle(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        as_it_is,
        ["eagle_aux_hidden_state_layer_ids is [1, 3, 6]; SGLang captures layers 0 to 5"],
    ),
    "fewer layers than fc reads": ("plain", eagle(eagle_aux_hidden_state_layer_ids=[1, 3]), as_it_is, [WIDE]),
    "fewer layers than config.json says": (
        "plain",
        eagle(eagle_aux_hidden_state_layer_ids=[1, 3]) | {"num_aux_hidden_states": 3},
        as_it_is,
        ["num_aux_hidden_states is 3, but eagle_aux_hidden_state_layer_ids [1, 3]"],
    ),
    "no aux states": ("plain", eagle(use_aux_hidden_state=False), as_it_is, ["use_aux_hidden_state is False"]),
    "tied": (
        "plain",
        {"tie_word_embeddings": True},
        as_it_is,
        ["tie_word_embeddings is True; SGLang would take the embedding"],
    ),
    "no draft_vocab_size": (
        "plain",
        {"draft_vocab_size": None},
        as_it_is,
        [
            "draft_vocab_size is None; SGLang would take the target's head",
            "lm_head.weight is [41, 32]",
            "d2t has 41 entries",
        ],
    ),
    "another draft_vocab_size": (
        "plain",
        {"draft_vocab_size": 40},
        as_it_is,
        [
            "lm_head.weight is [41, 32]; config.json asks for [40, 32] for a draft_vocab",
            "d2t has 41 entries, but draft_vocab_size is 40",
        ],
    ),
    "d2t too short": (
        "plain",
        {},
        put(d2t=IDS[:40] // 2),
        ["d2t has 40 entries, but draft_vocab_size is 41", "t2d marks 41 tokens, not the 40"],
    ),
    "no d2t": ("plain", {}, without("d2t"), ["d2t is missing, but draft_vocab_size is 41 of 97"]),
    "d2t of ids": ("plain", {}, put(d2t=IDS), ["d2t holds ids (0 to 80), not target id minus draft id"]),
    "d2t of ids, no t2d": (
        "plain",
        {},
        lambda tensors: tensors.update(d2t=tensors.pop("t2d").nonzero()[:, 0]),
        ["d2t holds ids (0 to 80), not target id minus draft id"],
    ),
    "d2t beyond the target": (
        "plain",
        {},
        put(d2t=torch.full((DRAFT_VOCAB,), 60)),
        ["d2t plus the draft id names 97 of 97 tokens"],
    ),
    "d2t with a token twice": (
        "plain",
        {},
        put(d2t=-torch.arange(DRAFT_VOCAB)),
        ["d2t plus the draft id names ids that do not ascend, or come twice"],
    ),
    "d2t in another order": (
        "plain",
        {},
        put(d2t=IDS.flip(0) - torch.arange(DRAFT_VOCAB)),
        ["d2t plus the draft id names ids that do not ascend, or come twice"],
    ),
    "t2d of another vocabulary size": (
        "plain",
        {},
        put(d2t=IDS * 0, t2d=marked(IDS // 2, 101)),
        ["t2d has 101 entries, the target 97 tokens"],
    ),
    "t2d of other tokens": ("plain", {}, put(t2d=marked(IDS + 1)), ["t2d marks 41 tokens, not the 41 that d2t names"]),
    "another vocab_size": (
        "plain",
        {"vocab_size": 101},
        as_it_is,
        ["vocab_size is 101, the target's 97", "embed_tokens.weight is [97, 32]; config.json asks for [101, 32]"],
    ),
    "another target_hidden_size": (
        "plain",
        {"target_hidden_size": 16},
        as_it_is,
        [
            "target_hidden_size is 16, the target's hidden_size 32",
            "fc.weight is [32, 96]; config.json asks for [32, 48]",
        ],
    ),
    "no target_hidden_size": (
        "own width",
        {"target_hidden_size": None},
        as_it_is,
        [
            "hidden_size is 48, the target's hidden_size 32",
            "fc_norm.0.weight",
            "fc_norm.1.weight",
            "fc_norm.2.weight",
            "fc.weight",
        ],
    ),
    "no embedding of its own": (
        "own width",
        {},
        without("embed_tokens"),
        ["embed_tokens.weight is missing from the weights"],
    ),
    "fp16 in fp32": ("plain", {}, cast, ["fc.weight is float16, but config.json's dtype is 'float32'"]),
    "fp16 said, fp32 stored": (
        "plain",
        {"dtype": "float16"},
        as_it_is,
        ["embed_tokens.weight (and 13 more) is float32, but config.json's dtype is 'float16'"],
    ),
    "a value that is not finite": (
        "plain",
        {},
        broken("fc.weight"),
        ["model.safetensors: fc.weight holds values that are not finite; SGLang would draft from them"],
    ),
    "several such, and an infinity and its opposite": (
        "two layers",
        {},
        broken("fc.weight", "lm_head.weight", "norm.weight"),
        [" (with 2 more) holds values that are not finite"],
    ),
    "RoPE by the older key, beside the newer": (
        "plain",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        as_it_is,
        ["rope_scaling is {'rope_type': 'linear', 'factor': 4.0} beside rope_parameters {'rope_theta': 10000.0"],
    ),
    "RoPE that is none": (
        "plain",
        {"rope_parameters": {"rope_type": "linear"}},
        as_it_is,
        ['its RoPE cannot be read, nor would SGLang start: "Missing required keys'],
    ),
    "another activation": ("plain", {"hidden_act": "gelu"}, as_it_is, ["hidden_act is 'gelu'"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(fault: str, tmp_path: Path):
    name, config, edit, expected = FAULTS[fault]
    change(exported(tmp_path, name), config, edit)
    found = check_folder(tmp_path, SHAPES[name][0] | LAYERS)
    assert len(found) == len(expected) and all(part in said for part, said in zip(expected, found, strict=True)), found
    assert all(said.startswith(("config.json: ", "model.safetensors: ")) and "SGLang" in said for said in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_an_exported_folder_has_no_fault(name: str, dtype: str, tmp_path: Path):
    target = SHAPES[name][0] | LAYERS
    assert check_folder(exported(tmp_path, name, dtype), target) == []
    assert check_folder(tmp_path, {"architectures": ["Wrapped"], "text_config": target}) == []


def test_what_sglang_reads_alike_is_no_fault(tmp_path: Path):
    """Another trainer's names, older words for flags, no t2d, no embedding, a table of RoPE that is made anew."""

    def edit(tensors: dict[str, Tensor]) -> None:
        without("t2d", "embed_tokens")(tensors)
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            renamed(name, name.replace("midlayer.", "model.layers.0."))(tensors)
        for i, word in enumerate(("low", "mid", "high")):
            renamed(f"fc_norm.{i}.weight", f"aux_norm_{word}.weight")(tensors)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["d2t"] //= 2  # so that some tokens are neighbours

    older = {"fc_norm": None, "use_aux_norm": True, "dtype": None, "torch_dtype": "float32", "target_hidden_size": None}
    older |= {"rope_scaling": {"type": "default", "rope_theta": 1e4}}
    change(exported(tmp_path, "fc_norm"), older | {"num_aux_hidden_states": None}, edit)
    assert check_folder(tmp_path, SHAPES["fc_norm"][0] | LAYERS) == []


def test_a_folder_that_cannot_be_read_is_one_fault(tmp_path: Path):
    (said,) = check_folder(tmp_path, DEEPSEEK | LAYERS)
    assert re.search(r"config.json and safetensors cannot be read .*no config.json|cannot be read", said)
    exported(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    (said,) = check_folder(tmp_path, DEEPSEEK | LAYERS)
    assert "cannot be read" in said and "nothing else is opened" in said


# ---------------------------------------------------------------- export.embedding


def test_an_embedding_left_out_is_the_target_s_when_loaded_again(tmp_path: Path):
    drafter, batch = drafter_of("plain", torch.float32), documents()
    batch.aux = batch.aux.float()
    for folder, embedding in (("whole", True), ("part", False)):
        export(tmp_path / folder, drafter, [1, 3, 4], "float32", embedding)
        assert check_folder(tmp_path / folder, SHAPES["plain"][0] | LAYERS) == []
    whole, part = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert whole.keys() - part.keys() == {"embed_tokens.weight"}
    loaded, slots = load(tmp_path / "part", drafter.embed_tokens.weight.detach()), valid_slots(batch, 3)
    assert all(torch.equal(a, b) for a, b in zip(drafter(batch, slots), loaded(batch, slots), strict=True))
    with pytest.raises(ValueError, match="embed_tokens.weight is missing"):
        load(tmp_path / "part")


def test_a_drafter_of_its_own_width_keeps_its_embedding(tmp_path: Path):
    with pytest.raises(ValueError, match="another width"):
        export(tmp_path, drafter_of("own width", torch.float32), [1, 3, 4], "float32", embedding=False)
    left_out, target = ExportConfig(embedding="none"), {"hidden_size": 32}
    with pytest.raises(ConfigError, match="export.embedding: 'none' with drafter.hidden_size=48"):
        check_export(left_out, DrafterConfig(hidden_size=48), target)
    for width in (None, 32):
        check_export(left_out, DrafterConfig(hidden_size=width), target)
