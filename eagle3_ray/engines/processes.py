"""Ending an engine for good: its processes, its folders, and the shared memory that SGLang leaves when it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import psutil

SHARED_MEMORY = "/dev/shm/"
SHARED_MEMORY_NAMES = "shared_memory"  # in an engine's own folder: what SGLang has there
RELEASE_S = 120.0  # a scheduler that is killed frees hundreds of GB before it is gone


def own_folder(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder, and the lock that says it is in use; folders whose owner died without cleaning up are removed.

    A lock and not a pid: containers may share /dev/shm without sharing pids.
    """
    for lock in parent.glob("eagle3-ray-engine-*/lock"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            names = lock.parent / SHARED_MEMORY_NAMES
            unlink(names.read_text().splitlines() if names.exists() else [])
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="eagle3-ray-engine-", dir=parent))
    mine = (folder / "new").open("wb")
    fcntl.flock(mine, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / "lock")  # seen only when it is held
    return folder, mine


def kill_tree(process: subprocess.Popen[bytes], schedulers: list[psutil.Process], grace_s: float) -> None:
    """End a child and all that it started, waiting `grace_s` for it to end by itself.

    `schedulers` are named because they are nobody's children any more once the child is dead.
    """
    family = list(schedulers)
    left: set[str] = set()
    if process.poll() is None:  # else its pid may be another's by now
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        left = shared_memory([process.pid, *(relative.pid for relative in family if is_alive(relative))])
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for relative in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            relative.kill()
    deadline = time.monotonic() + RELEASE_S
    while any(is_alive(relative) for relative in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    unlink(left)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that is dead but not yet reaped by its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The files of shared memory that these processes map and that still have a name.

    SGLang ends its schedulers by SIGKILL, which skips every unlink of theirs (`sglang_loads_*`, `sem.mp-*`, …). Files
    are told by inode: a semaphore is mapped under another name than the one that it keeps.
    """
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
                if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY):
                    inodes.add(int(fields[4]))
    return {entry.path for entry in os.scandir(SHARED_MEMORY) if entry.is_file() and entry.inode() in inodes}


def unlink(paths: Iterable[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)
