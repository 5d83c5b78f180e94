"""A published drafter to go on from (drafter.start_from), in the layout of any of the usual trainers.

SGLang's loader, SafeAILab's EAGLE, SpecForge, TorchSpec and speculators agree on the modules and differ in names: the
layer is `midlayer.` or `layers.0.`, all may lie below `model.` or `draft_model.`, speculators keeps the layer's sizes
in a `transformer_layer_config`. Every tensor must find its place, with its shape: one without a place is a part that
SGLang would not serve. The embedding is the target's in serving, so that of the file is passed over.

Its config decides sizes, RoPE and epsilon: weights that were trained with others would be of no use. Files are read as
safetensors only; a pytorch_model.bin is a pickle, which can run code, and is refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from eagle3_ray.config import Config, ConfigError, DrafterConfig
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import MLA, ROPE_KEYS, drafter_config
from eagle3_ray.drafter.vocabulary import names_tokens
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.tensors import Tensors

CHOICES = (
    "vocabulary",
    "start_from",
    "initial_fc",
    "initial_lm_head",
    "path",
)  # of DrafterConfig: no part of the shape
MAPS = ("d2t", "t2d")
PREFIX = r"^(?:draft_model\.|model\.)+"
# The target's own, or made anew
PASSED_OVER = r"embed_tokens\.weight|verifier_(?:lm_head|norm)\.weight|(?:.*\.)?rotary_emb\.inv_freq"
RENAMED = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}  # SGLang's old names


class Published:
    """The drafter at `settings.start_from`, for the target with the text config `model` and `num_aux` boundaries.

    Opening it reads config.json and the headers, and checks all of them: ConfigError names the setting or the tensor
    that does not fit. `options` are store.storage_options, for an s3:// URL; `setting` is what errors name.
    """

    def __init__(
        self,
        settings: DrafterConfig,
        model: dict[str, Any],
        num_aux: int,
        options: dict[str, Any] | None = None,
        setting: str = "drafter.start_from",
    ) -> None:
        self.setting = setting
        self.path, self.vocab_size = str(settings.start_from), int(model["vocab_size"])
        try:
            files = Filesystem(self.path, options)
            given = json.loads(files.read("config.json"))
            self._tensors = Tensors(files)
        except FileNotFoundError as error:
            if files.exists("pytorch_model.bin"):
                raise self._error("a pytorch_model.bin is never unpickled; convert it to safetensors") from None
            raise self._error(f"no config.json with safetensors is there ({error})") from None
        except (StoreError, ValueError) as error:
            raise self._error(str(error).replace("store.root", self.setting)) from None
        if settings.attention != "gqa" or MLA in (given.get("architectures") or []):
            raise self._error("only drafters of drafter.attention=gqa can be started from")
        theirs = self._theirs = self._config(given)
        self.config = self._adopted(settings, model, num_aux, theirs)  # of the drafter that goes on from here
        self._names = self._places()

    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each draft id."""
        maps = {name: self._tensors.read(self._names[name]) for name in MAPS if name in self._names}
        return self._checked_ids(maps.get("d2t"), maps.get("t2d"))

    def weights(self) -> dict[str, Tensor]:
        """Every trained tensor by its name in our `Drafter`, in its own dtype, and the vocabulary maps."""
        ids = self.draft_ids()
        t2d = torch.zeros(self.vocab_size, dtype=torch.bool)  # [V]
        t2d[ids] = True
        weights = {ours: self._tensors.read(theirs) for ours, theirs in self._names.items() if ours not in MAPS}
        return {**weights, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}

    def layers(self) -> dict[str, Any]:
        """What its config.json says of the layers it was trained on: layer ids of its own trainer, or nothing."""
        name = "eagle_aux_hidden_state_layer_ids"
        return {name: getattr(self._theirs, name, None)}

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {self.path!r}: {why}")

    def _config(self, given: dict[str, Any]) -> LlamaConfig:
        """Its config.json with everything in one place and Llama's defaults, which its trainers rely on."""
        given = {**given, **(given.get("transformer_layer_config") or {}), **(given.get("eagle_config") or {})}
        if given.get("norm_before_residual"):
            raise self._error("it was trained with norm_before_residual, which SGLang does not serve")
        if given.get("hidden_act", "silu") != "silu":
            raise self._error(f"its hidden_act is {given['hidden_act']!r}, not silu")
        given["draft_vocab_size"] = given.get("draft_vocab_size") or given.get("vocab_size")
        return LlamaConfig(**{k: v for k, v in given.items() if k not in ("model_type", "transformer_layer_config")})

    def _adopted(
        self, settings: DrafterConfig, model: dict[str, Any], num_aux: int, theirs: LlamaConfig
    ) -> PreTrainedConfig:
        if theirs.vocab_size != self.vocab_size:
            raise self._error(f"its vocab_size is {theirs.vocab_size}, the target's {self.vocab_size}")
        if theirs.hidden_size != model["hidden_size"]:
            raise self._error(f"its hidden_size is {theirs.hidden_size}, the target's {model['hidden_size']}")
        taken = {}
        for field in dataclasses.fields(settings):
            mine, other = getattr(settings, field.name), getattr(theirs, field.name, None)
            if isinstance(mine, bool):
                other = bool(other)
            if field.name in CHOICES or other is None or other == mine:
                continue
            if mine is not None:
                raise ConfigError(f"drafter.{field.name}: {mine}, but {self.setting} has {other} ({self.path})")
            taken[field.name] = other
        rope: dict[str, Any] = theirs.rope_parameters  # type: ignore[assignment]
        if rope["rope_type"] not in ROPE_KEYS:
            raise self._error(f"its RoPE is of the type {rope['rope_type']!r}, none of {', '.join(ROPE_KEYS)}")
        of_theirs = {name: getattr(theirs, name) for name in ("rms_norm_eps", "max_position_embeddings")}
        return drafter_config(
            dataclasses.replace(settings, **taken),
            {**model, **of_theirs, "rope_parameters": rope},
            num_aux,
            int(theirs.draft_vocab_size),
        )

    def _places(self) -> dict[str, str]:
        """The file's name of each of our tensors. All are looked at before any is read."""
        with torch.device("meta"):
            empty = Drafter(self.config, torch.arange(int(self.config.draft_vocab_size))).state_dict()
        wanted = {name: tuple(tensor.shape) for name, tensor in empty.items() if name != "embed_tokens.weight"}
        places: dict[str, str] = {}
        for theirs in self._tensors.names():
            bare = re.sub(PREFIX, "", theirs)
            if re.fullmatch(PASSED_OVER, bare):
                continue
            ours = our_name(bare, wanted)
            if ours is None or ours in places:
                raise self._error(f"its tensor {theirs} has no place in a drafter of these settings")
            found = self._tensors.entry(theirs).shape
            if found != wanted[ours]:
                hint = "; look at capture.boundaries" if ours == "fc.weight" else ""
                raise self._error(f"its tensor {theirs} is {list(found)}, not {list(wanted[ours])}{hint}")
            places[ours] = theirs
        missing = sorted(wanted.keys() - places.keys() - set(MAPS))
        if missing:
            raise self._error(f"it has no tensor for {', '.join(missing)}")
        return places

    def _checked_ids(self, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
        """d2t holds offsets (target id minus draft id) as SGLang reads it, or else ids; which of them, t2d tells."""
        size = int(self.config.draft_vocab_size)
        if d2t is None:
            if size != self.vocab_size:
                raise self._error(f"it has no d2t, but {size} draft tokens for {self.vocab_size} of the target")
            return torch.arange(size)
        d2t = d2t.long()  # [Vd]
        for ids in (d2t + torch.arange(size), d2t):
            if names_tokens(ids, self.vocab_size, t2d):
                return ids
        raise self._error("its d2t names neither by offset nor by id as many different tokens as t2d does")


def by_path(config: Config, model: dict[str, Any], num_aux: int) -> Published:
    """The drafter at drafter.path, for the target with the text config `model` and `num_aux` boundaries."""
    settings = dataclasses.replace(config.drafter, start_from=config.drafter.path, vocabulary="start")
    return Published(settings, model, num_aux, config.store.storage_options, "drafter.path")


def our_name(bare: str, wanted: dict[str, Any]) -> str | None:
    """Our name for a tensor, one of `wanted`, or None."""
    for old, new in {**RENAMED, "layers.0.": "midlayer.", "midlayer.": "layers.0."}.items():
        if bare not in wanted and bare.startswith(old):
            bare = new + bare.removeprefix(old)
            break
    return bare if bare in wanted else None
