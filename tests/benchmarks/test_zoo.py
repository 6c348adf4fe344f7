"""Models of other libraries hold the gates: a dozen by `make long`, all by `make zoo`.

python -m pytest tests/benchmarks/test_zoo.py
"""

from contextlib import suppress

import pytest

from curry_train.core.blocks import NoBlocks
from curry_train.gates import discover
from curry_train.workloads import Case, load_workload
from zoo import MODELS

# Those whose libraries the tests install.
SHORT = [
    "bert",
    "vit",
    "segformer",
    "monai_unet",
    "diffusers_dit",
    "whisper",
    "patch_tst",
    "gpt2",
    "llama",
    "mixtral",
    "x_transformer",
    "graph_attention",
    "snntorch_net",
]

# Of each technique, the gates that compare the training of a step with the plain one.
SHORT_GATES = [
    "recompute/parity-full",
    "recompute/memory",
    "recompute/off",
    "sac/parity-sac",
    "sac/regions",
    "grad-accum/equal",
    "memory-plan/estimate",
]


# Libraries warn about what they still use of torch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
def test_no_gate_fails_on_a_model_of_another_library(name):
    case = Case(load_workload(f"{MODELS}:{name}"))
    with suppress(NoBlocks):
        case, _ = case.with_running_blocks()
    gates = [gate for gate in discover() if gate.name in SHORT_GATES]
    assert len(gates) == len(SHORT_GATES)
    verdicts = {gate.name: gate.run(case) for gate in gates}
    assert {gate: verdict for gate, verdict in verdicts.items() if verdict.passed is False} == {}
    assert any(verdict.passed for verdict in verdicts.values())
