"""Make mutants, and run gates and tests on each in a fork of a process that has torch ready.

    python benchmarks/mutant_forks.py JOB.json

`mutants.py` starts this in a copy of the checkout in which the generator put all mutants of a
module beside its original functions; `MUTANT_UNDER_TEST` selects one. A process that starts afresh
takes seconds to import torch, and a fork takes none. First one fork runs everything without a
mutant and records which functions each gate and test calls, so that a mutant meets only what can
reach it. Each result is printed as one line of JSON.

The first process computes nothing with torch, since a fork of a process with threads may hang.
"""

import ast
import difflib
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import libcst as cst
import pytest
from libcst import metadata
from mutmut.mutation import file_mutation
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode
from mutmut.mutation.trampoline_templates import CLASS_NAME_SEPARATOR

# Make mutants.

MUTATED_DECORATORS = ([], ["classmethod"], ["staticmethod"])


@dataclass(frozen=True)
class Mutant:
    """A changed expression: its name for mutmut's runner, its place, and why it may not count."""

    name: str  # module.mangled function__mutmut_number
    module: str  # path in the package
    function: str  # as written, with the class
    line: int
    change: str
    kind: str | None = None  # a key of `KINDS` in mutants.py

    @property
    def key(self) -> str:
        """Return the name of the function for mutmut's runner."""
        return self.name.rpartition("__mutmut_")[0]

    @property
    def number(self) -> int:
        return int(self.name.rpartition("_")[2])


@dataclass
class MutatedModule:
    """The source of a module with all mutants in it, and what stands where."""

    code: str
    mutants: list[Mutant]
    hashes: dict[str, str]  # of each function, by its name as written
    skipped: list[str] = field(default_factory=list)  # functions that mutmut leaves alone


def mutate(module: str, source: str, lines: set[int] | None = None) -> MutatedModule:
    """Make every mutant of a module, or those of some lines."""
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    visitor = file_mutation.MutationVisitor(
        mutation_operators, IgnoredCode(set(), set(), set()), lines
    )
    tree = wrapper.visit(visitor)
    made = file_mutation.combine_mutations_to_source(
        tree, visitor.mutations, visitor.ignored_classes, visitor.ignored_functions
    )
    places = _Places(wrapper, source)
    dotted = "curry_train." + module.removesuffix(".py").replace("/", ".")
    mutants = []
    names = iter(made.mutant_names)
    grouped = file_mutation.group_by_top_level_node(visitor.mutations)
    for function in _functions(tree):
        for mutation in grouped.get(function, ()):
            name = next(names)
            mutants.append(
                Mutant(
                    name=f"{dotted}.{name}",
                    module=module,
                    function=written_name(name.rpartition("__mutmut_")[0]),
                    line=places.line(mutation),
                    change=places.change(mutation),
                    kind=places.kind(mutation),
                )
            )
    assert next(names, None) is None, f"{module}: mutmut names its mutants in another order"
    skipped = _not_mutated(ast.parse(source))
    return MutatedModule(made.code, mutants, function_hashes(source), skipped)


def written_name(mangled: str) -> str:
    """Return `Window.__len__` for `xǁWindowǁ__len__`, and `train_window` for `x_train_window`."""
    if CLASS_NAME_SEPARATOR in mangled:
        return ".".join(mangled.split(CLASS_NAME_SEPARATOR)[1:])
    return mangled.removeprefix("x_")


def _functions(tree: cst.Module) -> Iterator[cst.CSTNode]:
    """Yield functions and methods in the order in which mutmut names their mutants."""
    for statement in tree.body:
        if isinstance(statement, cst.FunctionDef):
            yield statement
        elif isinstance(statement, cst.ClassDef) and isinstance(statement.body, cst.IndentedBlock):
            yield from (one for one in statement.body.body if isinstance(one, cst.FunctionDef))


def _not_mutated(tree: ast.Module) -> list[str]:
    """Return functions and methods that mutmut leaves alone for their decorators."""
    functions = [("", node) for node in tree.body]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            functions += [(f"{node.name}.", inside) for inside in node.body]
    return [
        f"{owner}{node.name}"
        for owner, node in functions
        if isinstance(node, ast.FunctionDef)
        and list(map(_name_of, node.decorator_list)) not in MUTATED_DECORATORS
    ]


class _Places:
    """Lines, texts and kinds of the mutations of one module."""

    def __init__(self, wrapper: metadata.MetadataWrapper, source: str) -> None:
        self._module = wrapper.module
        self._lines = source.splitlines()
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._whole_positions = wrapper.resolve(metadata.WhitespaceInclusivePositionProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._ruled = [
            ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), kind)
            for node, kind in nodes_by_rule(ast.parse(source))
        ]

    def line(self, mutation: file_mutation.Mutation) -> int:
        return self._place(mutation).start.line

    def _place(self, mutation: file_mutation.Mutation) -> Any:
        """Return the place of what differs, such as one argument of a long call."""
        node = mutation.original_node
        remaining = {id(child) for child in mutation.mutated_node.children}
        gone = [child for child in node.children if id(child) not in remaining]
        places = [self._positions.get(place) for place in (*gone[:1], node)]
        return next(place for place in places if place is not None)

    def change(self, mutation: file_mutation.Mutation) -> str:
        """Return the lines of the mutated expression, before and after."""
        node = mutation.original_node
        before = self._module.code_for_node(node)
        after = self._module.code_for_node(mutation.mutated_node)
        if (place := self._whole_positions.get(node)) is not None:
            lines = self._lines[place.start.line - 1 : place.end.line]
            start = lines[0][: place.start.column]
            end = lines[-1][place.end.column :]
            before, after = (f"{start}{text}{end}" for text in (before, after))
        return shorten(" ".join(before.split()), " ".join(after.split()))

    def kind(self, mutation: file_mutation.Mutation) -> str | None:
        """Return a key of `KINDS` in mutants.py if a rule gives one."""
        if self._changes_only_strict(mutation):
            return "guard"
        place = self._place(mutation)
        start = (place.start.line, place.start.column)
        return next((kind for first, last, kind in self._ruled if first <= start <= last), None)

    def _changes_only_strict(self, mutation: file_mutation.Mutation) -> bool:
        """Return whether a call of `zip` differs in nothing but `strict`."""
        node = mutation.original_node
        if isinstance(node, cst.Call) and _callee(node) == "zip":
            before = self._positional(node)
            after = self._positional(mutation.mutated_node)
            return before == after
        parent = self._parents.get(node)
        if not isinstance(parent, cst.Arg) or parent.keyword is None:
            return False
        return parent.keyword.value == "strict" and _callee(self._parents[parent]) == "zip"

    def _positional(self, call: cst.CSTNode) -> list[str]:
        return [self._module.code_for_node(arg) for arg in call.args if not arg.keyword]


def _callee(node: cst.CSTNode) -> str:
    function = getattr(node, "func", None)
    name = function.attr if isinstance(function, cst.Attribute) else function
    return name.value if isinstance(name, cst.Name) else ""


def nodes_by_rule(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield nodes inside which a mutant changes only a message, or runs only at the import."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    messages = [node for node in ast.walk(tree) if _is_message(node)]
    candidates = [
        (function, tree)
        for function in functions
        if function.name.startswith("_") and _name_of(function.returns) == "str"
    ]
    for function in functions:
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        candidates += [(node, function) for node in assigned]
    found = True
    while found:
        inside = {id(name) for node in messages for name in _loads(node)}
        found = [
            node
            for node, scope in candidates
            if node not in messages and _used_only(_defined(node), scope, inside)
        ]
        messages += found
    yield from ((node, "message") for node in messages)

    yield from ((node, "message") for node in _named_in_messages(tree, functions, inside))

    inside = {id(name) for function in functions for name in _loads(function)}
    at_import = {id(name) for name in _loads(tree)} - inside
    for function in functions:
        if function.name.startswith("_") and _used_only(function.name, tree, at_import):
            yield function, "import"


def _named_in_messages(
    tree: ast.Module, functions: Sequence[ast.FunctionDef], inside: set[int]
) -> Iterator[ast.AST]:
    """Yield arguments of our own functions that are used only inside nodes of messages."""
    parameters = {function.name: _parameters(function) for function in functions}
    only = {
        (function.name, name)
        for function in functions
        for name in parameters[function.name]
        if _used_only(name, function, inside)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            names = parameters.get(call.func.id, [])
            pairs = list(zip(names, call.args, strict=False))
            pairs += [(keyword.arg, keyword.value) for keyword in call.keywords]
            yield from (node for name, node in pairs if (call.func.id, name) in only)


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in function.args.args]


def _is_message(node: ast.AST) -> bool:
    is_warning = isinstance(node, ast.Call) and _name_of(node.func) == "warn"
    return is_warning or isinstance(node, ast.Raise)


def _defined(node: ast.AST) -> str:
    """Return the one name that a function or an assignment defines."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else []
    return getattr(targets[0], "id", "") if len(targets) == 1 else ""


def _used_only(name: str, scope: ast.AST, inside: set[int]) -> bool:
    used = [node for node in _loads(scope) if _name_of(node) == name]
    return bool(name and used) and all(id(node) in inside for node in used)


def _loads(tree: ast.AST) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]


def _name_of(node: ast.AST | None) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def shorten(before: str, after: str, *, around: int = 30) -> str:
    """Return `before -> after` with what is equal at both ends cut to a few words."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    start = max(0, blocks[0][1] - around) if blocks else 0
    tail = min(len(before), blocks[-1][2] + around) if blocks else len(before)
    cut = len(before) - tail
    left, right = (text[start : len(text) - cut] for text in (before, after))
    return f"{'...' if start else ''}{left} -> {right}{'...' if cut else ''}"


def function_hashes(source: str) -> dict[str, str]:
    """Return a hash of each function and method, by its name as written."""
    return {
        written_name(key): text
        for key, text in file_mutation.compute_function_hashes(source).items()
    }


KINDS_OF_CHECKS = ("gates", "tests")

# A fork may take this much longer than the gates or tests that it runs took without a mutant.
TIMES_LONGER = 10
MORE_SECONDS = 20

# A fork that runs when the time of a job is over may still end in these.
MORE_SECONDS_AT_THE_END = 4.0

# Tests of the gates themselves run them on many planted faults: the gates alone say as much.
WORDS_OF_OTHER_TESTS = ("gate", "catch")

# Of the checks of a mutant, those that take longest are left out from here on.
MOST_SECONDS = 15.0

# Of the time that remains, what the gates take without a mutant, and then the tests.
SHARE_OF_FIRST_RUN = 0.3

# Checks that start processes take longest, and run after the others.
STARTS = {"os.fork", "os.posix_spawn", "subprocess.Popen"}


@dataclass
class Check:
    """A gate on a model, or a test: what it called and took without a mutant."""

    name: str
    run: Callable[[], str | None]  # returns why it fails
    seconds: float = 0.0
    called: frozenset[str] = frozenset()
    starts_processes: bool = False
    failure: str | None = None

    def reaches(self, function: str) -> bool:
        return not self.failure and function in self.called


LATE = "did not end in time"


class Fork:
    """A child process that runs a function and answers with JSON, within a time limit."""

    def __init__(self, work: Callable[[], Any], limit: float) -> None:
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `ended`
        self._until = time.monotonic() + limit
        self._child = os.fork()
        if self._child == 0:
            _work_and_exit(work, self._answer)

    def ended(self) -> dict[str, Any] | None:
        """Return the answer, with the status of a child that gave none; None while it runs."""
        child, status = os.waitpid(self._child, os.WNOHANG)
        is_late = time.monotonic() > self._until
        if not child and not is_late:
            return None
        if not child:
            self.kill()
            return {"died": LATE}
        self._kill_group()
        self._answer.seek(0)
        text = self._answer.read()
        self._answer.close()
        return json.loads(text) if text else {"died": f"status {os.waitstatus_to_exitcode(status)}"}

    def kill(self) -> None:
        """End a child that runs, with all processes that it started."""
        self._kill_group()
        # It may not have become the leader of its group yet.
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._answer.close()

    def wait(self) -> dict[str, Any]:
        try:
            while (answer := self.ended()) is None:
                time.sleep(0.01)
        except SystemExit:  # from a signal
            self.kill()
            raise
        return answer

    def _kill_group(self) -> None:
        try:
            os.killpg(self._child, signal.SIGKILL)
        except ProcessLookupError:
            return


def _work_and_exit(work: Callable[[], Any], answer: IO[bytes]) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        os.setsid()
        answer.write(json.dumps(work()).encode())
        answer.flush()
    # Whatever a mutant raises counts, SystemExit too; the parent's stack must not run on.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


# Gates.


def gate_checks(patterns: Sequence[str], models: Sequence[str]) -> list[Check]:
    """Return the gates of a technique on each model."""
    from curry_train.gates import discover

    techniques = {pattern.partition("/")[0] for pattern in patterns}
    gates = [gate for gate in discover(sorted(techniques)) if gate.name.startswith(tuple(patterns))]
    return [
        Check(f"{gate.name} on {model}", functools.partial(_run_gate, gate, model))
        for model in models
        for gate in gates
    ]


def _run_gate(gate: Any, model: str) -> str | None:
    verdict = gate.run(_case(model))
    return None if verdict.passed is not False else f"{verdict.measured}; {verdict.hint}"


@functools.cache
def _case(model: str) -> Any:
    """Make the case as `validate` does, once in a fork."""
    from curry_train.core.blocks import NoBlocks
    from curry_train.workloads.models import load_workload
    from curry_train.workloads.workload import Case

    case = Case(load_workload(model))
    try:
        return case.with_running_blocks()[0]
    except NoBlocks:
        return case


# Tests.


class Reports:
    """Plugin of pytest that holds the reports of the test that runs."""

    def __init__(self) -> None:
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report)


def test_checks(session: pytest.Session, reports: Reports) -> list[Check]:
    """Return the collected tests."""
    return [
        Check(item.nodeid, functools.partial(_run_test, item, reports)) for item in session.items
    ]


def _run_test(item: pytest.Item, reports: Reports) -> str | None:
    """Run one test with all of its fixtures; return why it failed."""
    reports.failed.clear()
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    return next(map(_reason, reports.failed), None)


def _reason(report: pytest.TestReport) -> str:
    text = str(report.longrepr)
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
    return lines[0][:200] if lines else "failed"


# The first run, without a mutant.


# Added to the package, so that each process writes the functions that it calls to a file.
RECORDER = """
from mutmut.mutation import trampoline

def _record(name, caller=None):
    import os
    path = os.environ["MUTANT_CALLS"]
    if (path, name) not in _recorded:
        _recorded.add((path, name))
        with open(path, "a") as file:
            print(name, file=file)

_recorded = set()
trampoline.record_trampoline_hit = _record
"""


def measure(checks: Sequence[Check], until: float) -> list[dict[str, Any]]:
    """Run checks without a mutant; return what each called, its seconds and its failure."""
    started_processes: list[str] = []
    sys.addaudithook(lambda event, _: event in STARTS and started_processes.append(event))
    os.environ["MUTANT_UNDER_TEST"] = "stats"
    found = []
    for check in checks:
        if time.time() > until:
            break
        _case.cache_clear()
        started_processes.clear()
        with tempfile.NamedTemporaryFile("r") as calls:
            os.environ["MUTANT_CALLS"] = calls.name
            started = time.monotonic()
            worked = time.process_time()
            failure = check.run()
            seconds = time.monotonic() - started
            if not started_processes:
                seconds = time.process_time() - worked  # not what a busy machine adds
            called = sorted(set(calls.read().split()))
        found.append(
            {
                "seconds": seconds,
                "called": called,
                "starts_processes": bool(started_processes),
                "failure": failure,
            }
        )
    return found


# All mutants.


def run_checks(checks: Sequence[Check], mutant: str) -> dict[str, Any]:
    """Run checks on a mutant until one fails; return its name and why it failed."""
    os.environ["MUTANT_UNDER_TEST"] = mutant  # processes that are started inherit it
    for check in checks:
        if failure := check.run():
            return {"caught_by": check.name, "why": failure}
    return {"caught_by": None}


def in_order(checks: Iterable[Check], function: str) -> list[Check]:
    """Return the checks that can reach a function, the quickest first, up to a time in all."""
    chosen = [check for check in checks if check.reaches(function)]
    chosen.sort(key=lambda check: (check.starts_processes, check.seconds))
    times = itertools.accumulate(check.seconds for check in chosen)
    return [check for check, seconds in zip(chosen, times, strict=True) if seconds < MOST_SECONDS]


def tasks(
    job: dict[str, Any], kinds: dict[str, list[Check]]
) -> Iterator[tuple[dict[str, Any], list[Check]]]:
    for mutant in job["mutants"]:
        for kind, checks in kinds.items():
            ordered = in_order(checks, mutant["function"])
            yield {"mutant": mutant["name"], "kind": kind, "reached_by": len(ordered)}, ordered


def run_mutants(
    job: dict[str, Any], kinds: dict[str, list[Check]], say: Callable[[dict[str, Any]], None]
) -> None:
    """Run all mutants, so many at a time, until the time of the job is over."""
    running: list[tuple[dict[str, Any], float, Fork]] = []
    waiting = tasks(job, kinds)
    is_over = False
    # A mutant of `os.kill(pid, 0)` may send the first signal to its parent.
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        while (running or not is_over) and time.time() < job["until"] + MORE_SECONDS_AT_THE_END:
            while len(running) < job["at_once"] and not is_over:
                row, checks = next(waiting, (None, []))
                is_over = row is None or time.time() > job["until"]
                if checks and not is_over:
                    limit = TIMES_LONGER * sum(check.seconds for check in checks) + MORE_SECONDS
                    work = functools.partial(run_checks, checks, row["mutant"])
                    running.append((row, time.monotonic(), Fork(work, limit)))
                elif row is not None and not is_over:
                    say(row | {"caught_by": None, "seconds": 0.0})
            running = [entry for entry in running if not _said(*entry, say)]
            time.sleep(0.005)
    finally:
        for _, _, fork in running:
            fork.kill()
        signal.signal(signal.SIGHUP, hang_up)


def _said(
    row: dict[str, Any], started: float, fork: Fork, say: Callable[[dict[str, Any]], None]
) -> bool:
    """Print the result of a fork that has ended."""
    if (answer := fork.ended()) is None:
        return False
    if "died" in answer:
        answer = {"caught_by": answer["died"]}
    say(row | answer | {"seconds": round(time.monotonic() - started, 2)})
    return True


class Forks:
    """Plugin of pytest that runs mutants in place of the collected tests."""

    def __init__(
        self, job: dict[str, Any], say: Callable[[dict[str, Any]], None], reports: Reports
    ) -> None:
        self._job = job
        self._say = say
        self._reports = reports

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            self._say({"error": f"{session.testsfailed} of the test files can't be imported"})
            return True
        kinds = {
            "gates": gate_checks(self._job["gates"], self._job["models"]),
            "tests": test_checks(session, self._reports),
        }
        kinds = {kind: kinds[kind] for kind in self._job["kinds"]}
        gc.collect()
        gc.freeze()
        for kind, checks in kinds.items():
            if not self._measured(kind, checks):
                return True
        run_mutants(self._job, kinds, self._say)
        return True

    def _measured(self, kind: str, checks: list[Check]) -> bool:
        """Measure the checks without a mutant; those that there is no time for are left out."""
        now = time.time()
        until = now + SHARE_OF_FIRST_RUN * (self._job["until"] - now)
        answer = Fork(lambda: {"rows": measure(checks, until)}, self._job["until"] - now).wait()
        if answer.get("died") == LATE:
            return False
        if "died" in answer:
            self._say({"error": f"the {kind} without a mutant: {answer['died']}"})
            return False
        num_left_out = len(checks) - len(answer["rows"])
        del checks[len(answer["rows"]) :]
        for check, row in zip(checks, answer["rows"], strict=True):
            vars(check).update(row, called=frozenset(row["called"]))
        failed = {check.name: check.failure for check in checks if check.failure}
        seconds = round(sum(check.seconds for check in checks), 1)
        reached = sorted(frozenset().union(*(check.called for check in checks)))
        row = {"kind": kind, "checks": len(checks), "seconds": seconds, "failed": failed}
        self._say(row | {"reached": reached, "left_out": num_left_out})
        return True


def main() -> None:
    """Run the mutants of a job; results go to the first standard output, and nothing else."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(row), file=answers, flush=True)

    import warm_python

    for name in warm_python.READY:
        importlib.import_module(name)
    warm_python.warm_python()  # ranks of all forks are forks of it
    from curry_train.gates import two_ranks

    two_ranks.PYTHON_EXECUTABLE = warm_python.WarmPython()
    options = ["--numprocesses=0", "-p", "no:cacheprovider", "-q", "--capture=no"]
    reports = Reports()
    plugins = [reports, Forks(job, say, reports)]
    status = pytest.main([*options, *job["tests"]], plugins=plugins)
    sys.exit(int(status) not in (0, 1))


if __name__ == "__main__":
    main()
