"""One engine for several units at work, through its deaths: what they ask is done once, or given up with a reason.

An engine starts with the first request and again after it died. Its death costs what was in flight: every unit that was
at work on it tries again what it lacks, in the groups that the crashes recorded so far make sense of (attempts.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt, wait_incrementing

from eagle3_ray.attempts import Attempts
from eagle3_ray.engines.base import EngineError, RequestError, TargetEngine
from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Units

FAILED_STARTS = 3  # engine starts in a row that may fail
PAUSE_S = 10.0  # after the first of them, twice that after the second
BARREN_CRASHES = 16  # deaths of engines in a row, with nothing done between two: more than it takes to find one sample


class GivenUp(RuntimeError):
    """Engines do not start, or die one after the other."""


class _Crash(RuntimeError):
    """The engine died."""

    def __init__(self, why: str, at_work: list[int]) -> None:
        super().__init__(why)
        self.at_work = at_work


class RestartingEngine:
    """`start(failed)` gives a new engine, after `failed` starts in a row that raised EngineError.

    `work` may be called from several threads at once. Raises GivenUp where no engine comes up or stays up.
    """

    def __init__(self, start: Callable[[int], TargetEngine]) -> None:
        self.start = start
        self.engine: TargetEngine | None = None
        self.starts = self.failed_starts = self.crashes_in_a_row = 0
        self.changing = threading.Lock()  # of self.engine
        self.turn = threading.Condition()  # of the attempts that run, and whether one of them must run alone
        self.attempts, self.alone = 0, False

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def work(
        self,
        units: Units,
        unit: str,
        numbers: list[int],
        do: Callable[[TargetEngine, int], Any],
        pool: ThreadPoolExecutor,
        progress: Progress,
    ) -> list[Any]:
        """`do` for every number, as often as it takes; a RequestError in place of what cannot be done.

        The engine's death costs what was in flight. What else this call has done is kept.
        """
        done: dict[int, Any] = {}
        attempts = Attempts(units, unit)
        while True:
            given_up = attempts.given_up([number for number in numbers if number not in done])
            done |= {number: RequestError(reason) for number, reason in given_up.items()}
            if given_up:
                progress.add(len(given_up))
            todo = [number for number in numbers if number not in done]
            if not todo:
                return [done[number] for number in numbers]
            group, suspected = attempts.next_group(todo)
            with self._turn(alone=suspected):
                engine = self._running()
                key = attempts.begin(group)
                try:
                    self._attempt(engine, group, do, done, pool, progress)
                except _Crash as crash:
                    attempts.crashed(key, crash.at_work, str(crash))
                    self._ended(engine, crash)
                except BaseException:
                    attempts.ended(key)
                    raise
                else:
                    attempts.ended(key)

    @contextmanager
    def _turn(self, alone: bool) -> Iterator[None]:
        """Attempts run side by side, but a suspected one with no other: two units would blame each other."""
        with self.turn:
            self.turn.wait_for(lambda: not self.alone and not (alone and self.attempts))
            self.attempts, self.alone = self.attempts + 1, alone
        try:
            yield
        finally:
            with self.turn:
                self.attempts, self.alone = self.attempts - 1, False
                self.turn.notify_all()

    def _attempt(
        self,
        engine: TargetEngine,
        group: list[int],
        do: Callable[[TargetEngine, int], Any],
        done: dict[int, Any],
        pool: ThreadPoolExecutor,
        progress: Progress,
    ) -> None:
        """`do` for a group, into `done`. _Crash where the engine died; where it was replaced, not all is done."""
        at_work: set[int] = set()
        died = threading.Event()

        def run_one(number: int) -> None:
            if died.is_set() or self.engine is not engine:  # what had not begun is not to blame
                died.set()
                return
            at_work.add(number)
            try:
                done[number] = do(engine, number)
            except RequestError as error:
                done[number] = error.with_traceback(None)  # whose frames would hold the states in shared memory
            except EngineError:
                died.set()
                raise
            at_work.discard(number)
            self.crashes_in_a_row = 0
            progress.add(1)

        futures = [pool.submit(run_one, number) for number in group]
        errors = [error for error in [future.exception() for future in futures] if error]  # waits for all
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        if errors:
            raise _Crash(str(errors[0]), sorted(at_work))

    def _running(self) -> TargetEngine:
        """The engine, started where there is none."""
        with self.changing:
            if self.engine is None:
                self.failed_starts = 0
                tries = Retrying(
                    retry=retry_if_exception_type(EngineError),
                    stop=stop_after_attempt(FAILED_STARTS),
                    wait=wait_incrementing(PAUSE_S, PAUSE_S),  # what it lacked, memory above all, may be freed
                )
                try:
                    self.engine = tries(self._start)
                except RetryError as error:
                    why = error.last_attempt.exception()
                    raise GivenUp(f"the engine failed to start {FAILED_STARTS} times in a row: {why}") from why
            return self.engine

    def _start(self) -> TargetEngine:
        failed, self.failed_starts = self.failed_starts, self.failed_starts + 1  # unless this one comes up
        self.starts += 1
        return self.start(failed)

    def _ended(self, engine: TargetEngine, error: BaseException) -> None:
        """Close an engine that died. Every unit that was at work on it says so, the first is enough."""
        with self.changing:
            if self.engine is engine:
                engine.close()
                self.engine = None
                self.crashes_in_a_row += 1
        if self.crashes_in_a_row >= BARREN_CRASHES:
            raise GivenUp(f"{self.crashes_in_a_row} engines in a row died before they did anything: {error}")
