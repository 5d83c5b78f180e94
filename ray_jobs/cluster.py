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
    """Ray, as `config` says: the job's cluster inside `ray job submit`, one that runs, or one of our own."""
    own = config.address is None and "RAY_ADDRESS" not in os.environ
    ray.init(
        address="local" if own else config.address,
        num_cpus=config.num_cpus if own else None,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"GOMP_SPINCOUNT": "5000"}} if own else None,  # see conf/hardware/cpu.yaml
    )
    try:
        yield
    finally:
        ray.shutdown()
