"""The parts of the target that training needs, read from its safetensors by name: nothing else is loaded.

They are the token embedding, the output head that turns the last hidden state into targets, and the final norm's
weight, with which a new drafter starts. They lie in a local folder, on the hub, or in a bucket (target.weights), where
just their bytes are read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3_ray.capture import target_config, target_folder, text_config
from eagle3_ray.config import ConfigError, DrafterConfig, TargetConfig
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.tensors import Source, Tensors

if TYPE_CHECKING:  # an extraction needs no drafter, nor the seconds that Transformers' models take to import
    from eagle3_ray.drafter.model import Drafter

EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# Model types whose RMSNorm multiplies by 1 + weight, in Transformers and in SGLang (srt/layers/layernorm.py)
ZERO_CENTRED = {"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "minimax_m3_vl", "minimax_m3_vl_text"}
ZERO_CENTRED |= {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p5"}


@dataclass
class TargetPieces:
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    norm: Tensor  # [H]: what the final norm multiplies by


def load_pieces(
    target: TargetConfig, dtype: torch.dtype, storage_options: dict[str, Any] | None = None
) -> TargetPieces:
    """All three in `dtype`; ConfigError names what is missing. `storage_options` are for an s3:// URL."""
    pieces = _Pieces(target, storage_options)
    embedding = pieces.read(EMBEDDING).to(dtype)
    head = embedding if pieces.head == EMBEDDING else pieces.read(pieces.head).to(dtype)
    return TargetPieces(embedding, head, pieces.norm().to(dtype))


def load_head(target: TargetConfig, storage_options: dict[str, Any] | None = None) -> Tensor:
    """The output head alone, [V, H] in its own dtype."""
    pieces = _Pieces(target, storage_options)
    return pieces.read(pieces.head)


def load_norm(target: TargetConfig, storage_options: dict[str, Any] | None = None) -> Tensor:
    """What the final norm multiplies by, [H]."""
    return _Pieces(target, storage_options).norm()


def check_weights(target: TargetConfig, storage_options: dict[str, Any] | None = None) -> None:
    """ConfigError unless target.weights holds the target's pieces: of the same shape and dtype, the norm equal."""
    there, here = _Pieces(target, storage_options), _Pieces(replace(target, weights=None))
    for name in (EMBEDDING, there.head, NORM):
        if there.kind(name) != here.kind(name):
            raise there.error(f"its {name} is {there.kind(name)}, that of target.path {here.kind(name)}")
    if not torch.equal(there.read(NORM), here.read(NORM)):
        raise there.error(f"its {NORM} is not that of target.path={target.path!r}")


class _Pieces:
    """The target's tensors, by the end of their name: a multimodal model's language part is nested, in either order."""

    def __init__(self, target: TargetConfig, storage_options: dict[str, Any] | None = None) -> None:
        self.place = f"target.weights: {target.weights!r}" if target.weights else f"target.path: {target.path!r}"
        try:
            if target.weights:
                files = Filesystem(target.weights, storage_options)
                config, self._tensors = json.loads(files.read("config.json")), Tensors(files)
            else:
                config, self._tensors = target_config(target_folder(target)), Tensors(_source(target))
        except FileNotFoundError as error:
            raise self.error(f"no config.json with safetensors is there ({error})") from None
        except StoreError as error:
            raise self.error(str(error).replace("store.root", "it")) from None
        tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
        if tied is None:  # the default of the model's own class: where that is to tie, no head is stored
            tied = not self._named(HEAD)
        self.head = EMBEDDING if tied else HEAD
        self._zero_centred = text_config(config).get("model_type") in ZERO_CENTRED
        if self._named(HEAD.replace("weight", "bias")):
            raise self.error("its head has a bias, of which drafters learn nothing here")

    def read(self, name: str) -> Tensor:
        try:
            tensor = self._tensors.read(self._one(name))
        except (FileNotFoundError, StoreError) as error:
            raise self.error(str(error).replace("store.root", "it")) from None
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise self.error(f"its {name} is quantised ({tensor.dtype})")
        return tensor

    def norm(self) -> Tensor:
        weight = self.read(NORM)
        return weight.float() + 1 if self._zero_centred else weight

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        entry = self._tensors.entry(self._one(name))
        return entry.dtype, entry.shape

    def error(self, why: str) -> ConfigError:
        return ConfigError(f"{self.place}: {why}")

    def _one(self, name: str) -> str:
        found = self._named(name)
        if len(found) != 1:
            raise self.error(f"it has {found or 'no tensor'} for {name}, not one")
        return found[0]

    def _named(self, name: str) -> list[str]:
        pattern = rf"(?:model\.|language_model\.)*{re.escape(name)}"
        return [key for key in self._tensors.names() if re.fullmatch(pattern, key)]


def _source(target: TargetConfig) -> Source:
    folder = Path(target.path).expanduser()
    return Filesystem(str(folder.resolve())) if folder.is_dir() else _Hub(target)


class _Hub:
    """Files of a hub's repository; one that is read is downloaded whole, into the hub's own cache."""

    def __init__(self, target: TargetConfig) -> None:
        self.target = target

    def url(self, key: str) -> str:
        return f"{self.target.path}/{key}"

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = Path(hf_hub_download(self.target.path, key, revision=self.target.revision))
        except EntryNotFoundError as error:
            raise FileNotFoundError(f"no {key} in {self.target.path}") from error
        return Filesystem(str(path.parent)).read(path.name, start, end)


@torch.no_grad()
def initialise(drafter: Drafter, pieces: TargetPieces, seed: int, settings: DrafterConfig | None = None) -> None:
    """A drafter that starts as the target without the layers above its top boundary.

    fc passes the top boundary on, the layers add nothing yet, and norm, head and embedding are the target's. The other
    weights are normal with the target's usual deviation; in a drafter of another width than the target all are. On 120k
    tokens of SmolLM2 this start, with smaller batches and a higher rate, was worth 0.09 of the mean prefix hits.
    `settings` choose another fc (drafter.initial_fc) or a random head (drafter.initial_lm_head).
    """
    settings = settings or DrafterConfig()
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # a norm's
        elif parameter.requires_grad:
            parameter.normal_(0.0, 0.02, generator=generator)
    for layer in drafter.decoder:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    if drafter.own_embedding:
        return
    hidden, boundaries = drafter.config.hidden_size, drafter.config.num_aux_hidden_states
    if settings.initial_fc != "random":
        shares = {"top": [0.0] * (boundaries - 1) + [1.0], "average": [1 / boundaries] * boundaries}
        drafter.fc.weight.copy_(torch.cat([share * torch.eye(hidden) for share in shares[settings.initial_fc]], dim=1))
    drafter.norm.weight.copy_(pieces.norm)
    if settings.initial_lm_head == "target":
        drafter.lm_head.weight.copy_(pieces.head[drafter.draft_ids])
    drafter.embed_tokens.weight.copy_(pieces.embedding)
