"""JSON as its standard has it: NaN and Infinity, which Python would write, are no part of it."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """A measured `value` with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
