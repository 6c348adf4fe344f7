"""Where a recorded figure comes from: command, date, device and versions, at the head of every JSON that is written.

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
    """The facts without which a figure can't be compared with another."""
    return {
        "command": shlex.join(["python", *_as_typed(sys.orig_argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()})",
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write to a file, or to standard output where the path is `-`."""
    text = json.dumps(data, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def _as_typed(arguments: list[str]) -> list[str]:
    """Without the folders of this machine."""
    here = Path.cwd()
    paths = (Path(argument) for argument in arguments)
    return [
        str(path.relative_to(here)) if path.is_absolute() and here in path.parents else str(path)
        for path in paths
    ]
