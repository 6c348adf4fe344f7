"""Read journals back: attempts, the history that counts, and the facts of a run.

    history = read_history("runs/run-001")  # "runs/run-001@2" is the run at the end of attempt 2
    print(history.steps.step[-1], history.steps.values["loss"][-1])
    print([attempt.number for attempt in history.attempts])

When an attempt begins at a step, all later steps of earlier attempts move to `superseded`. Figures
are stored in arrays, so that a million steps take about 70 MB.

Proof: `python -m pytest tests/runs/test_journal_reading.py`.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import subprocess
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.wording import provenance
from .files import StrPath
from .journal import JOURNAL_FILE_NAME, OPENING_EVENT_KINDS, Event, event_number, read_events
from .layout import find_run, split_request
from .values import Facts, Values

# Read the history of a run from its journal: attempts, steps and other events.

STEP_FIGURES = ("loss", "learning_rate", "grad_norm", "terms", "seconds", "peak_bytes")
RUN_FACTS = ("config", "code", "environment", "command")


class Steps:
    """Figures of steps in ascending order, one array per figure; a missing figure is nan."""

    def __init__(self, names: Iterable[str]) -> None:
        self.step = array("q")
        self.values = {name: array("d") for name in names}
        # Steps that no longer count, in the order in which they were superseded.
        self.superseded: list[Steps] = []

    def __len__(self) -> int:
        return len(self.step)

    def columns(self) -> list[Any]:
        return [self.step, *self.values.values()]

    def add(self, event: Event) -> None:
        # A step that was made again replaces the earlier one.
        self.keep_up_to(event.step - 1)
        self.step.append(event.step)
        for name, values in self.values.items():
            values.append(event_number(event.facts.get(name)))

    def keep_up_to(self, step: int) -> None:
        index = bisect_right(self.step, step)
        if index < len(self):
            removed = Steps(self.values)
            for own, other in zip(self.columns(), removed.columns(), strict=True):
                other.extend(own[index:])
                del own[index:]
            self.superseded.append(removed)


@dataclass
class Attempt:
    """One attempt of a run, from a start, resume or rollback to the next one."""

    # Time and step are those of its opening event.
    time: float
    step: int
    number: int
    # start, resume, rollback, or lost if the opening event is missing.
    kind: str
    facts: Facts
    last_step: int = 0
    # The reason of its stop event. None without such an event: killed, or still running.
    ended: str | None = None


@dataclass
class History:
    """The contents of a whole journal."""

    # The name under which the caller asked for it.
    name: str
    path: Path
    steps: Steps = field(default_factory=lambda: Steps(STEP_FIGURES))
    metrics: dict[str, Steps] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    # The other events, by kind.
    events: dict[str, list[Event]] = field(default_factory=dict)
    # Configuration, code, environment and command, each of the newest attempt that records it.
    facts: Facts = field(default_factory=dict)
    # The numbers of the lines that are no event.
    damaged: list[int] = field(default_factory=list)

    def add(self, event: Event) -> None:
        kind = event.kind
        if (
            kind in OPENING_EVENT_KINDS
            or not self.attempts
            or event.attempt > self.attempts[-1].number
        ):
            self._open(event)
        attempt = self.attempts[-1]
        attempt.last_step = max(attempt.last_step, event.step)
        if kind == "step":
            self.steps.add(event)
            return
        if kind == "eval" and isinstance(metric := event.facts.get("metric"), str):
            self.metrics.setdefault(metric, Steps(["value"])).add(event)
        elif kind == "stop":
            attempt.ended = str(event.facts.get("reason", "without a reason"))
        self.events.setdefault(kind, []).append(event)

    def _open(self, event: Event) -> None:
        """Begin a new attempt at this event.

        The opening event may be lost; the next event then has a higher attempt number.
        """
        if event.kind not in OPENING_EVENT_KINDS:
            event = event._replace(kind="lost", step=max(0, event.step - 1), facts={})
        self.attempts.append(Attempt(*event))
        self.facts |= {name: one for name, one in event.facts.items() if name in RUN_FACTS}
        for steps in (self.steps, *self.metrics.values()):
            steps.keep_up_to(event.step)


def read_history(run: StrPath, *, root: StrPath = "") -> History:
    """Read the journal of a run: a folder, a journal file, or a name in `root`.

    With the suffix `@2` it is read up to attempt 2.
    """
    given = os.fspath(run)
    place, number = split_request(given, root=root)
    attempt = math.inf
    if number.isdecimal():
        given = place
        attempt = int(number)
    path = find_run(
        given,
        root=root,
        is_run=lambda place: place.is_file() or (place / JOURNAL_FILE_NAME).is_file(),
        kind="run with a journal",
    )
    history = History(os.fspath(run), path / JOURNAL_FILE_NAME if path.is_dir() else path)
    for event in read_events(history.path, history.damaged):
        if event.attempt > attempt:
            break
        history.add(event)
    last = history.attempts[-1].number if history.attempts else 0
    if last < attempt < math.inf:
        raise ValueError(f"{history.path} has no attempt {attempt}: the last one is {last}")
    return history


# What differs between two runs.

# Stands for the value of a key that only the other run has.
ABSENT_VALUE = "(none)"


def changes(a: Any, b: Any, *, name: str = "") -> list[Facts]:
    """List the differing leaves; a mapping that only one side has counts as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in dict.fromkeys([*a, *b]):
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT_VALUE), b.get(key, ABSENT_VALUE), name=inner)
        return found
    # 1 differs from true, and equals 1.0; as text nan equals itself.
    is_equal = repr(a) == repr(b) or (isinstance(a, bool) == isinstance(b, bool) and bool(a == b))
    return [] if is_equal else [{"name": name, "a": a, "b": b}]


# Facts of a run for its journal: configuration, code, packages, device and command.

GIT_SECONDS = 10.0


def run_facts(config: Values, *, device: torch.device, world_size: int = 1) -> Facts:
    """Collect the facts of a run whose code is in the working directory."""
    known = provenance(device)
    environment = {
        "device": known["device"],
        "world_size": world_size,
        "python": known["python"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "threads": known["threads"],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "packages": package_versions(),
    }
    return {
        "command": known["command"],
        "config": dict(config),
        "code": git_state(Path.cwd()),
        "environment": environment,
    }


def peak_bytes(device: torch.device) -> int:
    """Return peak allocated bytes on CUDA, or the peak resident memory of the process on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))

    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the version of every installed distribution, by normalised name."""
    # Of several distributions with one name, Python imports the first.
    found = reversed([*importlib.metadata.distributions()])
    return {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in found}


def git_state(folder: Path) -> Facts:
    """Return the git revision and a digest of uncommitted code, or why there is no revision.

    Uncommitted code is the changes to tracked files, and Python files that git does not track.
    """
    try:
        revision = _run_git(folder, "rev-parse", "--verify", "HEAD").decode("ascii").strip()
        changes = _run_git(folder, "diff", "--no-ext-diff", "--no-color", "--no-textconv", "HEAD")
        added = _run_git(
            folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py"
        ).split(b"\0")[:-1]
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error).encode()
        return {"revision": None, "why": words.decode().splitlines()[0]}
    for name in added:
        changes += name
        # The file may have been removed in the meantime.
        with contextlib.suppress(OSError):
            changes += (folder / os.fsdecode(name)).read_bytes()
    digest = {"changes": hashlib.sha256(changes).hexdigest()[:16]} if changes else {}
    return {"revision": revision, "dirty": bool(changes), **digest}


def _run_git(folder: Path, *arguments: str) -> bytes:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(folder), *arguments]
    completed = subprocess.run(
        command, capture_output=True, check=True, timeout=GIT_SECONDS, env=environment
    )
    return completed.stdout
