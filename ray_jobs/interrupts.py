"""SIGINT and SIGTERM: a command ends within seconds, says how to go on, and exits with 128 + the signal's number.

The first signal raises KeyboardInterrupt in the main thread, so that half-written files are removed and Ray is shut
down as at any end; further ones are ignored. Where the main thread is not done after GRACE_S, another one ends the
process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

GRACE_S = 7.0
_received: signal.Signals | None = None
_begun = False  # there is something to tidy up
_telling = threading.Lock()
_tidy: list[Callable[[], None]] = []


def catch() -> None:
    """Take both signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


@contextmanager
def interruptible() -> Iterator[None]:
    """What is interrupted here ends with the message and the exit code."""
    global _begun
    catch()
    _begun = True
    try:
        yield
    except BaseException:  # whatever became of the KeyboardInterrupt
        if _received is None:
            raise
        sys.exit(_tell(_received))


@contextmanager
def held(tidy: Callable[[], None] | None = None) -> Iterator[None]:
    """For ray.init, which takes both signals itself, and in C++ again. Nor do they reach what is started here: one that
    goes to the whole process group, as Ctrl-C's does, is this process's alone. One that comes meanwhile ends the
    command at once. `tidy` is what there is to be done then, and later where the main thread does not come to it."""
    _tidy[:] = [tidy] if tidy else []
    both = {signal.SIGINT, signal.SIGTERM}
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if came := signal.sigtimedwait(both, 0.1):
                _finish(signal.Signals(came.si_signo))

    handlers = {number: signal.getsignal(number) for number in both}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, both)
    waiting = threading.Thread(target=wait, name="held signals")
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    if _received is not None:
        return
    _received = signal.Signals(number)
    if not _begun:
        os._exit(_tell(_received))
    threading.Thread(target=_end, args=(_received,), name="interrupt", daemon=True).start()
    raise KeyboardInterrupt


def _end(received: signal.Signals) -> NoReturn:
    """The end, if the main thread does not come to it."""
    time.sleep(GRACE_S)
    _finish(received)


def _finish(received: signal.Signals) -> NoReturn:
    from eagle3_ray.leftovers import remove_own

    code = _tell(received)
    for tidy in _tidy:
        tidy()
    remove_own()
    os._exit(code)


def _tell(received: signal.Signals) -> int:
    """Print the message, once; returns the exit code."""
    if _telling.acquire(blocking=False):
        command = sys.modules["__main__"].__spec__
        name = command.name.rpartition(".")[2] if command else Path(sys.argv[0]).stem
        print(
            f"{name}: interrupted by {received.name}; what is committed stays, and the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
    return 128 + received
