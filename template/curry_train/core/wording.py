"""Format and parse what people read and type: sizes, suggested names, provenance.

Proof: `python -m pytest tests/cli tests/core`.
"""

import datetime
import difflib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Parse and format memory sizes such as `24GiB` or `512MB`.

SIZE_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}
_SIZE_PATTERN = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse a size such as `24GiB` (2**30 each), `24GB` (10**9 each), `1.5 MiB` or `512B`.

    A whole number of at least 2**20 without a unit is in bytes. The result is in whole bytes.
    """
    found = _SIZE_PATTERN.fullmatch(text.strip())
    number, unit = found.groups() if found else ("0", "")
    is_bytes = number.isdecimal() and int(number) >= 2**20
    if not unit and not is_bytes and Fraction(number) > 0:
        raise ValueError(
            f"{text!r} has no unit: write {number}GiB or {number}MiB (2**30 and 2**20 bytes), or "
            f"{number}B for bytes"
        )
    if unit and unit.lower() not in _BY_LOWER_CASE:
        raise ValueError(f"{text!r} has the unit {unit!r}: use one of {', '.join(SIZE_UNITS)}")
    size = int(Fraction(number) * _BY_LOWER_CASE.get(unit.lower(), 1))
    if size < 1:
        raise ValueError(
            f"{text!r} is not a memory size: write a number and a unit, such as 24GiB or 512MiB; "
            "it must be at least 1 byte"
        )
    return size


def format_bytes(size: int) -> str:
    """Format a size to at least three digits in the largest binary unit: `1.50 GiB`, `512 MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= SIZE_UNITS[unit]:
            return f"{three_digits(size / SIZE_UNITS[unit])} {unit}"
    return f"{size} B"


# Figures to three digits, as tables and pictures show them.


def three_digits(number: float) -> str:
    """Format to three digits, or as a whole number from 100 on: `1.50`, `12.3`, `1234`."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def format_mebibytes(size: int) -> str:
    """Format a size in MiB, without the unit; one digit where it is below 0.1 MiB."""
    mebibytes = size / SIZE_UNITS["MiB"]
    return three_digits(mebibytes) if mebibytes >= 0.1 or not size else f"{mebibytes:.1g}"


def format_seconds(seconds: float) -> str:
    """Format a short time: `1.50 s`, `12.3 ms`."""
    is_long = seconds >= 1
    return f"{three_digits(seconds)} s" if is_long else f"{three_digits(1000 * seconds)} ms"


def format_count(number: float) -> str:
    """Format a count or a rate: `950`, `1234`, `12.3k`, `1.50M`."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{three_digits(number / size)}{letter}"
    return f"{three_digits(number / 1e3)}k" if number >= 1e4 else three_digits(number)


def format_percent(ratio: float | None) -> str:
    """Format a ratio as a percentage, to two digits where it is below 10%; `-` for None."""
    if ratio is None:
        return "-"
    return f"{100 * ratio:.2g}%" if ratio < 0.1 else f"{ratio:.0%}"


def format_duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: `0:01:05`."""
    return str(datetime.timedelta(seconds=round(seconds)))


# Refuse a wrong value, and suggest the closest known name for a misspelled one.


def require_whole(name: str, value: Any, *, least: int) -> None:
    """Raise ValueError unless a value is an integer from `least` on; True and False are none."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, or None; case and the kind of dash do not count."""
    by_plain_name = {_normalize(known_name): known_name for known_name in known}
    matches = difflib.get_close_matches(_normalize(name), by_plain_name, n=1)
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


def _normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


# Provenance of recorded figures: command, date, device and versions, for each JSON file.


def provenance(device: "torch.device | None" = None) -> dict[str, Any]:
    """Return the facts that are needed to compare a figure with another, by default of a CPU."""
    # Here, because commands that copy files suggest names too, and need no torch.
    import torch

    is_cuda = device is not None and device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu ({platform.machine()})"
    return {
        "command": shlex.join(_shorten_paths(sys.orig_argv[1:])),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": name,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


# A mapping that is longer than this in JSON has a line for each of its names.
LONGEST_ROW = 120


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write JSON to a file, or to standard output if the path is `-`."""
    text = _one_row_a_line(data) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    write_output(path, text)


def write_output(place: str | Path, content: bytes | str) -> None:
    """Write a file; an error names it, that of a full disk too."""
    try:
        Path(place).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        error.filename = error.filename or str(place)
        raise


def _one_row_a_line(value: Any, indent: str = "") -> str:
    """Render JSON with each item of a list of rows on a line of its own, as short mappings are."""
    inner = indent + "  "
    text = json.dumps(value)
    if isinstance(value, dict) and len(indent + text) > LONGEST_ROW:
        lines = [
            f"{inner}{json.dumps(name)}: {_one_row_a_line(item, inner)}"
            for name, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        lines = [f"{inner}{json.dumps(item)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return text


def _shorten_paths(arguments: list[str]) -> list[str]:
    """Return the command line, with absolute paths below the current folder relative to it."""
    if arguments and Path(arguments[0]).name == "curry-train":
        return ["curry-train", *arguments[1:]]
    here = f"{Path.cwd()}{os.sep}"
    return ["python", *(argument.removeprefix(here) for argument in arguments)]


def some_of(texts: Sequence[str], most: int = 6) -> str:
    """Write the first of several texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def error_in_a_line(error: BaseException) -> str:
    """Return the type and the first line of an error; torch goes on with advice on itself."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".removesuffix(": ")
