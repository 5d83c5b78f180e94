"""The training data: samples read from committed shards, in an order that only (seed, epoch, commit list) decide.

An epoch takes the shards in a random order and, so that reads stay near-sequential, shuffles samples only within a
window of a few shards. The epochs follow each other without a seam: global batch b is positions [b*B, (b+1)*B) of the
endless sequence, and worker r of w takes every w-th of them from r on. So the number of samples consumed is the whole
resume state beside the commit list, whatever the number of workers before and after.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator

import torch
from transformers import PreTrainedConfig

from eagle3_ray.config import ConfigError, TrainConfig
from eagle3_ray.drafter.model import Batch
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import Damaged
from eagle3_ray.store.shards import Features, ShardReader

WINDOW = 8  # shards whose samples are shuffled together, and the most that are open at a time
PREFETCH = 4  # batches read ahead


Pair = tuple[int, int]  # a sample: its shard, and its place in that


def heldout(seed: int, sizes: list[int], count: int) -> list[Pair]:
    """`count` samples out of shards of `sizes` samples, ascending; at most a quarter of all."""
    every = [(shard, i) for shard, size in enumerate(sizes) for i in range(size)]
    return sorted(random.Random(f"{seed}/heldout").sample(every, min(count, len(every) // 4)))


def epoch_order(seed: int, epoch: int, sizes: list[int], held: Collection[Pair] = ()) -> list[Pair]:
    """(shard, sample) of every sample but the `held` ones, for shards of `sizes` samples."""
    shuffle = random.Random(f"{seed}/{epoch}").shuffle
    shards = list(range(len(sizes)))
    shuffle(shards)
    order = []
    for start in range(0, len(shards), WINDOW):
        window = [(shard, i) for shard in shards[start : start + WINDOW] for i in range(sizes[shard])]
        window = [pair for pair in window if pair not in held]
        shuffle(window)
        order += window
    return order


def positions(
    config: TrainConfig, sizes: list[int], rank: int, world: int, consumed: int, held: Collection[Pair] = ()
) -> Iterator[list[Pair]]:
    """This worker's share of each global batch, for ever; `consumed` counts all workers'."""
    total, epoch, order = sum(sizes) - len(held), -1, []
    for start in range(consumed, 2**63, config.batch_size):
        share = []
        for position in range(start + rank, start + config.batch_size, world):
            if position // total != epoch:
                epoch = position // total
                order = epoch_order(config.seed, epoch, sizes, held)
            share.append(order[position % total])
        yield share


def stream(
    config: TrainConfig,
    features: Units,
    commits: list[Commit],
    cache: Cache,
    rank: int,
    world: int,
    consumed: int,
    held: Collection[Pair] = (),
) -> Iterator[list[Features]]:
    """The samples of this worker's share of each global batch, read ahead by a thread."""
    sizes = [len(commit.samples) for commit in commits]
    if not sum(sizes):
        raise ConfigError(f"train: no sample is committed below {features.files.url(features.folder)}")
    return _ahead(_read(features, commits, positions(config, sizes, rank, world, consumed, set(held)), cache))


def read_samples(features: Units, commits: list[Commit], cache: Cache, pairs: list[Pair]) -> list[Features]:
    """The samples named by `pairs`."""
    return next(_read(features, commits, iter([pairs]), cache))


def _read(
    features: Units, commits: list[Commit], shares: Iterator[list[Pair]], cache: Cache
) -> Iterator[list[Features]]:
    readers: OrderedDict[int, ShardReader] = OrderedDict()
    for share in shares:
        samples = []
        for shard, i in share:
            if shard not in readers:
                if len(readers) == WINDOW:
                    readers.popitem(last=False)
                readers[shard] = features.open(commits[shard], cache)
            readers.move_to_end(shard)
            samples.append(readers[shard].features(i))
        yield samples


def _ahead(source: Iterator[list[Features]]) -> Iterator[list[Features]]:
    """`source`, run by a thread up to PREFETCH items ahead; its error is raised here."""
    ready: queue.Queue[list[Features] | BaseException] = queue.Queue(PREFETCH)
    stopped = threading.Event()

    def fill() -> None:
        try:
            for item in source:
                while not stopped.is_set():
                    try:
                        ready.put(item, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if stopped.is_set():
                    return
        except BaseException as error:  # also what a dying interpreter raises: the reader must not wait for ever
            ready.put(error)

    threading.Thread(target=fill, daemon=True).start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()


def check_fits(samples: list[Features], shape: PreTrainedConfig) -> None:
    """Damaged unless the samples are of the target that the drafter of this config is for."""
    hidden, width = shape.target_hidden_size, shape.target_hidden_size * shape.num_aux_hidden_states
    for sample in samples:
        tokens = int(sample.input_ids.max()) + 1 if len(sample.input_ids) else 0
        seen = sample.aux.shape[1], sample.last_hidden.shape[1]
        if tokens > shape.vocab_size or seen != (width, hidden):
            raise Damaged(
                f"sample {sample.id} has states of {seen[0]} and {seen[1]} numbers and token ids up to {tokens - 1}; "
                f"the target has states of {width} and {hidden} and {shape.vocab_size} tokens"
            )


def batches(samples: list[Features], max_length: int, dtype: torch.dtype) -> list[Batch]:
    """The samples in micro-batches of at most `max_length` tokens. What follows the last response token is cut off."""
    groups: list[list[Features]] = []
    room = 0
    for sample in samples:
        mask = sample.loss_mask[:max_length]  # [T]
        length = int(mask.nonzero()[-1]) + 1 if mask.any() else 0
        if not length:
            continue
        if length > room:
            groups.append([])
            room = max_length
        groups[-1].append(_cut(sample, length))
        room -= length
    return [_batch(group, dtype) for group in groups]


def _cut(sample: Features, length: int) -> Features:
    rows = int((sample.last_rows < length).sum())
    return Features(
        id=sample.id,
        input_ids=sample.input_ids[:length],
        loss_mask=sample.loss_mask[:length],
        aux=sample.aux[:length],
        last_hidden=sample.last_hidden[:rows],
        last_rows=sample.last_rows[:rows],
    )


def _batch(samples: list[Features], dtype: torch.dtype) -> Batch:
    lengths = tuple(len(s.input_ids) for s in samples)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(
        ids=tuple(s.id for s in samples),
        lengths=lengths,
        input_ids=torch.cat([s.input_ids for s in samples]).long(),  # [N]
        loss_mask=torch.cat([s.loss_mask for s in samples]),  # [N]
        aux=torch.cat([s.aux for s in samples]).to(dtype),  # [N, A*H]
        last_hidden=torch.cat([s.last_hidden for s in samples]).to(dtype),  # [R, H]
        last_rows=torch.cat([s.last_rows + start for s, start in zip(samples, starts, strict=False)]),  # [R]
    )
