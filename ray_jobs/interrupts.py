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
from types import FrameType
from typing import NoReturn

GRACE_S = 7.0
_received: signal.Signals | None = None
_begun = False  # there is something to tidy up
_telling = threading.Lock()
_tidy: list[Callable[[], None]] = []  # what else is to be done where the main thread does not come to it


def catch(tidy: Callable[[], None] | None = None) -> None:
    """Take both signals; again behind whatever takes them itself, as ray.init does. `tidy` is for the other thread."""
    _tidy[:] = [tidy] if tidy else []
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
    except BaseException as error:  # whatever became of the KeyboardInterrupt
        if _received is None and not (isinstance(error, SystemExit) and error.code == signal.SIGTERM):
            raise
        sys.exit(_tell(_received or signal.SIGTERM))  # that exit code is of ray.init's own handler


@contextmanager
def held(tidy: Callable[[], None]) -> Iterator[None]:
    """Keep both signals from what is started here: one that goes to the whole process group, as Ctrl-C's does, is then
    this process's alone. One that comes meanwhile ends the command at once, after `tidy`."""
    both = {signal.SIGINT, signal.SIGTERM}
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if came := signal.sigtimedwait(both, 0.1):
                _finish(signal.Signals(came.si_signo), [tidy])

    before = signal.pthread_sigmask(signal.SIG_BLOCK, both)
    waiting = threading.Thread(target=wait, name="held signals")
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    _finish(received, _tidy)


def _finish(received: signal.Signals, tidy: list[Callable[[], None]]) -> NoReturn:
    from eagle3_ray.leftovers import remove_own

    code = _tell(received)
    for function in tidy:
        function()
    remove_own()
    os._exit(code)


def _tell(received: signal.Signals) -> int:
    """Print the message, once; returns the exit code."""
    if _telling.acquire(blocking=False):
        command = sys.modules["__main__"].__spec__
        name = (command.name if command else sys.argv[0]).rpartition(".")[2]
        print(
            f"{name}: interrupted by {received.name}; what is committed stays, and the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
    return 128 + received
