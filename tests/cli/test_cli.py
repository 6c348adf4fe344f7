"""Command `validate`: exit status, one line for wrong input, tables, JSON with its origin.

Run: `python -m pytest tests/cli/test_cli.py`.
"""

import functools
import inspect
import json
from pathlib import Path

import pytest

from curry_train.gates import discover
from curry_train.gates.implementation import CONTRACTS
from curry_train.gates.verdict import Gate, NotApplicable

from ..command_runs import flat, in_python, ran, read_json, require_narrow, results

QUICK = "--model mlp --gate grad-accum/equal --gate grad-accum/uneven"
run = functools.partial(ran, "validate")


def test_gates_that_hold_end_with_0_a_table_of_80_columns_and_json_of_their_origin():
    ended = run(QUICK, "--json -")
    assert "  grad-accum/uneven           held on model + loss: worst" in ended.stderr
    assert "2 held, 0 failed, 0 not applicable" in ended.stderr
    assert "gates that ran your model: 2, its loss: 2" in ended.stderr
    require_narrow(ended.stderr)
    data = json.loads(ended.stdout)
    assert {"command", "date", "device", "torch", "python", "dtype", "seed"} <= set(data)
    found = [(row["gate"], row["passed"], row["workload"]) for row in data["results"]]
    assert found == [(name, True, "mlp") for name in ("grad-accum/equal", "grad-accum/uneven")]


def gate(name, hint="", *, applies=True):
    """Make a gate that holds without a hint, fails with one, or does not apply because of it."""

    def check(case):
        if not applies:
            raise NotApplicable(hint)
        return "3 of 4", "4 of 4", hint

    return Gate(name, check)


def test_a_run_in_which_no_gate_applies_is_no_success(monkeypatch):
    reasons = {"some/gate": "no such layer", "some/other": "no such layer", "b/gate": "no\nloop"}
    gates = [gate(*reason, applies=False) for reason in reasons.items()]
    monkeypatch.setattr("curry_train.cli.validate.discover", lambda *patterns: gates)
    ended = run("--model mlp --gate some --gate b/* --json gates.json", status=2)
    assert ended.stderr.endswith(
        "Error: nothing was checked: of some, b/* no gate applies to mlp (no such layer;\n"
        "no loop)\n"
    )
    assert "0 held, 0 failed, 3 not applicable" in ended.stdout
    assert len(read_json("gates.json")["results"]) == 3
    ended = run("--model mlp", status=2)
    assert flat(ended.stderr).endswith(
        "Error: nothing was checked: of all gates no gate applies to mlp (no such layer; no loop)"
    )


def test_the_summary_has_a_line_per_technique_and_the_details_of_failures(monkeypatch):
    reasons = {"b/two": "no layer", "c/one": "no layer", "c/two": "no block"}
    gates = [gate("a/one"), gate("a/two"), gate("b/one", "do this")]
    gates += [gate(*reason, applies=False) for reason in reasons.items()]
    monkeypatch.setattr(
        "curry_train.cli.validate.discover",
        lambda patterns: [one for one in gates if one.name.startswith(patterns or ("",))],
    )
    lines = run("--model mlp", status=1).stdout.splitlines()
    assert [flat(line) for line in lines[2:5]] == [
        "a 2 held",
        "b 1 FAILED, 1 n/a: no layer",
        "c 2 n/a for 2 reasons",
    ]
    assert "mlp, b/one: FAILED" in lines
    for line in ("  measured: 3 of 4", "  required: 4 of 4", "  what to do: do this"):
        assert line in lines
    end = "2 held, 1 failed, 3 not applicable; --figures shows what each measured"
    assert lines[-2:] == [end, "gates that ran your model: 0"]
    narrowed = run("--model mlp --gate a").output
    assert "  a/one                       held on nothing: 3 of 4" in narrowed
    assert "--figures" not in narrowed
    figures = run("--model mlp --figures", status=1).output
    assert "  b/two                       n/a: no layer" in figures


def test_a_model_without_blocks_gets_a_message_on_naming_them():
    Path("flat_model.py").write_text("from torch import nn\ndef build(): return nn.Linear(8, 8)\n")
    ended = run("--model flat_model:build --gate recompute/memory --gate grad-accum/equal")
    assert "the model repeats no block: name some" in ended.output
    assert "1 held, 0 failed, 1 not applicable" in ended.output


@pytest.mark.parametrize(
    ("words", "advice"), [("", "--shrink 2, or --gate NAME"), ("--shrink 2", "--gate NAME")]
)
def test_gates_that_take_long_say_how_to_run_fewer(monkeypatch, words, advice):
    monkeypatch.setattr("curry_train.cli.validate.LONG_SECONDS", 0.0)
    assert f"\nQuicker: {advice}\n" in run(QUICK, words).output


def test_gates_are_listed_without_being_run():
    assert run("--list").output.split() == [gate.name for gate in discover()]


def test_the_list_with_figures_tells_how_each_implementation_is_called():
    listed = run("--list --figures").output
    require_narrow(listed.partition("What --impl takes")[2])
    for name, contract in CONTRACTS.items():
        assert f"\n  {name}{inspect.signature(contract.call)}\n" in listed
    only_accum = run("--list --figures --gate grad-accum").output
    assert "  train_window(" in only_accum
    assert "apply_sac" not in only_accum


def test_two_factories_of_one_name_are_distinguished():
    for name, blocks in (("first", 2), ("second", 3)):
        layer = "nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))"
        model = f"nn.Sequential(*[{layer} for _ in range({blocks})])"
        Path(f"{name}.py").write_text(f"from torch import nn\ndef build(): return {model}\n")
    ended = run("--model first.py:build --model second.py:build --gate recompute/flops --json out")
    words = flat(ended.output)
    assert "first.py:build 2 blocks" in words
    assert "second.py:build 3 blocks" in words
    rows = read_json("out")["results"]
    assert [row["workload"] for row in rows] == ["first.py:build", "second.py:build"]


GREEDY = """
import multiprocessing, os, signal
from curry_train.gates import verdict
from curry_train.gates.implementation import load_implementation
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import load_workload, mlp
from curry_train.workloads.workload import Case

def small():
    return mlp()

def again(model, *, blocks):
    recompute_blocks(model, blocks=blocks)

def large():
    if multiprocessing.parent_process():
        os.kill(os.getpid(), signal.SIGKILL)
    return mlp()

if __name__ == "__main__":
    # Forks, which start at once with what is imported here.
    import torch._dynamo
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork
    gates = [gate for gate in verdict.discover() if gate.name == "recompute/flops"]
    small, large = (Case(load_workload(f"greedy.py:{name}")) for name in ("small", "large"))
    given = [load_implementation("recompute_blocks=greedy.py:again")]
    verdict.GATES_WORTH_A_PROCESS, verdict.num_cores = 1, lambda: 2
    for cases in ([small, small], [small, large]):
        for one in verdict.measure_all(cases, gates, implementations=given):
            print(one.passed, *one.ran)
"""


def test_gates_run_in_processes_and_one_that_the_system_ends_is_named():
    Path("greedy.py").write_text(GREEDY)
    ended = in_python("greedy.py", status=1)
    assert ended.stdout.startswith("True model loss implementation\n" * 2), ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: memory ran out (the system ended a process): validate")


def test_a_step_has_as_many_samples_as_the_batch_of_the_factory_and_gates_take_few():
    Path("sized_model.py").write_text(
        "import torch\n"
        "def pair():\n    return torch.nn.Linear(2, 2), torch.ones(7, 2)\n"
        "def alone():\n    return pair()[0]\n"
    )

    def printed_header(line):
        return ran(line).stdout.splitlines()[0]

    assert "batch size 7," in printed_header("memory --model sized_model.py:pair")
    assert "batch size 4," in printed_header("memory --model sized_model.py:alone")
    assert "batch size 3," in printed_header("memory --model sized_model.py:pair --batch-size 3")
    assert "batch size 4," in printed_header(
        "validate --model sized_model.py:pair --gate grad-accum/equal"
    )


def test_memory_of_a_window_of_microbatches_begins_with_their_gradients():
    Path("windows.py").write_text(
        "import torch\n"
        "from curry_train.workloads.workload import Workload\n"
        "def make(accumulation):\n"
        "    rows, loss = lambda n: torch.randn(n, 8), lambda model, x: model(x).square().sum()\n"
        "    build = lambda: torch.nn.Linear(8, 8)\n"
        "    return Workload('linear', build, rows, loss, accumulation=accumulation)\n"
        "def one():\n    return make(1)\n"
        "def two():\n    return make(2)\n"
    )
    first = {}
    for name in ("one", "two"):
        found = results(f"memory --model windows.py:{name}")
        first[name] = found["timeline"]["owners"]["gradients"][0]
    assert first == {"one": 0, "two": 4 * (8 * 8 + 8)}
