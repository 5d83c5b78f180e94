"""JSON as the store has it: strict (RFC 8259), and with a check of its own content where it is read back.

Python's json writes and reads NaN and Infinity, which are no JSON, and takes the last of two members of one name. And a
digit that was changed by a failing disk or by hand is JSON still: `sealed` adds a digest of all else, which `unsealed`
compares. That tells of damage; who can write a store on purpose can also seal what was written.
"""

from __future__ import annotations

import hashlib
import json
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


def fingerprint(description: dict[str, Any]) -> str:
    """sha256 of a description (JSON, sorted keys), its first 16 hex digits."""
    return hashlib.sha256(dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """`value`, its check behind it."""
    return value | {CHECK: fingerprint(loads(dumps(value)))}  # of what will be read: keys are strings, tuples lists


def unsealed(value: Any) -> dict[str, Any]:
    """The object without its check; ValueError where that is another's. One without a check was written before 0.2."""
    if not isinstance(value, dict):
        raise ValueError(f"it is no object, but {type(value).__name__}")
    rest = {name: inner for name, inner in value.items() if name != CHECK}
    if CHECK in value and value[CHECK] != fingerprint(rest):
        raise ValueError("its content is not what was written: it does not fit its check")
    return rest


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a name stands twice in one object")
    return found
