"""Engines that are killed, on real SGLang and a real Ray: every sample once, nothing wrong, nothing left behind."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from conftest import compose

from eagle3_ray.attempts import DIED
from eagle3_ray.extract import Extractor, extract, extracted
from eagle3_ray.leftovers import SHARED_MEMORY
from eagle3_ray.prepare import Corpus, prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.shards import Features

pytestmark = [pytest.mark.engine, pytest.mark.full]
VICTIMS = ["scheduler"] * 5 + ["actor"]


@pytest.fixture
def line(tiny_llama_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Opens a run over 200 conversations in units of 40, in a store of that name."""
    prompts = tmp_path / "prompts.jsonl"
    words = [f"word{i}" for i in range(300)]
    draw = random.Random(0)
    records = [{"id": f"p{i}", "prompt": " ".join(draw.choices(words, k=120))} for i in range(200)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    handover = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))

    def opened(store: str, *overrides: str) -> tuple[Run, Corpus]:
        common = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path}/{store}", f"prompts.source={prompts}"]
        common += ["prompts.limit=200", "prompts.unit_size=40", "sampling.max_new_tokens=8", "capture.dtype=float32"]
        common += ["capture.boundaries=[1,4,6]", "hardware.num_actors=1", "hardware.max_inflight=8"]
        common += [f"hardware.capture_dir={handover}"]
        run = open_run(compose(*common, *overrides))
        return run, prepare(run, run.config.prompts)

    yield opened
    assert list(handover.iterdir()) == []
    handover.rmdir()


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def features(run: Run, corpus: Corpus) -> dict[str, Features]:
    units, commits = extracted(run, corpus)
    found: dict[str, Features] = {}
    for commit in commits:
        reader = units.open(commit, Cache(Path("/nonexistent")))
        for number in range(len(reader)):
            sample = reader.features(number)
            assert sample.id not in found, "a sample is there twice"
            found[sample.id] = sample
    return found


def engine_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "sglang" in line:
            found.append(process)
    return found


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # it ended meanwhile
        return ""


def kill(store: Path, killed: list[int], stop: threading.Event) -> None:
    """As an operator would see it from outside: where captures are at work, kill a process at a random moment."""
    draw = random.Random(1)
    seen: set[int] = set()
    while len(killed) < len(VICTIMS) and not stop.wait(0.02):
        at_work = any(DIED in read(path) for path in store.glob("features/*/attempts/*/*.json"))  # not ended yet
        schedulers = [p for p in engine_processes() if "sglang::scheduler" in " ".join(p.cmdline())]
        if at_work and schedulers and schedulers[0].pid not in seen:
            seen.add(schedulers[0].pid)
            time.sleep(draw.uniform(0, 0.3))
            child = schedulers[0].parent()
            assert child is not None and "sglang_child" in " ".join(child.cmdline())
            waiting = child.parent()
            assert waiting is not None
            actor = waiting.parent()
            victim = schedulers[0] if VICTIMS[len(killed)] == "scheduler" else actor
            assert victim is not None
            victim.kill()
            killed.append(victim.pid)


def test_captures_with_killed_schedulers_and_a_killed_actor_equal_undisturbed_ones(
    line, local_ray, left_behind, tmp_path: Path
) -> None:
    run, corpus = line("quiet")
    extract(run, corpus)
    wanted = features(run, corpus)
    for kind in ("responses", "prompts"):
        shutil.copytree(tmp_path / "quiet" / kind, tmp_path / "disturbed" / kind)
    run, corpus = line("disturbed")
    killed: list[int] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill, args=(tmp_path / "disturbed", killed, stop))
    killer.start()
    try:
        summary = extract(run, corpus)
    finally:
        stop.set()
        killer.join()
    assert len(killed) == len(VICTIMS)
    assert (summary["samples"], summary["failed"]) == (200, 0)
    found = features(run, corpus)
    assert found.keys() == wanted.keys()
    for name, sample in found.items():
        assert torch.equal(sample.input_ids, wanted[name].input_ids)
        for got, expected in ((sample.aux, wanted[name].aux), (sample.last_hidden, wanted[name].last_hidden)):
            assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    deadline = time.monotonic() + 30  # Ray ends the actor after the data set, and it tidies up after its engine
    while (engine_processes() or left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert engine_processes() == []
    assert left_behind() == set()


POISON = """
import os

def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def forward(original, self, input_ids, *args, **kwargs):
        if (input_ids == {token}).any():
            os._exit(1)
        return original(self, input_ids, *args, **kwargs)

    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", forward, HookType.AROUND)
"""


def test_a_prompt_that_kills_every_engine_is_quarantined(line, smollm2_tokenizer, left_behind, tmp_path: Path) -> None:
    """The fault is a plugin of SGLang's own, which dies on one token; nothing else knows which."""
    plugin = tmp_path / "plugin"
    (plugin / "poison-0.dist-info").mkdir(parents=True)
    (plugin / "poison-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: poison\nVersion: 0\n")
    (plugin / "poison-0.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\npoison = poison:load\n")
    (token,) = smollm2_tokenizer(" quetzal", add_special_tokens=False)["input_ids"][:1]
    (plugin / "poison.py").write_text(POISON.format(token=token))
    prompts = [json.loads(text) for text in (tmp_path / "prompts.jsonl").read_text().splitlines()][:40]
    prompts[13]["prompt"] += " quetzal"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    run, corpus = line("store", f"+hardware.env.PYTHONPATH={plugin}", "prompts.max_bad_share=0.1")
    sequences = [prompt.segments[0] for prompt in corpus.read(corpus.units[0])]
    assert sum(token in ids for ids in sequences) == 1
    for units, description in (run.responses(corpus.fingerprint), run.features(corpus.fingerprint)):
        units.describe(description)
    extractor = Extractor(run, corpus)
    row = extractor({"unit": corpus.units})
    extractor.engine.close()
    assert (row["samples"], row["failed"]) == ([39], [1])
    (failure,) = run.responses(corpus.fingerprint)[0].read_commit(corpus.units[0]).facts["failed"]
    assert failure["id"] == "p13" and failure["reason"].startswith("quarantined: the engine died")
    assert sorted(features(run, corpus)) == sorted({f"p{i}" for i in range(40)} - {"p13"})
    assert row["engine_starts"][0] <= 8
    assert engine_processes() == []
    assert left_behind() == set()
