"""The same torture for each checkpoint library: kills, flips, full disks and hostile files.

    make torture PEER=dcp

This installs the library next to the project's environment first. The counts go into the record of
all, and the table of the record into its page. It forks, and needs Linux.

Proof: `python -m pytest tests/benchmarks/test_torture_peers.py`.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from curry_train.core.wording import provenance
from recording import ROOT, Figures, write_record
from torture_peer_savers import PEERS, Peer, prepared, state_of, step_of
from torture_shapes import calls

RECORD = ROOT / "evidence/peers_torture.json"
PAGE = ROOT / "skills/checkpoint-policy/references/peers.md"
KILLS_OF_A_FOLDER = 5
FORK = multiprocessing.get_context("fork")
LONGEST_LOAD = 120  # seconds after which a load counts as hung
FIRST_STEPS = (1, 2)
# Limits of a file's size, as parts of the largest file of a checkpoint.
FULL_PARTS = tuple(number / 20 for number in range(20))

# Processes that save until they are killed, and processes that load.


def in_a_fork(act: Callable[[Callable[[Any], None]], None]) -> tuple[Any, Any]:
    """Fork a process that acts and reports; return it and the pipe with its reports."""
    reading, writing = FORK.Pipe(duplex=False)

    def run() -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        warnings.simplefilter("ignore")
        signal.alarm(LONGEST_LOAD)
        act(writing.send)
        os._exit(0)  # without the threads of a library

    process = FORK.Process(target=run)
    process.start()
    writing.close()
    return process, reading


def reports_of(process, pipe) -> tuple[list[Any], int]:
    """Wait for a fork to end; return its reports and its status."""
    reports = []
    with contextlib.suppress(EOFError):
        while True:
            reports.append(pipe.recv())
    process.join()
    return reports, process.exitcode


def loaded(load: Callable[[], Any]) -> Figures:
    """Load in a process of its own; return the step, or the error, or that it is another state."""

    def act(report: Callable[[Any], None]) -> None:
        try:
            state = load()
        except BaseException as error:  # noqa: BLE001 - whatever the library raises is the finding
            report({"error": f"{type(error).__name__}: {error!s:.150}"})
            return
        try:
            report({"step": step_of(state)})
        except (ValueError, KeyError, IndexError) as error:
            report({"silent": str(error)[:150]})

    reports, status = reports_of(*in_a_fork(act))
    return reports[0] if reports else {"error": f"the process ended with {status}"}


def save_anew(peer: Peer, root: Path, steps: tuple[int, ...]) -> Path:
    """Save steps into a new folder, in a process; return the path of the last one."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)

    def act(report: Callable[[Any], None]) -> None:
        for step in steps:
            peer.save(peer.path(root, step), state_of(step))

    _, status = reports_of(*in_a_fork(act))
    if status:
        raise RuntimeError(f"{peer.name} does not save {steps}: status {status}")
    return peer.path(root, steps[-1])


# Kills.


def kill_many(peer: Peer, folder: Path, number: int, *, again: bool = False) -> dict[str, int]:
    """Kill a process at random moments of its saves, and load in another; count what was lost.

    With `again` every checkpoint has the name of the one before.
    """
    generator = random.Random(f"{peer.name}-{again}")
    counts = dict.fromkeys(("kills", "newest_fails", "older", "lost", "silent", "refused"), 0)
    root = folder / "kills"
    longest = 0.0
    while counts["kills"] < number:
        if not counts["kills"] % KILLS_OF_A_FOLDER or not root.exists():
            began = time.monotonic()
            save_anew(peer, root, (0,))
            longest = longest or 4 * (time.monotonic() - began)
            saved = begun = 0
        reports = _killed_reports(peer, root, begun + 1, again, generator.uniform(0, longest))
        # The last step that was reported saved, and the last that may have been.
        saved = max([one for one in reports if isinstance(one, int)], default=saved)
        begun = max(begun, saved) + 1
        counts["kills"] += 1
        counts["refused"] += any(isinstance(one, dict) for one in reports)

        found = loaded(lambda: peer.load(root))
        counts["silent"] += "silent" in found
        counts["newest_fails"] += "error" in found
        counts["older"] += found.get("step", saved) < saved
        if found.get("step", -1) < saved:
            # Is the step that was reported saved still there, if it is loaded by its name?
            path = peer.path(root, 0 if again else saved)
            counts["lost"] += loaded(lambda path=path: peer.load_one(path)).get("step", -1) < saved
            shutil.rmtree(root)
    return counts


def _killed_reports(peer: Peer, root: Path, first: int, again: bool, seconds: float) -> list[Any]:
    """Save one step after the other in a process, kill it, and return what it reported."""

    def act(report: Callable[[Any], None]) -> None:
        report("begin")
        for step in range(first, first + 10_000):
            try:
                peer.save(peer.path(root, 0 if again else step), state_of(step))
            except Exception as error:  # noqa: BLE001 - a refusal to save over a save is one answer
                report({"refused": str(error)[:100]})
                return
            report(step)

    process, pipe = in_a_fork(act)
    pipe.poll(LONGEST_LOAD)
    time.sleep(seconds)
    process.kill()
    return reports_of(process, pipe)[0]


# Flips, full disks and hostile files.


def flip_many(peer: Peer, folder: Path, number: int) -> dict[str, int]:
    """Flip single bits of the newest checkpoint, equally many in each file, and load."""
    generator = random.Random(peer.name)
    root = folder / "flips"
    files = _files_of(save_anew(peer, root, FIRST_STEPS))
    counts = dict.fromkeys(("flips", "silent"), 0)
    for turn in range(number):
        path = files[turn % len(files)]
        data = path.read_bytes()
        if not data:
            continue
        flipped = bytearray(data)
        flipped[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        found = loaded(lambda: peer.load(root))
        path.write_bytes(data)
        counts["flips"] += 1
        counts["silent"] += "silent" in found
    return counts


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def fill_disks(peer: Peer, folder: Path) -> dict[str, int]:
    """Let the kernel refuse to write more than some bytes of a file, as a full disk does."""
    counts = dict.fromkeys(("full", "not_reported", "newest_fails", "lost", "silent"), 0)
    root = folder / "full"
    for part in FULL_PARTS:
        first = save_anew(peer, root, (1,))
        limit = int(part * max(one.stat().st_size for one in _files_of(first)))

        def act(report: Callable[[Any], None], limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            peer.save(peer.path(root, 2), state_of(2))
            report(2)

        reports, _ = reports_of(*in_a_fork(act))
        found = loaded(lambda: peer.load(root))
        counts["full"] += 1
        counts["not_reported"] += bool(reports) and found.get("step") != 2
        counts["newest_fails"] += "error" in found
        counts["silent"] += "silent" in found
        counts["lost"] += loaded(lambda first=first: peer.load_one(first)).get("step") != 1
    return counts


def forge_many(peer: Peer, folder: Path) -> dict[str, int]:
    """Replace each pickle of a checkpoint by one that calls a function, hashes fitting; load."""
    counts = dict.fromkeys(("hostile", "executed"), 0)
    canary = folder / "canary"
    root = folder / "hostile"
    for call in calls(str(canary)).values():
        for pattern in peer.pickled:
            newest = save_anew(peer, root, FIRST_STEPS)
            files = [newest] if newest.is_file() else sorted(newest.glob(pattern))
            for path in files:
                _forge_file(path, call)
            peer.forge(newest)
            loaded(lambda: peer.load(root))
            counts["hostile"] += 1
            counts["executed"] += canary.exists()
            if canary.is_dir():
                canary.rmdir()
            canary.unlink(missing_ok=True)
    return counts


def _forge_file(path: Path, call) -> None:
    """Put a hostile pickle in place of the pickle in a file."""
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        path.write_bytes(pickle.dumps(call, 2))
        return
    end = data.rindex(b"PK\x05\x06") + 22
    with path.open("wb") as stream:
        torch.save(call, stream)
        stream.write(b"\0" * max(0, end - stream.tell()))
    if not zipfile.is_zipfile(path):
        torch.save(call, path)


# The whole torture of one library, its record and its table.


NUM_KILLS = 300
NUM_RESAVES = 100  # kills of saves over a save
NUM_FLIPS = 600


def torture_peer(peer: Peer) -> Figures:
    parts = {
        "kills": partial(kill_many, number=NUM_KILLS),
        "resaves": partial(kill_many, number=NUM_RESAVES, again=True),
        "flips": partial(flip_many, number=NUM_FLIPS),
        "full_disks": fill_disks,
        "hostile": forge_many,
    }
    found = {}
    for name, part in parts.items():
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            found[name] = part(peer, Path(folder))
        print(name, found[name], file=sys.stderr)
    return found


def record(peer: Peer) -> None:
    """Torture one library, and put its counts into the record of all and into the page."""
    written = {"peers": json.loads(RECORD.read_text())["peers"]}
    facts = provenance()
    row = {"version": peer.version(), "torch": facts["torch"], "date": facts["date"]}
    written["peers"][peer.name] = row | {"counts": torture_peer(peer)}
    write_record(str(RECORD), written)
    PAGE.write_text(with_table(PAGE.read_text(), written))


TABLE_BEGIN = "<!-- table of evidence/peers_torture.json -->"
TABLE_END = "<!-- end of the table -->"
COLUMNS = {
    "kills": ("kills", "kills"),
    "resume fails": ("kills", "newest_fails"),
    "lost": ("kills", "lost"),
    "saves over a save": ("resaves", "kills"),
    "lost by them": ("resaves", "lost"),
    "flips": ("flips", "flips"),
    "loaded in silence": ("flips", "silent"),
    "full disks": ("full_disks", "full"),
    "resume fails after": ("full_disks", "newest_fails"),
    "hostile": ("hostile", "hostile"),
    "executed": ("hostile", "executed"),
}


def table_of(written: dict[str, Any]) -> str:
    """Return the record as a table in Markdown."""
    lines = [f"| library | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name in PEERS:
        row = written["peers"][name]
        cells = [str(row["counts"][part][key]) for part, key in COLUMNS.values()]
        lines.append(f"| {name} {row['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, written: dict[str, Any]) -> str:
    """Return a page with the table of a record between its two comments."""
    table = f"{TABLE_BEGIN}\n{table_of(written)}\n{TABLE_END}"
    return re.sub(f"(?s){TABLE_BEGIN}.*{TABLE_END}", table, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=[*PEERS], required=True, help="the library to torture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record(prepared(options.peer))


if __name__ == "__main__":
    main()
