"""The workers' process group, out of other machines' reach where it can be.

The store over which torch's processes find each other listens on every interface, whatever address it is given. Workers
that are all on one node find each other by a file instead, and then talk over the loopback interface.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend

from eagle3_ray.leftovers import own_folder

# Of a process group on one node; who sets them otherwise is followed
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class GroupConfig(TorchConfig):
    """Ray Train's own, but for workers that are all on one node."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group, backend_config) -> None:  # type: ignore[no-untyped-def]
        if len(set(worker_group.execute(_node))) > 1:
            return super().on_start(worker_group, backend_config)
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        meeting = worker_group.execute_single(0, _meeting)
        worker_group.execute(_set_torch_distributed_env_vars)
        worker_group.execute(_on_loopback)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _setup_torch_process_group,
                    backend="nccl" if gpus else "gloo",
                    world_rank=rank,
                    world_size=len(worker_group),
                    init_method=f"file://{meeting}",
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(len(worker_group))
            ]
        )


def _node() -> str:
    return ray.get_runtime_context().get_node_id()


def _meeting() -> str:
    """A file that is not there yet, in a folder that goes with this worker."""
    folder, _ = own_folder(Path(tempfile.gettempdir()))
    return str(folder / "meeting")


def _on_loopback() -> None:
    os.environ.update({name: value for name, value in LOOPBACK.items() if name not in os.environ})
