"""Fork ranks from a warm process of one thread, since importing torch outlasts a life.

They report through a pipe, whose content survives a kill.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

LONGEST = 120.0  # seconds of silence after which ranks are taken to hang
QUICK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class RankReport:
    """One report of a rank: a word and its value."""

    at: float
    rank: int
    word: str
    what: Any = None


@dataclass
class Ranks:
    """Forked processes that train together, and their reports so far."""

    pids: list[int]
    pipe: int
    meeting: str
    reports: list[RankReport] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    hung: bool = False
    _rest: bytes = b""

    def listen(self, until: Callable[[list[RankReport]], Any]) -> bool:
        """Wait until the reports fulfil a condition; False if the ranks ended or took too long."""
        while not until(self.reports):
            if not self._read():
                return False
        return True

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(
                self.pids[rank], signal.SIGKILL
            )  # not reaped yet, so the number still belongs to it

    def end(self) -> None:
        """Read all reports, and wait for all ranks to end."""
        while self._read():
            pass
        self.statuses = {rank: os.waitpid(pid, 0)[1] for rank, pid in enumerate(self.pids)}
        os.close(self.pipe)
        Path(self.meeting).unlink(missing_ok=True)

    def _read(self) -> bool:
        """Read more reports and return whether there were any; kill ranks silent for too long."""
        if not select.select([self.pipe], [], [], LONGEST)[0]:
            self.hung = True
            self.kill(list(range(len(self.pids))))
        data = os.read(self.pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.reports += [RankReport(*json.loads(line)) for line in lines]
        return bool(data)


def start(world: int, life: Callable[..., None], **arguments: Any) -> Ranks:
    """Fork `world` ranks that call `life(rank, world, say, **arguments)`."""
    meeting = tempfile.mktemp(prefix="meet-", dir=QUICK)
    reading, writing = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            os.close(reading)
            _be_a_rank(rank, world, writing, meeting, life, arguments)
        pids.append(pid)
    os.close(writing)
    return Ranks(pids, reading, meeting)


def _be_a_rank(
    rank: int,
    world: int,
    pipe: int,
    meeting: str,
    life: Callable[..., None],
    arguments: dict[str, Any],
) -> None:
    def say(word: str, what: Any = None) -> None:
        os.write(pipe, json.dumps([time.monotonic(), rank, word, what]).encode() + b"\n")

    status = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # gloo prints a message for every peer that was killed
        if world > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
            )
        life(rank, world, say, **arguments)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the parent process judges it
        trace = traceback.format_exception(error)[-3:]
        say("failed", f"{type(error).__name__}: {error} {''.join(trace)[-600:]}"[:3000])
    finally:
        os._exit(status)
