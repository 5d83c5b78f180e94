"""JSON as the store has it: strict (RFC 8259), and with a check of its own content where it is read back.

Python's json writes and reads NaN and Infinity, which are no JSON, and takes the last of two members of one name. And
a digit that was changed by a failing disk or by hand is JSON still, as is a file that was put in another's place:
`sealed` adds a digest of all else and of the place, which `unsealed` compares. That tells of damage; who can write a
store on purpose can also seal what was written.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

CHECK = "check"  # the member that holds the digest of all others


def dumps(value: Any, **how: Any) -> str:
    """As json.dumps; ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, **how)


def loads(text: str | bytes) -> Any:
    """As json.loads; ValueError for whatever is no strict JSON, or nested too deep to be read."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def without_nan(value: Any) -> Any:
    """A measured value with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fingerprint(description: dict[str, Any]) -> str:
    """sha256 of a description (JSON, sorted keys), its first 16 hex digits."""
    return hashlib.sha256(dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def sealed(value: dict[str, Any], key: str) -> dict[str, Any]:
    """`value` as it is kept at `key`, with its check."""
    return value | {CHECK: fingerprint({key: loads(dumps(value))})}  # of what will be read: tuples are lists


def unsealed(value: Any, key: str) -> dict[str, Any]:
    """The object without its check; ValueError where that does not fit. One from before there were checks has none."""
    if not isinstance(value, dict):
        raise ValueError(f"it is no object, but {type(value).__name__}")

    def without(member: str) -> dict[str, Any]:
        return {name: inner for name, inner in value.items() if name != member}

    may = [name for name, inner in value.items() if isinstance(inner, str) and re.fullmatch("[0-9a-f]{16}", inner)]
    fits = [name for name in may if value[name] == fingerprint({key: without(name)})]
    if fits != [CHECK] * (CHECK in value):  # also where it fits under another name: that was damaged
        raise ValueError("it does not fit its check")
    return without(CHECK)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a name stands twice in one object")
    return found
