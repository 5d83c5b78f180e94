"""Ending an engine for good: its processes, and the shared memory that SGLang leaves when it is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from eagle3_ray.leftovers import SHARED_MEMORY, is_alive, unlink

RELEASE_S = 120.0  # a scheduler that is killed frees hundreds of GB before it is gone


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


def kill_descendants() -> None:
    """Kill all that this process started, and remove the shared memory that they have. None may start another first."""
    family: list[psutil.Process] = []
    while new := [process for process in psutil.Process().children(recursive=True) if process not in family]:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        family += new
    left = shared_memory([os.getpid(), *(process.pid for process in family)])
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    unlink(left)


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
