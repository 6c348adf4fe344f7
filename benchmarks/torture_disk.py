"""Fail a disk at each change, once and permanently, and at each read.

Committed checkpoints stay, load bit-equal, and the next training continues from them.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from store_models import CountedFiles

from curry_train.runs import BackgroundSaver, RunError, SavedRun, Store, load_chosen
from curry_train.runs.files import Files
from curry_train.runs.policy import SavingPolicy
from torture_books import Books
from torture_kills import CONFIGS
from torture_ranks import RankReport
from torture_training import Expected, Training, dev_loss

KINDS_OF_ERROR = (errno.ENOSPC, errno.EIO, errno.EROFS)
BEFORE, AFTER = 5, 7  # steps committed before the disk fails, and the last step of training
CONFIG = CONFIGS[0]


class Trial:
    """A run in a folder, with the books that judge it."""

    def __init__(self, folder: Path, expected: Expected) -> None:
        self.books, self.folder = Books(folder, expected, CONFIG), folder
        self.reports: list[RankReport] = []

    def train(self, until: int, files: Any = None, *, in_background: bool = True) -> str | None:
        """Train and report; return the error that ended it early, if any."""
        training, store = Training(), Store(self.folder, files=files)
        try:
            with store:
                saver = BackgroundSaver(store) if in_background else None
                with saver or mock.MagicMock(), SavingPolicy(store, CONFIG, saver=saver) as found:
                    resumed = found.resume(training.state)
                    self._say("resumed", training.state.step if resumed else 0)
                    while training.state.step < until:
                        self._compare(training)
                        training.step()
                        step = training.state.step
                        self._say("step", step)
                        saved = found.after_step(step, training.state, {"dev_loss": dev_loss(step)})
                        self._say("committed", [one.folder for one in saved])
                    self._compare(training)
                    self._say("committed", [one.folder for one in found.finish()])
        except (RunError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if isinstance(files, CountedFiles):
                files.ask = lambda operation: None
            store.close()
        return None

    def judge(self) -> list[str]:
        found = self.books.judge(self.reports, finished=False)
        self.reports = []
        return found

    def wrong_state(self) -> list[str]:
        """Load the latest state and return every error in it."""
        training, newest = (
            Training(),
            max(one.step for one in self.books.needed.values() if one.kind != "best-k"),
        )
        try:
            step = load_chosen(self.folder, training.state).saved.step
        except (RunError, OSError) as error:
            return [f"nothing loads: {error}"]
        same = step == newest and training.live() == self.books.expected.live[0, step]
        return (
            [] if same else [f"step {step} was loaded, and {newest} is the newest; or it differs"]
        )

    def _say(self, word: str, what: Any) -> None:
        self.reports.append(RankReport(0.0, 0, word, what))

    def _compare(self, training: Training) -> None:
        step = training.state.step
        if step and self.books.expected.live[0, step] != training.live():
            self._say("differs", step)


class Failing:
    """Raise at the n-th change, and at each later one if it lasts."""

    def __init__(self, number: int, code: int, *, lasts: bool) -> None:
        self.number = number
        self.code = code
        self.lasts = lasts
        self.count = 0
        self.failed = 0

    def __call__(self, operation: str) -> None:
        self.count += 1
        if self.count == self.number or (self.lasts and self.count > self.number):
            self.failed += 1
            raise OSError(self.code, os.strerror(self.code))


def prepared(folder: Path, expected: Expected, *, of: Trial | None = None) -> Trial:
    """Make a run of some steps, or a copy of one."""
    shutil.rmtree(folder, ignore_errors=True)
    trial = Trial(folder, expected)
    if of is not None:
        shutil.copytree(of.folder, folder, symlinks=True)
        trial.books.needed = dict(of.books.needed)
        return trial
    error_text = trial.train(BEFORE)
    if error_text or (wrong := trial.judge()):
        raise RuntimeError(f"the run that is to be damaged did not train: {error_text or wrong}")
    return trial


def errors_at_each_change(
    folder: Path, expected: Expected, *, every: int = 1, progress: Callable[[int], None] = print
) -> dict[str, Any]:
    """Raise each kind of error, once and permanently, at each change of a training."""
    errors = 0
    num_raised = 0
    wrong = []
    first = prepared(folder.with_name("first"), expected)
    for lasts in (False, True):
        for code in KINDS_OF_ERROR:
            number = 1
            while True:
                trial = prepared(folder, expected, of=first)
                failing = Failing(number, code, lasts=lasts)
                error_text = trial.train(AFTER, CountedFiles(folder, ask=failing))
                if not failing.failed:
                    break
                errors += 1
                num_raised += error_text is not None
                found = trial.judge() + trial.wrong_state()
                if error_text is None and trial.books.needed and lasts:
                    found.append("a disk that fails permanently raised no error")
                error_text = trial.train(AFTER)
                found += [f"the next training ended with {error_text}"] if error_text else []
                found += trial.judge() + trial.wrong_state()
                how = "for good" if lasts else "once"
                wrong += [
                    f"{errno.errorcode[code]} {how} at change {number}: {one}" for one in found
                ]
                number += every
                progress(errors)
    return {"errors": errors, "told": num_raised, "wrong": wrong}


class _FailingReads(Files):
    """File access in which the n-th opened file can't be read."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number, self.failed = number, 0

    def open(self, key: str) -> Any:
        self.number -= 1
        if not self.number:
            self.failed = 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(key)


def errors_at_each_read(folder: Path, expected: Expected) -> dict[str, Any]:
    """Fail one read: a state loads whole or not at all, and the next try loads all of it."""
    trial = prepared(folder, expected)
    errors = 0
    wrong = []
    while True:
        files, training = _FailingReads(folder, errors + 1), Training()
        before = training.live()
        try:
            step = load_chosen(SavedRun(folder, files=files), training.state).saved.step
            same = training.live() == expected.live[0, step]
        except (RunError, OSError):
            same = training.live() == before
        if not files.failed:
            return {"errors": errors, "wrong": wrong}
        errors += 1
        found = (
            ([] if same else ["a part of a state was loaded"]) + trial.wrong_state() + trial.judge()
        )
        wrong += [f"EIO at read {errors}: {one}" for one in found]


def small_files(expected: Expected, folder: Path, *, every: int = 1) -> dict[str, Any]:
    """Limit file sizes in the kernel, in place of a full disk where nothing can be mounted."""
    wrong = []
    errors = 0
    first = prepared(folder.with_name("whole"), expected)
    for limit in (0, 1, 100, 1000, 5000, 8000)[::every]:
        trial = prepared(folder, expected, of=first)
        pid = os.fork()
        if not pid:
            status = 9
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                status = 3 if "File too large" in (trial.train(AFTER) or "") else 4
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors += status == 3
        found = ([] if status == 3 else [f"status {status}"]) + trial.judge() + trial.wrong_state()
        wrong += [f"files of at most {limit} bytes: {one}" for one in found]
    return {"errors": errors, "wrong": wrong}
