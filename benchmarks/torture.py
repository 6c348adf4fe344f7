"""Torture checkpoints: kills, signals, damage and hostile files.

    python -m torture [--kills N] [--signals N] [--flips N] [--every N] [--only KEY...]

`make torture` runs the full one. The status is 1 if anything was wrong. Full disks are those of
`torture_peers.py --peer ours`. It forks, and therefore needs Linux.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import argparse
import gc
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from curry_train.core.wording import provenance, write_json
from torture_damage import damage
from torture_hostile import hostile
from torture_lives import QUICK, BecomeRank, Job, Struck, be_a_rank, warm_up
from torture_planted import FAULTS, plant

# The number of ranks, and their share of the kills and of the signals.
WORLDS = {"one_rank": (1, 0.6), "two_ranks": (2, 0.25), "three_ranks": (3, 0.15)}
SHOW_SECONDS = 10.0
Progress = Callable[[int], None]


def parts_of(
    folder: Path, options: argparse.Namespace
) -> dict[str, Callable[[Progress], dict[str, Any]]]:
    """Return the parts by their dotted key in the record; each gets a function that shows it."""
    every, fault = options.every, options.plant
    parts: dict[str, Callable[[Progress], dict[str, Any]]] = {}
    for group, number in (("kills", signal.SIGKILL), ("signals", signal.SIGTERM)):
        for name, (world, share) in WORLDS.items():
            struck = Struck(folder / group / name, options.seed, fault)
            wanted = round(getattr(options, group) * share)

            def strike(
                show: Progress,
                struck: Struck = struck,
                number: int = number,
                wanted: int = wanted,
                world: int = world,
            ) -> dict[str, Any]:
                return struck.strike_many(number, wanted, world, show)

            parts[f"{group}.{name}"] = strike
    at_each = Struck(folder / "at-each-change", options.seed, fault)
    parts["kills.at_each_change"] = lambda show: at_each.at_each_change(every, show)

    def damaged(show: Progress) -> dict[str, Any]:
        with plant(fault):
            return damage(folder / "damaged", options.flips, every, options.seed, show)

    def forged(show: Progress) -> dict[str, Any]:
        with plant(fault):
            return hostile(folder / "hostile", every=every, progress=show)

    return {**parts, "damage": damaged, "hostile": forged}


def progress_of(key: str) -> Progress:
    """Return a function that prints how far a part is, now and then."""
    shown_at = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > SHOW_SECONDS:
            shown_at = time.monotonic()
            print(f"{key}: {done}", file=sys.stderr, flush=True)

    return show


def torture(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the parts one after the other; return the findings as the record has them."""
    found: dict[str, Any] = {}
    warm_up(folder / "warm")
    # The end of a rank then leaves alone what it shares with this process.
    gc.collect()
    gc.freeze()
    for key, run in parts_of(folder, options).items():
        if options.only and not key.startswith(tuple(options.only)):
            continue
        began = time.monotonic()
        result = run(progress_of(key)) | {"seconds": round(time.monotonic() - began)}
        group, _, name = key.rpartition(".")
        (found.setdefault(group, {}) if group else found)[name] = result
    for group in {"kills", "signals"} & found.keys():
        found[group]["total"] = sum(part["blows"] for part in found[group].values())
    return found


def wrongs(found: Any) -> list[str]:
    """Collect the entries of all lists named `wrong`."""
    if not isinstance(found, dict):
        return []
    return [*found.get("wrong", []), *(fault for part in found.values() for fault in wrongs(part))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--signals", type=int, default=200, help="SIGTERMs")
    parser.add_argument("--flips", type=int, default=1120)
    parser.add_argument(
        "--every", type=int, default=1, help="of changes, of other damage, and of hostile shapes"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="keys of the result, such as kills.one_rank or damage"
    )
    parser.add_argument("--plant", choices=[*FAULTS], help="a fault, which must be found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="evidence/checkpoint_torture.json")
    options = parser.parse_args()
    # Damaged checkpoints are skipped with a warning, some thousand times.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # A rank leaves this function by BecomeRank, and must not remove the folder.
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=QUICK))
    found = torture(options, folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_json(options.json, provenance(torch.device("cpu")) | found)
    wrong = wrongs(found)
    for fault in wrong[:20]:
        print(fault, file=sys.stderr)
    print(f"{len(wrong)} wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    forked: Job | None = None
    status = 0
    try:
        status = main()
    except BecomeRank as rank:
        forked = rank.job
    if forked is not None:
        status = be_a_rank(forked)
    sys.exit(status)
