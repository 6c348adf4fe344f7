"""What a setting of a configuration may be, and the error that names it where it is something else.

Proof: `python -m pytest tests/test_policy_config.py`.
"""

import math
from typing import Any


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(held: bool, key: str, value: Any, wanted: str) -> None:
    """`key must be wanted; got value`, unless it holds."""
    if not held:
        raise ValueError(f"{key} must be {wanted}; got {value!r}")
