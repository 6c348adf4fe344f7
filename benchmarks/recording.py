"""Read the options of a program that records evidence, and write its record.

Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from curry_train.core.wording import provenance, write_json

ROOT = Path(__file__).resolve().parents[1]
# The figures of a record, each under its name.
Figures = dict[str, Any]


def record_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with `--json`, described by the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the record")
    return parser


def write_record(path: str | None, figures: Figures, *, device: str = "cpu") -> None:
    """Write figures, and the command, device and versions that they are of, if there is a path."""
    if path:
        write_json(path, provenance(torch.device(device)) | figures)
