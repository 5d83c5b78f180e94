"""A published drafter, to go on from (drafter.start_from) or to serve as it is (drafter.path), in any usual layout.

SGLang's loader, SafeAILab's EAGLE, SpecForge, TorchSpec and speculators agree on the modules and differ in names: the
layer is `midlayer.` or `layers.0.`, all may lie below `model.` or `draft_model.`, speculators keeps the layer's sizes
in a `transformer_layer_config`. Every tensor must find its place, with its shape: one without a place is a part that
SGLang would not serve. The embedding is the target's in serving, so that of the file is passed over, unless the drafter
is of another width.

Its config decides sizes, RoPE and epsilon: weights that were trained with others would be of no use. One to go on from
must also be of the settings' shape; one that is served has a shape of its own, and of what SGLang passes over in its
folder faults.py tells, not an error here. Files are read as safetensors only; a pytorch_model.bin is a pickle, which
can run code, and is refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig

from eagle3_ray.config import MLA_SIZES, Config, ConfigError, DrafterConfig
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import MLA, MLA_ROPE_KEYS, ROPE_KEYS, drafter_config
from eagle3_ray.drafter.vocabulary import names_tokens
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.precision import finite
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
    """The drafter at `settings.start_from`, for the target with the text config `model` and `num_aux` boundaries; or
    that at `settings.path`, of which no other setting says anything.

    Opening it reads config.json and the headers, and checks all of them: ConfigError names the setting or the tensor
    that does not fit. `options` are store.storage_options, for an s3:// URL.
    """

    def __init__(
        self,
        settings: DrafterConfig,
        model: dict[str, Any],
        num_aux: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._served = settings.start_from is None
        self.setting = "drafter.path" if self._served else "drafter.start_from"
        self.path, self.vocab_size = str(settings.start_from or settings.path), int(model["vocab_size"])
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
        self._mla = MLA in (given.get("architectures") or [])
        attention = "mla" if self._mla else "gqa"
        if not self._served and settings.attention != attention:
            raise ConfigError(
                f"drafter.attention: {settings.attention}, but {self.setting} has {attention} ({self.path})"
            )
        theirs = self._theirs = self._config(given)
        # Of the drafter that goes on from here, or serves
        self.config = self._adopted(settings, model, num_aux, theirs)
        self._names = self._places()

    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each draft id."""
        maps = {name: self._tensors.read(self._names[name]) for name in MAPS if name in self._names}
        return self._checked_ids(maps.get("d2t"), maps.get("t2d"))

    def weights(self) -> dict[str, Tensor]:
        """Every trained tensor by its name in our `Drafter`, in its own dtype, and the vocabulary maps. The embedding
        is among them where it is served."""
        ids = self.draft_ids()
        t2d = torch.zeros(self.vocab_size, dtype=torch.bool)  # [V]
        t2d[ids] = True
        weights = {ours: self._tensors.read(theirs) for ours, theirs in self._names.items() if ours not in MAPS}
        broken = [self._names[name] for name, tensor in weights.items() if not finite(tensor)]
        if broken and not self._served:  # of one that is served, faults.py tells
            raise self._error(f"{len(broken)} of its tensors hold values that are not finite: {', '.join(broken)}")
        return {**weights, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}

    def layers(self) -> dict[str, Any]:
        """What its config.json says of the layers it was trained on: layer ids of its own trainer, or nothing."""
        name = "eagle_aux_hidden_state_layer_ids"
        return {name: getattr(self._theirs, name, None)}

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {self.path!r}: {why}")

    def _config(self, given: dict[str, Any]) -> Any:
        """Its config.json with everything in one place and its class's defaults, which its trainers rely on."""
        given = {**given, **(given.get("transformer_layer_config") or {}), **(given.get("eagle_config") or {})}
        if given.get("norm_before_residual"):
            raise self._error("it was trained with norm_before_residual, which SGLang does not serve")
        for name in ("bias", "attention_bias"):
            if self._served and given.get(name) and not (self._mla and name == "attention_bias"):
                raise self._error(f"its {name} is {given[name]!r}; SGLang serves it with biases, which are not rebuilt")
        if given.get("hidden_act", "silu") != "silu":
            raise self._error(f"its hidden_act is {given['hidden_act']!r}, not silu")
        given["draft_vocab_size"] = given.get("draft_vocab_size") or given.get("vocab_size")
        given["fc_norm"] = given.get("fc_norm") or given.get("use_aux_norm")  # SGLang's old name
        values = {k: v for k, v in given.items() if k not in ("model_type", "transformer_layer_config")}
        try:
            return (DeepseekV3Config if self._mla else LlamaConfig)(**values)
        except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"its config.json makes no drafter: {error}") from None

    def _adopted(self, settings: DrafterConfig, model: dict[str, Any], num_aux: int, theirs: Any) -> PreTrainedConfig:
        if theirs.vocab_size != self.vocab_size:
            raise self._error(f"its vocab_size is {theirs.vocab_size}, the target's {self.vocab_size}")
        reads = getattr(theirs, "target_hidden_size", None) or theirs.hidden_size
        if reads != model["hidden_size"]:
            raise self._error(f"its hidden_size is {reads}, the target's {model['hidden_size']}")
        found = self._settings(theirs)
        for name, value in found.items():
            mine = getattr(settings, name)
            if not self._served and mine not in (None, value):
                raise ConfigError(f"drafter.{name}: {mine}, but {self.setting} has {value} ({self.path})")
        rope, known = theirs.rope_parameters, MLA_ROPE_KEYS if self._mla else ROPE_KEYS
        if rope["rope_type"] not in known:
            raise self._error(f"its RoPE is of the type {rope['rope_type']!r}, none of {', '.join(known)}")
        names = ("rms_norm_eps", "max_position_embeddings", *(MLA_SIZES if self._mla else ()))
        of_theirs = {name: getattr(theirs, name) for name in names}
        try:
            return drafter_config(
                dataclasses.replace(settings, attention="mla" if self._mla else "gqa", **found),
                {**model, **of_theirs, "rope_parameters": rope},
                num_aux,
                int(theirs.draft_vocab_size),
            )
        except ConfigError as error:
            raise self._error(str(error)) from None

    def _settings(self, theirs: Any) -> dict[str, Any]:
        """What of drafter.* its config.json decides; of an MLA drafter SGLang reads less."""
        unread = {"num_key_value_heads", "head_dim", "norm_before_fc"} if self._mla else set()
        flags = {field.name for field in dataclasses.fields(DrafterConfig) if isinstance(field.default, bool)}
        names = {field.name for field in dataclasses.fields(DrafterConfig)} - {"attention", *CHOICES, *unread}
        found = {name: getattr(theirs, name, None) for name in names}
        return {k: bool(v) if k in flags else v for k, v in found.items() if k in flags or v is not None}

    def _places(self) -> dict[str, str]:
        """The file's name of each of our tensors. All are looked at before any is read."""
        with torch.device("meta"):
            drafter = Drafter(self.config, torch.arange(int(self.config.draft_vocab_size)))
        wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        if not drafter.own_embedding:
            del wanted["embed_tokens.weight"]
        places: dict[str, str] = {}
        for theirs in self._tensors.names():
            bare = re.sub(PREFIX, "", theirs)
            if bare not in wanted and re.fullmatch(PASSED_OVER, bare):
                continue
            ours = our_name(bare, wanted)
            if ours is None and self._served:
                continue
            if ours is None or ours in places:
                raise self._error(f"its tensor {theirs} has no place in a drafter of these settings")
            found = self._tensors.entry(theirs).shape
            if found != wanted[ours]:
                if self._served and ours == "t2d":  # SGLang does not read it
                    continue
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
    return Published(DrafterConfig(path=config.drafter.path), model, num_aux, config.store.storage_options)


def our_name(bare: str, wanted: dict[str, Any]) -> str | None:
    """Our name for a tensor, one of `wanted`, or None."""
    for old, new in {**RENAMED, "layers.0.": "midlayer.", "midlayer.": "layers.0."}.items():
        if bare not in wanted and bare.startswith(old):
            bare = new + bare.removeprefix(old)
            break
    return bare if bare in wanted else None
