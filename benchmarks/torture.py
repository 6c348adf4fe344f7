"""Torture checkpoints: kills, damage, failing disks, hostile files, random histories.

    python -m torture [--kills N] [--flips N] [--histories N] [--every N] [--only KEY]... [--seed S]
        [--more] [--json PATH]

`make torture` runs the full one, half an hour on two cores. The status is 1 if anything was wrong.
With `--more` it runs nothing but random kills, others than before, and adds them to the record.
It forks, and therefore needs Linux.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import argparse
import json
import logging
import os
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
from torture_disk import errors_at_each_change, errors_at_each_read
from torture_hostile import hostile
from torture_kills import kill_many
from torture_ranks import QUICK
from torture_retention import histories
from torture_training import straight, warm_up
from torture_volume import full_disk, read_only, small_files

WORLDS = {
    "one_rank": (1, 0.6),
    "two_ranks": (2, 0.25),
    "three_ranks": (3, 0.15),
}  # and their share of the kills
Part = tuple[
    str, int | None, Callable[[Callable[[int], None]], dict[str, Any]]
]  # dotted key, number, and the function that runs it
SHOW_SECONDS = 30.0


def kills(folder: Path, options: argparse.Namespace) -> list[Part]:
    def of_world(name: str) -> Callable[[Callable[[int], None]], dict[str, Any]]:
        world, share = WORLDS[name]

        def act(progress: Callable[[int], None]) -> dict[str, Any]:
            expected = straight(world, folder / f"straight-{world}")
            number = round(options.kills * share)
            return kill_many(
                folder / name,
                world,
                number,
                expected=expected,
                seed=options.seed,
                progress=progress,
            )

        return act

    def at_each_change(progress: Callable[[int], None]) -> dict[str, Any]:
        return store_kills.at_every_change(
            folder / "store", store_kills.states(), every=options.every
        )

    return [
        *(
            (f"kills.{name}", round(options.kills * share), of_world(name))
            for name, (_, share) in WORLDS.items()
        ),
        ("kills.at_each_change", None, at_each_change),
    ]


def others(folder: Path, options: argparse.Namespace) -> list[Part]:
    every = subjects(folder / "damaged")
    expected = straight(1, folder / "straight")
    number = options.flips
    seed = options.seed
    step = options.every
    return [
        ("flips", number, lambda progress: flips(every, number, seed=seed, progress=progress)),
        ("cuts", None, lambda progress: cut(every, 10 // step, stride=min(step, 3))),
        ("swaps", None, lambda progress: swapped(every, stride=min(step, 3))),
        ("disk.each_read", None, lambda progress: errors_at_each_read(folder / "reads", expected)),
        (
            "disk.small_files",
            None,
            lambda progress: small_files(expected, folder / "small", every=step),
        ),
        ("disk.read_only", None, lambda progress: read_only(expected)),
        ("disk.full", None, lambda progress: full_disk(expected, most=max(2, 40 // step))),
        (
            "hostile",
            None,
            lambda progress: hostile(folder / "hostile", every=step, progress=progress),
        ),
        (
            "histories",
            options.histories,
            lambda progress: histories(options.histories, seed=seed, progress=progress),
        ),
        (
            "disk.each_change",
            None,
            lambda progress: errors_at_each_change(
                folder / "changes", expected, every=2 * step, progress=progress
            ),
        ),
    ]


def in_a_process(
    parts: Callable[[Path, argparse.Namespace], list[Part]], folder: Path, options: Any
) -> tuple[int, Path]:
    """Run these checks in order beside the other process; write JSON and report progress."""
    report_file = folder / f"{parts.__name__}.jsonl"
    report_file.touch()
    pid = os.fork()
    if pid:
        return pid, report_file
    status = 1
    try:
        place = folder / parts.__name__
        place.mkdir()
        with report_file.open("w") as stream:
            for key, total, act in parts(place, options):
                if options.only and not key.startswith(tuple(options.only)):
                    continue
                began, shown = time.monotonic(), [0.0]

                def progress(
                    done: int, key: str = key, total: int | None = total, shown: list[float] = shown
                ) -> None:
                    if time.monotonic() - shown[0] > 1:
                        shown[0] = time.monotonic()
                        print(json.dumps([key, done, total, None]), file=stream, flush=True)

                found = act(progress) | {"seconds": round(time.monotonic() - began)}
                print(json.dumps([key, total, total, found]), file=stream, flush=True)
        status = 0
    finally:
        if status:
            logging.exception("the torture itself failed")
        os._exit(status)


def follow(processes: list[tuple[int, Path]]) -> tuple[dict[str, Any], bool]:
    """Collect the findings by key and whether all finished; show progress on one line."""
    left = dict(processes)
    statuses = []
    shown = 0.0
    began = time.monotonic()
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses.append(status)
                del left[pid]
        terminal = sys.stderr.isatty()
        if time.monotonic() - shown > (1 if terminal else SHOW_SECONDS):
            shown = time.monotonic()
            lines = [_last(report_file) for report_file in left.values()]
            line = "   ".join(
                f"{key} {done}{f'/{total}' if total else ''}"
                for key, done, total, _ in filter(None, lines)
            )
            line = f"{(shown - began) / 60:4.1f} min   {line}"
            print(
                f"\r\033[K{line}" if terminal else line,
                end="" if terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(0.2)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    found: dict[str, Any] = {}
    for _, report_file in processes:
        for line in report_file.read_text().splitlines():
            key, _, _, result = json.loads(line)
            if result is not None:
                *path, name = key.split(".")
                place = found
                for step in path:
                    place = place.setdefault(step, {})
                place[name] = result
    return found, not any(statuses)


def _last(report_file: Path) -> Any:
    lines = report_file.read_text().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].endswith("]") else None


def with_more(path: Path, found: dict[str, Any], date: str) -> dict[str, Any]:
    """Return the record at `path` with these random kills added."""
    record: dict[str, Any] = json.loads(path.read_text())
    kills = record["kills"]
    for name in (*WORLDS, "total"):
        kills[name] = _added(kills[name], found["kills"][name])
    kills |= {"more_runs": kills.get("more_runs", 0) + 1, "last_more": date}
    return record


def _added(before: Any, more: Any) -> Any:
    if isinstance(before, dict):
        return {key: _added(before[key], more[key]) for key in before}
    return before + more


def wrongs(found: Any) -> list[str]:
    """Collect the entries of all lists named `wrong`."""
    if not isinstance(found, dict):
        return []
    return [*found.get("wrong", []), *(fault for part in found.values() for fault in wrongs(part))]


def torture(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run the whole torture in two processes."""
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=QUICK))
    try:
        warm_up(folder / "warm")
        found, ended = follow([in_a_process(parts, folder, options) for parts in (kills, others)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    of_worlds = found.setdefault("kills", {})
    of_worlds["total"] = sum(of_worlds.get(name, {}).get("kills", 0) for name in WORLDS)
    return found, ended


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1120)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument(
        "--every", type=int, default=1, help="of changes on the disk and of hostile shapes"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="keys of the result, such as kills.one_rank or disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--more", action="store_true", help="add random kills to those in the record"
    )
    parser.add_argument("--json", default="evidence/checkpoint_torture.json")
    options = parser.parse_args()
    record = Path(options.json)
    if options.more:
        options.only = [f"kills.{name}" for name in WORLDS]
        options.seed += 1 + json.loads(record.read_text())["kills"].get("more_runs", 0)
    logging.disable(
        logging.WARNING
    )  # damaged checkpoints are skipped with a warning, some thousand times
    torch.set_num_threads(1)
    facts = provenance(torch.device("cpu"))
    found, ended = torture(options)
    if options.more:
        found = with_more(record, found, facts["date"])
    write_json(options.json, facts | found)
    wrong = wrongs(found)
    for fault in wrong[:20]:
        print(fault, file=sys.stderr)
    print(f"{found['kills']['total']} kills, {len(wrong)} wrong", file=sys.stderr)
    sys.exit(0 if ended and not wrong else 1)


if __name__ == "__main__":
    main()
