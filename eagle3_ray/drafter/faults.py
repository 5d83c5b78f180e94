"""What SGLang 0.5.23 would ignore in a drafter's folder, or take otherwise, in words: anybody's drafter, not only ours.

Its loaders (sglang/srt/models/llama_eagle3.py, kimi_k25_eagle3.py) pass over tensors that have no place, leave
parameters without a tensor as they came from memory, and take a default of their own for what config.json does not say.
Most of this is silent, and costs acceptance alone. Each fault is one sentence: file, key, value seen, what SGLang does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.published import MAPS, PASSED_OVER, RENAMED, our_name
from eagle3_ray.drafter.shape import GQA, MLA, is_mla, read_config, read_rope
from eagle3_ray.drafter.vocabulary import names_tokens
from eagle3_ray.store.precision import finite
from eagle3_ray.store.tensors import STORED, Entry

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
# What in config.json decides whether the weights that begin so are there
FLAGS = {"input_norm": "norm_before_fc", "fc_norm": "fc_norm", "midlayer": "num_hidden_layers"}
FLAGS["layers"] = FLAGS["midlayer"]
READ_ELSEWHERE = ("model_type", "dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters")

Shapes = Mapping[str, tuple[int, ...]]


# ---------------------------------------------------------------- config.json


def config_faults(given: dict[str, Any], target: dict[str, Any]) -> Iterator[str]:
    """Of the drafter's config.json, for the target with this text config."""
    architectures = given.get("architectures")
    if architectures not in ([GQA], [MLA]):
        yield (
            f"config.json: architectures is {architectures!r}; SGLang serves {GQA} or {MLA} with EAGLE-3, and would "
            "take another class, or none"
        )
    yield from _layer_faults(given, int(target["num_hidden_layers"]))
    yield from _size_faults(given, target)
    eagle = given.get("eagle_config") or {}
    if given.get("norm_before_residual") or eagle.get("norm_before_residual"):
        yield (
            "config.json: norm_before_residual is True; SGLang has no such thing, and would add the hidden state as it "
            "was before its norm"
        )
    if architectures == [MLA] and (given.get("norm_before_fc") or eagle.get("norm_before_fc")):
        yield f"config.json: norm_before_fc is True; SGLang's {MLA} has no such thing, and would leave that norm out"
    if given.get("hidden_act", "silu") != "silu":
        yield f"config.json: hidden_act is {given['hidden_act']!r}; SGLang's MLP knows silu alone"
    if given.get("tie_word_embeddings"):
        yield (
            "config.json: tie_word_embeddings is True; SGLang would take the embedding for the drafter's head, and "
            "pass over lm_head.weight"
        )
    yield from _rope_faults(given)


def _rope_faults(given: dict[str, Any]) -> Iterator[str]:
    try:
        read = read_rope(given)
        said = read_rope({name: value for name, value in given.items() if name != "rope_scaling"})
    except ValueError as error:
        yield f"config.json: its RoPE cannot be read, nor would SGLang start: {error}"
        return
    if given.get("rope_parameters") and read != said:
        yield (
            f"config.json: rope_scaling is {given['rope_scaling']!r} beside rope_parameters "
            f"{given['rope_parameters']!r}; SGLang would pass over the latter, and read {read}"
        )


def _layer_faults(given: dict[str, Any], layers: int) -> Iterator[str]:
    eagle = given.get("eagle_config")
    ids = eagle.get(LAYER_IDS) if isinstance(eagle, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        where, seen = (f"eagle_config.{LAYER_IDS}", ids) if isinstance(eagle, dict) else ("eagle_config", eagle)
        yield f"config.json: {where} is {seen!r}; SGLang would choose layers itself"
        return
    assert isinstance(eagle, dict)
    if ids != sorted(set(ids)):
        yield (
            f"config.json: {LAYER_IDS} is {ids}, not strictly ascending; SGLang would hand the states over in the "
            "order of the layers"
        )
    if min(ids) < 0 or max(ids) >= layers:
        yield f"config.json: {LAYER_IDS} is {ids}; SGLang captures layers 0 to {layers - 1} of this target at most"
    if eagle.get("use_aux_hidden_state", True) is not True:
        yield (
            f"config.json: use_aux_hidden_state is {eagle['use_aux_hidden_state']!r}; SGLang would hand over the last "
            "hidden state, and none of these layers"
        )
    states = given.get("num_aux_hidden_states")
    if states not in (None, len(ids)):
        yield (
            f"config.json: num_aux_hidden_states is {states}, but {LAYER_IDS} {ids}; SGLang would build fc for the one "
            "and capture the other"
        )


def _size_faults(given: dict[str, Any], target: dict[str, Any]) -> Iterator[str]:
    if given.get("vocab_size") != target["vocab_size"]:
        yield (
            f"config.json: vocab_size is {given.get('vocab_size')}, the target's {target['vocab_size']}; SGLang would "
            "put the target's embedding in a table of another size"
        )
    hidden, reads = given.get("hidden_size"), given.get("target_hidden_size")
    if (reads or hidden) != target["hidden_size"]:
        name, seen = ("target_hidden_size", reads) if reads else ("hidden_size", hidden)
        yield (
            f"config.json: {name} is {seen}, the target's hidden_size {target['hidden_size']}; SGLang would build fc "
            "for states of another width than it gets"
        )
    if given.get("draft_vocab_size") is None:
        yield "config.json: draft_vocab_size is None; SGLang would take the target's head for the drafter's"


def served_config(given: dict[str, Any]) -> PreTrainedConfig:
    """The shape that SGLang builds for this config.json, with its defaults for what is not said.

    ValueError and its kin where the values make no drafter. RoPE is left out: it decides no shape.
    """
    eagle = given.get("eagle_config") or {}
    mla = MLA in (given.get("architectures") or [])
    values = {name: value for name, value in given.items() if name not in READ_ELSEWHERE}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config: Any = read_config({**values, "architectures": [MLA if mla else GQA]})
    ids = len(eagle.get(LAYER_IDS) or (1, 2, 3))
    config.num_aux_hidden_states = ids if mla else given.get("num_aux_hidden_states") or ids
    config.target_hidden_size = given.get("target_hidden_size") or config.hidden_size
    config.draft_vocab_size = given.get("draft_vocab_size") or config.vocab_size
    config.norm_before_fc = not mla and bool(eagle.get("norm_before_fc", given.get("norm_before_fc")))
    config.fc_norm = bool(given.get("fc_norm") or given.get("use_aux_norm"))
    config.norm_output = bool(given.get("norm_output"))
    return config


# ---------------------------------------------------------------- weights


def places(names: list[str], config: PreTrainedConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The parameters that SGLang makes of a config (our name: shape), and the tensor that it loads into each.

    A tensor that it has no place for keeps its name. What belongs to the target or is made anew is left out.
    """
    shape: Any = config
    with torch.device("meta"):
        empty = Drafter(shape, torch.arange(int(shape.draft_vocab_size))).state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.items() if name not in MAPS}
    if getattr(shape, "bias", False):
        wanted["fc.bias"] = (shape.hidden_size,)
    if not is_mla(shape) and (getattr(shape, "bias", False) or shape.attention_bias):  # its q, k and v have none
        for name in [name for name in wanted if name.endswith("o_proj.weight")]:
            wanted[name.removesuffix("weight") + "bias"] = (shape.hidden_size,)
    found = {}
    for name in names:
        bare = name if is_mla(shape) or name.startswith("model.lm_head") else name.removeprefix("model.")
        unknown = is_mla(shape) and bare.split(".")[0] in RENAMED
        if bare.split(".")[-1] not in MAPS and (bare == EMBEDDING or not re.fullmatch(PASSED_OVER, bare)):
            found[(None if unknown else our_name(bare, wanted)) or name] = name
    if shape.hidden_size == shape.target_hidden_size and EMBEDDING not in found:
        del wanted[EMBEDDING]  # SGLang puts the target's there
    return wanted, found


def weight_faults(wanted: Shapes, found: Shapes, config: PreTrainedConfig) -> Iterator[str]:
    """Where the tensors `found` are not those `wanted`; of a part that is missing or too many, one sentence."""
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(wanted.keys() ^ found.keys()):
        kinds.setdefault((_reason(name, config), name in wanted), []).append(name)
    for (reason, missing), names in kinds.items():
        more = f" (with {len(names) - 1} more)" if len(names) > 1 else ""
        if missing:
            yield f"{names[0]} is missing from the weights{more}, but {reason}; SGLang would leave what memory held"
        else:
            yield f"{names[0]} is among the weights{more}, but {reason}; SGLang would pass over it"
    shape: Any = config
    hints = {
        "fc.weight": f" for {shape.num_aux_hidden_states} layers of {shape.target_hidden_size}",
        "lm_head.weight": f" for a draft_vocab_size of {shape.draft_vocab_size}",
    }
    for name in wanted:
        if name in found and wanted[name] != found[name]:
            hint = hints.get(name, "")
            yield f"{name} is {list(found[name])}; config.json asks for {list(wanted[name])}{hint}, and SGLang stops"


def _reason(name: str, config: Any) -> str:
    flag = FLAGS.get(name.split(".")[0])
    if re.search(r"self_attn\.[qkv]_proj\.bias$|mlp\.\w+\.bias$", name):
        return "SGLang's EAGLE-3 layer has no bias there, whatever config.json's attention_bias and mlp_bias say"
    if name.endswith("o_proj.bias") and not getattr(config, "bias", False):
        flag = "attention_bias"
    elif name.endswith(".bias"):
        flag = "bias"
    return f"config.json's {flag} is {getattr(config, flag, None)!r}" if flag else "config.json asks otherwise"


def dtype_faults(given: dict[str, Any], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Of tensors in another dtype than config.json says."""
    said = given.get("dtype") or given.get("torch_dtype")
    kinds: dict[str, list[str]] = {}
    for name, entry in entries.items():
        dtype = str(STORED.get(entry.dtype, entry.dtype)).removeprefix("torch.")
        if name.split(".")[-1] not in MAPS and dtype != said:
            kinds.setdefault(dtype, []).append(name)
    for dtype, names in kinds.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        yield (
            f"{entries[names[0]].file}: {names[0]}{others} is {dtype}, but config.json's dtype is {said!r}; SGLang "
            "would cast it to --dtype, or to what it makes of config.json's"
        )


def value_faults(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Of weights that hold values that are not finite: one sentence for all. One tensor at a time is asked for."""
    broken = [name for name, tensor in tensors if tensor.is_floating_point() and not finite(tensor)]
    if broken:
        more = f" (with {len(broken) - 1} more)" if len(broken) > 1 else ""
        yield f"{broken[0]}{more} holds values that are not finite; SGLang would draft from them"


# ---------------------------------------------------------------- the vocabulary maps


def map_faults(d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> Iterator[str]:
    """Of d2t [Vd], which SGLang reads as target id minus draft id, and t2d [V], which it does not read."""
    if t2d is not None and len(t2d) != vocab_size:
        yield (
            f"t2d has {len(t2d)} entries, the target {vocab_size} tokens: a map of another vocabulary; SGLang does not "
            "read it, and would take d2t for this one"
        )
        t2d = None
    if d2t is None:
        if draft_vocab_size != vocab_size:
            yield (
                f"d2t is missing, but draft_vocab_size is {draft_vocab_size} of {vocab_size}; SGLang would take draft "
                "ids for the target's"
            )
        return
    if len(d2t) != draft_vocab_size:
        yield (
            f"d2t has {len(d2t)} entries, but draft_vocab_size is {draft_vocab_size}; SGLang would look up draft ids "
            "beyond it, or never use its end"
        )
    d2t = d2t.long()
    ids = d2t + torch.arange(len(d2t))
    sensible = names_tokens(ids, vocab_size, None) and bool((ids.diff() > 0).all())
    agreed = t2d is not None and sensible and names_tokens(ids, vocab_size, t2d)
    # Ascending ids read as offsets only rise faster; as offsets they would mean a vocabulary without two neighbours
    if not agreed and bool((d2t.diff() > 0).all()) and names_tokens(d2t, vocab_size, t2d):
        seen = f"{d2t[0]} to {d2t[-1]}"
        yield f"d2t holds ids ({seen}), not target id minus draft id; SGLang would add the draft id once more"
    elif not sensible:
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        seen = f"{int(wrong[0])} of {vocab_size} tokens" if len(wrong) else "ids that do not ascend, or come twice"
        yield f"d2t plus the draft id names {seen}; SGLang would propose tokens that the head was not trained for"
    elif t2d is not None and not agreed:
        yield (
            f"t2d marks {int(t2d.bool().sum())} tokens, not the {len(ids)} that d2t names; SGLang reads d2t alone, and "
            "the head may have been trained for t2d's"
        )
