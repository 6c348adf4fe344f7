"""The name that was meant where one was typed that is none.

Proof: `python -m pytest tests/test_nearest.py`.
"""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like it, in any case and with any dash; None where none is like it."""
    plain = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """The end of a message that refuses a name: the one that was meant, else `otherwise`, else all that there are."""
    known = list(known)
    meant = nearest(name, known)
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"there are {', '.join(known) or 'none'}" if otherwise is None else otherwise


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")
