"""One engine over several nodes: SGLang's RayEngine, whose schedulers are Ray actors of one GPU each.

Untested where it matters: it needs GPUs on two nodes. tests/test_nodes.py tests Ray's part, on GPUs that do not exist.

The engine's process joins its actor's cluster as a Ray job of its own. Ray then ends its schedulers, on every node, and
frees their placement group when that process dies, however it dies. The first ranks must be on the actor's node: SGLang
talks to rank 0 through local sockets, and rank 0 hands rows over in that node's shared memory.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from eagle3_ray.config import ConfigError, HardwareConfig
from eagle3_ray.engines.sglang_plugin import FOLDER_VARIABLE

NODE = "ray.io/node-id"  # a label that Ray gives every node
HOOK = "eagle3_ray.engines.sglang_plugin.load_in_worker"


def actor_options(hardware: HardwareConfig) -> dict[str, Any]:
    """Ray options that put an engine's actor on a node with the GPUs of its first ranks; asked in the driver.

    The actor takes no GPU itself, so that Ray would rather keep it off such nodes.
    """
    if hardware.nodes_per_engine == 1:
        return {}
    import ray

    each = hardware.tp_size // hardware.nodes_per_engine
    able = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= each]
    if len(able) < hardware.nodes_per_engine:
        raise ConfigError(
            f"hardware.nodes_per_engine: {hardware.nodes_per_engine}, but Ray has {len(able)} nodes of {each} GPUs"
        )
    return {"label_selector": {NODE: f"in({','.join(able)})"}}


def membership(hardware: HardwareConfig, capture_dir: Path | None) -> dict[str, Any] | None:
    """What the engine's process needs to join the cluster of the actor that asks; None for an engine on one node."""
    if hardware.nodes_per_engine == 1:
        return None
    import ray

    context = ray.get_runtime_context()
    runtime_env = dict(context.runtime_env)  # the job's own code, on every node
    # SGLang counts GPUs as the node does, and so must not be shown a single one
    variables = {**runtime_env.get("env_vars", {}), **hardware.env, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    if capture_dir:
        variables[FOLDER_VARIABLE] = str(capture_dir)
        runtime_env["worker_process_setup_hook"] = HOOK  # RayEngine's schedulers load no plugins by themselves
    return {
        "address": context.gcs_address,
        "runtime_env": runtime_env | {"env_vars": variables},
        "nodes": hardware.nodes_per_engine,
        "timeout_s": hardware.start_timeout_s,
    }


def start_over_nodes(args: dict[str, Any], cluster: dict[str, Any], folders: list[str]) -> Any:
    """Start the engine; when one of its schedulers ends, on any node, this process removes `folders` and ends too."""
    import ray
    from sglang.srt.ray.engine import RayEngine

    ray.init(address=cluster["address"], runtime_env=cluster["runtime_env"])
    group = placed(cluster["nodes"], args["tp_size"] // cluster["nodes"], cluster["timeout_s"])
    engine = RayEngine(**args, nnodes=cluster["nodes"], placement_group=group)

    def end_with_schedulers() -> None:
        engine._scheduler_init_result.block_until_scheduler_exits()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_schedulers, name="ray-schedulers", daemon=True).start()
    return engine


def placed(nodes: int, gpus_each: int, timeout_s: float) -> Any:
    """A placement group of bundles of one GPU, rank by rank: this node's first, then `gpus_each` of each other node.

    RuntimeError where there is none, or where Ray spread the ranks of one node over two.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    here = ray.get_runtime_context().get_node_id()
    group = placement_group(
        [{"GPU": 1}] * (nodes * gpus_each),
        strategy="PACK",
        bundle_label_selector=[{NODE: here}] * gpus_each + [{NODE: f"!{here}"}] * ((nodes - 1) * gpus_each),
    )
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise RuntimeError(f"hardware.nodes_per_engine: no {nodes} nodes have {gpus_each} free GPUs each")
    table = placement_group_table(group)["bundles_to_node_id"]
    where = [table[rank] for rank in range(nodes * gpus_each)]
    ranks = [set(where[first : first + gpus_each]) for first in range(0, len(where), gpus_each)]
    if any(len(of_one_node) > 1 for of_one_node in ranks) or len(set(where)) < nodes:
        remove_placement_group(group)
        raise RuntimeError(f"hardware.nodes_per_engine: the ranks came to lie on {len(set(where))} nodes: {where}")
    return group
