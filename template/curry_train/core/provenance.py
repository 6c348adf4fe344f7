"""Provenance of recorded figures: command, date, device and versions, for each JSON file.

Proof: `python -m pytest tests/test_cli.py`.
"""

import datetime
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the facts that are needed to compare a figure with another."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu ({platform.machine()})"
    return {
        "command": shlex.join(["python", *_as_typed(sys.orig_argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": name,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write JSON to a file, or to standard output if the path is `-`."""
    text = json.dumps(data, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def _as_typed(arguments: list[str]) -> list[str]:
    """Make absolute paths below the current folder relative to it."""
    here = Path.cwd()
    paths = (Path(argument) for argument in arguments)
    return [
        str(path.relative_to(here)) if path.is_absolute() and here in path.parents else str(path)
        for path in paths
    ]
