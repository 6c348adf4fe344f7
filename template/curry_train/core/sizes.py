"""Parse and format memory sizes such as `24GiB` or `512MB`.

Proof: `python -m pytest tests/test_sizes.py`.
"""

import re
from fractions import Fraction

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in UNITS.items()}
_SIZE = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse a size such as `24GiB` (2**30 each), `24GB` (10**9 each), `1.5 MiB` or `512B`.

    The result is in whole bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not a memory size: write a number and a unit, such as 24GiB or 512MiB"
        )
    number, unit = found["number"], found["unit"]
    if not unit and Fraction(number) > 0:
        raise ValueError(
            f"{text!r} has no unit: write {number}GiB (2**30 bytes each) or {number}GB (10**9)"
        )
    if unit and unit.lower() not in _BY_LOWER_CASE:
        raise ValueError(f"{text!r} has the unit {unit!r}: use one of {', '.join(UNITS)}")
    size = int(Fraction(number) * _BY_LOWER_CASE.get(unit.lower(), 1))
    if size < 1:
        raise ValueError(
            f"{text!r} is not a memory size: it must be at least 1 byte, such as 24GiB or 512MiB"
        )
    return size


def format_bytes(size: int) -> str:
    """Format a size to at least three digits in the largest binary unit: `1.50 GiB`, `512 MiB`."""
    number = float(size)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024:
            break
        number /= 1024
        unit = larger

    if unit == "B" or abs(number) >= 100:
        digits = 0
    elif abs(number) >= 10:
        digits = 1
    else:
        digits = 2
    return f"{number:.{digits}f} {unit}"
