"""Ray's part of an engine over several nodes, on two nodes of this machine whose GPUs do not exist."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, compose

from eagle3_ray.config import ConfigError
from eagle3_ray.engines import sglang_nodes

pytestmark = pytest.mark.full

# What an engine's process does, with a stand-in for each scheduler
ENGINE = """
import json, os, sys, time, ray
from eagle3_ray.engines.sglang_nodes import placed
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
cluster = json.loads(sys.argv[1])
ray.init(address=cluster["address"], runtime_env=cluster["runtime_env"])
group = placed(cluster["nodes"], 2, 60.0)

@ray.remote(num_cpus=0, num_gpus=1)
class Scheduler:
    def told(self):
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "gpus": context.get_accelerator_ids()["GPU"],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "variable": os.environ.get("NCCL_DEBUG"),
        }

ranks = [
    Scheduler.options(
        scheduling_strategy=In(placement_group=group, placement_group_bundle_index=rank)
    ).remote() for rank in range(4)
]
print(json.dumps({"here": ray.get_runtime_context().get_node_id(), "told": ray.get([r.told.remote() for r in ranks])}))
sys.stdout.flush()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
    cluster.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def free_gpus() -> float:
    import ray

    return ray.available_resources().get("GPU", 0.0)


def test_the_first_ranks_are_on_the_engines_node_and_all_end_with_its_process(two_nodes: Any, tmp_path: Path) -> None:
    hardware = compose("hardware=two_nodes", "hardware.tp_size=4", "hardware.env.NCCL_DEBUG=INFO").hardware
    membership = sglang_nodes.membership(hardware, None)
    assert membership is not None
    with (tmp_path / "log").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(membership)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert engine.stdout is not None
    line = engine.stdout.readline()
    assert line, (tmp_path / "log").read_text()[-3000:]
    said = json.loads(line)
    nodes = [rank["node"] for rank in said["told"]]
    assert nodes[:2] == [said["here"]] * 2
    assert len(set(nodes[2:])) == 1 and nodes[2] != said["here"]
    for rank in said["told"]:
        assert rank["visible"] is None or len(rank["visible"].split(",")) != 1  # SGLang counts as the node does
        assert rank["variable"] == "INFO"
    assert free_gpus() == 0
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    deadline = time.monotonic() + 60
    while free_gpus() < 4 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert free_gpus() == 4


def test_an_actor_goes_to_a_node_with_the_gpus_of_its_first_ranks(two_nodes: Any) -> None:
    import ray

    larger = two_nodes.add_node(num_cpus=1, num_gpus=8)
    another = two_nodes.add_node(num_cpus=1, num_gpus=8)
    two_nodes.wait_for_nodes()
    options = sglang_nodes.actor_options(compose("hardware=two_nodes").hardware)  # 8 GPUs each

    def where(row: dict[str, Any]) -> dict[str, Any]:
        return {"node": [ray.get_runtime_context().get_node_id()] * len(row["id"])}

    placed = {row["node"] for row in ray.data.range(2).map_batches(where, batch_size=1, **options).iter_rows()}
    task = ray.remote(num_cpus=1, **options)(lambda: ray.get_runtime_context().get_node_id())
    placed.add(ray.get(task.remote()))
    assert placed <= {larger.node_id, another.node_id}
    two_nodes.remove_node(larger)
    two_nodes.remove_node(another)
    assert sglang_nodes.actor_options(compose("hardware=gpu8").hardware) == {}


def test_too_few_nodes_are_refused_by_name(two_nodes: Any) -> None:
    with pytest.raises(ConfigError, match="hardware.nodes_per_engine: 2, but Ray has 0 nodes of 8 GPUs"):
        sglang_nodes.actor_options(compose("hardware=two_nodes").hardware)


def test_a_worker_without_the_plugins_hooks_does_not_start(two_nodes: Any, tmp_path: Path) -> None:
    """SGLang's Ray actors load no plugins; with `load_in_worker` as the setup hook, Ray's workers do."""
    hardware = compose("hardware=two_nodes", "hardware.tp_size=4").hardware
    membership = sglang_nodes.membership(hardware, tmp_path)
    assert membership is not None
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT)}
    environment = membership["runtime_env"]
    environment["env_vars"] |= variables
    code = """
import json, sys, ray
ray.init(address=sys.argv[1], runtime_env=json.loads(sys.argv[2]))
@ray.remote(num_cpus=0)
def hooked():
    from eagle3_ray.engines.sglang_plugin import HOOKS, _hooked
    return _hooked() == list(HOOKS)
print(ray.get(hooked.remote()))
"""
    command = [sys.executable, "-c", code, membership["address"], json.dumps(environment)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.stdout.strip().endswith("True"), ended.stderr[-3000:]
    environment["env_vars"]["EAGLE3_RAY_CAPTURE"] = ""  # the plugin then registers nothing
    ended = subprocess.run(
        [*command[:-1], json.dumps(environment)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert "the capture plugin did not hook" in ended.stdout + ended.stderr
