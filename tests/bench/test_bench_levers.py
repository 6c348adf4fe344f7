"""Levers do what their names promise, can be joined, and misspelled names get a suggestion.

python -m pytest tests/bench/test_bench_levers.py
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from curry_train.bench.steps import TrainingStep, find_lever, list_levers
from curry_train.core.measure_compiled import holds_compiled_code
from curry_train.plan import plan
from curry_train.primitives.strategies import STRATEGIES
from curry_train.workloads.models import mlp, transformer
from curry_train.workloads.workload import Case, batch_size

SMALL = transformer(depth=2, dim=32, length=16)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_registered_strategy_is_a_lever(name):
    assert find_lever(name).changes == (STRATEGIES[name].apply,)
    assert name in list_levers()


def test_a_lever_applies_the_technique_that_its_name_promises():
    case = Case(SMALL)
    assert TrainingStep(case, find_lever("full")).changed == ["layers.0", "layers.1"]
    assert TrainingStep(case, find_lever("sac_matmuls")).changed == ["layers.0", "layers.1"]
    assert TrainingStep(case, find_lever("chunked_loss")).changed == ["head"]
    cut = TrainingStep(Case(SMALL, batch_size=8), find_lever("accumulate=3")).window
    assert list(map(batch_size, cut)) == [3, 3, 2]
    assert len(TrainingStep(case, find_lever("accumulate=1")).window) == 1
    assert next(TrainingStep(case, find_lever("bf16")).model.parameters()).dtype == torch.bfloat16
    cast = TrainingStep(case, find_lever("autocast"))
    assert next(cast.model.parameters()).dtype == torch.float32
    assert cast.dtype_of_products == torch.bfloat16
    product = Case(replace(SMALL, loss=lambda *_: torch.ones(1, 1) @ torch.ones(1, 1)))
    for name, dtype in (("autocast", torch.bfloat16), ("none", torch.float32)):
        assert TrainingStep(product, find_lever(name)).loss(None, None).dtype == dtype
    compiled = TrainingStep(case, find_lever("compile:eager"))
    assert holds_compiled_code(compiled.model)
    assert compiled.changed == [""]
    backends = []
    model = SimpleNamespace(compile=lambda backend: backends.append(backend))
    find_lever("compile").changes[0](model, None)
    assert backends == ["inductor"]


def test_levers_are_joined_in_order():
    step = TrainingStep(Case(SMALL), find_lever("chunked_loss + full+accumulate=2"))
    assert step.changed == ["head", "layers.0", "layers.1"]
    assert len(step.window) == 2
    assert find_lever("full+accumulate=2").name == "full+accumulate=2"


def test_a_plan_from_a_file_is_a_lever(tmp_path):
    found, path = (
        plan(mlp(depth=2), 2**30, device="cpu", without=["sac"], chunked_loss=False),
        tmp_path / "plan.json",
    )
    path.write_text(json.dumps(found.to_json()))
    changed = [name for name, option in found.options.items() if option.kind != "none"]
    assert TrainingStep(Case(mlp(depth=2)), find_lever(f"plan={path}")).changed == changed


def test_a_batch_of_fewer_samples_than_microbatches_is_refused_with_the_reason():
    message = "can't be cut into 4 microbatches: use --batch-size 4 or more"
    with pytest.raises(ValueError, match=message):
        TrainingStep(Case(mlp(), batch_size=2), find_lever("accumulate=4"))
