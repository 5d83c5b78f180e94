"""One process that commits shards: `python -m eagle3_ray.store.uploader FD`, run by store/uploads.py.

Jobs come over a pipe, and each is answered by (result, error). The pipe's end (the actor died) ends this process: what
it is writing is removed, and then what the actor has left on this node's disk.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle3_ray.leftovers import step_aside, sweep

UNWIND_S = 3.0  # for removing what is half written


def main(connection: Connection) -> None:
    parents: set[Path] = set()  # of the folders where shards are staged
    try:
        while True:
            units, unit, shard, samples, facts = connection.recv()
            parents.add(shard.parent.parent)
            answer: tuple[bool | None, Exception | None]
            try:
                answer = units.commit(unit, shard, samples, **facts), None
            except Exception as error:
                error.add_note(f"in an uploader's process:\n{traceback.format_exc()}")
                answer = None, error
            _send(connection, answer)
    except (EOFError, OSError, KeyboardInterrupt):
        sweep(*parents)


def _send(connection: Connection, answer: tuple[bool | None, Exception | None]) -> None:
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception:  # an error that cannot be pickled
        connection.send((None, RuntimeError(str(answer[1]))))


def _interrupt() -> None:
    """Unwind the main thread wherever it is, for a while."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(UNWIND_S)
    os._exit(1)


if __name__ == "__main__":
    pipe: Any = Connection(int(sys.argv[1]))
    step_aside(pipe.fileno(), _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
    main(pipe)
    os._exit(0)
