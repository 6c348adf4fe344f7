"""Gates and their verdicts: a claim checked on a case, with both figures.

A gate passes on a right implementation, and its tests show that it fails on wrong ones.
"""

import fnmatch
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.blocks import NoBlocks
from ..core.wording import nearest
from ..workloads.workload import Case


@dataclass(frozen=True)
class Verdict:
    """Result of one gate.

    If the claim does not apply, `passed` is None and `hint` has the reason.
    """

    gate: str
    passed: bool | None
    measured: str
    required: str
    hint: str = ""

    def __post_init__(self) -> None:
        if not self.passed and not self.hint:
            raise ValueError(
                f"gate {self.gate}: a verdict that does not hold needs a hint with what to do"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class NotApplicable(ValueError):
    """Raised by a check whose claim does not apply to the model; the message has the reason."""

    def __init__(self, why: str, *, required: str) -> None:
        super().__init__(why)
        self.required = required


@dataclass(frozen=True)
class Takes:
    """The way a gate's check takes another implementation of what it judges."""

    # The keyword argument of the check.
    parameter: str

    # Makes the argument of an `Implementation`, and of the argument made so far for the same
    # parameter, or None.
    adapt: Callable[[Any, Any], Any] = lambda given, present: given.value


@dataclass(frozen=True)
class Gate:
    """A named claim and the function that checks it on a case."""

    name: str
    check: Callable[..., Verdict]

    # What the gate judges, by its public name; `gates/implementation.py` puts others in its place.
    judges: Mapping[str, Takes] = field(default_factory=dict)

    def run(self, case: Case) -> Verdict:
        """Check a case; a check that fails on the user's model is a gate that does not hold."""
        try:
            return self.check(case)
        except NoBlocks as error:
            return not_applicable(self.name, required="blocks", why=error.in_short)
        except NotApplicable as error:
            return not_applicable(self.name, required=error.required, why=str(error))
        except ValueError as error:
            # Our own errors state what to do.
            return Verdict(self.name, False, "could not be measured", "to run", str(error))
        except Exception as error:  # noqa: BLE001
            # The user's model may raise anything, and the other gates must still run.
            where = traceback.extract_tb(error.__traceback__)[-1]
            measured = f"raised {type(error).__name__}: {error}"
            hint = f"see {where.filename}, line {where.lineno}"
            return Verdict(self.name, False, measured, "to run", hint)


def no_such_gate(pattern: str, names: Sequence[str]) -> str:
    """Return the error for a pattern, such as `recompute/memry`, that matches no gate."""
    technique, _, rest = pattern.partition("/")
    meant = nearest(technique, dict.fromkeys(name.partition("/")[0] for name in names))
    if meant and rest:
        inside = [name.partition("/")[2] for name in names if name.startswith(f"{meant}/")]
        gate = rest if fnmatch.filter(inside, rest) else nearest(rest, inside)
        meant = f"{meant}/{gate}" if gate else None
    advice = f"did you mean {meant!r}?" if meant else f"there are {', '.join(names) or 'none'}"
    return f"no gate matches {pattern!r}; {advice}"


def not_applicable(gate: str, *, required: str, why: str) -> Verdict:
    return Verdict(gate, None, "not applicable", required, why)
