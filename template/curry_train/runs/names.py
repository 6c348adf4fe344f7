"""Names of checkpoints in a run's folder: `rollback/step-00000500.dcp`, `best-k/dev_loss-0.25-step-00000450.dcp`.

Steps are compared as numbers, and a metric by the value in the manifest: text sorts step 10 before step 9.
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
MOST_NAMED = 10  # runs that are told where one is not there
PARAMETERS = (
    "rollback"  # the metric of a rollback that holds parameters only; its value is the step
)

_METRIC = re.compile(r"[A-Za-z]\w*")
_STEP = re.compile(r"step-(?P<step>\d{8,18})\.dcp")
_BEST = re.compile(
    r"(?P<metric>[A-Za-z]\w*)-(?P<value>-?\d[\d.]*(?:e[+-]\d+)?)-step-(?P<step>\d{8,18})\.dcp"
)
_LEFTOVER = re.compile(r"\..+\.(?:partial|removed)-[0-9a-f]+")


@dataclass(frozen=True)
class Metric:
    """The figure by which one checkpoint is better than another."""

    name: str
    value: float

    def __post_init__(self) -> None:
        if not _METRIC.fullmatch(self.name):
            raise ValueError(
                f"a metric's name is letters, digits and _, got {self.name!r}: rename it, as in dev_loss"
            )
        if not math.isfinite(self.value):
            raise ValueError(
                f"{self.name} is {self.value}: it would be best for ever, so don't save by it"
            )


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint. `folder` is relative to the run's folder, `location` is what other tools open."""

    kind: str
    step: int
    folder: str
    location: str
    metric: Metric | None = None
    num_bytes: int = 0

    @property
    def serves_as(self) -> str:
        """The kind whose cadence and number it is under: a rollback of parameters only is a file as a best-K is."""
        return (
            "rollback" if self.metric is not None and self.metric.name == PARAMETERS else self.kind
        )


def folder_name(kind: str, step: int, metric: Metric | None = None) -> str:
    """The folder of a checkpoint, relative to the run's."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind of checkpoint {kind!r}: take one of {', '.join(KINDS)}")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise ValueError(f"a step is a whole number from 0, got {step!r}")
    if (metric is None) == (kind == BEST):
        raise ValueError(f"{BEST} needs a metric, and only {BEST}: got {kind} with {metric}")
    prefix = f"{metric.name}-{metric.value:.6g}-" if metric else ""
    return f"{kind}/{prefix}step-{step:08d}{SUFFIX}"


def step_of(kind: str, name: str) -> int | None:
    """The step that a folder's name says, or None where the name is not a checkpoint's."""
    found = (_BEST if kind == BEST else _STEP).fullmatch(name)
    return int(found["step"]) if found else None


def is_leftover(name: str) -> bool:
    """Whether a name was given to what was not committed yet, or is being removed."""
    return _LEFTOVER.fullmatch(name) is not None


def what_runs_there_are(name: str, there: Iterable[str], *, root: object) -> str:
    """The end of a message about a run that is not there: those in `root` that are, the likeliest first."""
    wanted, known = name.lower(), sorted(there)
    if not known:
        return f"{root} has no run"
    likely = sorted(
        known, key=lambda each: -difflib.SequenceMatcher(None, wanted, each.lower()).ratio()
    )
    shown, more = likely[:MOST_NAMED], len(likely) - MOST_NAMED
    others = f" and {more} more" if more > 0 else ""
    if not difflib.get_close_matches(wanted, [shown[0].lower()]):
        return f"{root} has {', '.join(shown)}{others}"
    also = f" {root} also has {', '.join(shown[1:])}{others}" if shown[1:] else ""
    return f"did you mean {shown[0]}?{also}"
