"""What is captured, named so that it cannot be mistaken: boundaries, the engine's own layer ids, and fingerprints.

Boundary k is the residual stream after k decoder layers (Hugging Face `hidden_states[k]`). SGLang's model classes count
in layer ids of their own, and not all alike, so `sglang_layer_ids` asks the class itself. A fingerprint is the sha256
of everything that decides a value; its description is kept beside what it names, so that two can be compared by eye.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_ray.config import Config, ConfigError, TargetConfig
from eagle3_ray.secrets import described

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
# ServerArgs and variables that change how fast an engine runs, never what it computes
# Of a config.json: what SGLang does to the logits behind the head (srt/layers/logits_processor.py, srt/models/)
LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
SPEED_ARGS = {"log_level", "max_total_tokens", "mem_fraction_static", "max_running_requests"}
SPEED_ARGS |= {"cuda_graph_max_bs_decode", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "NCCL_DEBUG", "sleep_on_idle"}
CAPTURE_VERSION = "2"  # of our own capture code, engines/sglang_plugin.py above all: another one, other values
WINDOW_BYTES = 4096  # of each weight tensor that goes into the target's digest


# ---------------------------------------------------------------- the target's own files


def target_folder(target: TargetConfig) -> Path:
    """The target's local folder; of a hub name, the snapshot of its small files (the engine fetches the weights).

    Asked on every node by itself: a hub's cache lies at another path on another node.
    """
    folder = Path(target.path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute():
        raise ConfigError(f"target.path: no folder {target.path!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + ["*.py"] * target.trust_remote_code
        return Path(snapshot_download(target.path, revision=target.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"target.path: neither a folder nor on the hub: {target.path!r}: {error}") from None


def target_config(folder: Path) -> dict[str, Any]:
    """The target's config.json, whole."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.path: no readable config.json in {folder}: {error}") from None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: itself, or its `text_config` where the model is multimodal."""
    return config.get("text_config") or config


def model_value(model: dict[str, Any], name: str) -> Any:
    """A value that the target's text config must have."""
    if model.get(name) is None:
        raise ConfigError(f"target.path: its config.json has no {name}")
    return model[name]


def describe_target(target: TargetConfig, folder: Path) -> dict[str, Any]:
    """What the target is, by content: a digest of each file that decides its values, and of its weights."""
    names = [
        "config.json",
        "generation_config.json",
        *TOKENIZER_FILES,
        *sorted(path.name for path in folder.glob("*.py")),
    ]
    digests = {name: _sha256(folder / name) for name in names if (folder / name).is_file()}
    if Path(target.path).expanduser().is_dir():
        weights = {path.name: _weights_digest(path) for path in sorted(folder.glob("*.safetensors"))}
        if not weights:
            raise ConfigError(f"target.path: no *.safetensors in {folder}")
    else:
        weights = {"hub": f"{target.path}@{target.revision}"}  # pinned to a commit by `open_run`
    return {"files": digests, "weights": weights, "chat_template_kwargs": dict(target.chat_template_kwargs)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _weights_digest(path: Path) -> str:
    """Size, header and the middle of every tensor of one safetensors file: seconds for hundreds of GB."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        digest.update(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                file.seek(8 + length + max(begin, (begin + end - WINDOW_BYTES) // 2))
                digest.update(file.read(min(WINDOW_BYTES, end - begin)))
    return digest.hexdigest()


# ---------------------------------------------------------------- fingerprints


def response_description(config: Config, target: dict[str, Any], prompts: str) -> dict[str, Any]:
    """All that decides a response; `prompts` is the prepared corpus's fingerprint. The engine is left out on purpose:
    another version of it never repeats a generation."""
    room = engine_args(config, "capture").get("context_length")
    return {"target": target, "prompts": prompts, "sampling": asdict(config.sampling), "context_length": room}


def capture_description(
    config: Config, target: dict[str, Any], responses: str, spec: CaptureSpec, version: str
) -> dict[str, Any]:
    """All that decides a feature's value."""
    return {
        "target": target,
        "responses": responses,
        "engine": config.engine.name,
        "engine_version": version,
        "engine_dtype": config.engine.dtype,
        "capture_version": CAPTURE_VERSION,
        **deciding_args(config, "capture"),
        "boundaries": list(spec.boundaries),
        "dtype": spec.dtype,
    }


def check_logits(model: dict[str, Any]) -> None:
    """ConfigError where the logits of the target with this text config are not its head times its last hidden state."""
    for name in LOGIT_SETTINGS:
        value = model.get(name)
        if value is not None and value != 1:
            raise ConfigError(
                f"target.path: its config.json has {name}={value!r}: its logits are not its head times its last hidden "
                "state alone, of which drafters learn here"
            )


def engine_args(config: Config, purpose: str) -> dict[str, Any]:
    """The ServerArgs that the settings add for an engine that shall "capture" or "serve". Later ones win: hardware's,
    the target's, engine.args."""
    hardware = config.hardware
    own = hardware.capture_args if purpose == "capture" else hardware.serve_args
    args = {"device": hardware.device, "tp_size": hardware.tp_size}
    args |= {**hardware.args, **own, **config.target.args, **config.engine.args}
    return {name: value for name, value in args.items() if value is not None}


def deciding_args(config: Config, purpose: str) -> dict[str, Any]:
    """Those that can change what the engine computes, and its environment; no secrets."""
    given = described({"engine_args": engine_args(config, purpose), "engine_env": config.hardware.env})
    return {group: {k: v for k, v in sorted(of.items()) if k not in SPEED_ARGS} for group, of in given.items()}


def engine_version(config: Config) -> str:
    """`engine.version`, or the version installed where the driver runs; each engine then checks its own against it."""
    if config.engine.version:
        return config.engine.version
    try:
        return importlib.metadata.version(config.engine.name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"engine.version: {config.engine.name} is not installed where the driver runs; name the version"
        ) from None


# ---------------------------------------------------------------- boundaries and layer ids


@dataclass(frozen=True)
class CaptureSpec:
    """The captured states: aux [T, A*H] at A boundaries, and the last hidden state [T, H], stored in `dtype`."""

    boundaries: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Stored bytes a token, aux and last hidden state, before compression."""
        aux = len(self.boundaries) * self.hidden_size
        if self.dtype == "float8_e4m3":
            return aux + 4 * len(self.boundaries) + 2 * self.hidden_size  # the scales; the last hidden state in bf16
        return (aux + self.hidden_size) * (4 if self.dtype == "float32" else 2)


def capture_spec(config: Config, model: dict[str, Any]) -> CaptureSpec:
    """`config.capture` for the target whose text config is `model`; ConfigError where it cannot be."""
    layers = int(model_value(model, "num_hidden_layers"))
    boundaries = config.capture.boundaries
    if boundaries is None:
        boundaries = [2, layers // 2, layers - 3]
    check_boundaries(boundaries, layers)
    return CaptureSpec(tuple(boundaries), int(model_value(model, "hidden_size")), config.capture.dtype)


def check_boundaries(boundaries: list[int], layers: int) -> None:
    """ConfigError unless strictly ascending and within 0 <= boundary < layers (SGLang cannot capture the last)."""
    if len(boundaries) < 2:
        raise ConfigError(f"capture.boundaries: {list(boundaries)}; SGLang serves drafters of two or more")
    for boundary in boundaries:
        if not 0 <= boundary < layers:
            raise ConfigError(
                f"capture.boundaries: {boundary} is outside the target, which has boundaries 0 to {layers - 1}"
            )
    if list(boundaries) != sorted(set(boundaries)):
        raise ConfigError(f"capture.boundaries: {list(boundaries)} is not strictly ascending")


def sglang_layer_ids(folder: Path, boundaries: tuple[int, ...], trust_remote_code: bool = False) -> list[int]:
    """The layer ids for which the target's own SGLang class captures exactly `boundaries`.

    The class's `set_eagle3_layers_to_capture` is called on a stub that only records, without weights or engine. Where
    no ids give those boundaries, it says so; it never guesses. Imports sglang: for an engine's process, or one like it.
    """
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(folder), trust_remote_code=trust_remote_code)
    tried = {}
    for ids in ([boundary - 1 for boundary in boundaries], list(boundaries)):
        if min(ids) >= 0:
            tried[tuple(ids)] = captured = layers_to_capture(ModelRegistry, config, ids)
            if captured == list(boundaries):
                return ids
    raise ConfigError(f"capture.boundaries: {list(boundaries)} cannot be had from {config.architectures}: {tried}")


class _Recorder(SimpleNamespace):
    """Stands for a model in `set_eagle3_layers_to_capture`: has a config, and keeps what the class writes to it."""

    def __init__(self, cls: Any, config: Any) -> None:
        super().__init__(pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True), config=config, _cls=cls)

    def set_eagle3_layers_to_capture(self, ids: list[int] | None = None) -> None:
        if self._cls is None:
            self.layers_to_capture = ids
        else:
            self._cls.set_eagle3_layers_to_capture(self, ids)


def layers_to_capture(registry: Any, config: Any, ids: list[int]) -> list[int]:
    """The boundaries that the SGLang class of `config` captures for `ids`; ConfigError where it captures none."""
    cls, architecture = registry.resolve_model_cls(list(config.architectures))
    if architecture not in config.architectures:  # SGLang falls back to another class in silence
        raise ConfigError(f"target.path: SGLang has no class of its own for {config.architectures}")
    text = getattr(config, "text_config", None) or config
    model = _Recorder(cls, text)
    model.model = _Recorder(None, text)
    inner = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM"}.get(architecture)
    if inner:
        model.language_model = _Recorder(registry.resolve_model_cls([inner])[0], text)
        model.language_model.model = model.model
    try:
        cls.set_eagle3_layers_to_capture(model, ids)
        return list(model.model.layers_to_capture)
    except AttributeError as error:
        raise ConfigError(f"target.path: {architecture} has no EAGLE-3 capture that can be asked: {error}") from None
