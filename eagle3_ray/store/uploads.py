"""Shards on their way to the store: staged on local disk, put there by processes of their own.

One engine can make states faster than one process can hash and upload them, and must not wait for either. So a shard is
written whole to a local folder and committed from there in the background; what is staged is bounded, and who would
stage more waits. A death on either side costs nothing but work: the folder is local, and only commits count.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from eagle3_ray.config import StoreConfig
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import room_in

DEATHS = 3  # of the processes, that one shard may see


class Uploads:
    """Commits shards that are staged in `folder`, store.uploaders at a time."""

    def __init__(self, config: StoreConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.staged, self.freed = 0, threading.Condition()
        self.threads = ThreadPoolExecutor(config.uploaders)  # each waits for one process
        # Pools of one: where processes share a pool, one that is killed can leave another waiting for it for ever
        self.idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        for _ in range(config.uploaders):
            self.idle.put(_uploader())

    def commit(
        self, units: Units, unit: str, write: Callable[[Path], None], size: int, samples: list[Any], **facts: Any
    ) -> Future[bool]:
        """Stage a shard of about `size` bytes with `write(path)`, when there is room, and commit it as `unit`.

        The result is that of Units.commit. Raises StoreError where the folder cannot hold the shard.
        """
        with self.freed:
            self.freed.wait_for(lambda: not self.staged or self.staged + size <= self.config.staging_bytes)
            self.staged += size
        shard = self.folder / f"{uuid4().hex}.safetensors"
        try:
            with room_in(self.folder):
                write(shard)
            return self.threads.submit(self._commit, units, unit, shard, size, samples, facts)
        except BaseException:
            self._free(shard, size)
            raise

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        while not self.idle.empty():  # waiting: their semaphores must go before Ray kills what tracks them
            self.idle.get().shutdown()

    def _commit(
        self, units: Units, unit: str, shard: Path, size: int, samples: list[Any], facts: dict[str, Any]
    ) -> bool:
        tries = Retrying(
            retry=retry_if_exception_type(BrokenProcessPool), stop=stop_after_attempt(DEATHS), reraise=True
        )
        try:
            return tries(self._in_process, units, unit, shard, samples, facts)
        finally:
            self._free(shard, size)

    def _in_process(self, units: Units, unit: str, shard: Path, samples: list[Any], facts: dict[str, Any]) -> bool:
        process = self.idle.get()
        try:
            return process.submit(_commit, units, unit, shard, samples, facts).result()
        except BrokenProcessPool:
            process = _uploader()
            raise
        finally:
            self.idle.put(process)

    def _free(self, shard: Path, size: int) -> None:
        shard.unlink(missing_ok=True)
        with self.freed:
            self.staged -= size
            self.freed.notify_all()


def _uploader() -> ProcessPoolExecutor:
    """One process. Spawned, since s3fs hangs after a fork."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)


def _commit(units: Units, unit: str, shard: Path, samples: list[Any], facts: dict[str, Any]) -> bool:
    return units.commit(unit, shard, samples, **facts)


def _end_with_parent() -> None:
    """A pool's process waits for work for ever when the actor is killed, since it holds both ends of its queue."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
