"""The driver's connection to Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from eagle3_ray.config import ClusterConfig


@contextmanager
def cluster(config: ClusterConfig) -> Iterator[None]:
    """Ray, as `config` says: the job's cluster inside `ray job submit`, one that runs, or one of our own.

    The actors import this project from the job's working folder, or, on one machine, from where the driver found it.
    """
    own = config.address is None and "RAY_ADDRESS" not in os.environ
    paths = [path for path in (os.getcwd(), os.environ.get("PYTHONPATH")) if path]
    ray.init(
        address="local" if own else config.address,
        num_cpus=config.num_cpus if own else None,
        include_dashboard=False if own else None,
        logging_level=logging.WARNING,
        log_to_driver=True,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}} if own else None,
    )
    try:
        yield
    finally:
        ray.shutdown()
