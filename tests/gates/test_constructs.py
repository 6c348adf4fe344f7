"""Gates on models of unusual form: none fails, and what does not apply has its cause.

python -m pytest tests/gates/test_constructs.py
"""

import fnmatch

import pytest

from curry_train.gates import discover
from curry_train.gates.first_look import explain_failure, look
from curry_train.gates.same_training import flops_again
from curry_train.gates.verdict import drop_shared_results
from curry_train.workloads import Case, load_workload

from .constructs import CONSTRUCTS

# The compiler and torch.jit warn.
pytestmark = pytest.mark.filterwarnings("ignore")
# Gates that need a part which these models have not: experts, an output layer, a loop over time.
NEED_A_PART = ["recompute/routing", "memory-plan/chunked-*", "snn-timesteps/*"]
ON_BLOCKS = ["grad-flow/*", "memory-plan/*", "recompute/*", "sac/*"]
STATEFUL = ["bench/*", "grad-accum/*", "grad-flow/*", "loss-spike/*", "memory-plan/*", "sac/*"]
STATEFUL += ["checkpoint-policy/bitwise", "checkpoint-policy/two-ranks", "recompute/budget"]
TWO_RANKS = ["*/two-ranks"]

# Of each model: gates that need not apply, and what first look tells of it. All others hold.
NEED_NOT_APPLY = {
    **dict.fromkeys(
        ("calls_forward", "flat", "lone_layers", "no_products", "partly_frozen", "tied_words"),
        (ON_BLOCKS, ""),
    ),
    # Torch's own checkpoint fails too.
    "grows_a_list": (["recompute/flops", "sac/products"], ""),
    "checkpoints_all": (ON_BLOCKS, "nothing is saved in forward: the model checkpoints by itself"),
    "checkpoints_segments": (
        ["recompute/flops", "sac/products", "sac/regions"],
        "layers.0: the model recomputes these by itself",
    ),
    "drops_layers": (["memory-plan/*", "recompute/budget"], ""),
    "skips": (["memory-plan/*", "recompute/budget", "recompute/parity-selective"], ""),
    "keeps_last": ([], "last: tensors of a step stay alive"),
    "keeps_in_closure": (
        ["recompute/memory"],
        "stay alive after it, 3 from one of shape",
    ),
    "raises_in_eval": (
        ["*-*/*", "*/off", *TWO_RANKS],
        "the model raises RuntimeError in eval mode",
    ),
    "communicates": (TWO_RANKS, ""),
    "counted_in_python": (STATEFUL, "layers.0.calls to layers.2.calls: state stays in the model"),
    "counted_in_buffer": (["grad-accum/*", "recompute/budget"], "each call changes buffers"),
    "own_generator": (STATEFUL, "layers.0.generator to layers.2.generator: state stays"),
    "spectral": ([], "each call changes buffers"),
    "differentiates": ([*ON_BLOCKS], "forward or loss takes derivatives with torch.func"),
    "scripted": ([*ON_BLOCKS, "bench/*"], "scripted, so neither hooks nor techniques reach"),
    "data_parallel": (["grad-flow/*"], ""),
    "compiled": (["grad-flow/*"], "the model is compiled as a whole"),
    "compiled_blocks": ([*ON_BLOCKS], ": compiled, scripted or wrapped already"),
    "derivative_in_loss": (["recompute/*", "sac/*"], "forward or loss takes derivatives"),
    "noisy_loss": (["grad-accum/*"], ""),
    "own_optimizer": (["loss-spike/found"], ""),
    "sparse": (["*"], "0.weight: the gradient is sparse"),
    "weighted_words": ([*ON_BLOCKS, "grad-accum/*"], ""),
    "lazy": (["memory-plan/*"], "lazy modules"),
    "frozen": (ON_BLOCKS, "run in eval mode"),
    "partly_unused": (ON_BLOCKS, "unused.0 to unused.2: never called"),
    "opens_in_place": (ON_BLOCKS, "the input is overwritten, as by an in-place activation"),
    "overwrites": (["sac/*", *TWO_RANKS, "recompute/memory"], ""),
    "ragged": (["*"], "nested tensors"),
    "penalized_words": ([*ON_BLOCKS, "grad-accum/*", *TWO_RANKS], "takes derivatives"),
}
# Most causes are among these forms; the others run with the long tests.
IN_ALL = ("compiled_blocks", "sparse")


def case_of(name):
    return Case(load_workload(f"tests.gates.constructs:{name}"))


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_first_look_finds_the_cause_or_nothing(name):
    findings = look(case_of(name))
    _, found = NEED_NOT_APPLY.get(name, ([], ""))
    assert found in " ".join(finding.text for finding in findings)
    assert found or not findings, findings


def test_a_model_that_checkpoints_by_itself_runs_nothing_again():
    case = case_of("checkpoints_segments")
    assert flops_again(case, case.build()) == [0, 0]


def verdicts_on(name, gates):
    case = case_of(name)
    findings = look(case)
    left_out, _ = NEED_NOT_APPLY.get(name, ([], ""))
    patterns = [*NEED_A_PART, *left_out]
    verdicts = [explain_failure(gate.run(case), findings) for gate in gates]
    drop_shared_results()
    wrong = [
        verdict
        for verdict in verdicts
        if not verdict.passed
        and (
            verdict.passed is False
            or not any(fnmatch.fnmatch(verdict.gate, pattern) for pattern in patterns)
        )
    ]
    assert not wrong
    return verdicts


def gates_of_one_process():
    return [gate for gate in discover() if not gate.name.endswith("two-ranks")]


@pytest.mark.parametrize("name", IN_ALL)
def test_a_gate_of_each_technique_holds_or_does_not_apply_for_a_cause(name):
    gates = {gate.name.partition("/")[0]: gate for gate in gates_of_one_process()}
    assert any(verdict.passed for verdict in verdicts_on(name, gates.values()))


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_all_gates_hold_or_do_not_apply_for_a_cause(name):
    assert any(verdict.passed for verdict in verdicts_on(name, gates_of_one_process()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long][name == "communicates" :]) for name in CONSTRUCTS],
)
def test_gates_on_two_ranks_hold_or_do_not_apply_for_a_cause(name):
    verdicts_on(name, [gate for gate in discover() if gate.name.endswith("two-ranks")])
