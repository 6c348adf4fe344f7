"""Judge a run's folder after a kill, by the reports of its ranks alone.

Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from curry_train.runs import RunError, SavedRun
from curry_train.runs.layout import BEST_KIND, CHECKPOINT_KINDS, RESUMABLE_KINDS, SavedCheckpoint
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.store import LATEST_POINTER
from torture_ranks import RankReport
from torture_training import STEPS, Expected, contents, dev_loss


@dataclass
class Books:
    """Checkpoints that a run's folder must hold, derived from the reports of its ranks alone."""

    folder: Path
    expected: Expected
    config: PolicyConfig
    needed: dict[str, SavedCheckpoint] = field(default_factory=dict)
    checked: int = 0
    compared: dict[str, bytes] = field(default_factory=dict)

    def judge(self, reports: list[RankReport], *, finished: bool) -> list[str]:
        """Check the folder against the reports and return every violation."""
        run = SavedRun(self.folder)
        there = {one.folder: one for kind in CHECKPOINT_KINDS for one in run.committed(kind)}
        wrong = [
            f"{folder} is half there: {why}"
            for kind in CHECKPOINT_KINDS
            for folder, why in run.damaged(kind).items()
        ]
        wrong += [words for one in there.values() if (words := self._different(run, one))]
        gone = {one.folder for one in run.given_up(list(there.values()))}
        line = [
            one.step
            for one in there.values()
            if one.kind in RESUMABLE_KINDS and one.folder not in gone
        ]
        newest, reached = max(line, default=0), self._take(reports)
        wrong += [
            f"rank {one.rank} was not as the straight run at step {one.what}"
            for one in reports
            if one.word == "differs"
        ]
        before = max(
            (one.step for one in self.needed.values() if one.kind in RESUMABLE_KINDS), default=0
        )
        if newest < before:
            wrong.append(f"step {before} was committed, and {newest} is the newest")
        if reached is not None and newest > reached:
            wrong.append(
                f"step {newest} of a line that was given up came back: training was at {reached}"
            )
        wrong += [
            f"{name} was committed and is gone"
            for name in self.needed
            if name not in there and not self._superseded(name, there)
        ]
        if finished and any(
            one.word == "committed" and one.what for one in reports
        ):  # retention may have deleted it
            wrong += self._at_the_end(run, there)
        self.needed = {name: one for name, one in there.items() if name not in gone}
        return wrong

    def _different(self, run: SavedRun, one: SavedCheckpoint) -> str | None:
        self.checked += 1
        try:
            text = run.verify(
                one
            ).render()  # read every file; one with the same hashes was compared before
            same = self.compared.get(one.folder) == text or self.expected.is_as_saved(
                one, contents(run, one)
            )
            if same:
                self.compared[one.folder] = text
        except (RunError, OSError) as error:
            return f"{one.folder}: {error}"
        return None if same else f"{one.folder} is not what the straight run was at its step"

    def _take(self, reports: list[RankReport]) -> int | None:
        """Record a report of rank 0; return its step, or None before it resumed."""
        reached = None
        for one in reports:
            if one.rank:
                continue
            if one.word == "resuming" and one.what is not None:
                self.needed = {
                    name: held
                    for name, held in self.needed.items()
                    if held.step <= one.what or held.kind == BEST_KIND
                }
            elif one.word in ("resumed", "step"):
                reached = one.what
            elif one.word == "committed":
                for name in one.what:
                    kind, _, rest = name.partition("/")
                    self.needed[name] = SavedCheckpoint(
                        kind, int(rest.removesuffix(".dcp").rpartition("step-")[2]), name, name
                    )
        return reached

    def _superseded(self, name: str, there: dict[str, SavedCheckpoint]) -> bool:
        """Return whether retention may remove a checkpoint, given the newer or better ones."""
        one, keep = self.needed[name], self.config.retention
        if one.kind == BEST_KIND:
            mine = (dev_loss(one.step), one.step)
            better = [
                held
                for held in there.values()
                if held.kind == BEST_KIND and (dev_loss(held.step), held.step) < mine
            ]
            return len(better) >= self.config.best_k
        newer = {
            held.step
            for held in there.values()
            if held.kind in RESUMABLE_KINDS and held.step > one.step
        }
        recoveries = {
            held.step for held in there.values() if held.kind == "recovery" and held.step > one.step
        }
        same = f"recovery/{name.partition('/')[2]}" in there and one.kind == "rollback"
        return same or (
            len(newer) >= keep.rollback_keep
            and (one.kind == "rollback" or len(recoveries) >= keep.recovery_keep)
        )

    def _at_the_end(self, run: SavedRun, there: dict[str, SavedCheckpoint]) -> list[str]:
        every = self.config.rollback_every
        recovery = self.config.recovery_every
        keep = self.config.retention
        recoveries = [step for step in range(1, STEPS + 1) if step % recovery == 0]
        states = [step for step in range(1, STEPS + 1) if step % every == 0 or step in recoveries]
        wanted = sorted({*states[-keep.rollback_keep :], *recoveries[-keep.recovery_keep :]})
        found = sorted(one.step for one in there.values() if one.kind in RESUMABLE_KINDS)
        best = sum(one.kind == BEST_KIND for one in there.values())
        left = [
            path.name
            for kind in CHECKPOINT_KINDS
            for path in (self.folder / kind).iterdir()
            if path.name.startswith(".")
        ]
        return [
            *(
                [f"at the end the steps {found} are there, and {wanted} should be"]
                if found != wanted
                else []
            ),
            *([f"at the end {best} of the best are there"] if best != self.config.best_k else []),
            *([f"at the end there still are {left}"] if left else []),
            *(
                [f"latest points to {run.files.path(LATEST_POINTER).readlink()}"]
                if str(run.files.path(LATEST_POINTER).readlink()) != run.latest().folder
                else []
            ),
        ]
