"""What the chaos tests share: a Ray of two nodes, an S3 server, and what extraction and training make undisturbed.

Every stage runs as its own command, as an operator would start it, and is started again until it ends well. What came
of it is compared bit for bit; what is left behind is counted, and what the store's own tools remove is removed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from ray.cluster_utils import Cluster
from safetensors.torch import load
from seaweed import Server, serve

from eagle3_ray.engines.processes import shared_memory
from eagle3_ray.leftovers import PREFIX, SHARED_MEMORY, is_alive
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.garbage import ORPHANS, garbage, remove
from eagle3_ray.store.overview import find

PROMPTS, STEPS, EVERY = 24, 40, 10
WAIT_S = 300.0  # for a command: several times what the slowest takes on a busy machine
QUIET_S = 30.0  # for the processes of a job that ended to be gone


@dataclass
class Place:
    """Where the commands run, and what they make there undisturbed: `quiet` is a local store."""

    server: Server
    cluster: Cluster
    folder: Path
    settings: list[str]
    shared: set[str] = field(default_factory=lambda: set(os.listdir(SHARED_MEMORY)))

    @property
    def quiet(self) -> Filesystem:
        return Filesystem(str(self.folder / "quiet"))

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"  # TMPDIR of every process

    def store(self, root: str, endpoint: str | None = None) -> tuple[Filesystem, list[str]]:
        """A store, and the settings of a command that uses it; on S3 the command goes by way of `endpoint`."""
        settings = [f"store.root={root}", f"store.scratch_dir={self.folder / 'scratch'}"]
        if not root.startswith("s3://"):
            return Filesystem(root), settings
        endpoint = endpoint or self.server.endpoint
        settings += ["store=s3", f"+store.storage_options.endpoint_url={endpoint}"]
        return Filesystem(root, self.server.storage_options), settings

    def extracted(self, files: Filesystem) -> None:
        """Put what the undisturbed extraction made into another store."""
        for kind in ("prompts", "responses", "features"):
            for key in self.quiet.list(kind):
                files.upload(self.quiet.url(key), key)

    def start(self, stage: str, settings: list[str], log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"ray_jobs.{stage}", *self.settings, *settings]
        with log.open("ab") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)

    def run(self, stage: str, settings: list[str], log: Path) -> int:
        """One command; its exit code."""
        job = self.start(stage, settings, log)
        try:
            deadline = time.monotonic() + WAIT_S
            while job.poll() is None:
                assert time.monotonic() < deadline, f"no end in {WAIT_S} s:\n{tail(log)}"
                time.sleep(0.2)
                self.repair()
            return job.returncode
        finally:
            job.kill()
            job.wait()

    def run_to_the_end(self, stage: str, settings: list[str], log: Path, most: int = 4) -> int:
        """The same command again until it ends well; how often it ran."""
        for runs in range(1, most + 1):
            if self.run(stage, settings, log) == 0:
                return runs
        raise AssertionError(f"{stage} does not end well in {most} runs:\n{tail(log)}")

    def repair(self) -> None:
        """A node that lost its raylet joins again."""
        for node in list(self.cluster.worker_nodes):
            if node.all_processes["raylet"][0].process.poll() is not None:
                self.cluster.remove_node(node, allow_graceful=False)
                self.cluster.add_node(num_cpus=2)

    def raylet(self) -> psutil.Process:
        """Of the only node that has room for a worker."""
        (node,) = self.cluster.worker_nodes
        return psutil.Process(node.all_processes["raylet"][0].process.pid)

    def workers(self) -> list[psutil.Process]:
        """Those of a training; the one that writes its checkpoints, rank 0, comes first."""
        found = [process for process in ours() if "RayTrainWorker" in title(process)]
        return sorted(found, key=lambda process: not writes_curves(process))

    def rest(self) -> None:
        """Wait for what killed jobs left running to end by itself."""
        deadline = time.monotonic() + QUIET_S
        while busy := [title(process) for process in [*ours(), *self.apart()] if at_work(process)]:
            assert time.monotonic() < deadline, f"still there after {QUIET_S} s: {busy}"
            time.sleep(0.2)

    def apart(self) -> list[psutil.Process]:
        """Processes that are nobody's children any more; Ray's own do not show their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.temporary) and is_alive(process):
                    found.append(process)
        return found

    # ------------------------------------------------------------ what came of it

    def check_drafter(self, files: Filesystem) -> str:
        """The weights and the last checkpoints are those of the undisturbed training; what is lost and doubled."""
        (wanted,), (got,) = drafters(self.quiet), drafters(files)
        assert files.read(f"{got}/weights/model.safetensors") == self.quiet.read(f"{wanted}/weights/model.safetensors")
        states = [sorted(name(key) for key in store.list(f"{prefix}/state")) for store, prefix in self.both(files)]
        assert states[0] == states[1], states
        for state in states[0]:
            one, other = (load(store.read(f"{prefix}/state/{state}")) for store, prefix in self.both(files))
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[key]) for key, tensor in one.items()), state
        summary = files.read_json(f"{got}/summary.json")
        assert (summary["steps"], summary["consumed"]) == (STEPS, 4 * STEPS) and summary["seconds"] >= 0
        return "lost 0, doubled 0"

    def both(self, files: Filesystem) -> list[tuple[Filesystem, str]]:
        return [(store, drafters(store)[0]) for store in (self.quiet, files)]

    def check_features(self, files: Filesystem) -> str:
        """Every sample is there once, with the states of the undisturbed extraction; what is lost and doubled."""
        wanted, got = states_of(self.quiet, self.folder / "look"), states_of(files, self.folder / "look")
        counted = Counter(id for id, _ in got)
        lost, doubled = PROMPTS - len(counted), sum(counted.values()) - len(counted)
        assert (lost, doubled) == (0, 0)
        for id, tensors in got:
            for tensor, other in zip(tensors, dict(wanted)[id], strict=True):
                assert torch.equal(tensor, other), id
        return f"lost {lost}, doubled {doubled}"

    def left_behind(self, files: Filesystem) -> str:
        """What the trial left, of processes nothing. What the store's gc removes is removed, and nothing that a commit
        names goes with it."""
        self.rest()
        before = time.time() + 2 * 3600
        found = garbage(files, before)
        remove(files, [entry for entries in found.values() for entry in entries], before)
        assert not any(garbage(files, before).values())
        for folder in find(files):
            for commit in folder.commits():
                assert files.size(commit.shard) == commit.size
        names = set(os.listdir(SHARED_MEMORY)) - self.shared
        shared = {f"{SHARED_MEMORY}{one}" for one in names} - shared_memory(psutil.pids())
        shared = {path for path in shared if not os.path.isdir(path)}
        folders = [path for path in self.temporary.iterdir() if path.name.startswith(("tmp", PREFIX))]
        seen = {
            "orphan shards": len(found[ORPHANS]),
            "other garbage": sum(len(entries) for entries in found.values()) - len(found[ORPHANS]),
            "uploads": len(uploads(files)),
            "/dev/shm names": len(shared),
            "temporary folders": len(folders),
        }
        for path in folders:
            os.rename(path, path.with_name(f"counted-{path.name}"))
        self.shared |= names
        return ", ".join(f"{count} {what}" for what, count in seen.items() if count) or "nothing"

    def report(self, trial: str, runs: int, lost: str, files: Filesystem, more: str = "") -> None:
        """One line of the table: what was tried, how often the command ran, what is lost, doubled and left behind."""
        print(f"\nchaos | {trial} | {runs} runs | {lost} | left: {self.left_behind(files)} | {more}", flush=True)


@contextmanager
def place(target: Path, folder: Path) -> Iterator[Place]:
    """The head has no room for work: all of it is on the second node, which can be killed."""
    draw = random.Random(0)
    records = [{"id": f"p{i}", "prompt": " ".join(draw.choices("abcdefghijklmnop", k=20))} for i in range(PROMPTS)]
    (folder / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for made in ("tmp", "scratch"):
        (folder / made).mkdir()
    settings = ["engine=transformers", f"target.path={target}", f"prompts.source={folder}/p.jsonl"]
    settings += ["prompts.unit_size=4", "sampling.max_new_tokens=8", "capture.dtype=float32", "hardware.num_actors=1"]
    settings += [f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}", "train.num_workers=2"]
    settings += ["train.cpus_per_worker=1", "train.batch_size=4", "train.heldout=2", "train.max_failures=3"]
    settings += ["drafter.draft_vocab_size=4096", "drafter.intermediate_size=8192"]  # 23 MB a checkpoint: three parts
    with pytest.MonkeyPatch.context() as environment, serve(folder / "seaweed") as server:
        environment.setenv("AWS_ACCESS_KEY_ID", server.storage_options["key"])
        environment.setenv("AWS_SECRET_ACCESS_KEY", server.storage_options["secret"])
        environment.setenv("PYTHONPATH", str(ROOT))
        environment.setenv("RAY_TMPDIR", "/tmp")  # a socket's path must be short
        environment.setenv("TMPDIR", str(folder / "tmp"))
        # Ray Train asks the dashboard whether its controller lives. Each has a port that is free
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": None, "dashboard_agent_listen_port": 0}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=2)
            settings += ["cluster=running", f"cluster.address={cluster.address}"]
            found = Place(server, cluster, folder, settings)
            for stage in ("extract", "train"):
                _, quiet = found.store(str(folder / "quiet"))
                assert found.run(stage, quiet, folder / "quiet.log") == 0, tail(folder / "quiet.log")
            yield found
        finally:
            cluster.shutdown()


# ---------------------------------------------------------------- processes


def ours() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def at_work(process: psutil.Process) -> bool:
    """A command of ours, a worker of Ray's that works for one, or a process that it started."""
    words = ("ray_jobs.", "eagle3_ray.", "ray::")
    of_the_node = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return any(word in title(process) for word in words) and not title(process).startswith(of_the_node)


def writes_curves(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("events.out.tfevents" in file.path for file in process.open_files())
    return False


def strike(place: Place, victim: str, driver: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL them; nothing of it waits."""
    workers = place.workers()
    assert len(workers) == 2, [title(worker) for worker in workers]
    raylet = place.raylet()
    processes = {
        "writer": workers[:1],
        "other worker": workers[1:],
        "both workers": workers,
        "driver": [psutil.Process(driver.pid)],
        "node": [raylet, *raylet.children(recursive=True)],
    }[victim]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in processes]


# ---------------------------------------------------------------- stores


def name(key: str) -> str:
    return key.rpartition("/")[2]


def drafters(files: Filesystem) -> list[str]:
    return sorted({"/".join(key.split("/")[:2]) for key in files.list("drafters")})


def states_of(files: Filesystem, cache: Path) -> list[tuple[str, Any]]:
    """(id, tensors) of each sample that is committed, checked against its commit."""
    (folder,) = (folder for folder in find(files) if folder.name.startswith("features/"))
    found = []
    for commit in folder.commits():
        reader = folder.units.open(commit, Cache(cache))
        for number in range(len(reader)):
            sample = reader.features(number)
            found.append((sample.id, (sample.input_ids, sample.loss_mask, sample.aux, sample.last_hidden)))
    return found


def uploads(files: Filesystem) -> list[str]:
    """In parts, begun and neither completed nor given up."""
    if files.local:
        return []
    bucket, _, prefix = files.root.removeprefix("s3://").partition("/")
    return [u["Key"] for u in files._s3.fs.list_multipart_uploads(bucket) if u["Key"].startswith(prefix)]


def until(condition: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """What the condition gives, once it is true."""
    deadline = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {condition} in {wait_s} s"
        time.sleep(0.002)
    return found


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
