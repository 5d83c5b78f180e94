"""SIGKILL at chosen moments, on a real S3 server and a Ray of two nodes: every sample once, nothing wrong.

What is killed, and when, is decided out here: by a proxy before the server, and by the table of processes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import ray
import torch
from barriers import Barriers
from conftest import ROOT, compose
from ray.cluster_utils import Cluster
from seaweed import Server, serve

from eagle3_ray.extract import extract, extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.run import open_run
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.garbage import ORPHANS, garbage, remove
from eagle3_ray.store.overview import find
from eagle3_ray.store.shards import Features

WAIT_S = 600.0


@dataclass
class Chaos:
    """Kills the next victim of the plan, (moment, victim) in this order, when the job is at that moment."""

    plan: list[tuple[str, str]]
    cluster: Cluster
    log: list[str] = field(default_factory=list)
    driver: subprocess.Popen[bytes] | None = None
    deciding: threading.Lock = field(default_factory=threading.Lock)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def kill(self, moment: str, key: str) -> bool:
        with self.deciding:
            if len(self.log) == len(self.plan) or self.plan[len(self.log)][0] != moment:
                return False
            victim = self.plan[len(self.log)][1]
            processes = self.find(victim)
            if not processes:
                return False
            if moment in ("generation", "capture"):  # the request says that it begins
                time.sleep(self.draw.uniform(0, 1))
            chosen = self.draw.choice(processes)
            try:
                chosen.kill()
            except psutil.NoSuchProcess:
                return False
            self.log.append(f"kill {len(self.log) + 1}: {victim} {chosen.pid}, {moment} of {key.partition('?')[0]}")
            print(self.log[-1], flush=True)
            return True

    def find(self, victim: str) -> list[psutil.Process]:
        if victim == "driver":
            assert self.driver is not None
            return [psutil.Process(self.driver.pid)] if self.driver.poll() is None else []
        if victim == "raylet":  # of the second node
            return [
                psutil.Process(node.all_processes["raylet"][0].process.pid)
                for node in self.cluster.worker_nodes
                if node.all_processes["raylet"][0].process.poll() is None
            ]
        name = {"actor": "ray::", "engine": "eagle3_ray.engines.sglang_child"}[victim]
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if name in line and (victim != "actor" or "MapWorker" in line or "Extractor" in line):
                found.append(process)
        return found

    def repair(self) -> None:
        """A node that lost its raylet joins again."""
        for node in list(self.cluster.worker_nodes):
            if node.all_processes["raylet"][0].process.poll() is not None:
                self.cluster.remove_node(node, allow_graceful=False)
                self.cluster.add_node(num_cpus=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def write_prompts(path: Path, count: int) -> None:
    draw = random.Random(0)
    records = [{"id": f"p{i}", "prompt": " ".join(draw.choices("abcdefghijklmnop", k=20))} for i in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_to_the_end(chaos: Chaos, command: list[str], environment: dict[str, str], log: Path) -> int:
    """Start the driver again, as an operator would, until it ends well; returns how often it ran."""
    for runs in range(1, len(chaos.plan) + 4):
        chaos.repair()
        with log.open("ab") as file:
            chaos.driver = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
        deadline = time.monotonic() + WAIT_S
        while chaos.driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            chaos.repair()
        if chaos.driver.poll() is None:
            chaos.driver.kill()
            raise AssertionError(f"no end in {WAIT_S} s:\n{log.read_text(errors='replace')[-3000:]}")
        if chaos.driver.returncode == 0:
            return runs
    raise AssertionError(f"it does not end:\n{log.read_text(errors='replace')[-3000:]}")


def features(overrides: list[str], cache: Path) -> dict[str, Features]:
    """Each sample's features, checked against its commit."""
    run = open_run(compose(*overrides))
    corpus = prepare(run, run.config.prompts)
    units, commits = extracted(run, corpus)
    found: dict[str, Features] = {}
    for commit in commits:
        reader = units.open(commit, Cache(cache))
        for number in range(len(reader)):
            sample = reader.features(number)
            assert sample.id not in found, "a sample is there twice"
            found[sample.id] = sample
    return found


def swept(files: Filesystem) -> list[str]:
    """Find the shards that no commit names, and remove them with what else the kills left; nothing else goes."""
    before = time.time() + 60
    found = garbage(files, before)
    shards = {key for key in files.list("") if "/shards/" in key}
    named = {commit.shard for folder in find(files) for commit in folder.commits()}
    orphans = [entry.key for entry in found[ORPHANS]]
    assert named <= shards and sorted(orphans) == sorted(shards - named)
    remove(files, [entry for entries in found.values() for entry in entries], before)
    assert {key for key in files.list("") if "/shards/" in key} == named
    return orphans


def survive(
    plan: list[tuple[str, str]], samples: int, settings: list[str], server: Server, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.storage_options["secret"])
    write_prompts(tmp_path / "p.jsonl", samples)
    settings = [
        *settings,
        f"store.scratch_dir={tmp_path}",
        f"prompts.source={tmp_path}/p.jsonl",
        "sampling.max_new_tokens=8",
        "hardware.num_actors=2",
    ]
    settings += ["capture.dtype=float32", "drafter.draft_vocab_size=64", "cluster=running"]
    with two_nodes() as cluster:
        chaos = Chaos(plan, cluster)
        proxy = Barriers(server.endpoint, chaos.kill)
        store = ["store=s3", f"store.root=s3://{server.bucket}/{tmp_path.name}"]
        disturbed = [*settings, *store, f"+store.storage_options.endpoint_url={proxy.endpoint}"]
        command = [sys.executable, "-m", "ray_jobs.extract", *disturbed, f"cluster.address={cluster.address}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        runs = run_to_the_end(chaos, command, environment, tmp_path / "driver.log")
        proxy.close()
        assert len(chaos.log) == len(plan), chaos.log
        assert runs > 1
    direct = [*settings, *store, f"+store.storage_options.endpoint_url={server.endpoint}"]
    files = open_run(compose(*direct)).files
    orphans = swept(files)
    found = features(direct, tmp_path)
    assert sorted(found) == sorted(f"p{i}" for i in range(samples))
    print(f"{runs} runs, {Counter(victim for _, victim in plan)}, {len(orphans)} orphans")

    # An undisturbed run, given the same responses
    for key in [key for kind in ("prompts", "responses") for key in files.list(kind)]:
        files.download(key, tmp_path / "quiet" / key)
    quiet = [*settings, f"store.root={tmp_path}/quiet"]
    run = open_run(compose(*quiet))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        extract(run, prepare(run, run.config.prompts))
    finally:
        ray.shutdown()
    wanted = features(quiet, tmp_path)
    assert found.keys() == wanted.keys()
    for name, sample in found.items():
        assert torch.equal(sample.input_ids, wanted[name].input_ids)
        for got, expected in ((sample.aux, wanted[name].aux), (sample.last_hidden, wanted[name].last_hidden)):
            assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    shutil.rmtree(tmp_path / "quiet")


def test_an_extraction_survives_three_kills(server, tiny_llama_folder, tmp_path: Path, monkeypatch) -> None:
    plan = [("capture", "actor"), ("before commit", "driver"), ("after commit", "actor")]
    settings = ["engine=transformers", f"target.path={tiny_llama_folder}", "prompts.unit_size=4"]
    survive(plan, 16, settings, server, tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.engine
def test_300_samples_survive_30_kills(server, tiny_llama_folder, tmp_path: Path, monkeypatch) -> None:
    moments = ["generation", "capture", "upload", "before commit", "after commit"]
    plan = [(moment, victim) for victim in ("engine", "actor", "driver", "raylet") for moment in moments]
    plan += [(moment, victim) for moment in moments for victim in ("actor", "driver")]
    random.Random(0).shuffle(plan)
    settings = [f"target.path={tiny_llama_folder}", "prompts.unit_size=5", "hardware.max_inflight=8"]
    survive(plan, 300, settings, server, tmp_path, monkeypatch)
