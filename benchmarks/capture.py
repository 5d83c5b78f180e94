"""What capture costs an engine, and how full the extraction keeps it: `python benchmarks/capture.py`.

Two engines on SmolLM2, one with our plugin and one stock, take batches of new tokens in turns; while one is measured,
the other is stopped. Three ways through a batch: prefill alone, on the engine with our plugin; the same with capture,
and a shard committed to disk; SGLang's own hidden states, nested Python lists, as tensors to disk, one `torch.save` a
sample. Then a real extraction of 300 prompts, whose decode batches SGLang logs. The last line is one JSON object of
ratios; on CPU they say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra import compose, initialize_config_dir

from eagle3_ray.capture import engine_args
from eagle3_ray.config import SamplingConfig
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.extract import UNITS, Extractor
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.precision import stored
from eagle3_ray.store.shards import Features, target_rows, write_features
from ray_jobs import typed

ROOT = Path(__file__).resolve().parent.parent


def opened(store: Path, *overrides: str) -> Run:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return open_run(typed(compose("config", overrides=[f"store.root={store}", *overrides])))


def stock_child(
    connection: Connection, args: dict[str, Any], env: dict[str, str], folder: Path, dtype: torch.dtype
) -> None:
    """The same engine without our plugin, in a process of its own: its hidden states come back as SGLang gives them."""
    os.environ |= env
    import sglang

    engine = sglang.Engine(**args)
    connection.send("ready")
    while sequences := connection.recv():
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        outputs = engine.generate(input_ids=sequences, sampling_params=sampling, return_hidden_states=True)
        for number, (output, ids) in enumerate(zip(outputs, sequences, strict=True)):
            states = torch.tensor(output["meta_info"]["hidden_states"][0], dtype=dtype)  # [T, A*H]
            assert len(states) == len(ids)
            torch.save(states, folder / f"{number}.pt")
        connection.send("done")
    engine.shutdown()


class StockEngine:
    def __init__(self, run: Run, layer_ids: list[int], folder: Path) -> None:
        args = {
            "model_path": str(run.folder),
            "skip_tokenizer_init": True,
            "dtype": run.config.engine.dtype,
            "speculative_algorithm": "EAGLE3",
            "enable_return_aux_hidden_states": True,
            "return_aux_hidden_state_layer_ids": layer_ids,
            "disable_radix_cache": True,  # a hit would bring one row instead of all
            "chunked_prefill_size": -1,  # and chunks would lose all but the last
            **engine_args(run.config, "capture"),
        }
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        env = {**run.config.hardware.env, "SGLANG_USE_CPU_ENGINE": str(int(run.config.hardware.device == "cpu"))}
        self.process = spawn.Process(
            target=stock_child, args=(theirs, args, env, folder, getattr(torch, run.spec.dtype))
        )
        self.process.start()
        assert self.connection.recv() == "ready"

    def saved_to_disk(self, sequences: list[list[int]]) -> None:
        self.connection.send(sequences)
        assert self.connection.recv() == "done"

    def close(self) -> None:
        self.connection.send(None)
        self.process.join()


@contextmanager
def stopped(engine: SGLangEngine | StockEngine) -> Iterator[None]:
    """The processes of the other engine, which would poll for work, hold still."""
    family = psutil.Process(engine.process.pid).children(recursive=True)
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            process.resume()


def captured_to_disk(run: Run, engine: SGLangEngine, units: Units, scratch: Path, batch: list[list[int]]) -> None:
    """What the extraction does with a unit: states to a shard, the shard committed."""

    def features(number: int) -> Features:
        (captured,) = engine.capture([batch[number]])
        ids, mask = torch.tensor(batch[number], dtype=torch.int32), torch.ones(len(batch[number]), dtype=torch.bool)
        rows = target_rows(mask)  # [R]
        states = stored(captured.aux, captured.last_hidden[rows], run.spec.dtype)  # aux [T, A*H], last_hidden [R, H]
        return Features(str(number), ids, mask, last_rows=rows, **states)

    with ThreadPoolExecutor(len(batch)) as pool:
        samples = list(pool.map(features, range(len(batch))))
    write_features(scratch / "shard", samples, "benchmark")
    units.commit(f"{time.time_ns()}", scratch / "shard", [])


def rates(run: Run, args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Tokens a second of each way, one number a repeat."""
    engine = SGLangEngine(run.config, run.folder, run.spec)
    stock = StockEngine(run, engine.info["layer_ids"], folder)
    units = Units(Filesystem(str(folder)), "features", "benchmark")
    generator = torch.Generator().manual_seed(0)
    one = SamplingConfig(max_new_tokens=1)

    def batch() -> list[list[int]]:
        """New tokens each time: nothing comes from the prefix cache."""
        return torch.randint(1000, 40000, (args.batch, args.tokens), generator=generator).tolist()

    ways: dict[str, tuple[SGLangEngine | StockEngine, Callable[[list[list[int]]], Any]]] = {
        "no_capture": (stock, lambda sequences: engine.generate(sequences, one)),
        "capture": (stock, lambda sequences: captured_to_disk(run, engine, units, folder, sequences)),
        "stock": (engine, stock.saved_to_disk),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for repeat in range(args.repeats + 1):  # the first warms up
            for name, (other, way) in ways.items():
                with stopped(other):
                    start = time.monotonic()
                    for _ in range(args.batches):
                        way(batch())
                    rate = args.batches * args.batch * args.tokens / (time.monotonic() - start)
                if repeat:
                    found[name].append(rate)
                print(f"repeat {repeat} {name}: {rate:.0f} tok/s", flush=True)
    finally:
        engine.close()
        stock.close()
    return found


def occupancy(run: Run) -> dict[str, float]:
    """The mean share of hardware.max_inflight that decodes, over all decode steps of an extraction to its very end."""
    corpus = prepare(run, run.config.prompts)
    for units, description in (run.responses(corpus.fingerprint), run.features(corpus.fingerprint)):
        units.describe(description)
    extractor = Extractor(run, corpus)
    with ThreadPoolExecutor(UNITS) as pool:  # as Ray calls it
        for row in pool.map(lambda unit: extractor({"unit": [unit]}), corpus.units):
            print(f"unit {row['unit'][0]}: {row['samples'][0]} samples", flush=True)
    engine = extractor.engine.engine
    assert isinstance(engine, SGLangEngine)
    log = engine.log.read_text()
    extractor.engine.close()
    running = [int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", log)]
    return {"decode_steps": len(running), "mean": statistics.mean(running) / run.config.hardware.max_inflight}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, default=1, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        store = Path(scratch)
        found = rates(opened(store, f"engine.dtype={args.dtype}"), args, store)
        overrides = [f"prompts.limit={args.prompts}", "prompts.unit_size=50", "hardware.max_inflight=16"]
        overrides += ["engine.args.decode_log_interval=1", "hardware.args.max_running_requests=16"]
        filled = occupancy(opened(store, *["+" * o.startswith("engine.args") + o for o in overrides]))
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratios = {
        "vs_no_capture": [c / n for c, n in zip(found["capture"], found["no_capture"], strict=True)],
        "vs_stock": [c / s for c, s in zip(found["capture"], found["stock"], strict=True)],
    }
    print(f"tokens a second, median of {args.repeats}: { ({k: round(v) for k, v in middle.items()}) }")
    for name, values in ratios.items():
        print(f"{name}: {min(values):.3f} to {max(values):.3f}")
    print(f"decode steps: {filled['decode_steps']}")
    result = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    print(json.dumps(result | {"decode_batch_occupancy": round(filled["mean"], 3)}))


if __name__ == "__main__":
    main()
