"""What a setting's value may be, kept with the field that declares it: `config.py` says it, `faults` checks it.

A value of None passes, as does whatever lies in a dictionary of somebody else's settings (ServerArgs, s3fs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

NAME = r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
FORMS = {  # how a text that becomes part of a key must be written, and how that is told
    "name": (NAME, "a name: letters, digits, '_', '.' and '-', the first a letter or digit, no '..', at most 100"),
    "features": (rf"(features/)?{NAME}", "features/<fingerprint>"),
    "folder": (rf"((features|responses)/)?({NAME})?", "features/<fingerprint>, or the beginning of one"),
}


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, and of each in a list; choices or the form of a text, and of a dictionary's keys."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: float | None = None  # a number outside of the bounds that has a meaning of its own
    choices: tuple[str, ...] = ()
    form: str | None = None  # of FORMS

    def fault(self, value: Any) -> str | None:
        """What is wrong with one text or number, or None."""
        if isinstance(value, str):
            return self._fault_of_text(value)
        if value is None or isinstance(value, bool) or value == self.also:
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} is not a finite number"
        but = "" if self.also is None else f" and not {self.also}"
        if self.at_least is not None and value < self.at_least:
            return f"{value} is less than {self.at_least}{but}"
        if self.above is not None and value <= self.above:
            return f"{value} is not above {self.above}{but}"
        if self.at_most is not None and value > self.at_most:
            return f"{value} is more than {self.at_most}"
        if self.below is not None and value >= self.below:
            return f"{value} is not below {self.below}"
        return None

    def _fault_of_text(self, value: str) -> str | None:
        if self.choices and value not in self.choices:
            return f"{value!r} is none of {', '.join(self.choices)}"
        if self.form:
            pattern, words = FORMS[self.form]
            if not re.fullmatch(pattern, value):
                return f"{value!r} is not {words}"
        return None


def limits(**given: Any) -> dict[str, Limits]:
    """The metadata of a field whose values have `Limits(**given)`."""
    return {"limits": Limits(**given)}


def setting(default: Any = MISSING, **given: Any) -> Any:
    """A field whose values have `Limits(**given)`."""
    return field(default=default, metadata=limits(**given))


def limits_of(cls: Any, name: str) -> Limits:
    """Those of the field `name` of a dataclass; of a field that declares none, what holds for every number."""
    found: Limits = next(one.metadata.get("limits", Limits()) for one in fields(cls) if one.name == name)
    return found


def faults(value: Any, name: str = "", own: Limits | None = None) -> Iterator[str]:
    """What is wrong with a dataclass of settings and all below it: "{name}: {value} is less than {least}", …"""
    own = own or Limits()
    if is_dataclass(value):
        for one in fields(value):
            path = f"{name}.{one.name}" if name else one.name
            yield from faults(getattr(value, one.name), path, limits_of(value, one.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from faults(key, name, own)
            if is_dataclass(inner):
                yield from faults(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from faults(inner, name, own)
    elif fault := own.fault(value):
        yield f"{name}: {fault}"
