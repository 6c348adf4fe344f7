"""Tests of how mutants are made, run in forks, counted and recorded.

python -m pytest tests/benchmarks/test_mutants.py
"""

import math
import os
import signal
import sys
import textwrap
import time

import pytest

pytest.importorskip("libcst", reason="mutmut is not installed: pip install '.[dev]'")

import mutant_forks
import mutants
from mutant_forks import Check, Fork, in_order, mutate, run_mutants, shorten

# A fork of a process with threads is deprecated from Python 3.12 on; these forks use no thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SOURCE = textwrap.dedent('''
    """A module."""
    import contextlib, warnings

    def _doubled(number):
        return number * 2

    LIMIT = _doubled(1)

    def add(first, second):
        if first < 0:
            advice = "use " + "more"
            where = f"below {advice + '!'}"
            raise ValueError(_describe(first, "negative"), where)
        warnings.warn("adds", stacklevel=2)
        return first + second

    def _describe(number, what):
        return f"{number}" + what

    def _least(what, number):
        if number < 0:
            raise ValueError(what)
        return number

    def both(first, second):
        return _least("first", first), _least("second", number=second)

    def _label(number) -> str:
        return str(number)

    def pairs(first, second):
        return list(zip(first, second, strict=True))

    class Total:
        def plus(self, number):
            raise ValueError(_label(number) + "!")

    @contextlib.contextmanager
    def opened():
        yield 1 + 1
''').lstrip()


@pytest.fixture(scope="module")
def made():
    return mutate("primitives/sums.py", SOURCE)


def changes(made, function, kind=None):
    return {one.change for one in made.mutants if one.function == function and one.kind == kind}


def test_each_mutant_names_its_line_its_function_and_what_changes(made):
    (one,) = [one for one in made.mutants if "first - second" in one.change]
    assert (one.function, one.change) == ("add", "return first + second -> return first - second")
    assert SOURCE.splitlines()[one.line - 1].strip() == "return first + second"
    assert one.key == "curry_train.primitives.sums.x_add"
    assert one.name == f"{one.key}__mutmut_{one.number}"


def test_the_selected_mutant_runs_and_otherwise_the_original(made, monkeypatch):
    module = type(sys)("curry_train.primitives.sums")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(made.code, vars(module))  # noqa: S102 - the module above
    (one,) = [one for one in made.mutants if "first - second" in one.change]
    monkeypatch.setenv("MUTANT_UNDER_TEST", "")
    with pytest.warns(match="adds"):
        assert module.add(5, 3) == 8
    monkeypatch.setenv("MUTANT_UNDER_TEST", one.name)
    with pytest.warns(match="adds"):
        assert module.add(5, 3) == 2


def test_mutants_of_messages_and_of_our_own_checks_are_known_by_rule(made):
    assert any("negative" in change for change in changes(made, "add", "message"))
    assert any("stacklevel" in change for change in changes(made, "add", "message"))
    assert any("advice = " in change for change in changes(made, "add", "message"))
    assert not any("use" in change for change in changes(made, "add"))
    assert changes(made, "_doubled") == set()
    assert changes(made, "_doubled", "import")
    assert changes(made, "_label") == set()
    assert not any("XX" in change or "FIRST" in change for change in changes(made, "both"))
    assert any("_least(None, first)" in change for change in changes(made, "both", "message"))
    assert any("number=None" in change for change in changes(made, "both"))
    assert changes(made, "_label", "message")
    assert changes(made, "Total.plus") == set()
    guards = changes(made, "pairs", "guard")
    assert any("False" in change for change in guards)
    assert not any("zip(None" in change for change in guards)
    assert "if first < 0: -> if first <= 0:" in changes(made, "add")
    # Not annotated as text, so that a rule can't know.
    assert changes(made, "_describe")


def test_functions_that_are_not_mutated_are_listed(made):
    assert made.skipped == ["opened"]
    assert not changes(made, "opened")


def test_only_mutants_of_the_given_lines_are_made():
    line = SOURCE.splitlines().index("    return first + second") + 1
    some = mutate("primitives/sums.py", SOURCE, {line})
    assert {one.line for one in some.mutants} == {line}


def test_what_is_equal_in_a_change_is_cut():
    assert shorten("a + b", "a - b") == "a + b -> a - b"
    many = "x, " * 20
    cut = shorten(f"f({many}last=1, {many})", f"f({many}last=2, {many})", around=9)
    assert cut == "... x, last=1, x, x, x ->  x, last=2, x, x, x..."


def test_the_lines_of_a_diff_are_those_of_the_new_file():
    text = textwrap.dedent("""
        --- a/template/curry_train/core/blocks.py
        +++ b/template/curry_train/core/blocks.py
        @@ -3 +3,2 @@ def f():
        -old
        +new
        +more
        @@ -9,2 +11,0 @@
        -gone
        -gone
        --- a/template/curry_train/loop.py
        +++ b/template/curry_train/loop.py
        @@ -1 +1 @@
        -a
        +b
    """)
    assert mutants.lines_of_diff(text) == {"core/blocks.py": {3, 4}, "loop.py": {1}}


ENTRY = {"kind": "equivalent", "reason": "unused"}


def selected():
    return os.environ["MUTANT_UNDER_TEST"]


def run_job(kinds, names, *, until=math.inf):
    rows = []
    job = {"mutants": [{"name": name, "function": "f"} for name in names], "until": until}
    run_mutants(job | {"at_once": 2}, kinds, rows.append)
    return {(row["mutant"], row["kind"]): row["caught_by"] for row in rows}


def test_a_mutant_meets_the_checks_that_reach_it_until_one_fails():
    def catches(*names):
        return lambda: "wrong" if selected() in names else None

    reach = frozenset("f")
    first = Check("first", catches("b"), seconds=0.1, called=reach)
    second = Check("second", catches("a", "b"), seconds=0.2, called=reach)
    unable = Check("unable", catches("a", "b", "c"), called=frozenset("g"))
    broken = Check("broken", catches("a", "b", "c"), called=reach, failure="fails always")
    ranks = Check("ranks", catches("d"), called=reach, starts_processes=True)
    checks = [ranks, second, first, unable, broken]
    assert in_order(checks, "f") == [first, second, ranks]
    found = run_job({"gates": checks, "tests": [unable]}, "abcd")
    assert found == {
        ("a", "gates"): "second",
        ("b", "gates"): "first",
        ("c", "gates"): None,
        ("d", "gates"): "ranks",
        **{(name, "tests"): None for name in "abcd"},
    }


def test_a_mutant_that_ends_its_process_is_caught_and_no_mutant_begins_after_the_time():
    check = Check("exits", lambda: sys.exit(0), called=frozenset("f"))
    assert run_job({"gates": [check]}, "a") == {("a", "gates"): "status 3"}
    assert run_job({"gates": [check]}, "a", until=0.0) == {}


def test_a_mutant_whose_signal_0_became_1_does_not_end_the_runner():
    def hang_up():
        os.kill(os.getppid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    check = Check("hangs up", hang_up, called=frozenset("f"))
    before = signal.getsignal(signal.SIGHUP)
    assert run_job({"gates": [check]}, "a") == {("a", "gates"): "status -1"}
    assert signal.getsignal(signal.SIGHUP) == before


def test_forks_are_killed_some_seconds_after_the_time_of_a_job(monkeypatch):
    monkeypatch.setattr(mutant_forks, "MORE_SECONDS_AT_THE_END", 0.1)
    sleeps = Check("sleeps", lambda: time.sleep(60), called=frozenset("f"))
    started = time.monotonic()
    assert run_job({"gates": [sleeps]}, "ab", until=time.time() + 1) == {}
    assert time.monotonic() - started < 30


def test_a_fork_that_does_not_end_is_killed():
    started = time.monotonic()
    assert Fork(lambda: time.sleep(60), limit=0.1).wait() == {"died": "did not end in time"}
    assert time.monotonic() - started < 30


@pytest.fixture
def record(tmp_path, monkeypatch, made):
    """Return a function that reads the record of a technique whose source is SOURCE."""
    folder = tmp_path / mutants.PACKAGE / "primitives"
    folder.mkdir(parents=True)
    (folder / "sums.py").write_text(SOURCE)
    target = mutants.Target(["primitives/sums.py"], [], [], [])
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "TARGETS", {"sums": target})
    reviewed = {
        "change": "if first < 0: -> *",
        "kind": "equivalent",
        "reason": "unused",
    }
    table = {"reviewed": {"primitives/sums.py": {"add": [reviewed]}}}
    monkeypatch.setattr(mutants, "TABLE", table)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "mutants.json"
    return lambda: mutants.Record(path, resume=True)


def test_a_record_counts_what_was_caught_and_excuses_what_was_reviewed(record, made):
    modules = {"primitives/sums.py": made}
    found = record()
    found.begin("sums", modules)
    run = [one for one in made.mutants if one.function == "add" and not one.kind]
    for one in run:
        is_reviewed = one.change == "if first < 0: -> if first <= 0:"
        by_gates = "first - second" in one.change
        found.add("sums", one, {"gates": by_gates, "tests": by_gates or not is_reviewed})
    found.write("sums", modules)
    summary = found.techniques["sums"]["summary"]
    assert summary["run"] == len(run)
    assert summary["excused"] == 1
    assert summary["caught"] == len(run) - 1
    assert summary["share_caught"] == 1.0
    assert summary["mutants"] == len(made.mutants)
    (missed,) = found.techniques["sums"]["missed"]
    assert missed["reason"] == "unused"
    assert record().techniques == found.techniques


def test_a_changed_function_loses_its_rows_and_no_other_does(record, made):
    modules = {"primitives/sums.py": made}
    found = record()
    found.begin("sums", modules)
    for one in made.mutants:
        if not one.kind:
            found.add("sums", one, {"gates": True, "tests": True})
    found.write("sums", modules)
    path = mutants.ROOT / mutants.PACKAGE / "primitives/sums.py"
    path.write_text("# A comment moves every line.\n" + SOURCE.replace("+ second", "+ second * 1"))

    again = record()
    assert set(again.techniques["sums"]["modules"]["primitives/sums.py"]["functions"]) == {
        "_describe",
        "_doubled",
        "_label",
        "_least",
        "both",
        "pairs",
        "Total.plus",
    }
    again.begin("sums", {"primitives/sums.py": mutate("primitives/sums.py", path.read_text())})
    rows = again.techniques["sums"]["modules"]["primitives/sums.py"]["functions"]
    assert rows["add"]["not_run"]
    assert not rows["pairs"]["not_run"]


def test_every_reviewed_function_exists_and_every_kind_is_known():
    for module, functions in mutants.TABLE["reviewed"].items():
        source = (mutants.ROOT / mutants.PACKAGE / module).read_text()
        assert functions.keys() <= mutants.function_hashes(source).keys()
        entries = [entry for of_function in functions.values() for entry in of_function]
        assert {entry["kind"] for entry in entries} <= mutants.KINDS.keys()
        assert all(entry["reason"] for entry in entries)


def test_a_reviewed_change_that_no_mutant_makes_any_more_is_printed(made, capsys):
    entries = [{"change": "*first <= 0*"}, {"change": "*first < 5*"}]
    reviewed = mutants.Reviewed(
        {"primitives/sums.py": {"add": [entry | ENTRY for entry in entries]}}
    )
    mutants.print_stale(reviewed, made.mutants)
    assert capsys.readouterr().out.splitlines() == [
        "reviewed, and no mutant now: primitives/sums.py add: *first < 5*"
    ]


def test_a_low_share_fails_unless_few_mutants_or_not_all_checks_ran():
    low = [True] * 11 + [False] * 9
    assert mutants.is_too_few(low, [0, 0])
    assert not mutants.is_too_few([True] * 12 + [False] * 8, [0, 0])
    assert not mutants.is_too_few(low[1:], [0, 0])
    assert not mutants.is_too_few(low, [0, 3])


def test_every_module_and_test_of_the_table_exists():
    for target in mutants.TARGETS.values():
        for module in target.modules:
            assert (mutants.ROOT / mutants.PACKAGE / module).is_file()
        for test in target.tests:
            assert (mutants.ROOT / test).is_file()
