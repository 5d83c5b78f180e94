"""A drafter in the layouts that vLLM and speculators read, beside the SGLang folder and never in its place.

The same weights must mean the same function there, and what cannot is refused. Read from the sources, unrun in either:

    vllm-project/vllm   vllm/model_executor/models/llama_eagle3.py: `midlayer.` is its layers.0; the residual is the
                        projected state before hidden_norm unless norm_before_residual; the state fed back is the one
                        before the last norm; d2t is target id minus draft id; fc reads three states; a further layer
                        has norms that ours has not; of `fc_norm` and `norm_output` it knows nothing, and of
                        `norm_before_fc` only in some versions
                        vllm/v1/worker/gpu_model_runner.py: the top level's eagle_aux_hidden_state_layer_ids goes before
                        that of eagle_config
                        vllm/model_executor/models/llama.py, deepseek_v2.py, interfaces.py (EagleModelMixin): id k is
                        the residual stream before layer k, in every class: boundary k itself. A boundary 0 fails in
                        classes that have no residual yet
                        vllm/v1/spec_decode/llm_base_proposer.py: token x_{q+1} at position q with the state of x_q
                        vllm/model_executor/layers/rotary_embedding: plain and llama3 RoPE are Transformers'; YaRN takes
                        keys of its own
                        vllm/transformers_utils/configs/speculators/algos.py: norm_before_residual defaults to True
    vllm-project/speculators  src/speculators/models/eagle3/{config,core,model_definitions}.py: `layers.0.`, a
                        transformer_layer_config, the same ids as vLLM, the target's width, maps only for a vocabulary
                        of its own
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_ray.drafter.faults import EMBEDDING, LAYER_IDS
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import is_mla

ROPE_TYPES = ("default", "llama3")
STATES = 3
# Of the layer in a speculators config; the rest of ours is SGLang's, or follows
LAYER: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LAYER += (
    "head_dim",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
)
LAYER += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "model_type")


def refusals(config: Any, boundaries: list[int], form: str) -> list[str]:
    """What of a drafter with this config `form` ("vllm" or "speculators") would ignore or compute otherwise."""
    if is_mla(config):
        return ["drafter.attention='mla': its class for latent attention was not compared with ours"]
    found = [f"drafter.{name}=True" for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(config, name)]
    if config.num_hidden_layers != 1:
        found.append(f"drafter.num_hidden_layers={config.num_hidden_layers}: its further layers have other norms")
    if len(boundaries) != STATES or 0 in boundaries:
        found.append(f"capture.boundaries={boundaries}: its fc reads {STATES} states, none of them the embedding's")
    rope: dict[str, Any] = config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES:
        found.append(f"RoPE of the type {rope['rope_type']!r}, none of {', '.join(ROPE_TYPES)}")
    if form == "speculators" and config.hidden_size != config.target_hidden_size:
        found.append(f"drafter.hidden_size={config.hidden_size}: the target's is {config.target_hidden_size}")
    return found


def config_json(config: Any, boundaries: list[int], form: str, dtype: str, served: dict[str, Any]) -> dict[str, Any]:
    """The config.json that `form` reads; ValueError with all `refusals`. `config` is the drafter's, as ours.

    `served` is what a speculators config says of serving: target, architectures (the target's) and num_steps.
    """
    found = refusals(config, boundaries, form)
    if found:
        raise ValueError(f"{form} would take this drafter otherwise: {'; '.join(found)}")
    shape = config.to_dict()
    shape |= {"rope_theta": shape["rope_parameters"]["rope_theta"], "rope_scaling": _scaling(shape["rope_parameters"])}
    return (_vllm(shape, boundaries) if form == "vllm" else _speculators(shape, boundaries, served)) | {"dtype": dtype}


def write_weights(path: Path, drafter: Drafter, form: str, dtype: str, embedding: bool) -> None:
    """The safetensors that go with it. Without `embedding` the tool takes the target's."""
    save_file(_weights(drafter, form, getattr(torch, dtype), embedding), path, {"format": "pt"})


def _scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """As configs had it before rope_parameters, for versions that read no other."""
    return None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}


def _vllm(shape: dict[str, Any], boundaries: list[int]) -> dict[str, Any]:
    ids = {LAYER_IDS: list(boundaries)}
    return shape | ids | {"eagle_config": {**ids, "use_aux_hidden_state": True}, "norm_before_residual": False}


def _speculators(shape: dict[str, Any], boundaries: list[int], served: dict[str, Any]) -> dict[str, Any]:
    layer = {name: shape[name] for name in (*LAYER, "rope_parameters", "rope_theta", "rope_scaling")}
    proposal = {"proposal_type": "greedy", "speculative_tokens": served["num_steps"]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape["draft_vocab_size"],
        "norm_before_residual": False,
        LAYER_IDS: list(boundaries),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": served["target"], "architectures": served["architectures"]},
        },
    }


def _weights(drafter: Drafter, form: str, dtype: torch.dtype, embedding: bool) -> dict[str, Tensor]:
    left_out = set() if embedding else {EMBEDDING}
    if form == "speculators" and drafter.config.draft_vocab_size == drafter.config.vocab_size:
        left_out |= {"d2t", "t2d"}
    return {
        name.replace("midlayer.", "layers.0.") if form == "speculators" else name: (
            tensor.to(dtype) if tensor.is_floating_point() else tensor
        ).contiguous()
        for name, tensor in drafter.state_dict().items()
        if name not in left_out
    }
