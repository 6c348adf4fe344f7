"""Gates: their verdicts, another implementation under them, and how they run.

A gate passes on a right implementation, and its tests show that it fails on wrong ones.

    curry-train validate --gate sac --impl my_package.sac:apply_sac
    curry-train validate --impl recompute=my_package.memory:checkpoint_layers

What the gates promise stands in `claims.toml`, a table per gate; `claims` reads it.

Each `gates/<technique>.py` lists in `JUDGED_CALLABLES` what its gates judge, the main one first,
and each gate how it takes another one (`Gate.judges`). A gate that takes none of those named does
not apply: it never judges ours in their place.

Proof: `python -m pytest tests/gates/test_implementation.py tests/cli/test_cli.py`.
"""

import contextlib
import fnmatch
import functools
import importlib
import inspect
import logging
import multiprocessing
import os
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from ..core.blocks import NoBlocks
from ..core.wording import nearest
from ..workloads.models import import_callable, load_workload
from ..workloads.workload import Case, IndivisibleBatch, Workload

LESS_MEMORY = "try a smaller --batch-size, or the same model with fewer layers"


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


# How torch refuses saved-tensor hooks, which recompute, offload and the count of saved bytes need.
NO_HOOKS_INSIDE = "don't yet support saved tensor hooks"
WHY_NO_HOOKS = (
    "a module calls torch.func.grad, vjp, jacrev or hessian, inside which torch allows no hooks of "
    "saved tensors: use torch.autograd.grad with create_graph=True there"
)


@dataclass(frozen=True)
class Gate:
    """A named claim and the function that checks it on a case."""

    name: str
    check: Callable[..., Verdict]

    # What the gate judges, by its public name; an `Implementation` may take its place.
    judges: Mapping[str, Takes] = field(default_factory=dict)

    # Whether it takes so long that it runs only where it is asked for.
    thorough: bool = False

    def run(self, case: Case) -> Verdict:
        """Check a case; a check that fails on the user's model is a gate that does not hold."""
        try:
            return self.check(case)
        except NoBlocks as error:
            return not_applicable(self.name, required="blocks", why=error.in_short)
        except NotApplicable as error:
            return not_applicable(self.name, required=error.required, why=str(error))
        except IndivisibleBatch as error:
            return not_applicable(self.name, required="a batch of another size", why=str(error))
        except (MemoryError, torch.OutOfMemoryError) as error:
            # CUDA goes on for many sentences.
            why = f"memory ran out ({str(error).partition('. ')[0]}): {LESS_MEMORY}"
            return not_applicable(self.name, required="memory", why=why)
        except ValueError as error:
            # Our own errors state what to do.
            return Verdict(self.name, False, "could not be measured", "to run", str(error))
        except Exception as error:  # noqa: BLE001
            # The user's model may raise anything, and the other gates must still run.
            if NO_HOOKS_INSIDE in str(error):
                return not_applicable(self.name, required="saved-tensor hooks", why=WHY_NO_HOOKS)
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


# Tables of trials, each in a folder of its own.

Trial = Callable[..., str]


def judged_by(gate: str, trials: Mapping[str, Trial], *given: Any, hint: str) -> Verdict:
    """Run each trial of a table in a folder of its own; each returns what is wrong, or nothing."""
    wrong = {}
    for name, trial in trials.items():
        with (
            warnings_read() as warned,
            tempfile.TemporaryDirectory(prefix="saved-forms-gate-") as folder,
        ):
            problem = trial(Path(folder), *given)
        unnamed = [text for text in warned if "None" in text or "%s" in text]
        if problem or unnamed:
            wrong[name] = problem or f"a warning names nothing: {unnamed[0]}"
    first = next((f"{name}: {problem}" for name, problem in wrong.items()), "")
    return Verdict(
        gate,
        not wrong,
        f"{len(trials) - len(wrong)} of {len(trials)} forms right",
        f"{len(trials)} of {len(trials)}",
        f"{first}; {hint}" if first else "",
    )


@contextlib.contextmanager
def warnings_read() -> Iterator[list[str]]:
    """Yield the texts that the room `runs` logs, which nobody else hears meanwhile."""
    texts: list[str] = []
    logger = logging.getLogger(f"{__package__.rpartition('.')[0]}.runs")
    handler = logging.Handler()
    handler.handle = lambda record: bool(texts.append(record.getMessage()))  # type: ignore
    propagates = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def unrefused(error: type[Exception], call: Callable[..., Any], *words: str) -> str:
    """Return what is wrong unless a call raises this error, with these words in its message."""
    try:
        call()
    except error as raised:
        missing = [word for word in words if word not in str(raised)]
        return f"the error does not name {missing[0]}: {raised}" if missing else ""
    except Exception as raised:  # noqa: BLE001 - an implementation may fail with any error
        return f"{type(raised).__name__} instead of {error.__name__}: {raised}"
    return f"no {error.__name__} that names {', '.join(words)}"


def first_of(problems: Iterable[str]) -> str:
    return next((problem for problem in problems if problem), "")


def unlike(name: str, found: Any, expected: Any) -> str:
    """Return what is wrong unless both are equal, with types, NaN and the bits of tensors."""
    leaves = dict(tree_flatten_with_path(found)[0])
    wanted = dict(tree_flatten_with_path(expected)[0])
    if list(leaves) != list(wanted):
        return f"{name} is {found!r:.200}, not {expected!r:.200}"
    for path, value in wanted.items():
        if not _same(leaves[path], value):
            return f"{name}{''.join(map(str, path))} is {leaves[path]!r:.80}, not {value!r:.80}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_same = one.dtype == other.dtype and one.shape == other.shape
        return is_same and (torch.equal(one, other) or bool((one.isnan() & other.isnan()).all()))
    return bool(one == other) or one is other


@contextlib.contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes other values inside the context."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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
    judged = " and ".join(gate.judges) or "nothing that can be attributes_set"
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


# Find the gates of techniques, each by the name of its module.

TECHNIQUES = (
    "bench",
    "checkpoint-policy",
    "grad-accum",
    "grad-flow",
    "loss-spike",
    "memory-plan",
    "recompute",
    "sac",
    "snn-timesteps",
)

# First words of gate names that are not the name of the technique whose module holds the gates.
TECHNIQUE_OF_GATES = {"run-journal": "checkpoint-policy"}


@dataclass(frozen=True)
class Claim:
    """A promise of a technique that a gate holds."""

    name: str  # <skill>.<word>
    gate: str
    text: str
    broken_by: str


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Read the claims of all gates, in the order of the file."""
    tables = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    return tuple(
        Claim(f"{technique_of(gate)}.{word}", gate, text, broken_by)
        for gate, entries in tables.items()
        for word, (text, broken_by) in entries.items()
    )


def technique_of(gate: str) -> str:
    """Return the technique, and skill, that a gate belongs to."""
    word = gate.partition("/")[0]
    return TECHNIQUE_OF_GATES.get(word, word)


def _module_of(technique: str) -> Any:
    return importlib.import_module(f"{__package__}.{technique.replace('-', '_')}")


def gates_of(technique: str) -> tuple[Gate, ...]:
    """Return the gates of one technique; imports only its module."""
    return _module_of(technique).GATES


def judged_of(technique: str) -> tuple[Judged, ...]:
    """Return what the gates of one technique judge, the main callable first."""
    return _module_of(technique).JUDGED_CALLABLES


def techniques_of(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the techniques that gate patterns may match, in the order of `TECHNIQUES`.

    All of them, if a pattern has wildcards in its first word or starts with an unknown one.
    """
    words = [pattern.partition("/")[0] for pattern in patterns]
    found = {TECHNIQUE_OF_GATES.get(word, word) for word in words}
    if not found or not found <= set(TECHNIQUES):
        return TECHNIQUES
    return tuple(technique for technique in TECHNIQUES if technique in found)


def discover(patterns: Sequence[str] = ()) -> tuple[Gate, ...]:
    """Return every gate of the techniques that the patterns name; of all without patterns."""
    return tuple(gate for technique in techniques_of(patterns) for gate in gates_of(technique))


# Run every gate on every workload, in parallel on the cores of a CPU.

GATES_WORTH_A_PROCESS = 20  # starting a process takes as long as running ten gates


@dataclass(frozen=True)
class GateRow:
    """A verdict and the workload that it was measured on."""

    workload: str
    verdict: Verdict


def measure_rows(
    cases: Sequence[Case],
    gates: Sequence[Gate],
    *,
    implementations: Sequence[Implementation] = (),
    num_processes: int | None = None,
) -> Iterator[GateRow]:
    """Yield one row for each case and gate, in their order.

    With `implementations` the gates judge these instead of ours. `num_processes` defaults to the
    number that pays off. Worker processes look up case, gate and implementations by name, so more
    than one process needs cases that `load_workload` made.
    """
    if num_processes is None:
        num_processes = _processes_that_pay_off(cases, gates)
    if num_processes < 2:
        if implementations:
            gates = [judge(gate, implementations) for gate in gates]
        yield from (GateRow(case.workload.name, gate.run(case)) for case in cases for gate in gates)
        return

    named = tuple(f"{given.judged}={given.spec}" for given in implementations)
    tasks = [
        (case.workload.spec, _settings(case), gate.name, named) for case in cases for gate in gates
    ]
    names = (case.workload.name for case in cases for _ in gates)
    verdicts = _in_processes(tasks, num_processes)
    yield from (GateRow(name, verdict) for name, verdict in zip(names, verdicts, strict=True))


def _processes_that_pay_off(cases: Sequence[Case], gates: Sequence[Gate]) -> int:
    if any(case.device.type != "cpu" for case in cases):
        return 1
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(len(cases) * len(gates) // GATES_WORTH_A_PROCESS, cores)


Task = tuple[str, dict[str, Any], str, tuple[str, ...]]


def _in_processes(tasks: Sequence[Task], num_processes: int) -> Iterator[Verdict]:
    """Yield the verdicts of `_measure`, in order.

    Where memory runs out the system ends a process. The gates that have no verdict by then run one
    at a time; one that even then ends its process does not apply.
    """
    first = 0
    while first < len(tasks):
        with _pool(num_processes) as pool:
            futures = [pool.submit(_measure, *task) for task in tasks[first:]]
            try:
                for future in futures:
                    verdict = future.result()
                    first += 1
                    yield verdict
            except BrokenProcessPool:
                if num_processes == 1:
                    gate_name = tasks[first][2]
                    first += 1
                    why = f"memory ran out (the system ended the process): {LESS_MEMORY}"
                    yield not_applicable(gate_name, required="memory", why=why)
                num_processes = 1
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _pool(num_processes: int) -> ProcessPoolExecutor:
    threads = max(1, torch.get_num_threads() // num_processes)
    # Spawn, because a fork of a process that has used threads may hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (threads,))


def _settings(case: Case) -> dict[str, Any]:
    return {name: value for name, value in vars(case).items() if name != "workload"}


def _measure(
    spec: str, settings: dict[str, Any], gate_name: str, implementations: tuple[str, ...]
) -> Verdict:
    case = Case(_loaded(spec), **settings)
    gate = {gate.name: gate for gate in discover([gate_name])}[gate_name]
    if implementations:
        gate = judge(gate, _implementations(implementations))
    return gate.run(case)


@functools.cache
def _implementations(named: tuple[str, ...]) -> list[Implementation]:
    """Load implementations once per process, for all gates."""
    judged = {technique: judged_of(technique) for technique in TECHNIQUES}
    return [load_implementation(text, judged) for text in named]


@functools.cache
def _loaded(spec: str) -> Workload:
    """Load a workload once per process, for all of its gates."""
    return load_workload(spec)
