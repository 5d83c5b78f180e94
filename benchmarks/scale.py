"""What a sample costs beside the engine, over a whole corpus: `python benchmarks/scale.py PROMPTS.jsonl`.

A tiny target, whose states cost next to nothing, is extracted over two Ray nodes of this machine, an engine each. First
the same two engines answer and capture some of the prompts with nothing around them: no Ray, no store. Then the whole
corpus goes through the stage, its memory watched, and once more when all is done. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
from hydra import compose, initialize_config_dir
from ray.cluster_utils import Cluster

from eagle3_ray.engines.base import RequestError, answer, each
from eagle3_ray.engines.sglang import SGLangEngine, context_length
from eagle3_ray.extract import extract
from eagle3_ray.prepare import Corpus, Prompt, prepare
from eagle3_ray.run import Run, open_run
from ray_jobs import typed

ROOT = Path(__file__).resolve().parent.parent
ENGINES = 2
_warm: Any = None  # of an engine's process: where all of them wait for the slowest


def tiny_target(folder: Path) -> Path:
    """A random Llama of 64 numbers a state, with SmolLM2's tokenizer."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_targets import tiny_llama

    made = subprocess.run(
        [sys.executable, ROOT / "examples" / "smollm2.py"], check=True, capture_output=True, text=True
    )
    tiny_llama(folder, vocab=49152, layers=8)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (path := Path(made.stdout.split()[-1], name)).exists():
            shutil.copy(path, folder)
    return folder


def engine_seconds(run: Run, corpus: Corpus, samples: int) -> float:
    """A sample's time with nothing around the engines, each in a process of its own, once both are up and warm."""
    prompts = [prompt for unit in corpus.units for prompt in corpus.read(unit)]
    shares = [prompts[number : 2 * samples : ENGINES] for number in range(ENGINES)]  # half of each is to warm up
    context = multiprocessing.get_context("spawn")
    warm = context.Barrier(ENGINES)
    with ProcessPoolExecutor(ENGINES, context, initializer=_keep, initargs=(warm,)) as pool:
        spans = list(pool.map(_one_engine, [run] * ENGINES, shares))
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / samples


def _keep(barrier: Any) -> None:
    global _warm
    _warm = barrier


def _one_engine(run: Run, prompts: list[Prompt]) -> tuple[float, float]:
    """When the second half of the prompts began, and when it was captured. As the stage does, a unit is answered first
    and captured then: taken one by one, prefills would break into the others' decoding."""
    engine, room = SGLangEngine(run.config, run.folder, run.spec), context_length(run.config, run.folder)

    def respond(prompt: Prompt) -> list[int]:
        return answer(engine, prompt.segments, run.config.sampling, room).token_ids

    def work(some: list[Prompt], pool: ThreadPoolExecutor) -> None:
        for start in range(0, len(some), run.config.prompts.unit_size):
            answered = each(
                respond, some[start : start + run.config.prompts.unit_size], run.config.hardware.max_inflight
            )
            list(pool.map(lambda ids: engine.capture([ids]), [a for a in answered if not isinstance(a, RequestError)]))

    try:
        half = len(prompts) // 2
        with ThreadPoolExecutor(run.config.hardware.max_inflight) as pool:
            work(prompts[:half], pool)
            _warm.wait()
            start = time.time()
            work(prompts[half:], pool)
            return start, time.time()
    finally:
        engine.close()


def watch(sizes: list[float], stop: threading.Event) -> None:
    """MiB of the driver and the actors with their uploaders; the engines' processes are SGLang's."""
    while not stop.wait(5):
        found = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                line = " ".join(process.cmdline())
                if process.pid == psutil.Process().pid or "MapWorker" in line or "store.uploader" in line:
                    found += process.memory_info().rss
            except psutil.Error:
                continue
        sizes.append(found / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", type=int, help="prompts; all of them by default")
    parser.add_argument("--alone", type=int, default=500, help="samples of the engines alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        overrides = [f"target.path={tiny_target(Path(scratch, 'target'))}", f"store.root={scratch}/store"]
        overrides += [f"prompts.source={args.prompts.resolve()}", "prompts.unit_size=256", "sampling.max_new_tokens=8"]
        overrides += [f"prompts.limit={args.limit or 'null'}", "prompts.max_prompt_tokens=1024"]
        overrides += ["prompts.max_bad_share=0.5", f"hardware.num_actors={ENGINES}", "cluster=running"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            run = open_run(typed(compose("config", overrides=overrides)))
        corpus = prepare(run, run.config.prompts)
        alone = engine_seconds(run, corpus, args.alone)
        print(f"engines alone: {1000 * alone:.1f} ms a sample", flush=True)

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        cluster.add_node(num_cpus=2)
        sizes: list[float] = []
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(sizes, stop))
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            watcher.start()
            start = time.monotonic()
            summary = extract(run, corpus)
            seconds = time.monotonic() - start
            stop.set()
            start = time.monotonic()
            assert extract(run, corpus) == summary
            resumed = time.monotonic() - start
        finally:
            stop.set()
            watcher.join()
            ray.shutdown()
            cluster.shutdown()
    quarter = max(1, len(sizes) // 4)
    early, late = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
    result = {
        "samples": summary["samples"],
        "failed": summary["failed"],
        "seconds": round(seconds, 1),
        "engine_ms_a_sample": round(1000 * alone, 2),
        "overhead_ms_a_sample": round(1000 * (seconds / max(1, summary["samples"]) - alone), 2),
        "memory_mib": [round(statistics.median(early)), round(statistics.median(late))],
        "memory_growth": round(statistics.median(late) / statistics.median(early), 3),
        "resume_s": round(resumed, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
