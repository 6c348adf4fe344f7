"""Compare two runs by their journals, and collect the facts that explain a difference.

    found = difference(read_history("runs/run-001"), read_history("runs/run-002"))
    print(found.config, found.losses.parted)

`run_facts` are written when a run starts: configuration, code, packages, device and command.

Proof: `python -m pytest tests/runs/test_diff.py tests/runs/test_run_facts.py`.
"""

import contextlib
import hashlib
import importlib.metadata
import math
import os
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..core.wording import provenance
from .history import Attempt, History, Marks

# Facts of a run for its journal: configuration, code, packages, device and command.

GIT_SECONDS = 10.0
# The digest covers the content of at most this many files that git does not track.
MOST_ADDED = 1000


def run_facts(
    config: Mapping[str, Any],
    *,
    device: torch.device,
    world_size: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Collect the facts of a run whose code is in `folder`, the working directory by default."""
    known = provenance(device)
    environment = {
        "device": known["device"],
        "world_size": world_size,
        "python": known["python"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "threads": known["threads"],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "packages": package_versions(),
    }
    code = git_state(Path(folder or Path.cwd()))
    return {
        "command": known["command"],
        "config": dict(config),
        "code": code,
        "environment": environment,
    }


def package_versions() -> dict[str, str]:
    """Return the version of every installed distribution, by normalised name."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:
            # Of several distributions with one name, Python imports the first.
            versions.setdefault(name.lower().replace("_", "-"), package.version)
    return dict(sorted(versions.items()))


def git_state(folder: Path) -> dict[str, Any]:
    """Return the git revision and a digest of uncommitted code, or why there is no revision.

    Uncommitted code is the changes to tracked files, and Python files that git does not track.
    """
    try:
        revision = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD").decode("ascii").strip()
        changes = _git(folder, "diff", "--no-ext-diff", "--no-color", "--no-textconv", "HEAD")
        added = _git(
            folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py"
        ).split(b"\0")[:-1]
    except FileNotFoundError:
        return {"revision": None, "why": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"revision": None, "why": f"git took longer than {GIT_SECONDS:g} seconds"}
    except subprocess.CalledProcessError as error:
        if not error.stderr:
            why = "nothing was committed yet"
        elif b"not a git repository" in error.stderr:
            why = "no git repository"
        else:
            why = f"git exited with {error.returncode}"
        return {"revision": None, "why": why}
    if not changes and not added:
        return {"revision": revision, "dirty": False}

    digest = hashlib.sha256(changes)
    for name in added[:MOST_ADDED]:
        digest.update(name)
        # The file may have been removed in the meantime.
        with contextlib.suppress(OSError):
            digest.update((folder / os.fsdecode(name)).read_bytes())
    return {
        "revision": revision,
        "dirty": True,
        "changes": digest.hexdigest()[:16],
        "added_files": len(added),
    }


def _git(folder: Path, *arguments: str) -> bytes:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    command = ["git", "-C", str(folder), *arguments]
    completed = subprocess.run(
        command, capture_output=True, check=True, timeout=GIT_SECONDS, env=environment
    )
    return completed.stdout


# Compare two runs by their journals: configuration, code, losses, costs and events.

# Smallest relative difference of the loss that is visible in a plot.
VISIBLE_LOSS_DIFFERENCE = 0.01
# Stands for the value of a key that only the other run has.
ABSENT_VALUE = "(none)"
# Number of steps that are listed for each kind of event.
MOST_STEPS = 20
CODE_FACTS = ("revision", "dirty", "changes", "why")


@dataclass(frozen=True)
class SettingChange:
    """One differing setting or fact: its dotted name, and both values as JSON values."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Continuation:
    """The step at which run `later` continues `earlier`; `how` is resume or rollback."""

    earlier: str
    later: str
    step: int
    how: str = "resume"
    # Whether the journal of `earlier` reaches that step.
    reached: bool = True


@dataclass(frozen=True)
class Parting:
    """A step at which the losses differ; `relative` is the absolute amount divided by A's loss."""

    step: int
    a: float
    b: float

    @property
    def amount(self) -> float:
        return self.b - self.a

    @property
    def relative(self) -> float:
        if math.isfinite(self.amount) and self.a:
            return abs(self.amount / self.a)
        return math.inf


@dataclass(frozen=True)
class Losses:
    """Comparison of the losses, or of another metric, at the steps that both runs have."""

    num_common: int
    num_different: int = 0
    first_common: int | None = None
    last_common: int | None = None
    # The first step with different values.
    parted: Parting | None = None
    # The first step whose values differ by more than 1%.
    visibly: Parting | None = None
    # The step with the largest absolute difference.
    largest: Parting | None = None
    # The first and the last step of each run.
    spans: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)


@dataclass(frozen=True)
class Seen:
    """Events of one kind in one journal: their number, and the steps of the first ones."""

    num: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class RunDifference:
    """The whole comparison of two runs, A and B."""

    a: str
    b: str
    # Whether both names mean the same journal, which therefore cannot differ.
    same: bool
    resumed: Continuation | None
    config: list[SettingChange]
    code: list[SettingChange]
    environment: list[SettingChange]
    losses: Losses
    # The highest peak and the median seconds of a step, of A and of B.
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    metrics: dict[str, Losses] = field(default_factory=dict)
    # The events of A and of B, by kind.
    events: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)
    # Whether the journals of A and of B record the configuration, the code and the environment.
    recorded: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name, losses in ((None, self.losses), *self.metrics.items()):
            target = found["losses"] if name is None else found["metrics"][name]
            for key in ("parted", "visibly", "largest"):
                parting: Parting | None = getattr(losses, key)
                if parting is not None:
                    target[key] |= {"amount": parting.amount, "relative": parting.relative}
        return found


def difference(a: History, b: History) -> RunDifference:
    """Compare two runs; steps that were rolled back are left out."""
    facts_a = a.facts
    facts_b = b.facts
    changed: dict[str, list[SettingChange]] = {}
    recorded: dict[str, tuple[bool, bool]] = {}
    for section in ("config", "code", "environment"):
        changed[section] = changes(facts_a.get(section), facts_b.get(section))
        recorded[section] = (_known(section, facts_a), _known(section, facts_b))
    changed["code"] = [
        change for change in changed["code"] if change.name.split(".")[0] in CODE_FACTS
    ]
    command = changes({"command": facts_a.get("command")}, {"command": facts_b.get("command")})

    kinds = {*a.marks, *b.marks} - {"start"}
    return RunDifference(
        a.name,
        b.name,
        same=a.path.resolve() == b.path.resolve() and len(a.attempts) == len(b.attempts),
        resumed=find_continuation(a, b),
        config=changed["config"],
        code=changed["code"],
        environment=command + changed["environment"],
        losses=compare_values(
            a.steps.step, a.steps.values["loss"], b.steps.step, b.steps.values["loss"]
        ),
        costs=_costs(a, b),
        metrics=_metrics(a, b),
        events={kind: (_seen(a, kind), _seen(b, kind)) for kind in sorted(kinds)},
        recorded=recorded,
    )


def find_continuation(a: History, b: History) -> Continuation | None:
    """Return how B continues from A or A from B, or None.

    A and B may also be the same journal, read up to different attempts.
    """
    for earlier, later in ((a, b), (b, a)):
        if opening := _went_on(earlier, later):
            how = "rollback" if opening.kind == "rollback" else "resume"
            steps = earlier.steps.step
            reached = opening.step == 0 or (len(steps) > 0 and opening.step <= steps[-1])
            return Continuation(earlier.name, later.name, opening.step, how, reached)
    return None


def _went_on(earlier: History, later: History) -> Attempt | None:
    """Return the attempt of `later` that began from a state of `earlier`, or None."""
    if not earlier.attempts or not later.attempts:
        return None

    earlier_runs = {attempt.run for attempt in earlier.attempts} | {earlier.path.parent.name}
    later_runs = {attempt.run for attempt in later.attempts}
    for attempt in later.attempts:
        if (
            attempt.from_run is not None
            and attempt.from_run in earlier_runs
            and attempt.from_run not in later_runs
        ):
            return attempt

    # The same journal, or a copy that was continued, begins with all attempts of `earlier`.
    num_shared = len(earlier.attempts)
    earlier_openings = [_opening(attempt) for attempt in earlier.attempts]
    later_openings = [_opening(attempt) for attempt in later.attempts[: num_shared + 1]]
    if later_openings[:-1] == earlier_openings:
        return later.attempts[num_shared]
    return None


def _opening(attempt: Attempt) -> tuple[str | None, float, str, int]:
    return attempt.run, attempt.time, attempt.kind, attempt.step


def changes(a: Any, b: Any, *, name: str = "") -> list[SettingChange]:
    """List the differing leaves; a mapping that only one side has counts as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[SettingChange] = []
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{name}.{key}" if name else str(key)
            found += changes(a.get(key, ABSENT_VALUE), b.get(key, ABSENT_VALUE), name=inner)
        return found
    return [] if _equal(a, b) or not name else [SettingChange(name, a, b)]


def _equal(a: Any, b: Any) -> bool:
    """Compare JSON values: 1 differs from true, and equals 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def compare_values(
    steps_a: "array[int]", a: "array[float]", steps_b: "array[int]", b: "array[float]"
) -> Losses:
    """Compare the values at the steps that both have; nan on both sides counts as equal.

    The steps are in ascending order, so that one pass finds the common ones.
    """
    num_common = 0
    num_different = 0
    first = None
    last = None
    parted = None
    visibly = None
    largest = None
    i = 0
    j = 0
    while i < len(steps_a) and j < len(steps_b):
        step = steps_a[i]
        if step < steps_b[j]:
            i += 1
            continue
        if step > steps_b[j]:
            j += 1
            continue

        value_a = a[i]
        value_b = b[j]
        i += 1
        j += 1
        num_common += 1
        first = step if first is None else first
        last = step
        if value_a == value_b or (math.isnan(value_a) and math.isnan(value_b)):
            continue

        num_different += 1
        difference_here = Parting(step, value_a, value_b)
        parted = parted or difference_here
        if visibly is None and difference_here.relative > VISIBLE_LOSS_DIFFERENCE:
            visibly = difference_here
        if largest is None or _size(difference_here) > _size(largest):
            largest = difference_here

    spans = (_span(steps_a), _span(steps_b))
    return Losses(num_common, num_different, first, last, parted, visibly, largest, spans)


def _size(parting: Parting) -> float:
    """Return the absolute difference, infinite where it is nan."""
    amount = abs(parting.amount)
    return math.inf if math.isnan(amount) else amount


def _span(steps: Sequence[int]) -> tuple[int, int] | None:
    return (steps[0], steps[-1]) if len(steps) else None


def _known(section: str, facts: Mapping[str, Any]) -> bool:
    """Return whether the journal records this section.

    Code without a revision counts as unknown, since two runs outside of git may run different code.
    """
    recorded = facts.get(section)
    if not isinstance(recorded, Mapping):
        return False
    return section != "code" or isinstance(recorded.get("revision"), str)


def _seen(history: History, kind: str) -> Seen:
    marks = history.marks.get(kind, Marks())
    return Seen(len(marks.step), tuple(marks.step[:MOST_STEPS]))


def _costs(a: History, b: History) -> dict[str, tuple[float, float]]:
    """Return the highest peak and the median seconds of a step, where both journals record them."""
    found = {}
    for name, summarize in (("peak_bytes", max), ("seconds", median)):
        values_a = [value for value in a.steps.values[name] if value > 0]
        values_b = [value for value in b.steps.values[name] if value > 0]
        if values_a and values_b:
            found[name] = summarize(values_a), summarize(values_b)
    return found


def _metrics(a: History, b: History) -> dict[str, Losses]:
    found = {}
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        steps_a = a.metrics[name].steps
        steps_b = b.metrics[name].steps
        found[name] = compare_values(
            steps_a.step, steps_a.values["value"], steps_b.step, steps_b.values["value"]
        )
    return found
