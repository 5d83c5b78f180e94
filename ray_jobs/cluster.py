"""The driver's connection to Ray."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import ray
from ray._private import ray_constants, worker

from eagle3_ray.config import Config
from eagle3_ray.leftovers import MARK, end_marked, sweep, temporary_folder
from eagle3_ray.store.cache import scratch
from ray_jobs import interrupts


@contextmanager
def cluster(config: Config) -> Iterator[None]:
    """Ray, as config.cluster says: the job's cluster inside `ray job submit`, one that runs, or one of our own."""
    if config.cluster.address is None and "RAY_ADDRESS" not in os.environ:
        with _own(config):
            yield
        return
    try:
        with interrupts.held():
            ray.init(address=config.cluster.address, logging_level=logging.WARNING)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own(config: Config) -> Iterator[None]:
    """A Ray that only this machine can reach. At the end it is gone, with all that ran in it and what that left."""
    temporary, mark = tempfile.gettempdir(), uuid4().hex

    def tidy(grace_s: float = 1.0) -> None:
        end_marked(mark, grace_s)
        sweep(Path(temporary), scratch(config.store), Path(config.hardware.capture_dir))

    with temporary_folder() as folder:  # Ray's own processes leave temporary files, besides the logs below RAY_TMPDIR
        variables = {MARK: mark, "TMPDIR": str(folder), "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", temporary)}
        try:
            with interrupts.held(tidy), _environment(variables), _loopback():
                ray.init(
                    address="local",
                    num_cpus=config.cluster.num_cpus,
                    logging_level=logging.WARNING,
                    # GOMP_SPINCOUNT: see conf/hardware/cpu.yaml
                    runtime_env={"env_vars": {"GOMP_SPINCOUNT": "5000", "TMPDIR": temporary}},
                )
            yield
        finally:
            _shut_down()
            tidy(grace_s=5.0)


def _shut_down() -> None:
    """ray.shutdown(), which gives each process of its node a second for SIGTERM; but they were started with it held."""
    node, worker._global_node = worker._global_node, None
    ray.shutdown()
    if node is not None:
        node.destroy_external_storage()
        node.kill_all_processes(check_alive=False)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for the processes that are started here."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray's nodes listen on 127.0.0.1, as on systems where it knows no clusters; no argument of ray.init does that."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
