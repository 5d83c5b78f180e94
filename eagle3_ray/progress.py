"""One progress line at a time: done / total, rate and time left. The same on a terminal and in a job's log."""

from __future__ import annotations

import sys
import threading
import time


class Progress:
    """Counts towards `total`; prints at most a line every `every_s` seconds, or rewrites one line on a terminal."""

    def __init__(self, stage: str, total: int, unit: str, *, done: int = 0, every_s: float = 10.0) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self.done = self._before = done  # what an earlier run did tells nothing of this run's rate
        self._start = self._printed = time.monotonic()
        self._terminal = sys.stdout.isatty()
        self._every_s = 0.5 if self._terminal else every_s
        self._lock = threading.Lock()

    def add(self, n: int, note: str = "") -> None:
        with self._lock:
            self.done += n
            now = time.monotonic()
            if now - self._printed >= self._every_s or self.done >= self.total:
                self._printed = now
                line = self.line(now - self._start, note)
                print(f"\r\x1b[K{line}" if self._terminal else line, end="" if self._terminal else "\n", flush=True)
                if self._terminal and self.done >= self.total:
                    print(flush=True)

    def line(self, elapsed_s: float, note: str = "") -> str:
        rate = (self.done - self._before) / max(elapsed_s, 1e-9)
        left = _clock((self.total - self.done) / rate) if rate > 0 else "?"
        text = f"{self.stage}: {self.done}/{self.total} {self.unit}, {rate:.3g} {self.unit}/s, {left} left"
        return f"{text}, {note}" if note else text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
