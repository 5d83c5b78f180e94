"""What must be gone when a process is, however it ends: its temporary folders, and the processes that it started.

A folder of ours holds a lock for as long as its owner lives, so whoever finds one without can remove it. Ray kills an
actor's children with it, and its process group; a process that has something to tidy up then steps out of Ray's reach,
and ends by itself when the pipe to its owner does. What one command starts on its own machine carries its mark.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import psutil

PREFIX = "eagle3-ray-"
SHARED_MEMORY = "/dev/shm/"
SHARED_MEMORY_NAMES = "shared_memory"  # in an engine's own folder: what SGLang has there
KILL_S = 2.0  # that a killed process may take to be gone
MARK = "EAGLE3_RAY_COMMAND"  # in the environment of all processes that a command started
_own: dict[Path, IO[bytes]] = {}  # this process's folders, and their locks


# ---------------------------------------------------------------- folders


def own_folder(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder, and the lock that says it is in use; those whose owner died without cleaning up are removed.

    A lock and not a pid: containers may share /dev/shm without sharing pids.
    """
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = (folder / "new").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / "lock")  # seen only when it is held
    _own[folder] = lock
    return folder, lock


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """An own folder that is removed at the end."""
    folder, _ = own_folder(parent or Path(tempfile.gettempdir()))
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """An own folder, whole; its lock last."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _own:
        _own.pop(folder).close()


def remove_own() -> None:
    """Every folder of this process that is still there."""
    for folder in list(_own):
        remove(folder)


def sweep(*parents: Path) -> None:
    """Remove this user's folders below `parents` whose owner is dead."""
    for parent in parents:
        for lock in parent.glob(f"{PREFIX}*/lock"):
            with contextlib.suppress(OSError):
                if lock.parent.lstat().st_uid != os.geteuid():  # another may have written what is in it
                    continue
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                    names = lock.parent / SHARED_MEMORY_NAMES
                    unlink(names.read_text().splitlines() if names.exists() else [])
                    shutil.rmtree(lock.parent, ignore_errors=True)


def unlink(paths: Iterable[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)


# ---------------------------------------------------------------- processes


def step_aside(pipe: int, end: Callable[[], None]) -> None:
    """Go on in a process that Ray does not kill, and call `end` in a thread when the other end of `pipe` is closed.

    Ray kills an actor's children and its process group: a child's child in a session of its own is neither. The child
    waits, and ends with the same exit code. Call it before any thread is started, in a process that was started with
    start_new_session.
    """
    child = os.fork()
    if child:
        os.close(pipe)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what Ray starts has some signals blocked

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(pipe, select.POLLRDHUP)
        hung_up.poll()
        end()

    threading.Thread(target=watch, name="owner", daemon=True).start()


def marked(mark: str) -> list[psutil.Process]:
    """All other processes of this machine that carry `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.pid != os.getpid() and is_alive(process):
                found.append(process)
    return found


def end_marked(mark: str, grace_s: float) -> None:
    """Wait until all that carry `mark` have ended, and kill what has not after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while (left := marked(mark)) and time.monotonic() < deadline + KILL_S:
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that is dead but not yet reaped by its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
