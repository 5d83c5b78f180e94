"""What a command prints, without secrets: its own lines, Hydra's, Ray's, its workers', and every traceback."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from eagle3_ray.secrets import is_secret, known, without


class _Cleaned:
    """A stream that writes whole lines, without `secrets`."""

    def __init__(self, stream: TextIO, secrets: list[str]) -> None:
        self._stream, self._secrets, self._line = stream, secrets, ""
        self._lock = threading.RLock()  # a signal's handler may print too

    def write(self, text: str) -> int:
        with self._lock:
            lines, end, self._line = (self._line + text).rpartition("\n")
            if end:
                self._stream.write(without(lines, self._secrets) + end)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            line, self._line = self._line, ""
            if line:
                self._stream.write(without(line, self._secrets))
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def without_secrets(words: list[str]) -> Iterator[Callable[[Any], None]]:
    """Until the end stdout and stderr show no secret of the environment, of a command line's `words`, or of settings
    that are told to the function this gives. An error that nobody caught is told, and ends the process with 1."""
    overrides = (word.partition("=") for word in words)
    given = {name: value.strip("'\"") for name, _, value in overrides if is_secret(name)}
    secrets = known(given)

    def learn(settings: Any) -> None:
        secrets[:] = sorted({*secrets, *known(settings)}, key=len, reverse=True)

    before = sys.stdout, sys.stderr
    cleaned = [_Cleaned(stream, secrets) for stream in before]
    sys.stdout, sys.stderr = cleaned  # type: ignore[assignment]
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for handler in (handler for logger in (logging.root, *loggers) for handler in logger.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.setStream(cleaned[before.index(handler.stream)])
    try:
        yield learn
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        for stream in cleaned:
            stream.flush()
        sys.stdout, sys.stderr = before
