"""Everything that a stage needs, opened and checked before any engine starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_ray.capture import (
    CaptureSpec,
    capture_description,
    capture_spec,
    check_logits,
    describe_target,
    engine_args,
    engine_version,
    model_value,
    response_description,
    target_config,
    target_folder,
    text_config,
)
from eagle3_ray.config import (
    PLACEMENT,
    CaptureConfig,
    Config,
    ConfigError,
    HardwareConfig,
    StoreConfig,
    check,
    check_drafter,
    check_export,
    draftings,
    suites,
)
from eagle3_ray.secrets import Secret, clean, is_secret, known, marked
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import TEMPORARY, Filesystem, StoreError
from eagle3_ray.strict_json import fingerprint

CARD = "README.md"


@dataclass(frozen=True)
class Run:
    """A checked configuration, with the target and the store that it names."""

    config: Config  # target.revision of a hub name is a commit
    files: Filesystem
    model: dict[str, Any]  # the target's text config
    target: dict[str, Any]  # the target by content, for fingerprints
    spec: CaptureSpec

    @property
    def folder(self) -> Path:
        """The target's folder on this node."""
        return target_folder(self.config.target)

    def responses(self, corpus: str) -> tuple[Units, dict[str, Any]]:
        """The units of responses to a prepared corpus, or those of features.folder, and their description."""
        if self.config.features.folder:
            units = Units(self.files, "responses", self.features(corpus)[1]["responses"])
            return units, units.description()
        description = response_description(self.config, self.target, corpus)
        return Units(self.files, "responses", fingerprint(description)), description

    def features(self, corpus: str) -> tuple[Units, dict[str, Any]]:
        """The units of features taken from those responses, or features.folder, and their description."""
        if self.config.features.folder:
            return named_features(self.config, self.files)
        responses = fingerprint(response_description(self.config, self.target, corpus))
        version = engine_version(self.config)
        description = capture_description(self.config, self.target, responses, self.spec, version)
        return Units(self.files, "features", fingerprint(description)), description

    def drafter(self, features: Units) -> str:
        """The key below which the drafter of these settings and features is made, or what is measured of another's."""
        if self.config.drafter.path:
            return f"drafters/{fingerprint(exported(self, ''))}"
        train = {name: value for name, value in asdict(self.config.train).items() if name not in PLACEMENT}
        decides = {"features": features.folder, "drafter": self.config.drafter.made_of(), "train": train}
        return f"drafters/{fingerprint(decides)}"

    def read_json(self, key: str) -> dict[str, Any] | None:
        """A JSON object of the store, or None where there is none."""
        try:
            return self.files.read_json(key)
        except FileNotFoundError:
            return None

    def write_json(self, key: str, value: dict[str, Any]) -> None:
        """Put an object into the store, without the secrets that may be in it."""
        self.files.write_json(key, clean(value))


def named_features(config: Config, files: Filesystem) -> tuple[Units, dict[str, Any]]:
    """The features of features.folder, and their description. ConfigError where they are not there."""
    folder = str(config.features.folder)
    try:
        units = Units(files, "features", folder.removeprefix("features/"))
        return units, units.description()
    except StoreError as error:
        raise ConfigError(f"features.folder: no features at {folder!r}: {error}") from None


def _take_over(config: Config, files: Filesystem) -> None:
    """The description of features.folder takes the place of the settings that would capture them."""
    _, description = named_features(config, files)
    asked, boundaries = config.capture.boundaries, description["boundaries"]
    if asked not in (None, boundaries):
        raise ConfigError(
            f"capture.boundaries: {asked}, but features.folder={config.features.folder!r} was captured at {boundaries}"
        )
    config.capture = CaptureConfig(boundaries, description["dtype"])
    config.store.shard_bytes = description["shard_bytes"]  # by which its units were cut


def _check_target(config: Config, files: Filesystem, target: dict[str, Any]) -> None:
    """ConfigError where features.folder was captured of another target."""
    stored = named_features(config, files)[1]["target"]
    differ = [
        f"{group}.{name}"
        for group in sorted(target)
        for name in sorted(stored[group].keys() | target[group].keys())
        if stored[group].get(name) != target[group].get(name)
    ]
    if differ:
        raise ConfigError(
            f"features.folder: {config.features.folder!r} is of another target than {config.target.path!r}: "
            f"{', '.join(differ)} differ"
        )


def exported(run: Run, drafter: str) -> dict[str, Any]:
    """What tells the served drafter apart: `files` {name: sha256}, as they lie there now, whatever was edited since its
    export; of the one at the key `drafter` also its export.json."""
    path = run.config.drafter.path
    if path:
        return {"drafter_path": path, "files": _digests(_another(path, run.config, "drafter.path")[0], "")}
    found = run.read_json(f"{drafter}/export.json")
    if found is None:
        raise ConfigError(f"no exported drafter at {run.files.url(drafter)}; run ray_jobs.export first")
    return found | {"files": _digests(run.files, f"{drafter}/export")}


def _another(path: str, config: Config, setting: str) -> tuple[Filesystem, dict[str, Any]]:
    """Another's drafter, a folder or s3:// URL: its files, and its config.json. ConfigError names `setting`."""
    try:
        files = Filesystem(path, config.store.storage_options)
        return files, json.loads(files.read("config.json"))
    except (StoreError, OSError, ValueError) as error:
        raise ConfigError(f"{setting}: no drafter at {path!r}: {error}") from None


def _check_others(config: Config, target: dict[str, Any], boundaries: int) -> None:
    """ConfigError unless drafter.path and each of evaluate.drafters has weights that SGLang loads without unpickling,
    and is of a target of this text config's sizes. That at drafter.path must also be one that can be rebuilt, to
    compare its drafts with those that are served."""
    settings = {path: "evaluate.drafters" for path in config.evaluate.drafters}
    settings |= {config.drafter.path: "drafter.path"} if config.drafter.path else {}
    widest = max(drafting.topk for drafting in draftings(config.evaluate))
    for path, setting in settings.items():
        files, given = _another(path, config, setting)
        there = [name for name in files.list("") if "/" not in name]
        if not any(name.endswith(".safetensors") for name in there):
            raise ConfigError(f"{setting}: no safetensors in {path!r}, only {there}")
        shape = given | (given.get("transformer_layer_config") or {})
        seen = {"vocab_size": shape.get("vocab_size")}
        seen["hidden_size"] = shape.get("target_hidden_size") or shape.get("hidden_size")
        for name, value in seen.items():
            if value != target[name]:
                raise ConfigError(
                    f"{setting}: {path!r} is of another target: its {name} is {value}, this one's {target[name]}"
                )
        drafts = shape.get("draft_vocab_size") or shape["vocab_size"]
        if widest > drafts:
            raise ConfigError(f"evaluate.topk: {widest} is more than the draft vocabulary of {path!r}, {drafts} tokens")
    if config.drafter.path:
        from eagle3_ray.drafter.published import by_path  # torch

        by_path(config, target, boundaries).draft_ids()


_hashed: dict[tuple[str, int, float], str] = {}  # by URL, size and time: stages ask again, of gigabytes


def _digests(files: Filesystem, folder: str) -> dict[str, str]:
    """Of all but the model card, which an evaluation changes."""
    found = {}
    for entry in files.entries(folder):
        name = entry.key[len(folder) :].lstrip("/")
        if "/" in name or name.endswith((CARD, TEMPORARY)):  # SGLang reads no folder below
            continue
        now = files.url(entry.key), entry.size, entry.modified
        if now not in _hashed:
            _hashed[now] = files.sha256(entry.key)
        found[name] = _hashed[now]
    return found


def open_run(config: Config) -> Run:
    """Check the configuration and open what it names. ConfigError says which setting cannot work, and its value."""
    _mark_secrets(config)
    check_values(config)
    try:
        files = Filesystem(config.store.root, config.store.storage_options, config.store.exclusive_create)
        files.check()
    except StoreError as error:
        raise ConfigError(str(error)) from None
    if not files.exclusive:
        print("warning: store.exclusive_create=false: of two jobs on this store the last writer wins", flush=True)
    folder = target_folder(config.target)
    if not Path(config.target.path).expanduser().is_dir():
        config.target.revision = folder.name  # the commit; all nodes and later runs must load the same
    model = text_config(target_config(folder))
    if config.features.folder:
        _take_over(config, files)
    check_logits(model)
    spec = capture_spec(config, model)
    check_drafter(config.drafter, model, len(spec.boundaries))
    _check_tensor_parallel(config, model)
    check_export(config.export, config.drafter, model)
    vocabulary = int(model_value(model, "vocab_size"))
    if config.drafter.draft_vocab_size > vocabulary:
        raise ConfigError(
            f"drafter.draft_vocab_size: {config.drafter.draft_vocab_size} is more than the target's {vocabulary}"
        )
    if config.target.weights:
        from eagle3_ray.drafter.target import check_weights

        check_weights(config.target, config.store.storage_options)
    if config.drafter.start_from:
        from eagle3_ray.drafter.published import Published  # torch: seconds that other runs need not wait

        Published(config.drafter, model, len(spec.boundaries), config.store.storage_options)
    if config.export.format != "sglang":
        _check_format(config, model, list(spec.boundaries))
    _check_others(config, model, len(spec.boundaries))
    room = int(model_value(model, "max_position_embeddings"))
    answers = {"sampling": config.sampling.max_new_tokens}
    for name, suite in suites(config.evaluate).items():
        answers[f"evaluate.suites.{name}" if config.evaluate.suites else "evaluate"] = suite.max_new_tokens or 0
    for name, new in answers.items():
        if new >= room:
            raise ConfigError(
                f"{name}.max_new_tokens: {new} leaves no room for a prompt in the target's context of {room}"
            )
    target = describe_target(config.target, folder)
    if config.features.folder:
        _check_target(config, files, target)
    return Run(config, files, model, target, spec)


def _mark_secrets(config: Config) -> None:
    """Of the settings that name no values of their own: what is a secret is hidden wherever they are shown."""
    secrets = known(config.store.storage_options)
    hardware = config.hardware
    for group, name in [(config.target, "args"), (config.engine, "args"), (hardware, "env"), (hardware, "args")] + [
        (hardware, f"{purpose}_args") for purpose in ("capture", "serve")
    ]:
        setattr(group, name, marked(getattr(group, name), secrets))
    for name, value in hardware.env.items():
        if hardware.nodes_per_engine > 1 and (isinstance(value, Secret) or is_secret(name)):
            raise ConfigError(
                f"hardware.env.{name}: the Ray job of an engine with hardware.nodes_per_engine="
                f"{hardware.nodes_per_engine} would show it; a secret goes into the environment of `ray start`"
            )


def _check_format(config: Config, model: dict[str, Any], boundaries: list[int]) -> None:
    """ConfigError unless export.format can be exact for the drafter of these settings."""
    from eagle3_ray.drafter.formats import refusals
    from eagle3_ray.drafter.published import Published
    from eagle3_ray.drafter.shape import drafter_config

    settings = config.drafter
    if settings.start_from:
        shape = Published(settings, model, len(boundaries), config.store.storage_options).config
    else:
        shape = drafter_config(settings, model, len(boundaries), settings.draft_vocab_size)
    found = refusals(shape, boundaries, config.export.format)
    if found:
        raise ConfigError(
            f"export.format: {config.export.format!r} would take this drafter otherwise: {'; '.join(found)}"
        )


def check_values(config: Config) -> None:
    """What can be told from the values alone."""
    check(config)
    check_cache(config.store)
    if config.drafter.start_from and not config.train.heldout:
        raise ConfigError("train.heldout: 0 is less than 1, and on held-out samples drafter.start_from is measured")
    _check_gpus(config.hardware)
    if (config.drafter.vocabulary == "start") != bool(config.drafter.start_from):
        raise ConfigError(
            f"drafter.vocabulary: {config.drafter.vocabulary!r} with drafter.start_from={config.drafter.start_from!r}: "
            "a published drafter keeps the vocabulary that its head was trained with, counted on another corpus "
            "(start); of a new one it is counted on this corpus (tokens, probability)"
        )
    if config.train.num_workers > config.train.batch_size:
        raise ConfigError(
            f"train.num_workers: {config.train.num_workers} share train.batch_size={config.train.batch_size} samples a "
            "step; some would never have one"
        )
    if config.hardware.nodes_per_engine > 1 and engine_args(config, "capture").get("enable_dp_attention"):
        raise ConfigError(
            "enable_dp_attention: ranks of other nodes would hand rows over where the actor cannot read them; not with "
            f"hardware.nodes_per_engine={config.hardware.nodes_per_engine}"
        )
    for name, only in (("pp_size", 1), ("enable_two_batch_overlap", False)):  # SGLang captures no layer under these
        if engine_args(config, "capture").get(name, only) != only:
            raise ConfigError(f"{name}: SGLang captures hidden states only with {name}={only}")
    if config.features.folder and config.features.path:
        raise ConfigError(
            f"features.folder: {config.features.folder!r} with features.path={config.features.path!r}; one of the two"
        )
    _check_evaluate(config)


def check_cache(store: StoreConfig) -> None:
    """ConfigError unless the node's cache holds a shard."""
    if store.cache_bytes < store.shard_bytes:
        raise ConfigError(f"store.cache_bytes: {store.cache_bytes} is less than {store.shard_bytes}, store.shard_bytes")


def _check_tensor_parallel(config: Config, model: dict[str, Any]) -> None:
    """A drafter's heads are shared among the ranks as the target's are (sglang/srt/models/llama.py, deepseek_v2.py)."""
    given, drafter = engine_args(config, "serve"), config.drafter
    ranks = int(given["tp_size"]) // (int(given.get("dp_size", 1)) if given.get("enable_dp_attention") else 1)
    heads = drafter.num_attention_heads or int(model_value(model, "num_attention_heads"))
    if heads % ranks:
        raise ConfigError(f"drafter.num_attention_heads: {heads} cannot be shared by {ranks} ranks (hardware.tp_size)")
    kv_heads = drafter.num_key_value_heads or int(model.get("num_key_value_heads") or heads)
    if drafter.attention == "gqa" and kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"drafter.num_key_value_heads: {kv_heads} cannot be shared by {ranks} ranks (hardware.tp_size)"
        )


def _check_evaluate(config: Config) -> None:
    evaluate = config.evaluate
    suites(evaluate)
    widest = max(drafting.topk for drafting in draftings(evaluate))
    if not config.drafter.path and widest > config.drafter.draft_vocab_size:
        raise ConfigError(
            f"evaluate.topk: {widest} is more than drafter.draft_vocab_size={config.drafter.draft_vocab_size}"
        )
    if evaluate.temperature and config.hardware.device == "cpu":
        raise ConfigError(
            f"evaluate.temperature: {evaluate.temperature}, but with hardware.device=cpu SGLang verifies greedily"
        )
    wanted = {"baseline": True, "temperature": 0}  # whose answers are walked
    for name, value in wanted.items():
        if evaluate.simulate and getattr(evaluate, name) != value:
            raise ConfigError(
                f"evaluate.simulate: it walks over the greedy answers of the target alone; not with "
                f"evaluate.{name}={getattr(evaluate, name)}; evaluate.simulate=false leaves it out"
            )


def _check_gpus(hardware: HardwareConfig) -> None:
    """ConfigError unless the actor, or the nodes of its engine, hold `tp_size` GPUs."""
    if hardware.nodes_per_engine == 1:
        if hardware.device == "cuda" and hardware.tp_size > hardware.gpus_per_actor:
            raise ConfigError(
                f"hardware.gpus_per_actor: {hardware.gpus_per_actor} for hardware.tp_size={hardware.tp_size}"
            )
        return
    nodes = f"with hardware.nodes_per_engine={hardware.nodes_per_engine}"
    if hardware.tp_size % hardware.nodes_per_engine:
        raise ConfigError(f"hardware.tp_size: {hardware.tp_size} cannot be split evenly {nodes}")
    if hardware.gpus_per_actor:
        raise ConfigError(
            f"hardware.gpus_per_actor: {hardware.gpus_per_actor}, not 0, {nodes}: the schedulers take them"
        )
    if hardware.num_actors > 1:
        raise ConfigError(f"hardware.num_actors: {hardware.num_actors}; one engine a run {nodes}")
