"""Suggest the closest known name for a misspelled one.

Proof: `python -m pytest tests/test_nearest.py`.
"""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, or None; case and the kind of dash do not count."""
    by_plain_name = {_plain(known_name): known_name for known_name in known}
    matches = difflib.get_close_matches(_plain(name), by_plain_name, n=1)
    return by_plain_name[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return the end of an unknown-name error.

    It suggests the closest known name. If there is none, it is `otherwise`, or lists all names.
    """
    known = list(known)
    meant = nearest(name, known)
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"there are {', '.join(known) or 'none'}" if otherwise is None else otherwise


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")
