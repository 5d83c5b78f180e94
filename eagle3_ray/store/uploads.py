"""Shards on their way to the store: staged on local disk, put there by processes of their own.

One engine can make states faster than one process can hash and upload them, and must not wait for either. So a shard is
written whole to a local folder and committed from there in the background; what is staged is bounded, and who would
stage more waits. A death on either side costs nothing but work: the folder is local, and only commits count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
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
        self.idle: SimpleQueue[_Uploader | None] = SimpleQueue()  # None: one that is not started yet
        for _ in range(config.uploaders):
            self.idle.put(None)

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
        while not self.idle.empty():
            if (process := self.idle.get()) is not None:
                process.close()

    def _commit(
        self, units: Units, unit: str, shard: Path, size: int, samples: list[Any], facts: dict[str, Any]
    ) -> bool:
        tries = Retrying(retry=retry_if_exception_type(_Died), stop=stop_after_attempt(DEATHS), reraise=True)
        try:
            return tries(self._in_process, units, unit, shard, samples, facts)
        finally:
            self._free(shard, size)

    def _in_process(self, units: Units, unit: str, shard: Path, samples: list[Any], facts: dict[str, Any]) -> bool:
        process = self.idle.get()
        try:
            process = process or _Uploader()
            return process.commit(units, unit, shard, samples, facts)
        except _Died:
            process = None
            raise
        finally:
            self.idle.put(process)

    def _free(self, shard: Path, size: int) -> None:
        shard.unlink(missing_ok=True)
        with self.freed:
            self.staged -= size
            self.freed.notify_all()


class _Died(RuntimeError):
    """An uploader's process ended before it answered."""


class _Uploader:
    """A process of its own (store/uploader.py), and the pipe to it. No pool of multiprocessing's: its semaphores would
    keep their names in /dev/shm when Ray kills an actor, and with it the process that tracks them."""

    def __init__(self) -> None:
        package = str(
            Path(__file__).resolve().parents[2]
        )  # also from a mere working directory, as `ray job submit` has
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eagle3_ray.store.uploader", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def commit(self, *job: Any) -> bool:
        try:
            self.connection.send(job)
            result, error = self.connection.recv()
        except (EOFError, OSError) as ended:
            self.close()
            raise _Died(f"the process that uploads ended with exit code {self.process.returncode}") from ended
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self.connection.close()
        self.process.wait()
