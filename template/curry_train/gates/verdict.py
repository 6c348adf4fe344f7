"""Gates, their verdicts, and another implementation under the gates of a technique.

A gate passes on a right implementation, and its tests show that it fails on wrong ones.

    curry-train validate --gate sac --impl my_package.sac:apply_sac
    curry-train validate --impl recompute=my_package.memory:checkpoint_layers

Each `gates/<technique>.py` lists in `JUDGED_CALLABLES` what its gates judge, the main one first,
and each gate how it takes another one (`Gate.judges`). A gate that takes none of those named does
not apply: it never judges ours in their place.

Proof: `python -m pytest tests/gates/test_implementation.py`.
"""

import fnmatch
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from typing import Any

from ..core.blocks import NoBlocks
from ..core.wording import nearest
from ..workloads.models import import_callable
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

    # What the gate judges, by its public name; an `Implementation` may take its place.
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


# Another implementation of what gates judge, as `--impl` names it.


@dataclass(frozen=True)
class Judged:
    """A public callable of the package that gates judge, or another one in its place."""

    name: str

    # A function with the parameters that the gates pass; only its signature is used.
    call: Callable[..., Any]


@dataclass(frozen=True)
class Implementation:
    """A callable to judge, in place of the one of the package that has the name `judged`."""

    judged: str
    spec: str  # package.module:function
    value: Any


class WrongImplementation(ValueError):
    """Raised for an implementation that can't be loaded or called; the message is one line."""


def load_implementation(
    text: str, judged: Mapping[str, Sequence[Judged]], *, techniques: Sequence[str] = ()
) -> Implementation:
    """Load `[NAME=]package.module:function`, where NAME is a technique or what its gates judge.

    `judged` maps techniques to what their gates judge. Without a name the function's own name
    counts, and else the main callable of the only technique in `techniques`.
    """
    name, equals, spec = text.rpartition("=")
    source, _, attribute = spec.rpartition(":")
    if not source or not attribute:
        raise WrongImplementation(
            f"--impl {text}: give package.module:function or file.py:function, with the name of a "
            "technique and = before it where the function's own name does not tell what it is"
        )
    found = _find_judged(text, name if equals else attribute, judged, techniques, bool(equals))
    try:
        value = import_callable(spec)
    except ValueError as error:
        raise WrongImplementation(f"--impl {name}{equals}{error}") from error
    _check_call(spec, value, found)
    return Implementation(found.name, spec, value)


def _find_judged(
    text: str,
    name: str,
    judged: Mapping[str, Sequence[Judged]],
    techniques: Sequence[str],
    is_named: bool,
) -> Judged:
    by_name = {one.name: one for of_technique in judged.values() for one in of_technique}
    if is_named and name in judged:
        return judged[name][0]
    if name in by_name:
        return by_name[name]
    if not is_named and len(techniques) == 1 and techniques[0] in judged:
        return judged[techniques[0]][0]
    known = [*judged, *by_name] if is_named else list(by_name)
    meant = nearest(name, known)
    advice = f"did you mean {meant!r}?" if meant else f"there are {', '.join(known)}"
    if is_named:
        raise WrongImplementation(f"--impl {text}: no gate judges {name!r}; {advice}")
    raise WrongImplementation(
        f"--impl {text}: no gate judges something called {name!r}; write NAME={text} with the "
        f"technique, or with what it stands for: {advice}"
    )


def _check_call(spec: str, value: Any, judged: Judged) -> None:
    """Refuse a callable that does not take the arguments that the gates pass."""
    wanted = inspect.signature(judged.call)
    try:
        theirs = inspect.signature(value)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    by_kind: dict[Any, list[str]] = {}
    for name, parameter in wanted.parameters.items():
        by_kind.setdefault(parameter.kind, []).append(name)
    positional = by_kind.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
    keywords = by_kind.get(inspect.Parameter.KEYWORD_ONLY, [])
    try:
        theirs.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise WrongImplementation(
            f"--impl {spec} takes {theirs}, and the gates call {judged.name}{wanted}: {error}"
        ) from error


def judge(gate: Gate, given: Sequence[Implementation]) -> Gate:
    """Return the gate with these implementations in place of ours.

    A gate that takes none of them does not apply, and its verdict has the reason.
    """
    arguments: dict[str, Any] = {}
    for implementation in given:
        if (takes := gate.judges.get(implementation.judged)) is not None:
            present = arguments.get(takes.parameter)
            arguments[takes.parameter] = takes.adapt(implementation, present)
    if arguments:
        return replace(gate, check=partial(gate.check, **arguments))

    named = ", ".join(implementation.judged for implementation in given)
    judged = " and ".join(gate.judges) or "nothing that can be replaced"
    why = f"this gate judges {judged}, and --impl names {named}"
    return replace(gate, check=lambda case: _other(gate.name, why))


def _other(gate: str, why: str) -> Verdict:
    return not_applicable(gate, required="another implementation", why=why)


# Adapters that several techniques use.


def with_errors(*kinds: type[Exception]) -> Callable[[Implementation, Any], Any]:
    """Return an adapter that only raises owned copies of these errors as ours."""
    return lambda given, present: as_ours(given.value, *kinds)


def as_ours(function: Callable[..., Any], *kinds: type[Exception]) -> Callable[..., Any]:
    """Raise errors of owned copies of these classes, which have the same names, as ours."""
    if not kinds:
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            for kind in kinds:
                if is_kind(error, kind) and not isinstance(error, kind):
                    ours = kind.__new__(kind, *error.args)
                    ours.__dict__.update(error.__dict__)
                    raise ours from error
            raise

    return call


def is_kind(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether an error is of a class, or of an owned copy of it with the same name."""
    return any(other.__name__ == kind.__name__ for other in type(error).__mro__)
