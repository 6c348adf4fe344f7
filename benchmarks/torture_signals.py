"""Send SIGTERM at random moments to runs of one to three ranks; nothing may be lost.

    PYTHONPATH=template:benchmarks:tests/runs python benchmarks/torture_signals.py --signals 500 \\
        --json evidence/signals.json

A training is started again after each signal, until it comes to its end. Every rank has to end with
the status of the signal after the same step, this step is the newest committed one, and every loss
is bit-equal to that of a run without signals.

Ranks are forks of this process, which has imported torch, and end as a new process does, with the
whole end of the interpreter: a process group whose threads outlive it aborts the process there.
Proof: `python -m pytest tests/benchmarks/test_torture_signals.py`.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from curry_train.core.wording import provenance, write_json
from curry_train.runs import SavedRun, Store, saving
from torture_ranks import QUICK, RankReport, Ranks

EPOCHS = 3
STEPS_PER_EPOCH = 4
WORLDS = (1, 2, 3)
STOPPED = 128 + signal.SIGTERM
# Where a signal is sent: at a report of this word, or a moment after it.
PHASES = (
    "warm-up",
    "opening",
    "first step",
    "step",
    "save",
    "loader",
    "evaluation",
    "between epochs",
    "closing",
)
# A signal before `saving` ends the process as the kernel does, and one at the end comes too late.
UNHANDLED = ("warm-up",)
LONGEST_DELAY_SECONDS = 0.03
# After the first rank has ended, the others have this long.
GRACE_SECONDS = 60.0


class Samples(Dataset):  # type: ignore[type-arg]
    """Samples with noise from torch's generator, slow enough to be signalled in the loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        return torch.full((4,), index / self.count) + torch.rand(4) / 9


@dataclass(frozen=True)
class Job:
    """One start of a training in a forked rank."""

    rank: int
    world: int
    folder: str
    meeting: str
    pipe: int
    num_workers: int
    in_background: bool

    def say(self, word: str, what: Any = None) -> None:
        line = json.dumps([time.monotonic(), self.rank, word, what])
        os.write(self.pipe, line.encode() + b"\n")


class BecomeRank(BaseException):
    """Carries the job of a forked rank to the top of this script, where processes end."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


def train(job: Job) -> int:
    """Train to the end, or until a signal; return the exit status."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    os.setpgid(0, 0)
    job.say("warm-up")
    time.sleep(0.005)
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    sampler = None
    data = Samples(2 * STEPS_PER_EPOCH * job.world)
    if job.world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.world
        )
        # Otherwise DDP orders the gradients anew after its first step, also after a resume, and
        # three ranks add them in another order, with other last bits.
        model = DistributedDataParallel(model, find_unused_parameters=True)
        sampler = DistributedSampler(data)
    torch.manual_seed(3 + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        data, 2, sampler=sampler, shuffle=sampler is None, num_workers=job.num_workers
    )
    report_saves(job)
    return train_with(job, model, optimizer, loader, sampler)


def report_saves(job: Job) -> None:
    """Report when a run is opened, and when each save begins."""
    open_store = Store.open
    begin = Store.begin

    def opening(store: Store, **options: Any) -> None:
        if not store._opened:
            job.say("opening")
        open_store(store, **options)

    def beginning(store: Store, *arguments: Any, **options: Any) -> Any:
        job.say("save")
        return begin(store, *arguments, **options)

    Store.open = opening  # type: ignore[method-assign]
    Store.begin = beginning  # type: ignore[method-assign]


def train_with(job: Job, model: nn.Module, optimizer: Any, loader: Any, sampler: Any) -> int:
    """Run the loop of a user's script, with a report at each phase."""
    try:
        run = saving(
            model,
            optimizer,
            runs=job.folder,
            rollback_every=2,
            recovery_every=None,
            in_background=job.in_background,
            journal=True,
        )
        job.say("resumed", run.steps)
        job.say("first step")
        for epoch in run.epochs(range(EPOCHS)):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in run.batches(loader):
                job.say("step")
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                job.say("loss", [run.steps + 1, loss.item().hex()])
                run.step(loss=loss)
                job.say("loader")
            job.say("evaluation")
            with torch.no_grad():
                time.sleep(0.005)
                dev = model(torch.ones(2, 4)).square().mean().item()
            run.measured(dev_loss=dev)
            job.say("between epochs")
        job.say("closing")
        run.close()
    except SystemExit as stopped:
        job.say("stopped", stopped.code)
        raise
    return 0


def warm_up(folder: Path) -> None:
    """Import once what each rank would import, without a thread or a process group."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with saving(model, optimizer, runs=folder, rollback_every=1, journal=True) as run:
        for batch in run.batches(DataLoader(Samples(4), 2, shuffle=True)):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
        run.measured(dev_loss=1.0)
    shutil.rmtree(folder)


@dataclass
class Life:
    """One start of all ranks, and how it ended."""

    ranks: Ranks
    phase: str | None = None
    to: str = ""
    sent_at: float | None = None
    hung: bool = False
    wrong: list[str] = field(default_factory=list)

    def losses(self, rank: int) -> list[tuple[int, str]]:
        return [
            tuple(one.what) for one in self.ranks.reports if (one.rank, one.word) == (rank, "loss")
        ]

    def statuses(self) -> list[int]:
        return [
            os.waitstatus_to_exitcode(status) for _, status in sorted(self.ranks.statuses.items())
        ]


def start(world: int, folder: Path, *, num_workers: int, in_background: bool) -> Ranks:
    """Fork the ranks; in a rank this raises BecomeRank."""
    meeting = tempfile.mktemp(prefix="meet-", dir=QUICK)
    reading, writing = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            os.close(reading)
            raise BecomeRank(
                Job(rank, world, str(folder), meeting, writing, num_workers, in_background)
            )
        pids.append(pid)
    os.close(writing)
    return Ranks(pids, reading, meeting)


def signal_once(life: Life, generator: random.Random) -> None:
    """Wait for the phase of this life, and send the signal to one rank, all, or their groups."""
    world = len(life.ranks.pids)
    victim = generator.randrange(world)
    life.phase = generator.choice(PHASES)
    nth = generator.randint(1, EPOCHS * STEPS_PER_EPOCH) if life.phase in ("step", "loader") else 1
    if life.phase in ("save", "evaluation", "between epochs"):
        nth = generator.randint(1, EPOCHS)
    life.to = generator.choice(("one rank", "all ranks", "all groups"))
    if not life.ranks.listen(
        lambda reports: [one.word for one in reports if one.rank == victim].count(life.phase) >= nth
    ):
        return
    time.sleep(generator.uniform(0, LONGEST_DELAY_SECONDS))
    life.sent_at = time.monotonic()
    for rank in [victim] if life.to == "one rank" else range(world):
        pid = life.ranks.pids[rank]
        if life.to == "all groups":
            # A rank that has only just been forked has no group yet.
            try:
                os.killpg(pid, signal.SIGTERM)
            except ProcessLookupError:
                os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGTERM)


def end(life: Life) -> None:
    """Wait for all ranks; once one has ended by a failure, or too long ago, kill the others."""
    statuses: dict[int, int] = {}
    until = None
    pids = life.ranks.pids
    os.set_blocking(life.ranks.pipe, False)
    data = b""
    while len(statuses) < len(pids):
        with contextlib.suppress(BlockingIOError):
            data += os.read(life.ranks.pipe, 65536)
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[rank] = status
                    until = until or time.monotonic() + GRACE_SECONDS
        is_over = until is not None and time.monotonic() > until
        # A run that is closed has given back the signal, which then ends its process.
        fine = {0, STOPPED} | ({-signal.SIGTERM} if life.phase == "closing" else set())
        is_failed = any(os.waitstatus_to_exitcode(each) not in fine for each in statuses.values())
        if (is_over or is_failed) and len(statuses) < len(pids):
            # A launcher does the same where a rank fails.
            time.sleep(0 if is_over else 1.0)
            life.hung = is_over
            for rank in set(range(len(pids))) - set(statuses):
                os.kill(pids[rank], signal.SIGKILL)
            until = float("inf")
        time.sleep(0.002)
    life.ranks.statuses = statuses
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(life.ranks.pipe, 65536):
            data += piece
    for line in (life.ranks._rest + data).splitlines():
        life.ranks.reports.append(RankReport(*json.loads(line)))
    os.close(life.ranks.pipe)
    Path(life.ranks.meeting).unlink(missing_ok=True)


def judge(life: Life, folder: Path, expected: list[list[str]] | None, before: int) -> int:
    """Fill `life.wrong`, and return the newest committed step."""
    newest = SavedRun(folder).latest() if folder.exists() else None
    step = newest.step if newest else 0
    if newest is not None:
        SavedRun(folder).verify(newest)
    statuses = life.statuses()
    reports = life.ranks.reports
    if life.hung:
        life.wrong.append(f"a rank hung: {statuses}")
    if step < before:
        life.wrong.append(f"step {before} was committed, and {step} is the newest")
    for rank in range(len(statuses)):
        losses = life.losses(rank)
        if expected is not None:
            different = [
                (number, loss, expected[rank][number - 1])
                for number, loss in losses
                if loss != expected[rank][number - 1]
            ]
            if different:
                life.wrong.append(
                    f"rank {rank} has other losses than the run without signals: {different[:2]} "
                    f"of steps {losses[0][0]} to {losses[-1][0]}"
                )
    opened = {one.rank for one in reports if one.word == "resumed"}
    sent_at = life.sent_at
    handling = {
        one.rank for one in reports if one.word == "opening" and (not sent_at or one.at < sent_at)
    }
    handled = life.phase not in UNHANDLED and len(handling) == len(statuses)
    if (sent_at is None or handled) and not life.hung:
        life.wrong += _ends_in_order(life, statuses, step, opened)
    return step


def _ends_in_order(life: Life, statuses: list[int], step: int, opened: set[int]) -> list[str]:
    """Return what is wrong with the end of ranks that all handled the signal."""
    wrong = []
    closing = {one.rank for one in life.ranks.reports if one.word == "closing"}
    # After the loop the run is over: a signal that comes then may end a rank in its own way.
    late = len(closing) == len(statuses)
    allowed = {0, STOPPED, -signal.SIGTERM} if late else {0, STOPPED}
    if not set(statuses) <= allowed or (not late and len(set(statuses)) != 1):
        wrong.append(f"the ranks ended with {statuses}")
    last = [life.losses(rank)[-1][0] for rank in sorted(opened) if life.losses(rank)]
    done = set(last)
    if len(done) > 1 or (done and done != {step}):
        wrong.append(f"the ranks were at steps {last}, and {step} is the newest committed one")
    return wrong


def whole_training(
    folder: Path,
    world: int,
    generator: random.Random | None,
    expected: list[list[str]] | None,
    *,
    num_workers: int,
    in_background: bool,
) -> tuple[list[Life], list[list[str]]]:
    """Start a training until it comes to its end; return the lives, and the losses of each rank."""
    shutil.rmtree(folder, ignore_errors=True)
    lives: list[Life] = []
    losses: list[dict[int, str]] = [{} for _ in range(world)]
    step = 0
    while step < EPOCHS * STEPS_PER_EPOCH and len(lives) < 100:
        life = Life(start(world, folder, num_workers=num_workers, in_background=in_background))
        if generator is not None:
            signal_once(life, generator)
        end(life)
        step = judge(life, folder, expected, step)
        for rank in range(world):
            losses[rank] |= dict(life.losses(rank))
        lives.append(life)
        if life.wrong and generator is None:
            raise RuntimeError(f"the run without signals failed: {life.wrong}, {life.statuses()}")
    return lives, [list(dict(sorted(values.items())).values()) for values in losses]


def torture(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Send the signals, and return the counts with what was wrong."""
    generator = random.Random(options.seed)
    expected: dict[tuple[int, int], list[list[str]]] = {}
    signalled: list[tuple[int, Life]] = []
    wrong: list[str] = []
    num_hung = 0
    num_trainings = 0
    began = time.monotonic()
    while len(signalled) < options.signals:
        world = generator.choice(WORLDS)
        num_workers = generator.choice((0, 1))
        how = {"num_workers": num_workers, "in_background": generator.random() < 0.5}
        if (world, num_workers) not in expected:
            _, losses = whole_training(folder / "straight", world, None, None, **how)
            expected[world, num_workers] = losses
        lives, _ = whole_training(
            folder / "signalled", world, generator, expected[world, num_workers], **how
        )
        for life in lives:
            where = f"training {num_trainings}, {world} ranks, {how}, {life.phase}, {life.to}"
            wrong += [f"{where}: {one}" for one in life.wrong]
        signalled += [(world, life) for life in lives if life.sent_at is not None]
        num_hung += sum(life.hung for life in lives)
        num_trainings += 1
        print(f"{len(signalled)} signals, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {
        "signals": len(signalled),
        "trainings": num_trainings,
        "hung": num_hung,
        "of_ranks": Counter(str(world) for world, _ in signalled),
        "of_phases": Counter(str(life.phase) for _, life in signalled),
        "of_targets": Counter(life.to for _, life in signalled),
        "wrong": wrong,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--signals", type=int, default=500, help="to send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="-", help="the record; - is standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A rank leaves this function by BecomeRank, and must not remove the folder.
    folder = Path(tempfile.mkdtemp(prefix="signals-", dir=QUICK))
    warm_up(folder / "warm")
    # The end of a rank then leaves alone what it shares with this process.
    gc.collect()
    gc.freeze()
    found = torture(options, folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_json(options.json, provenance(torch.device("cpu")) | found)
    for fault in found["wrong"][:20]:
        print(fault, file=sys.stderr)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    forked: Job | None = None
    status = 0
    try:
        status = main()
    except BecomeRank as rank:
        forked = rank.job
    if forked is not None:
        status = train(forked)
    sys.exit(status)
