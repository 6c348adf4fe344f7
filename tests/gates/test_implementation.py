"""Tests of `--impl`: what is asked of the user's function, and which gates check it.

The implementations of each technique that are not ours stand in `foreign_<technique>.py`.
Run: `python -m pytest tests/gates/test_implementation.py`.
"""

import pytest

from curry_train.gates.implementation import CONTRACTS, Implementation
from curry_train.gates.verdict import discover, technique_of

from ..command_runs import flat, ran
from ..saboteurs.saboteurs import case_of

FOREIGN = """
from torch.utils.checkpoint import checkpoint

class Layers:
    @staticmethod
    def again(model, *, blocks):
        for name in blocks:
            block = model.get_submodule(name)
            run = block.forward
            def forward(*args, block=block, run=run, **kwargs):
                if not block.training:
                    return run(*args, **kwargs)
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            block.forward = forward
"""


def test_each_contract_is_taken_by_gates_of_one_technique_alone():
    pairs = {(name, technique_of(gate.name)) for gate in discover() for name in gate.takes}
    assert sorted(name for name, _ in pairs) == sorted(CONTRACTS)


@pytest.mark.parametrize("name", CONTRACTS)
def test_gates_that_do_not_take_an_implementation_do_not_apply(name):
    case = case_of("mlp")
    given = [Implementation(name, "nowhere:nothing", lambda *args, **kwargs: None)]
    for gate in discover():
        if name not in gate.takes:
            verdict = gate.run(case, given)
            assert verdict.passed is None, verdict
            assert "takes no --impl" in verdict.hint or f"and {name} was given" in verdict.hint


def test_a_foreign_implementation_is_checked_in_place_of_ours(monkeypatch, tmp_path):
    (tmp_path / "my_foreign.py").write_text(FOREIGN)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(tmp_path)
    line = "validate --device cpu --model shrink=2:transformer"
    line += " --impl recompute_blocks=my_foreign:Layers.again"
    ended = ran(line, "--gate recompute/parity-full --gate recompute/flops")
    assert "2 held, 0 failed, 0 not applicable" in ended.output
    assert "my_foreign:Layers.again in place of our recompute_blocks" in ended.output
    assert "gates that ran your model: 2, its loss: 2, your implementation: 2" in ended.output
    ended = ran(line, "--gate recompute/parity-sequential", status=2)
    assert "takes no --impl; it runs only without it" in flat(ended.stderr)
