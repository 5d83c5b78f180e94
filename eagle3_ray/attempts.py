"""Which sample kills the engine: attempts are written to the store before they start, so any death leaves a trace.

An attempt that ended well is deleted again. What is left are crashes, each with the samples that were then at work. A
unit that crashed twice is tried in halves, and a half that crashes again in halves of that, until one sample is alone:
it is given up when it has crashed three times. So a poison sample costs a few engine starts, and the rest is done.

Where the actor died too, nobody knows why: it may have been stopped. Such crashes make a sample suspected, but alone
they must be three to give it up.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Damaged

TOGETHER = 2  # crashes after which samples are tried in halves
ALONE = 3  # crashes after which a sample that was alone in the last one is given up
DIED = "the actor died, or was stopped"
LOG_LINES = 5  # of the engine's log that go into the reason


class Attempts:
    """The crashes of one unit so far."""

    def __init__(self, units: Units, unit: str) -> None:
        self.files = units.files
        self.folder = f"{units.folder}/attempts/{unit}"
        found = [self._read(key) for key in self.files.list(self.folder)]
        self.crashes: list[dict[str, Any]] = found  # {samples, error}, oldest first

    def next_group(self, todo: list[int]) -> tuple[list[int], bool]:
        """The samples of `todo` to try next, and whether one of them is suspected of killing engines."""
        by_crash: dict[int, list[int]] = {}
        for sample in todo:
            found = [i for i, crash in enumerate(self.crashes) if sample in crash["samples"]]
            by_crash.setdefault(found[-1] if len(found) >= TOGETHER else -1, []).append(sample)
        last, group = min(by_crash.items())  # the unsuspected first
        return (group, False) if last < 0 else (group[: (len(group) + 1) // 2], True)

    def given_up(self, todo: list[int]) -> dict[int, str]:
        """The samples of `todo` that are not tried again, each with its reason."""
        found = {}
        for sample in todo:
            crashes = [crash for crash in self.crashes if sample in crash["samples"]]
            alone = [crash for crash in crashes if crash["samples"] == [sample]]
            if len(crashes) < ALONE or not alone or alone[-1] is not crashes[-1]:
                continue
            if alone[-1]["error"] != DIED or len(alone) >= ALONE:
                first, *log = crashes[-1]["error"].splitlines()
                said = "\n".join([first, *log[-LOG_LINES:]])
                found[sample] = f"quarantined: the engine died {len(crashes)} times with it: {said}"
        return found

    def begin(self, samples: list[int]) -> str:
        """Write down what is tried; returns the key to end it by."""
        key = f"{self.folder}/{len(self.crashes):04d}.{uuid4().hex[:12]}.json"
        self._write(key, samples, DIED)
        return key

    def crashed(self, key: str, samples: list[int], error: str) -> None:
        """The engine died while `samples` were at work."""
        self._write(key, samples, error)
        self.crashes.append({"samples": samples, "error": error})

    def ended(self, key: str) -> None:
        """It ended without a crash."""
        self.files.delete(key)

    def _read(self, key: str) -> dict[str, Any]:
        crash = self.files.read_json(key)
        samples, error = crash.get("samples"), crash.get("error")
        if not isinstance(error, str) or not isinstance(samples, list) or not all(type(n) is int for n in samples):
            raise Damaged(f"{self.files.url(key)} is no attempt; remove it")
        return crash

    def _write(self, key: str, samples: list[int], error: str) -> None:
        self.files.write_json(key, {"samples": samples, "error": error})
