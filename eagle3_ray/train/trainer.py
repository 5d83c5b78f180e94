"""The training stage: a drafter from a feature store, on Ray Train workers, and its export for SGLang.

Everything about one drafter lies below its prefix in the store:

    start.json            what it is made from (`start`); start.safetensors, where it goes on from a published drafter
    before.json           its walked accept length on the held-out samples before the first step
    state/<step>…         checkpoints to resume from: weights, optimizer moments, recent losses, samples consumed
    nonfinite/<step>.json what is known of a step whose numbers cannot be right (`nonfinite`)
    weights/              the trained drafter, without the target's embedding
    tensorboard/, ray/    curves, and Ray Train's own files
    summary.json          written last: the drafter is finished

Every run follows start.json, so that a restart, with any number of workers, goes on with the same samples. Checkpoints
are not handed to Ray: one reported just before a kill may be lost.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_ray.config import Config, ConfigError
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.loss import Metrics
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import read_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.progress import Progress
from eagle3_ray.secrets import Sealed
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.precision import finite
from eagle3_ray.store.shards import Features
from eagle3_ray.store.tensors import read_tensors, write_tensors
from eagle3_ray.train.features import read_samples, stream
from eagle3_ray.train.loop import Training, all_here, mean_loss
from eagle3_ray.train.nonfinite import NonFiniteError, check_stopped, examine, forget, keep
from eagle3_ray.train.start import frozen_commits, frozen_start

KEPT = 2  # checkpoints to resume from
RECENT = 50  # steps that the printed and final metrics are the mean of
COMPARED = 8  # samples that those of a faulty step are compared with, where none is held out
WALKED = 3  # drafts a verify step on the held-out samples, whatever was trained: so drafters can be compared
# A published drafter below this many times the accept length of one that is never right is misused: one boundary off
# has been seen to leave a tenth of the first guesses right, where trained ones have a third and more
UNTRAINED = 1.2


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
    NonFiniteError where a step's numbers cannot be right and the settings do not skip it.
    """
    files = features.files
    if config.drafter.path:
        raise ConfigError(f"drafter.path: {config.drafter.path!r} is another's drafter, which can only be served")
    if files.exists(f"{prefix}/summary.json"):
        return files.read_json(f"{prefix}/summary.json")
    began = time.monotonic()
    start = frozen_start(config, features, description, prefix)
    frozen_commits(features, start)  # before workers start, which Ray would start again
    _check_fits(files, prefix, start)  # of an earlier run
    _run(Task(config, features, prefix, start))
    _check_fits(files, prefix, start)
    check_stopped(files, prefix)
    result = files.read_json(f"{prefix}/weights/result.json")
    summary = {
        **{name: start[name] for name in ("settings", "coverage", "coverage_by_domain", "samples")},
        **result,
        "draft_vocab_size": len(start["draft_ids"]),
        "units": len(start["units"]),
        "seconds": round(time.monotonic() - began, 1),
    }
    files.write_json(f"{prefix}/summary.json", summary)
    return summary


def export_drafter(
    config: Config, files: Filesystem, prefix: str, layer_ids: list[int], folder: Path, dtype: str
) -> None:
    """Write the trained drafter to a local folder as SGLang loads it; `layer_ids` name its boundaries, in order.

    With export.embedding=none the target's embedding is left out.
    """
    drafter = trained_drafter(config, files, prefix, dtype)
    export(folder, drafter, layer_ids, dtype, config.export.embedding == "target")


def trained_drafter(config: Config, files: Filesystem, prefix: str, dtype: str) -> Drafter:
    """The finished drafter below the key `prefix`; with export.embedding=none its embedding is not the target's.

    NonFiniteError where its weights are not finite.
    """
    weights, _ = read_tensors(files, f"{prefix}/weights/model.safetensors")
    broken = [name for name, tensor in weights.items() if not finite(tensor)]
    if broken:
        raise NonFiniteError(
            f"{len(broken)} of {len(weights)} tensors of the drafter at {files.url(prefix)} are not finite: "
            f"{', '.join(broken)}; a lower train.lr trains another one"
        )
    drafter_json = files.read_json(f"{prefix}/weights/config.json")
    draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    drafter = Drafter(read_config(drafter_json), draft_ids)
    with_embedding = config.export.embedding == "target"
    if with_embedding and not drafter.own_embedding:
        pieces = load_pieces(config.target, getattr(torch, dtype), config.store.storage_options)
        weights["embed_tokens.weight"] = pieces.embedding
    drafter.load_state_dict(weights, strict=with_embedding)
    return drafter


# ---------------------------------------------------------------- the driver


def _run(task: Task) -> None:
    """The workers, restarted by Ray Train when one dies; each start goes on from the newest checkpoint.

    In a task that knows this Ray's address: Ray Train's cleaner looks for an address, and where a second Ray runs on
    the machine it would ask that one, find no such training, and take the workers' placement group away.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    fit = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": {"RAY_ADDRESS": address}})(_fit)
    ray.get(fit.remote(task))


def _fits(start: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a drafter that claims to be trained is."""
    claims = start["settings"]["drafter"]["start_from"] is not None
    return not claims or before["accept_length"] >= UNTRAINED * before["never_right"]


def _check_fits(files: Filesystem, prefix: str, start: dict[str, Any]) -> None:
    """ConfigError where the workers found a published start to be no drafter for these features."""
    key = f"{prefix}/before.json"
    if not files.exists(key) or _fits(start, before := files.read_json(key)):
        return
    raise ConfigError(
        f"drafter.start_from: {start['settings']['drafter']['start_from']!r} has a walked accept length of "
        f"{before['accept_length']:.3f} on {len(start['heldout'])} held-out samples ({before['verify_steps']} verify "
        f"steps) before the first step; a drafter that is never right has {before['never_right']:.3f}, a trained one "
        f"{UNTRAINED} times that at least. It was probably trained on other boundaries than capture.boundaries (its "
        f"config says {start['published']}), on another target or chat template, or its vocabulary is mapped otherwise"
    )


def _fit(task: Task) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from eagle3_ray.train.group import GroupConfig

    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it logs each print once more; Ray hands it to the workers
    train = task.config.train
    TorchTrainer(
        _work,
        train_loop_config={"task": Sealed(task)},
        torch_config=GroupConfig(),
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

    task: Task = given["task"].inside
    train, files = task.config.train, task.files
    if not train.use_gpu:
        torch.set_num_threads(train.cpus_per_worker)  # Ray's OMP_NUM_THREADS says 1 for a share of one CPU
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    training = _build(task, ray.train.torch.get_device())
    consumed = _resume(files, f"{task.prefix}/state", training)
    if rank == 0:
        forget(files, task.prefix, training.taken)
    commits = frozen_commits(task.features, task.start)
    cache = node_cache(task.config.store)
    held = [(task.start["units"].index(unit), i) for unit, i in task.start["heldout"]]
    heldout = read_samples(task.features, commits, cache, held) if rank == 0 else []
    if not _fits(task.start, before := _before(task, training, heldout, rank)):
        return  # the driver says so: to Ray Train an error is a worker to start again
    progress = Progress("train", train.steps, "steps", done=training.taken)
    recent: deque[Metrics] = deque(maxlen=RECENT)
    with temporary_folder() as temporary:
        curves = _Curves(files, f"{task.prefix}/tensorboard", temporary / "curves") if rank == 0 else None
        data = stream(train, task.features, commits, cache, rank, world, consumed, held)
        tokens, began = 0, time.monotonic()
        if curves and not training.taken:
            curves.walked(0, before)
        while training.taken < train.steps:
            samples = next(data)
            metrics, facts = training.step(samples)
            consumed += train.batch_size
            tokens += int(facts["tokens"])
            saves = training.taken % train.checkpoint_every == 0
            if not training.fault and (saves or training.taken == train.steps) and not training.finite():
                training.fault = "parameters, or their squares, are not finite after its update"
            if training.fault:
                others = heldout or read_samples(task.features, commits, cache, _first(commits) if rank == 0 else [])
                record = examine(training, samples, others, commits, metrics, facts)
                if rank == 0:
                    keep(files, task.prefix, record)
                if record["stops_because"]:
                    return  # as above
            else:
                recent.append(metrics)
            if curves:
                if not training.fault:
                    curves.add(training.taken, metrics, facts)
                rate = tokens / (time.monotonic() - began)
                progress.add(1, f"{_note(recent)}, {rate:.0f} tok/s")
            if saves:
                if curves:
                    if training.taken < train.steps:
                        paused = time.monotonic()
                        curves.walked(training.taken, training.accept_length(heldout, WALKED))
                        began += time.monotonic() - paused
                    curves.upload()  # before the checkpoint, behind which a resumed training adds no point
                    _save(files, f"{task.prefix}/state", training, consumed)
                ray.train.report({"step": training.taken})
        if curves:
            rate = round(tokens / (time.monotonic() - began), 1)
            after = training.accept_length(heldout, WALKED)
            walked = {"samples": len(held), "draft_steps": WALKED, "before": before, "after": after}
            curves.walked(training.taken, after)
            curves.upload()
            result = {"steps": training.taken, "skipped": training.skipped, "consumed": consumed, "tokens_per_s": rate}
            _finish(task, training, {**result, "heldout": walked, **(_mean(recent) if recent else {})})
    ray.train.report({"step": training.taken})


def _before(task: Task, training: Training, heldout: list[Features], rank: int) -> dict[str, Any]:
    """before.json: measured once, by rank 0, before any step is taken."""
    key = f"{task.prefix}/before.json"
    if rank == 0 and not task.files.exists(key):
        task.files.write_json(key, training.accept_length(heldout, WALKED))
    all_here(training.device)
    return task.files.read_json(key)


def _build(task: Task, device: torch.device) -> Training:
    """The initial drafter and the target's head."""
    config, start = task.config, task.start
    pieces = load_pieces(config.target, getattr(torch, config.train.dtype), config.store.storage_options)
    drafter = Drafter(read_config(start["drafter"]), torch.tensor(start["draft_ids"]))
    initialise(drafter, pieces, config.train.seed, config.drafter)
    if config.drafter.start_from:
        start_from, _ = read_tensors(task.files, f"{task.prefix}/start.safetensors")
        drafter.load_state_dict(start_from, strict=False)
    return Training(config.train, drafter, pieces.head, device)


def _mean(recent: deque[Metrics]) -> dict[str, list[float]]:
    return _summed(recent).means()


def _summed(recent: deque[Metrics]) -> Metrics:
    return Metrics(*sum(metrics.stacked() for metrics in recent))  # type: ignore[misc]


def _note(recent: deque[Metrics]) -> str:
    """What a progress line says of the recent steps."""
    if not recent:
        return "no step made an update yet"
    summed = _summed(recent)
    return f"loss {mean_loss(summed):.3f}, accuracy {summed.means()['greedy_accuracy'][0]:.3f}"


def _first(commits: list[Commit]) -> list[tuple[int, int]]:
    """The first sample of some units."""
    return [(shard, 0) for shard, commit in enumerate(commits) if commit.samples][:COMPARED]


def _save(files: Filesystem, folder: str, training: Training, consumed: int) -> None:
    """One object a checkpoint, so that it is there whole or not at all; the older ones go."""
    progress = {"step": str(training.taken), "consumed": str(consumed)}
    write_tensors(files, f"{folder}/{training.taken:08d}.safetensors", training.state(), progress)
    for key in files.list(folder)[:-KEPT]:
        files.delete(key)


def _resume(files: Filesystem, folder: str, training: Training) -> int:
    """Restore the newest checkpoint, if there is one. Returns the samples consumed.

    Damaged where it is not what was written; deleted, training goes on from the one before it.
    """
    found = files.list(folder)
    if not found:
        return 0
    state, progress = read_tensors(files, found[-1])
    training.restore(state, int(progress["step"]))
    return int(progress["consumed"])


def _finish(task: Task, training: Training, result: dict[str, Any]) -> None:
    folder = f"{task.prefix}/weights"
    write_tensors(task.files, f"{folder}/model.safetensors", training.weights(), {"format": "pt"})
    task.files.write_json(f"{folder}/config.json", task.start["drafter"])
    task.files.write_json(f"{folder}/result.json", result)


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

    def walked(self, step: int, found: dict[str, Any]) -> None:
        if found["verify_steps"]:
            self.writer.add_scalar("heldout/accept_length", found["accept_length"], step)

    def upload(self) -> None:
        self.writer.flush()
        for path in self.folder.iterdir():
            self.files.upload(path, f"{self.key}/{path.name}")
