"""Kill training at random moments, over one to three ranks that save in the background.

Each life continues in the folder of the killed one, so that kills add up over a history; a judge
checks the folder after each.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_models import At, CountedFiles, die

from curry_train.runs import BackgroundSaver, Store
from curry_train.runs.layout import RESUMABLE_KINDS
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig, Retention
from torture_books import Books
from torture_ranks import Ranks, start
from torture_training import STEPS, Expected, Training, dev_loss

TURNS = 0.4  # share of trainings that begin with a rollback
CHANGES = 0.4  # share of kills at a change on the disk; the others come at a random time
SURVIVE = 0.03  # seconds that ranks may continue after another one was killed
CONFIGS = [
    PolicyConfig(
        rollback_every=every, recovery_every=recovery, best_k=2, retention=Retention(*keep)
    )
    for every, recovery, keep in ((1, 3, (2, 1)), (2, 4, (2, 2)), (1, 4, (3, 2)), (2, 3, (3, 1)))
]


def life(
    rank: int,
    world: int,
    say: Callable[..., None],
    *,
    folder: Path,
    expected: Expected,
    config: PolicyConfig,
    turn: int | None,
    victim: int | None,
    change: int | None,
    plant: Callable[[], None] | None,
) -> None:
    """Resume and train to the end; the victim, if any, dies at its n-th change."""
    if plant is not None:
        plant()
    training, state = (one := Training(rank, world)), one.state

    def compare() -> None:
        if expected.live[rank, state.step] != training.live():
            say("differs", state.step)

    def dies() -> None:
        say("dies")
        die()

    ask = At(change if rank == victim else None, dies)
    say("started")
    files = CountedFiles(folder, ask=ask)
    with (
        Store(folder, files=files) as store,
        BackgroundSaver(store, timeout=30) as saver,
        SavingPolicy(store, config, saver=saver) as policy,
    ):
        say("resuming", turn)
        resumed = policy.resume(state, "latest" if turn is None else f"before-{turn + 1}")
        say("resumed", state.step if resumed else 0)
        if resumed:
            compare()
        while state.step < STEPS:
            training.step()
            say("step", state.step)
            compare()
            saved = policy.after_step(
                state.step, state, {"loss": 1.0, "dev_loss": dev_loss(state.step)}
            )
            say("committed", [one.folder for one in saved])
        say("committed", [one.folder for one in policy.save_now(state.step, state)])
        policy.finish()
    say("finished")


@dataclass
class Plan:
    """Describe how a life ends: `victims` die together, at a change of one or after a time."""

    turn: int | None
    victims: list[int]
    change: int | None
    after: str  # the word of the first rank that starts the clock
    seconds: float
    at_once: bool = False  # during the rollback, or right after it

    @classmethod
    def draw(cls, generator: random.Random, books: Books, world: int, longest: float) -> "Plan":
        steps = sorted({one.step for one in books.needed.values() if one.kind in RESUMABLE_KINDS})
        turn = generator.choice(steps) if steps and generator.random() < TURNS else None
        at_once = turn is not None and generator.random() < 0.5
        victim = generator.randrange(world)
        if generator.random() < CHANGES:
            if at_once:
                most = 12
            elif victim == 0:
                most = 160
            else:
                most = 25
            return cls(turn, [victim], generator.randint(1, most), "dies", 0.0, at_once)
        victims = [victim] if generator.random() < 0.5 else list(range(world))
        seconds = generator.uniform(0, 0.05 * world if at_once else longest)
        return cls(turn, victims, None, "resuming" if at_once else "started", seconds, at_once)


def _one_life(
    books: Books,
    world: int,
    generator: random.Random,
    found: dict[str, Any],
    longest: float,
    plant: Callable[[], None] | None,
    *,
    wild: bool,
) -> tuple[bool, float]:
    """Return whether it finished, and the longest time for a life that is cut off."""
    plan = (
        Plan.draw(generator, books, world, longest) if wild else Plan(None, [], None, "never", 0.0)
    )
    ranks = start(
        world,
        life,
        folder=books.folder,
        expected=books.expected,
        config=books.config,
        plant=plant,
        turn=plan.turn,
        change=plan.change,
        victim=plan.victims[0] if plan.victims else None,
    )
    killed_at = _kill_as_planned(ranks, plan, world, generator)
    ranks.end()
    reports = ranks.reports
    ended = {one.rank for one in reports if one.word == "finished"}
    finished = len(ended) == world
    wrong = _failures(ranks, killed_at)
    wrong += books.judge(reports, finished=finished)
    found["wrong"] += [
        f"history {found['histories']}, kill {found['kills']}, {plan}: {one}" for one in wrong
    ]
    found["rollbacks"] += plan.turn is not None and any(one.word == "resumed" for one in reports)
    found["finished"] += finished
    if any(os.WIFSIGNALED(ranks.statuses[rank]) and rank not in ended for rank in plan.victims):
        found["kills"] += 1
        found["of_one_rank"] += world > 1 and len(plan.victims) == 1
        found["at_a_change"] += plan.change is not None
        found["right_after_a_rollback"] += plan.at_once
    steps = sum(one.word == "step" and one.rank == 0 for one in reports)
    if plan.after == "started":
        if steps > 6:
            longest *= 0.9
        elif steps < 1:
            longest *= 1.1
    return finished or bool(wrong), longest


def _kill_as_planned(
    ranks: Ranks, plan: Plan, world: int, generator: random.Random
) -> float | None:
    """Kill the ranks and return the time, or return None if they ended before the plan's word."""
    if not ranks.listen(
        lambda reports: any(
            one.word == plan.after and (one.rank == 0 or one.word == "dies") for one in reports
        )
    ):
        return None
    time.sleep(plan.seconds)
    killed_at = time.monotonic()
    if plan.change is None:
        ranks.kill(plan.victims)
    time.sleep(generator.uniform(0, SURVIVE) if len(plan.victims) < world else 0)
    ranks.kill(list(range(world)))
    return killed_at


def _failures(ranks: Ranks, killed_at: float | None) -> list[str]:
    """List the errors that ranks reported before the kill, and a hang."""
    struck_at = next((one.at for one in ranks.reports if one.word == "dies"), killed_at)
    wrong = [
        f"rank {one.rank}: {one.what}"
        for one in ranks.reports
        if one.word == "failed" and not (struck_at and one.at > struck_at)
    ]
    if ranks.hung:
        wrong.append("the ranks hung")
    return wrong


def kill_many(
    folder: Path,
    world: int,
    num_kills: int,
    *,
    expected: Expected,
    seed: int = 0,
    plant: Callable[[], None] | None = None,
    until_wrong: bool = False,
    progress: Callable[[int], None] = lambda kills: None,
) -> dict[str, Any]:
    """Run histories until `number` trainings were killed before their end."""
    generator = random.Random(f"{seed}-{world}")
    found = {
        "kills": 0,
        "of_one_rank": 0,
        "at_a_change": 0,
        "right_after_a_rollback": 0,
        "rollbacks": 0,
    }
    found |= {"histories": 0, "finished": 0, "checkpoints_checked": 0, "wrong": []}
    longest = 0.3 * world
    while found["kills"] < num_kills and not (until_wrong and found["wrong"]):
        shutil.rmtree(folder, ignore_errors=True)
        books = Books(folder, expected, generator.choice(CONFIGS))
        found["histories"] += 1
        finished = False
        while not finished and not (until_wrong and found["wrong"]):
            wild = found["kills"] < num_kills
            finished, longest = _one_life(books, world, generator, found, longest, plant, wild=wild)
            progress(found["kills"])
        found["checkpoints_checked"] += books.checked
    shutil.rmtree(folder, ignore_errors=True)
    return found
