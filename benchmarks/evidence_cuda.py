"""Record on a CUDA device what the bundle promises, in pieces that go on where they stop.

    make evidence-cuda PYTHON=python3                # 8 minutes at most, then the same again
    make evidence-cuda ARGS='--piece memory loss'    # some pieces
    make evidence-cuda ARGS='--dry-run --folder dry' # toy sizes, on the CPU

`PYTHON` is one that has torch and what curry-train needs; no network is. Each piece of
`benchmarks/cuda_pieces.py` runs in a process of its own and writes FOLDER/PIECE.json after each
row. `--goals` prints the figures beside what they are meant to be.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# In the order of their worth, where the time is short; predictions need no device.
PIECES = ("predict", "memory", "strategies", "expandable", "loss", "batch", "saving", "gates")
# Expandable segments are chosen before the first allocation of a process.
ENVIRONMENT = {"expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
STATUS_LEFT = 3


def main(arguments: list[str] | None = None) -> int:
    """Run the pieces; status 0 if all rows are there, 3 if some are left, 1 if one has an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--piece", nargs="+", choices=PIECES, default=PIECES, metavar="PIECE")
    parser.add_argument("--folder", type=Path, default=ROOT / "evidence" / "cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="for this call (default: 8)")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, without a device")
    parser.add_argument("--goals", action="store_true", help="print the figures that are there")
    options = parser.parse_args(arguments)
    if not options.goals:
        until = time.monotonic() + 60 * options.minutes
        left = [name for name in options.piece if not _run(name, options, until)]
        if left:
            print(f"left: {' '.join(left)}; the same command goes on with them")
            return STATUS_LEFT
    lines = list(goals(options.folder))
    print("\n".join(lines))
    return 1 if errors(options.folder) else 0


def _run(piece: str, options: argparse.Namespace, until: float) -> bool:
    """Run a piece for the time that is left; return whether it has all of its rows."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        return False
    words = [sys.executable, str(ROOT / "benchmarks" / "cuda_pieces.py"), piece]
    words += ["--folder", str(options.folder), "--minutes", str(seconds / 60)]
    words += ["--dry-run"] if options.dry_run else []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ENVIRONMENT.get(piece, {})
    return subprocess.run(words, env=environment).returncode == 0


def read(folder: Path, piece: str) -> dict[str, Any]:
    """Return the rows of a piece that were measured."""
    path = folder / f"{piece}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {key: row for key, row in rows.items() if "error" not in row}


def errors(folder: Path) -> list[str]:
    """List the rows that could not be measured, with the reason."""
    found = []
    for path in sorted(folder.glob("*.json")):
        rows = json.loads(path.read_text())["rows"]
        found += [
            f"{path.stem}: {key}: {row['error']}" for key, row in rows.items() if "error" in row
        ]
    return found


def goals(folder: Path) -> Iterator[str]:
    """Write a line per figure with what it is meant to be."""
    memory = [*read(folder, "memory").values(), *read(folder, "expandable").values()]
    for figure, most in (("allocated_bytes", 0.003), ("reserved_bytes", 0.01)):
        off = [abs(row["ratio"][figure] - 1) for row in memory]
        if off:
            yield (
                f"{figure}: {len(off)} steps, worst {max(off):.2%}, median "
                f"{statistics.median(off):.2%} from the prediction; goal {most:.1%}"
            )
    for table in read(folder, "strategies").values():
        yield from _times(table)
    for key, row in read(folder, "batch").items():
        yield f"largest batch, {key}: {row['samples']}"
    for row in read(folder, "saving").values():
        yield (
            f"saving: steps {row['slow_down']:.1%} slower, worst step {row['worst_step']:.2f} of "
            "one; goal 3% and 1.3"
        )
    for key, row in read(folder, "gates").items():
        yield f"gates of {key}: {row['held']} held, {len(row['failed'])} failed"
    yield from errors(folder)


def _times(table: dict[str, Any]) -> Iterator[str]:
    for row in table["rows"]:
        line = (
            f"{row['name']}: {row['peak_ratio']:.0%} of the peak, "
            f"{row['time_ratio']['median']:.3f} of the time without recompute"
        )
        if "time_of_peer" in row:
            line += f", {row['time_of_peer']['median']:.3f} of its peer's; goal 0.97"
        yield line
    yield from (f"{name}: not measured: {why}" for name, why in table["not_measured"].items())


if __name__ == "__main__":
    sys.exit(main())
