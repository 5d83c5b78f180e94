"""start.json: what a drafter is made from. The first run decides it, every later one follows it.

    settings              what decides the drafter; a later run with others is refused
    units, samples        the frozen list of feature units, and how many samples they hold
    heldout               (unit, place) of the samples that are not trained on
    drafter               the drafter's config.json
    draft_ids, coverage   the draft vocabulary, and the share of the target's tokens that it holds, also by domain
    target_rope           where the drafter has plain RoPE and not the target's kind: that kind (`shape.ROPE_KEYS`)
    counted_rows          with drafter.vocabulary=probability: the target rows that it was counted on
    published             with drafter.start_from: what its config.json says of layers; weights lie in start.safetensors

A vocabulary belongs to the corpus that it was counted on: the fingerprints of responses and features, its rule and its
size are all among the settings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eagle3_ray.capture import target_config, target_folder, text_config
from eagle3_ray.config import PLACEMENT, Config, ConfigError
from eagle3_ray.drafter.published import Published
from eagle3_ray.drafter.shape import drafter_config, rope_type
from eagle3_ray.drafter.target import load_head
from eagle3_ray.drafter.vocabulary import (
    count_probability,
    count_tokens,
    coverage,
    draft_vocabulary,
    end_tokens,
    tokenizer_ids,
)
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.precision import finite
from eagle3_ray.store.shards import ShardReader
from eagle3_ray.store.tensors import write_tensors
from eagle3_ray.train.features import heldout

COUNTED_ROWS = 2**16  # target rows, of random samples, that a vocabulary by probability is counted on


def frozen_start(config: Config, features: Units, description: dict[str, Any], prefix: str) -> dict[str, Any]:
    """start.json, made where there is none; ConfigError where the one there began with other settings."""
    key = f"{prefix}/start.json"
    train = {name: value for name, value in asdict(config.train).items() if name not in PLACEMENT}
    made_of = {"fingerprint": features.fingerprint, "responses": description["responses"]}
    settings = {"features": made_of, "drafter": config.drafter.made_of(), "train": train}
    if not features.files.exists(key):
        start = {"settings": settings, **_decided(config, features, description, prefix)}
        features.files.create_json(key, start)
    start = features.files.read_json(key)
    for group, values in settings.items():
        for name, value in values.items():
            before = start["settings"][group].get(name)
            if before != value:
                raise ConfigError(f"{group}.{name}: {value!r}, but {features.files.url(key)} began with {before!r}")
    return start


def _decided(config: Config, features: Units, description: dict[str, Any], prefix: str) -> dict[str, Any]:
    commits = features.commits()
    sizes = [len(commit.samples) for commit in commits]
    if not sum(sizes):
        raise ConfigError(f"train: no sample is committed below {features.files.url(features.folder)}")
    held = heldout(config.train.seed, sizes, config.train.heldout)
    counts = _counts(config, features.files, description["responses"])
    said = torch.stack(list(counts.values())).sum(0)  # [V]
    boundaries = len(description["boundaries"])
    if config.drafter.start_from:
        if not held:
            raise ConfigError(f"drafter.start_from: {sum(sizes)} samples are too few to measure it on")
        drafter, ids, told = _published(config, features.files, boundaries, prefix)
    else:
        drafter, ids, told = _new(config, features, commits, boundaries, said)
    return {
        "units": [commit.unit for commit in commits],
        "samples": sum(sizes),
        "heldout": [(commits[shard].unit, i) for shard, i in held],
        "drafter": drafter.to_dict(),
        "draft_ids": ids.tolist(),
        "coverage": coverage(said, ids),
        "coverage_by_domain": {domain: coverage(counts[domain], ids) for domain in sorted(counts)},
        **told,
    }


def _counts(config: Config, files: Filesystem, responses: str) -> dict[str, Tensor]:
    """How often each token was said in all committed responses, those of held-out samples too, by domain: [V] each."""
    vocab_size = int(text_config(target_config(target_folder(config.target)))["vocab_size"])
    units, counts = Units(files, "responses", responses), dict[str, Tensor]()
    for commit in units.commits():
        reader = units.open(commit, node_cache(config.store))
        for i in range(len(reader)):
            response = reader.response(i)
            domain = response.domain or "none"
            counts.setdefault(domain, torch.zeros(vocab_size, dtype=torch.int64)).add_(
                count_tokens([response], vocab_size)
            )
    return counts or {"none": torch.zeros(vocab_size, dtype=torch.int64)}


# ---------------------------------------------------------------- a new drafter


def _new(
    config: Config, features: Units, commits: list[Commit], boundaries: int, said: Tensor
) -> tuple[PreTrainedConfig, Tensor, dict[str, Any]]:
    """`said` [V]: how often the target said each token."""
    folder = target_folder(config.target)
    known, special = tokenizer_ids(folder)
    rows = len(said)  # of the target's head: a token may have been added to the tokenizer alone
    always = {number for number in end_tokens(folder) if number < rows}
    always |= {number for number in special if number < rows and said[number]}
    told: dict[str, Any] = {}
    counts = said
    if config.drafter.vocabulary == "probability":
        counts, told["counted_rows"] = _probability(config, features, commits)
    ids = draft_vocabulary(counts, config.drafter.draft_vocab_size, always, known)
    model = text_config(target_config(folder))
    drafter = drafter_config(config.drafter, model, boundaries, len(ids))
    if drafter.rope_parameters["rope_type"] != rope_type(model):  # type: ignore[index]
        told["target_rope"] = rope_type(model)
        print(f"train: the drafter has plain RoPE, not the target's {told['target_rope']}", flush=True)
    return drafter, ids, told


def _probability(config: Config, features: Units, commits: list[Commit]) -> tuple[Tensor, int]:
    """In a Ray task, where a training worker would run: seconds on a GPU may be an hour on the driver's CPU."""
    import ray

    train = config.train
    count = ray.remote(num_cpus=train.cpus_per_worker, num_gpus=int(train.use_gpu))(_count_probability)
    return ray.get(count.remote(config, features, commits))


def _count_probability(config: Config, features: Units, commits: list[Commit]) -> tuple[Tensor, int]:
    """The probability that the target gave to each token, summed over the rows read, [V], and the number of these."""
    device, dtype = ("cuda", torch.bfloat16) if config.train.use_gpu else ("cpu", torch.float32)
    read = 0

    def rows() -> Iterator[Tensor]:
        nonlocal read
        for some in _random_rows(config.train.seed, features, commits):
            read += len(some)
            yield some

    head = load_head(config.target, config.store.storage_options).to(device, dtype)
    return count_probability(rows(), head), read


def _random_rows(seed: int, features: Units, commits: list[Commit]) -> Iterator[Tensor]:
    """The target rows, [R, H] a sample, of random samples, about COUNTED_ROWS in all; each is read alone."""
    pairs = [(shard, i) for shard, commit in enumerate(commits) for i in range(len(commit.samples))]
    random.Random(f"{seed}/vocabulary").shuffle(pairs)
    readers: dict[int, ShardReader] = {}
    read = 0
    for shard, i in pairs:
        if read >= COUNTED_ROWS:
            return
        if shard not in readers:
            commit = commits[shard]
            readers[shard] = ShardReader(commit.shard, features.fingerprint, features.files, commit.samples)
        sample = readers[shard].features(i)
        rows = sample.last_hidden  # [R, H]
        if not finite(rows):
            unit = commits[shard].unit
            raise ConfigError(
                f"drafter.vocabulary: 'probability' counts states of sample {sample.id} of unit {unit} that are not "
                "finite; delete the unit's commit, and extract again"
            )
        read += len(rows)
        yield rows


# ---------------------------------------------------------------- a published one


def _published(
    config: Config, files: Filesystem, boundaries: int, prefix: str
) -> tuple[PreTrainedConfig, Tensor, dict[str, Any]]:
    """Its weights are copied into the store: every worker and every restart begins from the same ones."""
    model = text_config(target_config(target_folder(config.target)))
    published = Published(config.drafter, model, boundaries, config.store.storage_options)
    write_tensors(files, f"{prefix}/start.safetensors", published.weights(), {"format": "pt"})
    return published.config, published.draft_ids(), {"published": published.layers()}
