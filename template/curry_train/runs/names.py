"""Names of the checkpoints in a run's folder.

Examples: `rollback/step-00000500.dcp`, `best-k/dev_loss-0.25-step-00000450.dcp`. Steps are compared
as numbers, because text sorts step 10 before step 9. Metrics are compared by the value in the
manifest.
Proof: `python -m pytest tests/test_store.py`.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("rollback", "recovery", "best-k")
RESUMABLE = ("rollback", "recovery")
BEST = "best-k"
SUFFIX = ".dcp"
# Number of existing runs that an error about a missing run names.
MOST_NAMED = 10
# Metric name of a rollback that holds only parameters; its value is the step.
PARAMETERS = "rollback"

_METRIC = re.compile(r"[A-Za-z]\w*")
_STEP = re.compile(r"step-(?P<step>\d{8,18})\.dcp")
_BEST = re.compile(
    r"(?P<metric>[A-Za-z]\w*)-(?P<value>-?\d[\d.]*(?:e[+-]\d+)?)-step-(?P<step>\d{8,18})\.dcp"
)
_LEFTOVER = re.compile(r"\..+\.(?:partial|removed)-[0-9a-f]+")


@dataclass(frozen=True)
class Metric:
    """The figure that ranks checkpoints, such as dev_loss."""

    name: str
    value: float

    def __post_init__(self) -> None:
        if not _METRIC.fullmatch(self.name):
            raise ValueError(
                f"a metric's name is letters, digits and _, got {self.name!r}: rename it, "
                f"for example to dev_loss"
            )
        if not math.isfinite(self.value):
            raise ValueError(
                f"{self.name} is {self.value}: a value that is not finite can't rank checkpoints, "
                f"so don't save by it"
            )


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint."""

    kind: str
    step: int
    # Relative to the run's folder.
    folder: str
    # The path or URL that other tools open.
    location: str
    metric: Metric | None = None
    num_bytes: int = 0

    @property
    def serves_as(self) -> str:
        """The kind whose cadence and retention apply to this checkpoint.

        A rollback of parameters only is stored like a best-K checkpoint, but serves as a rollback.
        """
        if self.metric is not None and self.metric.name == PARAMETERS:
            return "rollback"
        return self.kind


def folder_name(kind: str, step: int, metric: Metric | None = None) -> str:
    """Return the folder of a checkpoint, relative to the run's folder."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind of checkpoint {kind!r}: take one of {', '.join(KINDS)}")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise ValueError(f"a step is a whole number from 0, got {step!r}")
    if (metric is None) == (kind == BEST):
        raise ValueError(
            f"{BEST} needs a metric, and other kinds take none: got {kind} with {metric}"
        )
    prefix = f"{metric.name}-{metric.value:.6g}-" if metric else ""
    return f"{kind}/{prefix}step-{step:08d}{SUFFIX}"


def step_of(kind: str, name: str) -> int | None:
    """Return the step in a folder's name, or None if it is not the name of a checkpoint."""
    found = (_BEST if kind == BEST else _STEP).fullmatch(name)
    return int(found["step"]) if found else None


def is_leftover(name: str) -> bool:
    """Whether a name is that of an uncommitted folder, or of one that is being removed."""
    return _LEFTOVER.fullmatch(name) is not None


def what_runs_there_are(name: str, there: Iterable[str], *, root: object) -> str:
    """List the runs in `root`, the most similar first, for an error about a missing run."""
    wanted = name.lower()
    runs = sorted(there)
    if not runs:
        return f"{root} has no run"

    runs.sort(key=lambda run: -difflib.SequenceMatcher(None, wanted, run.lower()).ratio())
    shown = runs[:MOST_NAMED]
    num_more = len(runs) - MOST_NAMED
    others = f" and {num_more} more" if num_more > 0 else ""
    if not difflib.get_close_matches(wanted, [shown[0].lower()]):
        return f"{root} has {', '.join(shown)}{others}"
    also = f" {root} also has {', '.join(shown[1:])}{others}" if shown[1:] else ""
    return f"did you mean {shown[0]}?{also}"
