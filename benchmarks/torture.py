"""Strike trainings at random moments with SIGKILL or SIGTERM, and judge what they leave behind.

    python -m torture [--kills N] [--signals N] [--every N]

`make torture` runs the full one. The status is 1 if anything was wrong. Flips, full disks and
hostile files are those of `torture_peers.py --peer ours`.

A training is started again after each blow, or rolled back first, until it comes to its end. Ranks
are forks of this process, which has imported torch, and end as a new process does, with the whole
end of the interpreter: a process group whose threads outlive it aborts the process there. Forks
need Linux.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import argparse
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from tests.store_models import WIDTH, network
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from curry_train.runs import RunError, SavedRun, saving
from curry_train.runs.layout import BEST_KIND, CHECKPOINT_KINDS, RESUMABLE_KINDS
from recording import Figures, record_parser, write_record

EPOCHS = 4
STEPS_PER_EPOCH = 5
STEPS = EPOCHS * STEPS_PER_EPOCH
STOPPED = 128 + signal.SIGTERM
QUICK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# The words that a rank reports, and how often: a blow comes at one of them, or a moment later.
WORDS = {
    "started": 1,
    "opening": 1,
    "resumed": 1,
    "step": STEPS,
    "loader": STEPS,
    "evaluation": EPOCHS,
    "epoch": EPOCHS,
    "closing": 1,
}
LONGEST_DELAY = 0.03  # seconds from the word to the blow
SURVIVE = 0.03  # seconds that ranks may continue after another one was killed
LONGEST_SILENCE = 120.0  # seconds without a report after which ranks are taken to hang
GRACE = 60.0  # seconds in which the other ranks must end after the first one
TURNS = 0.3  # share of the lives that begin with a rollback
AT_A_CHANGE = 0.4  # share of the blows that come at a change of the disk
MOST_CHANGES = 160
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}

# The training: every generator is in use, and each loss depends on all that came before.


class Samples(Dataset[torch.Tensor]):
    """Samples with noise from torch's generator, slow enough to be struck in the loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        return torch.full((WIDTH,), index / self.count) + torch.rand(WIDTH) / 9


@dataclass(frozen=True)
class Setup:
    """Options of one training: `world`, `sharded` and `num_workers` change its losses."""

    world: int = 1
    sharded: bool = False
    num_workers: int = 0
    in_background: bool = False
    rollback_every: int = 1
    recovery_every: int = 4
    keep: tuple[int, int] = (2, 1)  # of rollbacks and recoveries
    steps: int = STEPS

    @classmethod
    def draw(cls, generator: random.Random, world: int) -> "Setup":
        return cls(
            world,
            sharded=generator.random() < 0.5,
            num_workers=generator.choice((0, 0, 1)),
            in_background=generator.random() < 0.5,
            rollback_every=generator.choice((1, 2)),
            recovery_every=generator.choice((4, 5)),
            keep=generator.choice(((2, 1), (2, 2), (3, 2), (3, 1))),
        )

    @property
    def data(self) -> tuple[int, bool, int]:
        """The options that change the losses; runs that agree in them have equal losses."""
        return self.world, self.sharded, self.num_workers

    def at_the_end(self) -> set[int]:
        """The steps whose states retention keeps after the last step."""
        recoveries = range(self.recovery_every, self.steps + 1, self.recovery_every)
        rollbacks = range(self.rollback_every, self.steps + 1, self.rollback_every)
        states = sorted({*rollbacks, *recoveries, self.steps})
        return {*states[-self.keep[0] :], *recoveries[-self.keep[1] :]}


def parts(setup: Setup, rank: int = 0) -> dict[str, Any]:
    """Build what `saving` takes: on one rank, a state that any number of ranks has saved."""
    torch.manual_seed(3)
    model = network()
    if setup.world > 1 and setup.sharded:
        mesh = init_device_mesh("cpu", (setup.world,))
        for part in (model[0], model[3], model):
            fully_shard(part, mesh=mesh)
    elif setup.world > 1:
        # Otherwise DDP orders the gradients anew after its first step, also after a resume, and
        # three ranks add them in another order, with other last bits.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        "generators": {"own": torch.Generator().manual_seed(11 + rank)},
    }


def train(
    setup: Setup,
    folder: Path,
    say: Callable[..., None] = lambda *report: None,
    *,
    rank: int = 0,
    resume: str = "latest",
) -> None:
    """Run the loop of a user's script, with a report at each phase."""
    held = parts(setup, rank)
    data = Samples(3 * STEPS_PER_EPOCH * setup.world)
    sampler = DistributedSampler(data) if setup.world > 1 else None
    loader = DataLoader(
        data, 3, sampler=sampler, shuffle=sampler is None, num_workers=setup.num_workers
    )
    own, model = held["generators"]["own"], held["model"]
    say("opening")
    run = saving(
        **held,
        runs=folder,
        resume=resume,
        rollback_every=setup.rollback_every,
        recovery_every=setup.recovery_every,
        best_k=2,
        retention={"rollback_keep": setup.keep[0], "recovery_keep": setup.keep[1]},
        in_background=setup.in_background,
        journal=True,
    )
    say("resumed", run.steps)
    for epoch in run.epochs(range(EPOCHS)):
        if not run.continues(until=setup.steps):
            break
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            say("step", run.steps)
            noise = random.random() + numpy.random.random() + torch.rand(1, generator=own)
            loss = model(batch + noise).square().mean()
            loss.backward()
            held["optimizer"].step()
            held["optimizer"].zero_grad()
            held["scheduler"].step()
            say("loss", [run.steps + 1, loss.item().hex()])
            run.step(loss=loss)
            say("loader")
        say("evaluation")
        # A loss that goes up and down.
        run.measured(dev_loss=run.steps * 37 % 23 / 10)
        say("epoch")
    say("closing")
    run.close()


# Forked ranks and their reports, which go through a pipe, whose content survives a kill.


@dataclass(frozen=True)
class Blow:
    """A signal to some ranks: `delay` seconds after the nth report of a word, or from within.

    From within, the first victim sends it to itself at its `change`th change of the disk.
    """

    number: int
    victims: tuple[int, ...]
    word: str = "dies"
    nth: int = 1
    delay: float = 0.0
    change: int | None = None

    @classmethod
    def draw(cls, generator: random.Random, number: int, world: int) -> "Blow":
        victim = generator.randrange(world)
        if generator.random() < AT_A_CHANGE:
            most = 25 if victim else MOST_CHANGES
            return cls(number, (victim,), change=generator.randint(1, most))
        word = generator.choice([*WORDS])
        return cls(
            number,
            (victim,) if generator.random() < 0.5 else tuple(range(world)),
            word,
            generator.randint(1, WORDS[word]),
            generator.uniform(0, LONGEST_DELAY),
        )


@dataclass(frozen=True)
class RankReport:
    """One report of a rank: a word and its value."""

    at: float
    rank: int
    word: str
    what: Any = None


def be_a_rank(
    setup: Setup, folder: Path, resume: str, blow: Blow, *, rank: int, pipe, meeting: str
) -> int:
    """Train to the end, or until the blow; return the exit status."""

    def say(word: str, what=None) -> None:
        pipe.send(RankReport(time.monotonic(), rank, word, what))

    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # gloo prints a message for every peer that was killed
    say("started")
    try:
        if setup.world > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            method = f"file://{meeting}"
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=setup.world)
        change = blow.change if rank in blow.victims else None
        sys.addaudithook(_struck_at_a_change(change, blow.number, say))
        train(setup, folder, say, rank=rank, resume=resume)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the parent process judges it
        trace = "".join(traceback.format_exception(error)[-3:])[-900:]
        say("failed", f"{type(error).__name__}: {trace}")
        return 1
    say("finished")
    return 0


def _struck_at_a_change(
    change: int | None, number: int, say: Callable[..., None]
) -> Callable[[str, Any], None]:
    """Return an audit hook that sends the blow at a change of the disk by this process.

    It reports, too, from when on the signal is handled.
    """
    process, count, handled = os.getpid(), 0, False

    def hook(event: str, arguments) -> None:
        nonlocal count, handled
        writes = event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if os.getpid() != process or not (writes or event in CHANGES):
            return
        count += 1
        if not handled and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            handled = True
            say("handling")
        if count == change:
            say("dies")
            if number == signal.SIGKILL:
                os.killpg(0, number)  # with its loader's workers, which hold the pipe
            os.kill(process, number)

    return hook


@dataclass
class Life:
    """The reports and exit statuses of all ranks, from one start of the training to its end."""

    reports: list[RankReport] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    hung: bool = False

    def said(self, word: str, rank: int | None = None) -> list[RankReport]:
        return [one for one in self.reports if one.word == word and rank in (None, one.rank)]


class Ranks(Life):
    """Forked processes that train together."""

    def __init__(self, setup: Setup, folder: Path, resume: str, blow: Blow) -> None:
        """Fork; a rank ends here, as a new process does."""
        super().__init__()
        self.meeting = tempfile.mktemp(prefix="meet-", dir=QUICK)
        # The writing end stays open here too, so that a read never meets the end.
        self.pipe, self.writing = multiprocessing.Pipe(duplex=False)
        self.pids = []
        for rank in range(setup.world):
            pid = os.fork()
            if not pid:
                self.pipe.close()
                own = {"rank": rank, "pipe": self.writing, "meeting": self.meeting}
                sys.exit(be_a_rank(setup, folder, resume, blow, **own))
            # Here too, since a rank may be struck before it gets that far.
            os.setpgid(pid, pid)
            self.pids.append(pid)

    def listen(self, until: Callable[[], bool]) -> bool:
        """Wait until the reports fulfil a condition; False if a rank ended or all are silent."""
        heard_at = time.monotonic()
        while not until():
            heard = self._poll()
            if self.statuses:
                self._poll()
                return until()
            heard_at = time.monotonic() if heard else heard_at
            if time.monotonic() - heard_at > LONGEST_SILENCE:
                self.hung = True
                return False
        return True

    def strike(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self.statuses:
                os.killpg(self.pids[rank], number)

    def end(self) -> None:
        """Wait for all ranks; once one has failed, or ended too long ago, kill the others."""
        until = time.monotonic() + (0 if self.hung else LONGEST_SILENCE)
        while len(self.statuses) < len(self.pids):
            if self._poll() and not self.statuses:
                until = time.monotonic() + LONGEST_SILENCE
            elif self.statuses:
                failed = not {*self.statuses.values()} <= {0, STOPPED, -signal.SIGTERM}
                until = min(until, time.monotonic() + (1.0 if failed else GRACE))
            if time.monotonic() > until:
                self.hung = self.hung or {*self.statuses.values()} <= {0, STOPPED}
                self.strike(signal.SIGKILL, range(len(self.pids)))
                until = float("inf")
        while self._poll():
            pass
        self.pipe.close()
        self.writing.close()
        Path(self.meeting).unlink(missing_ok=True)

    def _poll(self) -> bool:
        """Read reports and reap ranks that ended; return whether there was a report."""
        heard = self.pipe.poll(0.002)
        while self.pipe.poll():
            self.reports.append(self.pipe.recv())
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return heard


# A history: one training, from its first start to its end.


@dataclass
class History:
    """A training that is struck and started again, and what its folder must hold."""

    folder: Path
    setup: Setup
    expected: dict[int, dict[int, str]] | None = None  # the losses of each rank by their steps
    newest: int = 0  # the newest committed step
    terminated: bool = False  # SIGTERM saves at steps at which nothing is due
    finished: bool = False
    losses: dict[int, dict[int, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def live(self, blow: Blow, turn: int | None = None) -> None:
        """Start all ranks, strike them, and judge; `turn` is a step to roll back to first."""
        resume = "latest" if turn is None else f"before-{turn + 1}"
        self.terminated = self.terminated or blow.number == signal.SIGTERM
        ranks = Ranks(self.setup, self.folder, resume, blow)
        struck_at = self._strike(ranks, blow)
        ranks.end()
        self.finished = len(ranks.said("finished")) == self.setup.world
        wrong = judge(self, ranks, blow, turn, struck_at)
        self.wrong += [f"{self.setup}, {blow}, {resume}: {one}" for one in wrong]
        for one in ranks.said("loss"):
            self.losses.setdefault(one.rank, {})[one.what[0]] = one.what[1]

    def _strike(self, ranks: Ranks, blow: Blow) -> float | None:
        """Strike as planned and return when; None where the ranks ended before the word."""
        victim = blow.victims[0]
        if not ranks.listen(lambda: len(ranks.said(blow.word, victim)) >= blow.nth):
            return None
        time.sleep(blow.delay)
        if blow.change:
            struck_at = ranks.said(blow.word, victim)[0].at
        else:
            struck_at = time.monotonic()
            ranks.strike(blow.number, blow.victims)
        if blow.number == signal.SIGKILL:
            time.sleep(random.uniform(0, SURVIVE) if len(blow.victims) < self.setup.world else 0)
            ranks.strike(signal.SIGKILL, range(self.setup.world))
        return struck_at


def judge(
    history: History, life: Life, blow: Blow, turn: int | None, struck_at: float | None
) -> list[str]:
    """Return all that is wrong after a life, by the reports and the folder."""
    wrong = _differences(history, life, turn)
    wrong += [
        f"rank {one.rank}: {one.what}"
        for one in life.said("failed")
        if struck_at is None or one.at < struck_at
    ]
    if life.hung:
        wrong.append(f"a rank hung: {life.statuses}")
    before = history.newest
    if turn is not None and life.said("opening", 0):
        before = min(before, turn)
    if history.folder.exists():
        wrong += _folder(history, life, before)
    if blow.number == signal.SIGTERM and not life.hung:
        wrong += _ends_in_order(history, life, struck_at)
    # A life that had nothing left to train saves nothing, and so deletes nothing.
    if history.finished and life.said("step"):
        wrong += _at_the_end(history)
    return wrong


def _differences(history: History, life: Life, turn: int | None) -> list[str]:
    """Compare the resumed step and each loss with the run that was never struck."""
    wrong = []
    wanted = history.newest if turn is None else turn
    for one in life.said("resumed"):
        if one.what != wanted:
            wrong.append(f"rank {one.rank} resumed at step {one.what}, not {wanted}")
    for one in life.said("loss"):
        step, loss = one.what
        if history.expected is not None and history.expected[one.rank][step] != loss:
            wrong.append(f"rank {one.rank} was not as the straight run at step {step}")
            break
    return wrong


def _folder(history: History, life: Life, before: int) -> list[str]:
    """Look for states that are half there, lost, or of a line that was given up."""
    run = SavedRun(history.folder)
    wrong = [f"{folder} is half there: {why}" for folder, why in run.scan()[1].items()]
    for one in run.committed():
        try:
            run.verify(one)
        except RunError as error:
            wrong.append(f"{one.folder}: {error}")
    newest = run.latest()
    history.newest = newest.step if newest else 0
    if history.newest < before:
        wrong.append(f"step {before} was committed, and {history.newest} is the newest")
    reached = [one.what for word in ("resumed", "step") for one in life.said(word, 0)]
    if reached and history.newest > max(reached) + 1:
        wrong.append(
            f"step {history.newest} of a line that was given up came back: training was at "
            f"{max(reached) + 1}"
        )
    return wrong


def _ends_in_order(history: History, life: Life, struck_at: float | None) -> list[str]:
    """Return what is wrong with the end of ranks that all handled SIGTERM."""
    reports = life.said("handling")
    handling = {one.rank for one in reports if struck_at is None or one.at < struck_at}
    if len(handling) < history.setup.world:
        return []  # the kernel ended a rank that did not handle it yet
    wrong = []
    statuses = {*life.statuses.values()}
    # After the loop the run is over: a signal that comes then may end a rank in its own way.
    late = len(life.said("closing")) == history.setup.world
    allowed = {0, STOPPED, -signal.SIGTERM} if late else {0, STOPPED}
    if not statuses <= allowed or (not late and len(statuses) != 1):
        wrong.append(f"the ranks ended with {dict(sorted(life.statuses.items()))}")
    last = {one.rank: one.what[0] for one in life.said("loss")}
    steps = sorted({*last.values()})
    if steps and steps != [history.newest]:
        wrong.append(
            f"the ranks were at steps {steps}, and {history.newest} is the newest committed"
        )
    return wrong


def _at_the_end(history: History) -> list[str]:
    run = SavedRun(history.folder)
    states = {one.step for kind in RESUMABLE_KINDS for one in run.committed(kind)}
    wanted, best = history.setup.at_the_end(), len(run.committed(BEST_KIND))
    left = [path.name for kind in CHECKPOINT_KINDS for path in (history.folder / kind).glob(".*")]
    wrong = []
    if states != wanted and not history.terminated:
        wrong.append(f"at the end the steps {sorted(states)} are there, not {sorted(wanted)}")
    if best != min(2, -(-history.setup.steps // STEPS_PER_EPOCH)):
        wrong.append(f"at the end {best} of the best are there")
    if left:
        wrong.append(f"at the end there still are {left}")
    return wrong


NEVER = Blow(0, (0,), word="never")


@functools.cache
def straight(*data) -> dict[int, dict[int, str]]:
    """Train without a blow, saving in the foreground; return the losses of each rank."""
    folder = Path(tempfile.mkdtemp(prefix="straight-", dir=QUICK))
    history = History(folder, Setup(*data))
    history.live(NEVER)
    if history.wrong or not history.finished:
        raise RuntimeError(f"the run without a blow failed: {history.wrong}")
    shutil.rmtree(folder)
    return history.losses


def strike_many(folder: Path, number: int, wanted: int, world: int) -> Figures:
    """Strike trainings over `world` ranks with a signal until it was sent often enough."""
    generator = random.Random(f"{number}-{world}")
    blows = 0
    wrong = []
    while blows < wanted:
        setup = Setup.draw(generator, world)
        history = History(folder, setup, straight(*setup.data))
        while not history.finished and not history.wrong:
            steps = [one.step for one in SavedRun(folder).states()] if history.newest else []
            turn = generator.choice(steps) if steps and generator.random() < TURNS else None
            wild = blows < wanted
            history.live(Blow.draw(generator, number, world) if wild else NEVER, turn)
            blows += wild and not history.finished
        wrong += history.wrong
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{world} ranks: {blows} of {wanted}", file=sys.stderr)
    return {"blows": blows, "wrong": wrong}


def kill_at_each_change(folder: Path, every: int) -> Figures:
    """Kill a short training at each nth change of the disk, and train on to its end."""
    setup = Setup(rollback_every=1, recovery_every=2, keep=(1, 1), steps=3)
    wrong = []
    for blows in itertools.count():
        history = History(folder, setup, straight(*setup.data))
        change = 1 + every * blows
        history.live(Blow(signal.SIGKILL, (0,), change=change))
        finished = history.finished
        if not finished:
            history.live(NEVER)
            if not history.finished:
                history.wrong.append(f"killed at change {change}, it does not go on")
        wrong += history.wrong
        shutil.rmtree(folder, ignore_errors=True)
        if finished:
            break
    return {"blows": blows, "wrong": wrong}


# The whole torture, and its record.

# The number of ranks, and their share of the kills and of the signals.
WORLDS = {"one_rank": (1, 0.6), "two_ranks": (2, 0.25), "three_ranks": (3, 0.15)}
SIGNALS = {"kills": signal.SIGKILL, "signals": signal.SIGTERM}


def torture(options: argparse.Namespace, folder: Path) -> Figures:
    """Run the parts one after the other; return the findings as the record has them."""
    # Import once what each rank would import, without a thread or a process group.
    train(Setup(steps=1), folder / "warm")
    # The end of a rank then leaves alone what it shares with this process.
    gc.collect()
    gc.freeze()
    found = {"kills": {"at_each_change": kill_at_each_change(folder / "each", options.every)}}
    for group, number in SIGNALS.items():
        rows = found.setdefault(group, {})
        for name, (world, share) in WORLDS.items():
            wanted = round(getattr(options, group) * share)
            rows[name] = strike_many(folder / f"{group}-{name}", number, wanted, world)
    wrong = [one for rows in found.values() for part in rows.values() for one in part["wrong"]]
    for rows in found.values():
        rows["total"] = sum(part["blows"] for part in rows.values())
    return found | {"wrong": wrong}


def main() -> int:
    parser = record_parser(__doc__)
    parser.set_defaults(json="-")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--signals", type=int, default=200, help="SIGTERMs")
    parser.add_argument("--every", type=int, default=1, help="kill at each nth change of the disk")
    options = parser.parse_args()
    # Damaged checkpoints are skipped with a warning, some thousand times.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # A rank leaves this function by SystemExit, and must not remove the folder.
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=QUICK))
    found = torture(options, folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_record(options.json, found)
    wrong = found["wrong"]
    print(*wrong[:20], f"{len(wrong)} wrong", sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
