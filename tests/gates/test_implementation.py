"""Tests of `--impl`: gates judge owned copies, sabotaged copies and copies that do nothing.

An owned copy is the import closure of a module, flat, in a package of its own.
Run: `python -m pytest tests/gates/test_implementation.py`.
"""

import json
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from click.testing import CliRunner
from owned_copies import own

from curry_train.cli.validate import validate_command
from curry_train.gates.verdict import (
    TECHNIQUES,
    Implementation,
    WrongImplementation,
    as_ours,
    discover,
    gates_of,
    is_kind,
    judge,
    judged_of,
    load_implementation,
    measure_rows,
    techniques_of,
)
from curry_train.primitives.grad_accum import NonFiniteWindow
from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case

# For each copied module: a model, the gates to run, and the functions that they judge.
COPIES = {
    "primitives/grad_accum": (
        "mlp",
        ["grad-accum"],
        ["train_window", "GradientAccumulation", "StepInBackward"],
    ),
    "primitives/recompute": (
        "transformer",
        [f"recompute/{gate}" for gate in ("memory", "parity-full", "parity-seq*", "flops", "off")],
        ["recompute_blocks", "recompute_segments"],
    ),
    "primitives/offload": ("mlp", ["recompute/offload-*"], ["offload_blocks"]),
    "primitives/compile_budget": ("mlp", ["recompute/budget-*"], ["memory_budget"]),
    "primitives/sac": (
        "transformer",
        ["sac/parity-sac", "sac/parity-every-second", "sac/products", "sac/refused"],
        ["apply_sac"],
    ),
    "primitives/regions": ("transformer", ["sac/parity-regions", "sac/regions"], ["apply_regions"]),
    "primitives/snn_timesteps": (
        "snn",
        ["snn-timesteps/[mpf]*"],
        ["checkpoint_timesteps"],
    ),
    "primitives/hidden_state": ("snn", ["snn-timesteps/hidden-state"], ["check_step"]),
    "primitives/grad_flow": ("mlp", ["grad-flow"], ["GradFlow"]),
    "primitives/chunked_loss": ("transformer", ["memory-plan/chunked-*"], ["apply_chunked_loss"]),
    "core/timing": ("mlp", ["bench/twice"], ["time_in_turns", "paired_ratio", "spread_of"]),
    "runs/journal": ("mlp", ["run-journal/complete"], ["Journal"]),
    "runs/retention": ("mlp", ["checkpoint-policy/retention"], ["to_delete", "is_among_best"]),
    "runs/store": (
        "mlp",
        ["checkpoint-policy/committed", "checkpoint-policy/damage", "checkpoint-policy/hostile"],
        ["Writing.commit", "SavedRun.verify", "SavedRun.load"],
    ),
    "runs/spike": (
        "mlp",
        ["loss-spike/found", "loss-spike/recovered"],
        ["SpikeWatchdog", "recover", "Recoveries"],
    ),
}

ACTIVE = "(module is None or module.training) and torch.is_grad_enabled()"

FAULTS = {
    "primitives/grad_accum": [
        ("value = value / window.loss_divisor", "value = value / len(window)"),
        ("if not (math.isfinite(total) and", "if False and not (math.isfinite(total) and"),
        ("loss_divisor=total / num_ranks", "loss_divisor=self.steps * total / len(window)"),
    ],
    "primitives/recompute": [
        ("if not self.recomputes:", "if True:"),
        (ACTIVE, "torch.is_grad_enabled()"),
    ],
    "primitives/offload": [
        (
            "self.moved.ask(self).view(self.dtype).as_strided(*self.view)",
            "self.moved.ask(self).view(self.dtype).as_strided(*self.view).flip(0)",
        ),
        ("if reason is None:", "if reason is None and not tensor.requires_grad:"),
    ],
    "primitives/sac": [
        ("return operation in policy.save", "return operation in policy.save and context is None"),
        ("if not saved:", "if False:"),
    ],
    "primitives/regions": [
        ("F.silu(node._saved_self)", "node._saved_self"),
        (ACTIVE, "False"),
    ],
    "primitives/snn_timesteps": [
        (
            "new_leaves, self.shape_after = tree_flatten(state)",
            "new_leaves, self.shape_after = tree_flatten(state)\n"
            "        new_leaves = [leaf.detach() for leaf in new_leaves]",
        ),
        (
            "*earlier, last = schedule.chunks",
            "earlier, last = (), ChunkSchedule(schedule.num_steps)",
        ),
    ],
    "primitives/grad_flow": [
        ("if not self._parameters.were_read():", "if True:"),
        ("if in_backward() or torch.compiler", "if torch.compiler"),
        ("sums_of(tensor)", "sums_of(tensor) * 1.001"),
    ],
    "primitives/chunked_loss": [
        ("factor = gradient / divisor", "factor = gradient * 1.01 / divisor"),
        (
            "chunks = _Pass(given, options)",
            "options = replace(options, chunk_tokens=len(given.targets))\n"
            "        chunks = _Pass(given, options)",
        ),
    ],
    "core/timing": [
        ("wait()", "None"),
        ("if turn >= warmup:", "if turn >= 0:"),
    ],
    "runs/retention": [
        ("if config.best_k == 0 or not float", "if config.best_k == 0 or False and not float"),
        ("retention.recovery_keep", "(retention.recovery_keep + 2)"),
    ],
    "runs/spike": [
        ("stop = after(state.position, spike.step + around - back_to)", "stop = start"),
        ("DEVIATIONS_PER_MAD = 1.4826", "DEVIATIONS_PER_MAD = 1000.0"),
    ],
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command in a folder whose packages can be imported."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda *arguments: CliRunner().invoke(validate_command, [*arguments, "--device", "cpu"])
    for name in set(sys.modules) - before:
        if "_copy" in name or "_fault_" in name or "_foreign" in name:
            del sys.modules[name]


def judged(copied, package):
    """Return the options that let gates judge a copied module."""
    model, gates, names = COPIES[copied]
    stem = copied.rpartition("/")[2]
    options = ["--model", model]
    for gate in gates:
        options += ["--gate", gate]
    for name in names:
        options += ["--impl", f"{package}.{stem}:{name}"]
    return options


@pytest.mark.parametrize("copied", COPIES)
def test_an_owned_copy_passes_the_gates_of_its_technique(copied, run, tmp_path):
    stem = copied.rpartition("/")[2]
    package = own(tmp_path, copied, package=f"{stem}_copy")
    report = tmp_path / "report.json"
    ended = run(*judged(copied, package), "--json", str(report))
    assert ended.exit_code == 0, ended.output
    results = json.loads(report.read_text())
    assert all(result["passed"] for result in results["results"]), ended.output
    expected = {name: f"{package}.{stem}:{name}" for name in COPIES[copied][2]}
    assert results["implementations"] == expected
    for name, spec in expected.items():
        assert f"judged: {spec} in place of our {name}" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("copied", "number"),
    [(copied, number) for copied, faults in FAULTS.items() for number in range(len(faults))],
)
def test_a_sabotaged_copy_fails(copied, number, run, tmp_path):
    stem = copied.rpartition("/")[2]
    package = f"{stem}_fault_{number}"
    own(tmp_path, copied, package=package, faults=[FAULTS[copied][number]])
    ended = run(*judged(copied, package))
    assert ended.exit_code == 1, ended.output
    assert "FAILED" in ended.output


def does_nothing(*args, **kwargs):
    """Do nothing, as an implementation that does not work."""


@pytest.mark.parametrize(
    ("name", "model", "gates"),
    [
        ("train_window", "mlp", ["grad-accum/[ens]*"]),
        ("recompute_blocks", "transformer", ["recompute/parity-full", "recompute/flops"]),
        ("recompute_segments", "transformer", ["recompute/parity-sequential"]),
        ("offload_blocks", "mlp", ["recompute/offload-bytes"]),
        ("apply_sac", "transformer", ["sac/parity-sac", "sac/refused"]),
        ("apply_regions", "transformer", ["sac/regions"]),
        ("recompute_timesteps", "snn", ["snn-timesteps/memory", "snn-timesteps/flops"]),
        ("check_step", "snn", ["snn-timesteps/hidden-state"]),
        ("GradFlow", "mlp", ["grad-flow"]),
        ("plan", "transformer", ["memory-plan/fits"]),
        ("apply_chunked_loss", "transformer", ["memory-plan/chunked-loss"]),
        ("time_in_turns", "mlp", ["bench/twice"]),
        ("SavedRun.verify", "mlp", ["checkpoint-policy/damage"]),
        ("Journal", "mlp", ["run-journal/complete"]),
        ("SpikeWatchdog", "mlp", ["loss-spike/found"]),
    ],
)
def test_an_implementation_that_does_nothing_fails_every_gate(name, model, gates):
    chosen = [
        gate for pattern in gates for gate in discover([pattern]) if fnmatch(gate.name, pattern)
    ]
    chosen = chosen or list(gates_of(gates[0]))
    case = Case(load_workload(model))
    for gate in chosen:
        verdict = judge(gate, [Implementation(name, "tests:does_nothing", does_nothing)]).run(case)
        assert verdict.passed is False, verdict


def test_a_gate_that_judges_something_else_does_not_apply_and_judges_nothing():
    given = [Implementation("apply_sac", "tests:does_nothing", does_nothing)]
    case = Case(load_workload("transformer"))
    for gate in discover():
        verdict = judge(gate, given).run(case) if "apply_sac" not in gate.judges else None
        if verdict is not None:
            assert verdict.passed is None, verdict
            assert "--impl names apply_sac" in verdict.hint


def test_every_technique_declares_what_its_gates_judge():
    num_gates = 0
    for technique in TECHNIQUES:
        judged_names = {one.name for one in judged_of(technique)}
        taken = {name for gate in gates_of(technique) for name in gate.judges}
        assert taken == judged_names, technique
        num_gates += sum(bool(gate.judges) for gate in gates_of(technique))
    others = {gate.name for gate in discover() if not gate.judges}
    assert others == {
        "recompute/parity-selective",
        "recompute/long-run",
        # These need several of our calls together: to wrap, to copy, to report and to restore.
        "recompute/chains",
        "recompute/caches",
        "recompute/wraps",
        "recompute/refused",
        "recompute/host-report",
        "recompute/host-memory",
        "memory-plan/loss-calls",
        "memory-plan/loss-heads",
        "memory-plan/estimate",
    }
    assert num_gates > 45


FOREIGN = """
import functools
from torch.utils.checkpoint import checkpoint

class Layers:
    @staticmethod
    def again(model, *, blocks=None):
        for name in blocks:
            block = model.get_submodule(name)
            run = block.forward
            def forward(*args, block=block, run=run, **kwargs):
                if not block.training:
                    return run(*args, **kwargs)
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            block.forward = forward

def too_few(model):
    pass
"""


def test_a_foreign_implementation_is_judged_by_the_name_of_the_technique(run, tmp_path):
    (tmp_path / "my_foreign.py").write_text(FOREIGN)
    options = ["--model", "transformer", "--impl", "recompute=my_foreign:Layers.again"]
    ended = run(*options, "--gate", "recompute/parity-full", "--gate", "recompute/flops")
    assert ended.exit_code == 0, ended.output
    assert "2 held, 0 failed, 0 not applicable" in ended.output
    assert "judged: my_foreign:Layers.again in place of our recompute_blocks" in ended.output
    ended = run(*options, "--gate", "recompute/parity-sequential")
    assert ended.exit_code == 2
    error = " ".join(ended.stderr.split())
    assert "this gate judges recompute_segments, and --impl names recompute_blocks" in error


def test_without_gates_all_that_judge_the_implementation_are_run_in_processes_too(tmp_path):
    module = tmp_path / "theirs_foreign.py"
    module.write_text(FOREIGN)
    judged_by = {technique: judged_of(technique) for technique in TECHNIQUES}
    given = [load_implementation(f"recompute_blocks={module}:Layers.again", judged_by)]
    names = ("recompute/parity-full", "recompute/off")
    gates = [gate for gate in gates_of("recompute") if gate.name in names]
    case = Case(load_workload("mlp"))
    rows = list(measure_rows([case], gates, implementations=given, num_processes=2))
    again = list(measure_rows([case], gates, implementations=given, num_processes=1))
    assert [row.verdict for row in rows] == [row.verdict for row in again]
    assert {row.verdict.gate: row.verdict.passed for row in rows}["recompute/parity-full"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_package.sac:apply_sac", "can't import no_such_package"),
        ("my_foreign:no_such_name", "my_foreign has no callable 'no_such_name'"),
        ("my_foreign:too_few", "the gates call apply_sac(model, policy, *, blocks)"),
        ("my_foreign", "give package.module:function"),
        ("sack=my_foreign:too_few", "no gate judges 'sack'; did you mean 'sac'?"),
    ],
)
def test_an_implementation_that_can_not_be_judged_ends_with_2_and_one_sentence(
    text, message, run, tmp_path
):
    (tmp_path / "my_foreign.py").write_text(FOREIGN)
    text = f"sac={text}" if "no_such_name" in text else text
    ended = run("--model", "mlp", "--gate", "sac", "--impl", text)
    assert ended.exit_code == 2
    error = " ".join(ended.stderr.split())
    assert message in error
    assert error.startswith("Error: ")
    assert "Traceback" not in ended.output


def test_a_name_that_no_gate_judges_needs_a_technique():
    judged_by = {technique: judged_of(technique) for technique in TECHNIQUES}
    with pytest.raises(WrongImplementation, match="write NAME=math:sqrt"):
        load_implementation("math:sqrt", judged_by)
    with pytest.raises(WrongImplementation, match="takes"):
        load_implementation("bench=textwrap:dedent", judged_by)


class NonFiniteWindowCopy(ArithmeticError):
    pass


NonFiniteWindowCopy.__name__ = "NonFiniteWindow"


def test_errors_of_an_owned_copy_are_raised_as_the_packages_own():
    def fail(kind):
        raise kind("microbatch 2")

    call = as_ours(fail, NonFiniteWindow)
    with pytest.raises(NonFiniteWindow, match="microbatch 2"):
        call(NonFiniteWindowCopy)
    with pytest.raises(KeyError):
        call(KeyError)
    assert is_kind(NonFiniteWindowCopy(), NonFiniteWindow)
    assert not is_kind(ArithmeticError(), NonFiniteWindow)


def test_patterns_with_wildcards_and_gates_of_another_name_find_their_technique():
    assert techniques_of(["run-journal/torn"]) == ("checkpoint-policy",)
    assert techniques_of(["sac", "bench/twice"]) == ("bench", "sac")
    assert techniques_of(["*parity*"]) == techniques_of([]) == techniques_of(["sack"]) == TECHNIQUES
    assert {gate.name.partition("/")[0] for gate in discover()} - set(TECHNIQUES) == {"run-journal"}


CHOOSE_GATES = """
import importlib
import json
import sys

import torch

loaded = {}
for technique in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "curry_train"]:
        del sys.modules[name]
    importlib.import_module("curry_train.cli.main")
    importlib.import_module("curry_train.cli.validate").choose_gates([technique])
    loaded[technique] = [name for name in sys.modules if name.partition(".")[0] == "curry_train"]
print(json.dumps(loaded))
"""


def test_the_gates_of_a_technique_load_no_other_gates_and_at_most_45_modules():
    command = [sys.executable, "-c", CHOOSE_GATES, *TECHNIQUES]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = json.loads(ended.stdout)
    assert list(loaded) == list(TECHNIQUES)
    gates = {f"curry_train.gates.{name.replace('-', '_')}" for name in TECHNIQUES}
    for technique, modules in loaded.items():
        assert gates & set(modules) == {f"curry_train.gates.{technique.replace('-', '_')}"}
        # As in the number of modules of the package, `__init__.py` is not counted.
        packages = {name.rpartition(".")[0] for name in modules}
        counted = [name for name in modules if name not in packages]
        assert 12 < len(counted) <= 45, f"{technique}: {len(counted)}"
