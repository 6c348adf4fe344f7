"""Checks of configuration values, with errors that name the key.

Proof: `python -m pytest tests/test_policy_config.py`.
"""

import math
from typing import Any


def is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(held: bool, key: str, value: Any, wanted: str) -> None:
    """Raise ValueError `{key} must be {wanted}; got {value}` unless `held`."""
    if not held:
        raise ValueError(f"{key} must be {wanted}; got {value!r}")
