"""Every setting of the project, typed. The Hydra files in conf/ are checked against these classes.

A number has bounds, and a text of a fixed set its choices, beside its default (`limits.py`). `run.open_run` checks them
before any engine starts, so that a wrong one costs seconds, not a model load.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from eagle3_ray.limits import faults, limits, limits_of, setting

DTYPES = ("float32", "bfloat16")
STORED_DTYPES = (*DTYPES, "float8_e4m3")
COMPRESSIONS = ("none", "zstd")
ENGINES = ("sglang", "transformers")
DEVICES = ("cuda", "cpu")
LOSSES = ("soft_ce", "lk_alpha", "lk_lambda")
ON_NONFINITE = ("stop", "skip")
LAYOUTS = ("specforge", "speculators")
ATTENTIONS = ("gqa", "mla")
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
VOCABULARIES = ("tokens", "probability", "start")
INITIAL_FC = ("top", "average", "random")
INITIAL_LM_HEAD = ("target", "random")
EMBEDDINGS = ("target", "none")
FORMATS = ("sglang", "vllm", "speculators")
STORE_ACTIONS = ("ls", "stat", "verify", "gc", "copy", "export", "transcode")


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting and the value seen; the command exits with 2."""


def check(settings: Any, name: str = "") -> None:
    """ConfigError for the first value of a dataclass, called `name`, that is outside of its own limits."""
    for fault in faults(settings, name):
        raise ConfigError(fault)


@dataclass
class TargetConfig:
    """The large model that is served."""

    name: str
    path: str  # a local Hugging Face folder, or a name on the hub
    revision: str | None = None
    # Where training reads embedding, head and final norm alone: a folder or s3:// URL; None: path, on every node
    weights: str | None = None
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {thinking: true}
    args: dict[str, Any] = field(default_factory=dict)  # sglang ServerArgs that this target needs on any hardware


@dataclass
class PromptsConfig:
    """The corpus: where it is, and how it is cut into response units."""

    source: str  # *.jsonl[.gz] | *.parquet, local or s3://, globs allowed; anything else is a `datasets` name
    split: str = "train"  # for a `datasets` name
    subset: str | None = None  # its configuration, where a `datasets` name has several
    limit: int | None = setting(None, at_least=1)  # the first N records
    max_prompt_tokens: int = setting(2048, at_least=1)  # a longer first prompt is a bad record
    unit_size: int = setting(512, at_least=1)  # prompts a response unit
    max_bad_share: float = setting(0.05, at_least=0, at_most=1)  # more bad records than this share stop the job


@dataclass
class SamplingConfig:
    """How the target answers the prompts."""

    max_new_tokens: int = setting(2048, at_least=1)
    temperature: float = setting(0.0, at_least=0)  # 0 is greedy
    top_p: float = setting(1.0, above=0, at_most=1)
    top_k: int = setting(-1, at_least=1, at_most=2**31 - 1, also=-1)  # -1 is the whole vocabulary; SGLang's is an int32
    # Of the engine's random numbers, when temperature > 0; draws also depend on how requests are batched
    seed: int = setting(0, at_least=0, at_most=2**32 - 1)  # as numpy takes it


@dataclass
class CaptureConfig:
    """Which hidden states are kept, and how."""

    boundaries: list[int] | None = setting(None, at_least=0)  # strictly ascending; None is (2, n//2, n-3) for n layers
    # Of the stored states: bfloat16 | float32 | float8_e4m3 (aux only, with scales)
    dtype: str = setting("bfloat16", choices=STORED_DTYPES)


@dataclass
class EngineConfig:
    """The software that runs the target."""

    name: str = setting("sglang", choices=ENGINES)  # sglang | transformers (the reference)
    version: str | None = None  # an engine of another version is refused; None: the version beside the driver
    dtype: str = setting("bfloat16", choices=DTYPES)
    args: dict[str, Any] = field(default_factory=dict)  # further sglang ServerArgs, as they are


@dataclass
class HardwareConfig:
    """What one engine runs on, and how many engines there are."""

    device: str = setting("cuda", choices=DEVICES)  # cuda | cpu
    # What this hardware computes in by default; engine.dtype follows it
    dtype: str = setting("bfloat16", choices=DTYPES)
    tp_size: int = setting(1, at_least=1)
    num_actors: int = setting(1, at_least=1)  # engines, one an actor
    # Start with so few, and add up to num_actors while the cluster has room; None: fixed
    min_actors: int | None = setting(None, at_least=1)
    cpus_per_actor: int = setting(1, at_least=1)
    gpus_per_actor: int = setting(0, at_least=0)
    # More: SGLang's RayEngine, tp_size over all of them and gpus_per_actor=0; untested
    nodes_per_engine: int = setting(1, at_least=1)
    max_inflight: int = setting(256, at_least=1)  # requests kept in one engine at a time while it generates
    capture_dir: str = "/dev/shm"  # where the scheduler hands rows to the actor: memory, not disk
    capture_bytes: int = setting(4 * 2**30, at_least=1)  # rows that may lie there at a time; further captures wait
    # An engine that is not up by then has failed; a pipe is waited for at most 2**31 ms
    start_timeout_s: float = setting(3600.0, above=0, at_most=2**31 // 1000)
    stall_timeout_s: float = setting(1800.0, above=0)  # no request answered for so long: the engine has failed
    args: dict[str, Any] = field(default_factory=dict)  # sglang ServerArgs of every engine on this hardware
    capture_args: dict[str, Any] = field(default_factory=dict)  # further ones of an engine that captures
    serve_args: dict[str, Any] = field(default_factory=dict)  # further ones of an engine that serves a drafter
    env: dict[str, str] = field(default_factory=dict)  # for the engine's processes only


@dataclass
class StoreConfig:
    """Where everything is written."""

    root: str  # an absolute path, or s3://bucket/prefix
    # for s3fs: endpoint_url, …; no secrets here, and if there are, no repr shows them
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    exclusive_create: bool = True  # false: for storage without create-if-absent; then one job alone
    # A capture unit is cut when its states, not compressed, reach this size
    shard_bytes: int = setting(512 * 2**20, at_least=1)
    compression: str = setting("none", choices=COMPRESSIONS)  # none | zstd, of the states; no value changes
    scratch_dir: str | None = None  # on each node, best an NVMe, for shards on their way; None: its temporary folder
    # Of copies that a node keeps there, when the root is not a local path
    cache_bytes: int = setting(64 * 2**30, at_least=1)
    uploaders: int = setting(4, at_least=1)  # processes of one actor that hash and upload shards
    # Shards that may wait for them in scratch_dir; the capture of further ones waits
    staging_bytes: int = setting(16 * 2**30, at_least=1)


@dataclass
class DrafterConfig:
    """The small model's shape; None takes the target's value."""

    draft_vocab_size: int = setting(32000, at_least=1)
    # gqa | mla: latent attention in the target's sizes (DeepSeek, Kimi)
    attention: str = setting("gqa", choices=ATTENTIONS)
    num_hidden_layers: int = setting(1, at_least=1)
    # Of another width than the target's, it trains an embedding of its own
    hidden_size: int | None = setting(None, at_least=1)
    intermediate_size: int | None = setting(None, at_least=1)
    num_attention_heads: int | None = setting(None, at_least=1)
    num_key_value_heads: int | None = setting(None, at_least=1)
    head_dim: int | None = setting(None, at_least=2)  # RoPE turns pairs
    norm_before_fc: bool = False  # one norm over all boundaries' states together, before fc
    fc_norm: bool = False  # EAGLE-3.1: a norm for each boundary's state, before fc
    norm_output: bool = False  # EAGLE-3.1: the normed output is fed back, in training and in SGLang alike
    # Draft vocabulary: tokens (those the target said most often) | probability (those it found likeliest) | start
    # (the one that start_from has)
    vocabulary: str = setting("tokens", choices=VOCABULARIES)
    # A published drafter to go on from: a folder or s3:// URL with safetensors. Its sizes and RoPE become the drafter's
    start_from: str | None = None
    # Of a new drafter: top (passes the top boundary on) | average (of the boundaries) | random
    initial_fc: str = setting("top", choices=INITIAL_FC)
    # Of a new drafter: target (the rows of its own) | random
    initial_lm_head: str = setting("target", choices=INITIAL_LM_HEAD)
    path: str | None = None  # verify and evaluate alone: another's drafter, a folder or s3:// URL, as SGLang loads it

    def made_of(self) -> dict[str, Any]:
        """What decides a drafter that is trained."""
        return {name: value for name, value in asdict(self).items() if name != "path"}


@dataclass
class TrainConfig:
    """The drafter's training."""

    steps: int = setting(20000, at_least=0)  # optimizer steps in all; 0 exports the initial drafter
    batch_size: int = setting(8, at_least=1)  # samples a step, over all workers
    max_length: int = setting(4096, at_least=3)  # tokens; a longer sample is cut; a slot needs three
    # Samples not trained on (at most a quarter), to tell the accept length before and after
    heldout: int = setting(16, at_least=0)
    ttt_steps: int = setting(7, at_least=1)
    # soft_ce | lk_alpha | lk_lambda: the last two aim at acceptance (drafter/loss.py)
    loss: str = setting("soft_ce", choices=LOSSES)
    step_decay: float = setting(1.0, above=0, at_most=1)  # step k of training-time test weighs step_decay**k
    lr: float = setting(1e-4, above=0)
    warmup_share: float = setting(0.05, at_least=0, at_most=1)  # of the steps
    min_lr_share: float = setting(0.1, at_least=0, at_most=1)  # the cosine ends at this share of lr
    weight_decay: float = setting(0.0, at_least=0)
    max_grad_norm: float = setting(0.5, above=0)
    # A step whose loss or gradient norm is not finite, or whose loss spikes, makes no update. stop: training ends, with
    # exit code 1; skip: it goes on with the next batch
    on_nonfinite: str = setting("stop", choices=ON_NONFINITE)
    # A loss beyond so many times the mean of the last 50 (of 1 nat, if that is less) spikes
    loss_spike: float = setting(20.0, above=1, at_most=1e6)
    seed: int = setting(0, at_least=0, at_most=2**64 - 1)  # as torch takes it
    # Of the forward pass; parameters and optimizer state are float32
    dtype: str = setting("bfloat16", choices=DTYPES)
    num_workers: int = setting(1, at_least=1)
    use_gpu: bool = True
    cpus_per_worker: int = setting(1, at_least=1)
    checkpoint_every: int = setting(500, at_least=1)  # steps
    max_failures: int = setting(3, at_least=0)  # worker deaths that are survived


def check_drafter(settings: DrafterConfig, target: dict[str, Any], num_aux: int) -> None:
    """ConfigError unless SGLang serves a drafter of this shape for the target with this text config.

    `num_aux` is the number of boundaries.
    """
    check(settings, "drafter")
    if num_aux < 2:
        raise ConfigError(f"capture.boundaries: {num_aux} given; SGLang applies fc only to two or more")
    hidden = settings.hidden_size or int(target["hidden_size"])
    if hidden == num_aux * int(target["hidden_size"]):  # SGLang knows projected states by their width
        raise ConfigError(
            f"drafter.hidden_size: {hidden} is the width of {num_aux} boundaries together, for which SGLang skips fc"
        )
    heads = settings.num_attention_heads or int(target["num_attention_heads"])
    if hidden % heads:
        raise ConfigError(f"drafter.num_attention_heads: {heads} does not divide the hidden size {hidden}")
    if settings.attention == "mla":
        return _check_mla(settings, target)
    kv_heads = settings.num_key_value_heads or int(target.get("num_key_value_heads") or heads)
    head_dim = drafter_head_dim(settings, target)
    if heads % kv_heads:
        raise ConfigError(f"drafter.num_key_value_heads: {kv_heads} does not divide {heads} attention heads")
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim: {head_dim} is odd; RoPE needs an even one")


def drafter_head_dim(settings: DrafterConfig, target: dict[str, Any]) -> int:
    """Of a GQA drafter: the target's, if not set. A target with latent attention has none; the width of its values is
    one that attention kernels know (128 for DeepSeek and Kimi), hidden size over heads is not (56 and 112)."""
    own = target.get("v_head_dim") if target.get("kv_lora_rank") else target.get("head_dim")
    hidden = settings.hidden_size or int(target["hidden_size"])
    return int(settings.head_dim or own or hidden // (settings.num_attention_heads or target["num_attention_heads"]))


def _check_mla(settings: DrafterConfig, target: dict[str, Any]) -> None:
    missing = [name for name in MLA_SIZES if not target.get(name)]
    if missing:
        raise ConfigError(f"drafter.attention: 'mla' takes its sizes from the target, which has no {missing[0]}")
    if settings.num_hidden_layers != 1:
        raise ConfigError(
            f"drafter.num_hidden_layers: {settings.num_hidden_layers}, but SGLang's MLA drafter has one layer"
        )
    for name in ("num_key_value_heads", "head_dim", "norm_before_fc"):
        if getattr(settings, name):
            raise ConfigError(f"drafter.{name}: {getattr(settings, name)}, but SGLang's MLA drafter has no such thing")


# What changes how training runs, but not what comes of it
PLACEMENT = {"num_workers", "use_gpu", "cpus_per_worker", "checkpoint_every", "max_failures"}
# Nor do these, unless a step is skipped, which the summary says. So a training that stopped goes on with other ones
PLACEMENT |= {"on_nonfinite", "loss_spike"}


@dataclass
class ExportConfig:
    """The folder that SGLang serves."""

    # target (a copy in the file) | none (SGLang puts the target's own there anyway)
    embedding: str = setting("target", choices=EMBEDDINGS)
    # sglang | vllm | speculators: the last two lie beside it, and are refused where not exact
    format: str = setting("sglang", choices=FORMATS)


def check_export(settings: ExportConfig, drafter: DrafterConfig, target: dict[str, Any]) -> None:
    """ConfigError unless SGLang serves a drafter without an embedding, if it shall have none."""
    if settings.embedding == "none" and drafter.hidden_size not in (None, target["hidden_size"]):
        raise ConfigError(
            f"export.embedding: 'none' with drafter.hidden_size={drafter.hidden_size}, of another width than the "
            f"target's {target['hidden_size']}: SGLang would serve it with an embedding that nobody loaded"
        )


@dataclass
class SuiteConfig:
    """One of several sets of held-out prompts that are answered together."""

    source: str
    split: str = "test"
    subset: str | None = None
    limit: int | None = setting(None, at_least=1)  # None is evaluate.limit
    max_new_tokens: int | None = setting(None, at_least=1)  # None is evaluate.max_new_tokens


@dataclass
class EvaluateConfig:
    """The drafter's acceptance, measured in real serving."""

    source: str | None = None  # held-out prompts, as prompts.source; None: those of the suites
    split: str = "test"  # for a `datasets` name
    subset: str | None = None  # as prompts.subset
    limit: int | None = setting(None, at_least=1)
    # Several, by name, answered by the same engines
    suites: dict[str, SuiteConfig] = field(default_factory=dict, metadata=limits(form="name"))
    max_new_tokens: int = setting(512, at_least=1)
    temperature: float = setting(0.0, at_least=0)  # above 0 answers with and without speculation are not compared
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # over the target's, e.g. {thinking: false}
    num_steps: int = setting(3, at_least=1)
    topk: int = setting(1, at_least=1)
    num_draft_tokens: int = setting(4, at_least=2)
    # Further [num_steps, topk, num_draft_tokens], each served too
    sweep: list[list[int]] = field(default_factory=list, metadata=limits(at_least=1))
    batch_size: int = setting(8, at_least=1)  # requests kept in the engine at a time
    dtype: str | None = setting(None, choices=DTYPES)  # None serves in engine.dtype
    baseline: bool = True  # also answer without speculation, and compare
    # The engine without speculation also captures, and the drafter is walked over its answers. Its speed is then not
    # measured, so conf/config.yaml has it on where there is none to measure: on a CPU
    simulate: bool = False
    # Further drafters, each served and compared: folders or s3:// URLs that SGLang loads as they are
    drafters: list[str] = field(default_factory=list)


ALONE = "heldout"  # the name of evaluate.source among suites


def suites(settings: EvaluateConfig) -> dict[str, SuiteConfig]:
    """The held-out prompts by name: evaluate.suites, or evaluate.source alone; each says its own max_new_tokens.

    ConfigError where both are given or neither is.
    """
    if bool(settings.suites) == bool(settings.source):
        raise ConfigError(
            f"evaluate.source: {settings.source!r} with evaluate.suites={sorted(settings.suites)}; one of the two, and "
            "not both, names the held-out prompts"
        )
    if not settings.suites:
        alone = settings.source, settings.split, settings.subset, settings.limit, settings.max_new_tokens
        return {ALONE: SuiteConfig(*alone)}  # type: ignore[arg-type]
    found = {}
    for name, suite in settings.suites.items():
        limit = settings.limit if suite.limit is None else suite.limit
        found[name] = replace(suite, limit=limit, max_new_tokens=suite.max_new_tokens or settings.max_new_tokens)
    return found


class Drafting(NamedTuple):
    """How a served drafter drafts: a chain (topk 1), or a tree of which the likeliest drafts are verified."""

    num_steps: int
    topk: int
    num_draft_tokens: int  # that a verify step looks at, the last accepted one included


def draftings(settings: EvaluateConfig) -> list[Drafting]:
    """What is served: the settings' own drafting first, then those of the sweep, each once.

    ConfigError names one that cannot work.
    """
    given = {"evaluate": [settings.num_steps, settings.topk, settings.num_draft_tokens]}
    given |= {f"evaluate.sweep {values}": values for values in settings.sweep}
    for name, values in given.items():
        if len(values) != 3:
            raise ConfigError(f"{name}: not [num_steps, topk, num_draft_tokens]")
        for field_name, value in zip(Drafting._fields, values, strict=True):
            if fault := limits_of(EvaluateConfig, field_name).fault(value):
                raise ConfigError(f"{name}.{field_name}: {fault}")
        steps, topk, tokens = values
        if topk == 1 and tokens != steps + 1:
            raise ConfigError(
                f"{name}.num_draft_tokens: a chain (topk 1) of {steps} steps verifies {steps + 1} tokens, not {tokens}"
            )
        if tokens <= steps:
            raise ConfigError(
                f"{name}.num_draft_tokens: {tokens}, the first of them no draft, so that {steps} steps can never all "
                f"be accepted"
            )
        drafts = topk + (steps - 1) * topk**2  # SGLang keeps topk paths, and tries topk tokens behind each
        if tokens > drafts + 1:
            raise ConfigError(
                f"{name}.num_draft_tokens: {tokens}, but {steps} steps of topk {topk} draft {drafts} tokens, to verify "
                f"with the one before them"
            )
    return list(dict.fromkeys(Drafting(*values) for values in given.values()))


@dataclass
class VerifyConfig:
    """The proof that the served drafter gets what it was trained on."""

    # Stored samples that are served and compared; 0: the pipeline does not verify
    samples: int = setting(8, at_least=0)
    max_tokens: int = setting(1024, at_least=3)  # of each; what lies behind is left out


@dataclass
class FeaturesConfig:
    """Which features are worked on, if not those that these settings would capture."""

    # features/<fingerprint> of the store, e.g. of another engine version
    folder: str | None = setting(None, form="features")
    path: str | None = None  # for verification alone: a folder of what another tool captured at capture.boundaries


@dataclass
class ClusterConfig:
    """How the driver reaches Ray."""

    address: str | None = None  # None: the job's cluster inside `ray job submit`, else a Ray of our own
    num_cpus: int | None = setting(None, at_least=1)  # of a Ray of our own


@dataclass
class Config:
    """One run, whole."""

    run: str = field(metadata=limits(form="name"))
    target: TargetConfig
    prompts: PromptsConfig
    sampling: SamplingConfig
    capture: CaptureConfig
    engine: EngineConfig
    hardware: HardwareConfig
    store: StoreConfig
    drafter: DrafterConfig
    train: TrainConfig
    export: ExportConfig
    evaluate: EvaluateConfig
    verify: VerifyConfig
    features: FeaturesConfig
    cluster: ClusterConfig


@dataclass
class StoreCommand:
    """One action of ray_jobs.store, on a store alone: neither target nor corpus nor Ray is needed."""

    store: StoreConfig
    action: str = setting(choices=STORE_ACTIONS)  # ls | stat | verify | gc | copy | export | transcode
    fingerprint: str | None = setting(None, form="folder")  # features/<fingerprint>, or its beginning; None: all
    delete: bool = False  # gc: remove what it found
    # gc: what is younger may be in use, e.g. a shard on its way to its commit
    older_than_hours: float = setting(24.0, at_least=0)
    to: str | None = None  # copy, transcode: another store's root; export: a local folder
    to_storage_options: dict[str, Any] = field(default_factory=dict)  # as store.storage_options
    layout: str | None = setting(None, choices=LAYOUTS)  # export: specforge | speculators
    target_path: str | None = None  # export to speculators: the target, for the weight of its final norm
    # transcode: of the states; None keeps it; store.compression says how they are kept
    dtype: str | None = setting(None, choices=STORED_DTYPES)
