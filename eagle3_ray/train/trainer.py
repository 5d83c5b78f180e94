"""The training stage: a drafter from a feature store, on Ray Train workers, and its export for SGLang.

Everything about one drafter lies below its prefix in the store:

    start.json            what it is made from: settings, the frozen list of feature units, the draft vocabulary
    state/<step>…         checkpoints to resume from: weights, optimizer moments, samples consumed
    weights/              the trained drafter, without the target's embedding
    tensorboard/, ray/    curves, and Ray Train's own files
    summary.json          written last: the drafter is finished

The first run decides start.json; every later one follows it, so that a restart, with any number of workers, goes on
with the same samples. Checkpoints are not handed to Ray: one reported just before a kill may be lost.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3_ray.capture import target_config, target_folder, text_config
from eagle3_ray.config import PLACEMENT, Config, ConfigError
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.loss import Metrics
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config, read_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.drafter.vocabulary import count_tokens, coverage, draft_vocabulary, end_tokens
from eagle3_ray.progress import Progress
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.train.features import stream
from eagle3_ray.train.loop import Training

KEPT = 2  # checkpoints to resume from
RECENT = 50  # steps that the printed and final metrics are the mean of


@dataclass
class Task:
    """What a worker needs; plain data, so that Ray can send it."""

    config: Config
    features: Units
    prefix: str
    start: dict[str, Any]  # start.json

    @property
    def files(self) -> Filesystem:
        return self.features.files


def train_drafter(config: Config, features: Units, description: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Train the drafter below `prefix` to its end, or return the summary of one that is finished. Ray is up already.

    `description` is that of the features: it names the boundaries, and the responses that the vocabulary is counted on.
    """
    files = features.files
    if files.exists(f"{prefix}/summary.json"):
        return json.loads(files.read(f"{prefix}/summary.json"))
    began = time.time()
    start = _start(config, features, description, prefix)
    _run(Task(config, features, prefix, start))
    result = json.loads(files.read(f"{prefix}/weights/result.json"))
    summary = {
        **{name: start[name] for name in ("settings", "coverage", "samples")},
        **result,
        "draft_vocab_size": len(start["draft_ids"]),
        "units": len(start["units"]),
        "seconds": round(time.time() - began, 1),
    }
    files.write(f"{prefix}/summary.json", _json(summary))
    return summary


def export_drafter(
    config: Config, files: Filesystem, prefix: str, layer_ids: list[int], folder: Path, dtype: str
) -> None:
    """Write the trained drafter to a local folder as SGLang loads it; `layer_ids` name its boundaries, in order."""
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(temporary, "model.safetensors")
        files.download(f"{prefix}/weights/model.safetensors", local)
        weights = load_file(local)
    drafter_json = json.loads(files.read(f"{prefix}/weights/config.json"))
    draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    drafter = Drafter(read_config(drafter_json), draft_ids)
    if not drafter.own_embedding:
        weights["embed_tokens.weight"] = load_pieces(config.target, getattr(torch, dtype)).embedding
    drafter.load_state_dict(weights)
    export(folder, drafter, layer_ids, dtype)


# ---------------------------------------------------------------- the driver


def _start(config: Config, features: Units, description: dict[str, Any], prefix: str) -> dict[str, Any]:
    """start.json: made by the first run, followed by every later one."""
    key = f"{prefix}/start.json"
    train = {name: value for name, value in asdict(config.train).items() if name not in PLACEMENT}
    fingerprint = features.folder.rpartition("/")[2]
    settings = {"features": {"fingerprint": fingerprint}, "drafter": asdict(config.drafter), "train": train}
    if not features.files.exists(key):
        commits = features.commits()
        folder = target_folder(config.target)
        model = text_config(target_config(folder))
        counts = _counts(config, features.files, description["responses"], int(model["vocab_size"]))
        ids = draft_vocabulary(counts, config.drafter.draft_vocab_size, end_tokens(folder))
        drafter = drafter_config(config.drafter, model, len(description["boundaries"]), len(ids))
        start = {
            "settings": settings,
            "units": [commit.unit for commit in commits],
            "samples": sum(len(commit.samples) for commit in commits),
            "drafter": drafter.to_dict(),
            "draft_ids": ids.tolist(),
            "coverage": coverage(counts, ids),
        }
        if not start["samples"]:
            raise ConfigError(f"train: no sample is committed below {features.files.url(features.folder)}")
        features.files.create(key, _json(start))
    start = json.loads(features.files.read(key))
    for group, values in settings.items():
        for name, value in values.items():
            if start["settings"][group].get(name) != value:
                before = start["settings"][group].get(name)
                raise ConfigError(f"{group}.{name}: {value!r}, but {features.files.url(key)} began with {before!r}")
    return start


def _counts(config: Config, files: Filesystem, responses: str, vocab_size: int) -> Tensor:
    """How often each token was said in all committed responses: [V]."""
    units, counts = Units(files, "responses", responses), torch.zeros(vocab_size, dtype=torch.int64)
    for commit in units.commits():
        reader = units.open(commit, node_cache(config.store))
        counts += count_tokens((reader.response(i) for i in range(len(reader))), vocab_size)
    return counts


def _run(task: Task) -> None:
    """The workers, restarted by Ray Train when one dies; each start goes on from the newest checkpoint.

    In a task that knows this Ray's address: Ray Train's cleaner looks for an address, and where a second Ray runs on
    the machine it would ask that one, find no such training, and take the workers' placement group away.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    fit = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": {"RAY_ADDRESS": address}})(_fit)
    ray.get(fit.remote(task))


def _fit(task: Task) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it logs each print once more; Ray hands it to the workers
    train = task.config.train
    TorchTrainer(
        _work,
        train_loop_config={"task": task},
        scaling_config=ScalingConfig(
            num_workers=train.num_workers,
            use_gpu=train.use_gpu,
            resources_per_worker={"CPU": train.cpus_per_worker, **({"GPU": 1} if train.use_gpu else {})},
        ),
        run_config=RunConfig(
            name="ray",
            failure_config=FailureConfig(max_failures=train.max_failures),
            **_storage(task.files, task.prefix),
        ),
    ).fit()


def _storage(files: Filesystem, prefix: str) -> dict[str, Any]:
    """Where Ray Train keeps its own files: below the store's root, too."""
    if files.local:
        return {"storage_path": files.url(prefix)}
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    scheme, _, path = files.url(prefix).partition("://")
    return {
        "storage_path": path,
        "storage_filesystem": PyFileSystem(
            FSSpecHandler(fsspec.filesystem(scheme, use_listings_cache=False, **files.storage_options))
        ),
    }


# ---------------------------------------------------------------- a worker


def _work(given: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch

    task: Task = given["task"]
    train, files = task.config.train, task.files
    if not train.use_gpu:
        torch.set_num_threads(train.cpus_per_worker)  # Ray's OMP_NUM_THREADS says 1 for a share of one CPU
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    training = _build(task, ray.train.torch.get_device())
    consumed = _resume(files, f"{task.prefix}/state", training)
    commits = [task.features.read_commit(unit) for unit in task.start["units"]]
    progress = Progress("train", train.steps, "steps", done=training.taken)
    recent: deque[Metrics] = deque(maxlen=RECENT)
    with tempfile.TemporaryDirectory() as temporary:
        curves = _Curves(files, f"{task.prefix}/tensorboard", Path(temporary, "curves")) if rank == 0 else None
        data = stream(train, task.features, commits, node_cache(task.config.store), rank, world, consumed)
        tokens, began = 0, time.monotonic()
        while training.taken < train.steps:
            metrics, facts = training.step(next(data))
            recent.append(metrics)
            consumed += train.batch_size
            tokens += int(facts["tokens"])
            if curves:
                curves.add(training.taken, metrics, facts)
                means = _mean(recent)
                rate = tokens / (time.monotonic() - began)
                note = f"loss {sum(means['loss']) / train.ttt_steps:.3f}, accuracy {means['greedy_accuracy'][0]:.3f}"
                progress.add(1, f"{note}, {rate:.0f} tok/s")
            if training.taken % train.checkpoint_every == 0:
                if curves:
                    _save(files, f"{task.prefix}/state", training, consumed)
                    curves.upload()
                ray.train.report({"step": training.taken})
        if curves:
            seconds = time.monotonic() - began
            facts = {"steps": training.taken, "consumed": consumed, "tokens_per_s": round(tokens / seconds, 1)}
            _finish(task, training, {**facts, **(_mean(recent) if recent else {})})
            curves.upload()
    ray.train.report({"step": training.taken})


def _build(task: Task, device: torch.device) -> Training:
    """The initial drafter and the target's head."""
    config, start = task.config, task.start
    pieces = load_pieces(config.target, getattr(torch, config.train.dtype))
    drafter = Drafter(read_config(start["drafter"]), torch.tensor(start["draft_ids"]))
    initialise(drafter, pieces, config.train.seed)
    return Training(config.train, drafter, pieces.head, device)


def _mean(recent: deque[Metrics]) -> dict[str, list[float]]:
    return Metrics(*sum(metrics.stacked() for metrics in recent)).means()  # type: ignore[misc]


def _save(files: Filesystem, folder: str, training: Training, consumed: int) -> None:
    """One object a checkpoint, so that it is there whole or not at all; the older ones go."""
    progress = {"step": str(training.taken), "consumed": str(consumed)}
    files.write(f"{folder}/{training.taken:08d}.safetensors", save(training.state(), progress))
    for key in files.list(folder)[:-KEPT]:
        files.delete(key)


def _resume(files: Filesystem, folder: str, training: Training) -> int:
    """Restore the newest checkpoint, if there is one. Returns the samples consumed."""
    found = files.list(folder)
    if not found:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(temporary, "state.safetensors")
        files.download(found[-1], local)
        with safe_open(local, "pt") as file:
            progress = file.metadata()
        training.restore(load_file(local), int(progress["step"]))
    return int(progress["consumed"])


def _finish(task: Task, training: Training, result: dict[str, Any]) -> None:
    folder = f"{task.prefix}/weights"
    task.files.write(f"{folder}/model.safetensors", save(training.weights(), {"format": "pt"}))
    task.files.write(f"{folder}/config.json", _json(task.start["drafter"]))
    task.files.write(f"{folder}/result.json", _json(result))


class _Curves:
    """TensorBoard scalars, written locally and copied to the store whenever a checkpoint is."""

    def __init__(self, files: Filesystem, key: str, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.files, self.key, self.folder = files, key, folder
        self.writer = SummaryWriter(str(folder))

    def add(self, step: int, metrics: Metrics, facts: dict[str, float]) -> None:
        for name, values in metrics.means().items():
            for k, value in enumerate(values):
                self.writer.add_scalar(f"{name}/step_{k}", value, step)
        for name, value in facts.items():
            self.writer.add_scalar(f"train/{name}", value, step)

    def upload(self) -> None:
        self.writer.flush()
        for path in self.folder.iterdir():
            self.files.upload(path, f"{self.key}/{path.name}")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
