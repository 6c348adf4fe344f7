"""Record on a CUDA device what the bundle promises, in pieces that go on where they stop.

    make evidence-cuda PYTHON=python3                # 8 minutes at most, then the same again
    make evidence-cuda ARGS='--piece memory loss'    # some pieces
    make evidence-cuda ARGS='--dry-run --folder dry' # toy sizes, on the CPU

`PYTHON` is one that has torch and what curry-train needs; no network is. Each piece of
`benchmarks/cuda_pieces.py` runs in a process of its own, which is ended a minute after its time,
and writes FOLDER/PIECE.json after each row. `--again` measures the rows with an error again.
`--goals` prints the figures beside what they are meant to be. The predictions need no device, so
record them before: `--piece predict`.

Proof: `python -m pytest tests/benchmarks/test_evidence_cuda.py`.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# In the order of their worth where the time is short.
PIECES = (
    "memory",
    "strategies",
    "gates",
    "loss",
    "hugging_face",
    "batch",
    "saving",
    "expandable",
    "compiled",
    "predict",
)
ALLOCATOR_NAMES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
# Expandable segments are chosen before the first allocation of a process.
ENVIRONMENT = {"expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
STATUS_LEFT = 3
STATUS_ANEW = 4
GRACE_SECONDS = 60.0
TRACES_NAME = "traces.jsonl.gz"


def main(arguments: list[str] | None = None) -> int:
    """Run the pieces; status 0 if all rows are there, 3 if some are left, 1 if one has an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--piece", nargs="+", choices=PIECES, default=PIECES, metavar="PIECE")
    parser.add_argument("--folder", type=Path, default=ROOT / "evidence" / "cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="for this call (default: 8)")
    parser.add_argument("--again", action="store_true", help="measure rows with an error again")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, without a device")
    parser.add_argument("--goals", action="store_true", help="print the figures that are there")
    options = parser.parse_args(arguments)
    left: list[str] = []
    if not options.goals:
        until = time.monotonic() + 60 * options.minutes
        left = [name for name in options.piece if not _run(name, options, until)]
    print("\n".join(goals(options.folder)))
    if left:
        print(f"left: {' '.join(left)}; the same command goes on with them")
        return STATUS_LEFT
    return 1 if errors(options.folder) else 0


def _run(piece: str, options: argparse.Namespace, until: float) -> bool:
    """Run a piece for the time that is left; return whether it has all of its rows."""
    status = STATUS_ANEW
    words = [sys.executable, str(ROOT / "benchmarks" / "cuda_pieces.py"), piece]
    words += ["--folder", str(options.folder)]
    words += ["--dry-run"] if options.dry_run else []
    words += ["--again"] if options.again else []
    given = {name: text for name, text in os.environ.items() if name not in ALLOCATOR_NAMES}
    environment = given | {"PYTHONUNBUFFERED": "1"} | ENVIRONMENT.get(piece, {})
    while status == STATUS_ANEW:
        seconds = until - time.monotonic()
        if seconds <= 0:
            return False
        minutes = ["--minutes", str(seconds / 60)]
        try:
            ended = subprocess.run(
                [*words, *minutes], env=environment, timeout=seconds + GRACE_SECONDS
            )
        except subprocess.TimeoutExpired:
            print(f"{piece}: ended in the middle of a row, a minute after its time", flush=True)
            return False
        status = ended.returncode
        # A row whose error ended the process is not measured again by the next process.
        words = [word for word in words if word != "--again"]
    return status == 0


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


def read_traces(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded traces by the key of their row; the latest one of each."""
    traces: dict[str, dict[str, Any]] = {}
    path = folder / TRACES_NAME
    if path.exists():
        with gzip.open(path, "rt") as file:
            try:
                for line in file:
                    trace = json.loads(line)
                    traces[trace["source"]] = trace
            except EOFError:
                print(f"{path}: the last trace was cut off")
    return traces


def goals(folder: Path) -> Iterator[str]:
    """Write a line per figure with what it is meant to be."""
    yield from _predictions(folder)
    for piece in ("strategies", "compiled", "hugging_face"):
        for key, table in read(folder, piece).items():
            yield f"{piece}, {key}:"
            yield from (f"  {line}" for line in _times(table))
    for key, row in read(folder, "batch").items():
        yield f"largest batch, {key}: {row['samples']}"
    for row in read(folder, "loss").values():
        for way in row["rows"]:
            mebibytes = way["peak_bytes"] / 2**20
            yield f"loss, {way['name']}: {mebibytes:.0f} MiB, {_ratio(way)} of whole"
    for row in read(folder, "saving").values():
        yield (
            f"saving: steps {row['slow_down']:.1%} slower, worst step {row['worst_step']:.2f} of "
            "one; goal 3% and 1.3"
        )
    for key, row in read(folder, "gates").items():
        yield f"gates of {key}: {row['held']} held, {len(row['failed'])} failed"
    yield from errors(folder)


def _predictions(folder: Path) -> Iterator[str]:
    """Compare the measured peaks with the predictions, by the kernel of attention."""
    predicted = read(folder, "predict")
    measured = read(folder, "memory") | read(folder, "expandable")
    kernels = sorted({row["attention"] for row in measured.values()})
    for kernel in kernels:
        for figure, most in (("allocated_bytes", 0.003), ("reserved_bytes", 0.01)):
            off = [
                abs(predicted[key.removesuffix(" flash")][figure] / row[figure] - 1)
                for key, row in measured.items()
                if row["attention"] == kernel and key.removesuffix(" flash") in predicted
            ]
            if off:
                yield (
                    f"{figure} with {kernel}: {len(off)} steps, worst {max(off):.2%}, median "
                    f"{statistics.median(off):.2%} from the prediction; goal {most:.1%}"
                )


def _times(table: dict[str, Any]) -> Iterator[str]:
    for row in table["rows"]:
        line = (
            f"{row['name']}: {row['peak_ratio']:.0%} of the peak, "
            f"{_ratio(row)} of the time without recompute"
        )
        if "time_of_peer" in row:
            line += (
                f"; {row['time_of_peer']['median']:.3f} of the time and {row['peak_of_peer']:.1%} "
                f"of the peak of {row['peer']}; goal 0.97, or 0.943 with 1 GiB more"
            )
        yield line
    for peer, plan, peak in at_equal_time(table["rows"]):
        yield f"in the time of {peer}: {peak:.1%} of its peak, by the {plan}"
    yield from (f"{name}: not measured: {why}" for name, why in table["not_measured"].items())


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["time_ratio"]
    within = "" if ratio["lower"] is None else f" ({ratio['lower']:.3f} to {ratio['upper']:.3f})"
    return f"{ratio['median']:.3f}{within}"


def at_equal_time(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Yield each peer, the plan of the least peak that takes no longer, and the ratio of peaks."""
    plans = [row for row in rows if row["name"].startswith("plan ")]
    for peer in rows:
        if "peer" in peer or peer["name"] == "none":
            continue
        seconds = peer["seconds"]["median"]
        quick = [plan for plan in plans if plan["seconds"]["median"] <= seconds]
        if quick:
            least = min(quick, key=lambda plan: plan["peak_bytes"])
            yield peer["name"], least["name"], least["peak_bytes"] / peer["peak_bytes"]


if __name__ == "__main__":
    sys.exit(main())
