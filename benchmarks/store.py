"""What the store costs beside the bare bytes: `python benchmarks/store.py`.

The states are SmolLM2's, of the demo's prompts, by plain Transformers, joined to samples of 2,048 tokens, repeated to
the size of a shard. Writing: our shard against safetensors' own `save_file` of one tensor of the same bytes, without
fsync on both sides, then with it on both. Reading: our stream of training batches against copying the same bytes out of
a memory map, in pieces of a micro-batch, of which both sides hold a batch. All from the page cache, since a disk would
hide what our code costs. The last line is one JSON object: ratios, and the bytes a token weighs in each kind of file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from store_s3 import transfers
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_ray.config import TrainConfig
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.precision import stored
from eagle3_ray.store.shards import Features, target_rows, write_features
from eagle3_ray.train.features import batches, stream

ROOT = Path(__file__).resolve().parent.parent
BOUNDARIES = (2, 15, 27)
TOKENS = 256  # of a real sample
JOINED = 8  # of them are a sample that is written and read
BATCH = 8
SHARDS = 2


def smollm2_states() -> list[Features]:
    """Of the demo's prompts, one after the other, in bfloat16; all but the first quarter of each sample is response."""
    make = [sys.executable, str(ROOT / "examples" / "smollm2.py")]
    folder = subprocess.run(make, check=True, capture_output=True, text=True).stdout.split()[-1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().base_model
    records = map(json.loads, (ROOT / "examples/prompts/train.jsonl").read_text().splitlines())
    turns = [[message] for record in records for message in record["messages"]]
    ids = [token for turn in turns for token in tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False)]
    mask = torch.arange(TOKENS) >= TOKENS // 4  # [T]
    found = []
    for number in range(JOINED):
        start = number * TOKENS
        piece = torch.tensor(ids[start : start + TOKENS])  # [T]
        with torch.inference_mode():
            states = model(piece[None], output_hidden_states=True, use_cache=False).hidden_states  # of [1, T, H]
        aux = torch.cat([states[boundary][0] for boundary in BOUNDARIES], dim=-1)  # [T, A*H]
        rows = target_rows(mask)  # [R]
        kept = stored(aux, states[-1][0][rows], "bfloat16")  # [T, A*H], [R, H]
        found.append(Features(f"s{number}", piece.int(), mask, last_rows=rows, **kept))
    return found


def joined(real: list[Features], number: int) -> Features:
    """One long sample, in memory of its own."""
    mask = torch.cat([f.loss_mask for f in real])  # [T]
    return Features(
        id=f"s{number}",
        input_ids=torch.cat([f.input_ids for f in real]),  # [T]
        loss_mask=mask,
        aux=torch.cat([f.aux for f in real]),  # [T, A*H]
        last_hidden=torch.cat([f.last_hidden for f in real]),  # [R, H]
        last_rows=target_rows(mask),  # [R]
    )


def nbytes(features: list[Features]) -> int:
    return sum(value.nbytes for f in features for value in vars(f).values() if isinstance(value, torch.Tensor))


def in_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, one number a repeat; the first repeat warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repeat:
                found[name].append(time.perf_counter() - start)
    return found


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str, size: int) -> float:
    """How many times as fast as theirs ours is: the median of the repeats' ratios."""
    found = [bare / own for own, bare in zip(seconds[ours], seconds[theirs], strict=True)]
    rates = ", ".join(f"{name} {size / statistics.median(seconds[name]) / 1e9:.2f} GB/s" for name in (ours, theirs))
    print(f"{ours} over {theirs}: {min(found):.3f} to {max(found):.3f}; {rates}", flush=True)
    return round(statistics.median(found), 3)


def writing(folder: Path, features: list[Features], repeats: int) -> dict[str, float]:
    size = nbytes(features)
    tensors = [value for f in features for value in vars(f).values() if isinstance(value, torch.Tensor)]
    one = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    path = folder / "written"

    def anew(write: Callable[[], Any], durable: bool) -> None:
        path.unlink(missing_ok=True)
        write()
        if durable:
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    ways = {
        "shard": lambda: anew(lambda: write_features(path, features, "benchmark"), False),
        "save_file": lambda: anew(lambda: save_file({"states": one}, path), False),
        "shard, synced": lambda: anew(lambda: write_features(path, features, "benchmark"), True),
        "save_file, synced": lambda: anew(lambda: save_file({"states": one}, path), True),
        "zstd shard": lambda: anew(lambda: write_features(path, features, "benchmark", "zstd"), False),
    }
    seconds = in_turns(ways, repeats)
    path.unlink()
    ratio(seconds, "zstd shard", "save_file", size)
    ratio(seconds, "shard, synced", "save_file, synced", size)
    return {"write_vs_save_file": ratio(seconds, "shard", "save_file", size)}


def reading(folder: Path, features: list[Features], repeats: int) -> dict[str, float]:
    config = TrainConfig(batch_size=BATCH)
    kinds = {"bf16": ("bfloat16", "none"), "fp8": ("float8_e4m3", "none"), "bf16+zstd": ("bfloat16", "zstd")}
    units = {name: Units(Filesystem(str(folder / name)), "features", "benchmark") for name in kinds}
    for name, (dtype, compression) in kinds.items():
        kept = [replace(f, **stored(f.aux, f.last_hidden, dtype)) for f in features]
        for number in range(SHARDS):
            write_features(folder / "new", kept, "benchmark", compression)
            units[name].commit(f"u{number}", folder / "new", [{"id": f.id} for f in features])

    def ours(name: str) -> None:
        commits = units[name].commits()
        steps = sum(len(commit.samples) for commit in commits) // config.batch_size
        samples = stream(config, units[name], commits, Cache(folder), 0, 1, consumed=0)
        read = 0
        for share in islice(samples, steps):
            read += sum(batch.aux.nbytes for batch in batches(share, config.max_length, torch.bfloat16))
        assert read == SHARDS * sum(f.aux.nbytes for f in features)

    def mapped() -> None:
        sample = nbytes(features[:1])
        piece = sample * config.max_length // len(features[0].input_ids)
        for commit in units["bf16"].commits():
            path = units["bf16"].files.url(commit.shard)
            for batch in torch.from_file(path, size=commit.size, dtype=torch.uint8).split(sample * BATCH):
                [rows.clone() for rows in batch.split(piece)]

    start = time.perf_counter()
    ours("bf16")
    first = time.perf_counter() - start  # with the sha256 of each shard, which is asked once a process
    seconds = in_turns({"mmap": mapped, **{name: lambda n=name: ours(n) for name in kinds}}, repeats)
    size = SHARDS * nbytes(features)
    print(f"bf16, the first time: {size / first / 1e9:.2f} GB/s")
    ratio(seconds, "fp8", "mmap", size)
    ratio(seconds, "bf16+zstd", "mmap", size)
    return {"read_vs_mmap": ratio(seconds, "bf16", "mmap", size)}


def bytes_per_token(folder: Path, features: list[Features]) -> dict[str, int]:
    """Of whole files, with all that a sample has beside its states."""
    tokens = sum(len(f.input_ids) for f in features)
    found = {}
    for dtype, name in (("bfloat16", "bf16"), ("float8_e4m3", "fp8")):
        kept = [replace(f, **stored(f.aux, f.last_hidden, dtype)) for f in features]
        for compression, more in (("none", ""), ("zstd", "+zstd")):
            write_features(folder / "shard", kept, "benchmark", compression)
            found[name + more] = (folder / "shard").stat().st_size
    each: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        "torch.save a sample": lambda tensors: torch.save(tensors, folder / "sample"),
        "safetensors a sample": lambda tensors: save_file(tensors, folder / "sample"),
    }
    for name, save in each.items():
        found[name] = 0
        for f in features:
            save({key: value for key, value in vars(f).items() if isinstance(value, torch.Tensor)})
            found[name] += (folder / "sample").stat().st_size
    return {name: round(size / tokens) for name, size in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512, help="of a shard")
    parser.add_argument("--s3-mib", type=int, default=256, help="of the file that goes to S3 and back")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    real = smollm2_states()
    torch.set_num_threads(1)  # what Ray gives a worker of one CPU
    whole = args.mib * 2**20 // nbytes(real) // BATCH * BATCH
    features = [joined(real, number) for number in range(whole)]
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        folder = Path(scratch)
        result: dict[str, Any] = {
            **writing(folder, features, args.repeats),
            **reading(folder, features, args.repeats),
            "bytes_per_token": bytes_per_token(folder, real),
        }
    result |= transfers(args.s3_mib, args.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
