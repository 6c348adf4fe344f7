"""Torture checkpoints: kills, damage and hostile files.

    python -m torture [--kills N] [--flips N] [--every N] [--only KEY]... [--seed S] [--json PATH]

`make torture` runs the full one, half an hour. The status is 1 if anything was wrong. SIGTERM has a
program of its own, `torture_signals.py`; full disks are those of `torture_peers.py --peer ours`.
It forks, and therefore needs Linux.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import argparse
import functools
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import store_kills
from curry_train.core.wording import provenance, write_json
from torture_damage import cut, flips, subjects, swapped
from torture_hostile import hostile
from torture_kills import kill_many
from torture_ranks import QUICK
from torture_training import straight, warm_up

# The number of ranks, and their share of the kills.
WORLDS = {"one_rank": (1, 0.6), "two_ranks": (2, 0.25), "three_ranks": (3, 0.15)}
SHOW_SECONDS = 10.0


def parts_of(
    folder: Path, options: argparse.Namespace
) -> dict[str, Callable[[Callable[[int], None]], dict[str, Any]]]:
    """Return the parts by their dotted key in the record; each gets a function that shows it."""
    seed, every = options.seed, options.every

    @functools.cache
    def expected_of(world: int) -> Any:
        return straight(world, folder / f"straight-{world}")

    @functools.cache
    def damaged() -> Any:
        return subjects(folder / "damaged")

    def kills(show: Callable[[int], None], *, name: str) -> dict[str, Any]:
        world, share = WORLDS[name]
        number = round(options.kills * share)
        expected = expected_of(world)
        return kill_many(folder / name, world, number, expected=expected, seed=seed, progress=show)

    return {
        **{f"kills.{name}": functools.partial(kills, name=name) for name in WORLDS},
        "kills.at_each_change": lambda show: store_kills.at_every_change(
            folder / "store", store_kills.states(), every=every
        ),
        "flips": lambda show: flips(damaged(), options.flips, seed=seed, progress=show),
        "cuts": lambda show: cut(damaged(), 10 // every, stride=min(every, 3)),
        "swaps": lambda show: swapped(damaged(), stride=min(every, 3)),
        "hostile": lambda show: hostile(folder / "hostile", every=every, progress=show),
    }


def progress_of(key: str) -> Callable[[int], None]:
    """Return a function that prints how far a part is, now and then."""
    shown_at = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > SHOW_SECONDS:
            shown_at = time.monotonic()
            print(f"{key}: {done}", file=sys.stderr, flush=True)

    return show


def torture(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts one after the other; return the findings as the record has them."""
    found: dict[str, Any] = {"kills": {}}
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=QUICK))
    try:
        warm_up(folder / "warm")
        for key, run in parts_of(folder, options).items():
            if options.only and not key.startswith(tuple(options.only)):
                continue
            began = time.monotonic()
            result = run(progress_of(key)) | {"seconds": round(time.monotonic() - began)}
            group, _, name = key.rpartition(".")
            (found[group] if group else found)[name] = result
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kills = found["kills"]
    kills["total"] = sum(kills[name]["kills"] for name in WORLDS if name in kills)
    return found


def wrongs(found: Any) -> list[str]:
    """Collect the entries of all lists named `wrong`."""
    if not isinstance(found, dict):
        return []
    return [*found.get("wrong", []), *(fault for part in found.values() for fault in wrongs(part))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1120)
    parser.add_argument(
        "--every", type=int, default=1, help="of kills at a change, and of hostile shapes"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="keys of the result, such as kills.one_rank or flips"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="evidence/checkpoint_torture.json")
    options = parser.parse_args()
    # Damaged checkpoints are skipped with a warning, some thousand times.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = torture(options)
    write_json(options.json, provenance(torch.device("cpu")) | found)
    wrong = wrongs(found)
    for fault in wrong[:20]:
        print(fault, file=sys.stderr)
    print(f"{found['kills']['total']} kills, {len(wrong)} wrong", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
