"""Levers do what their names promise, can be joined, and misspelled names get a suggestion.

python -m pytest tests/bench/test_bench_levers.py
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from curry_train.bench.steps import TrainingStep, find_lever
from curry_train.core.measure_compiled import holds_compiled_code
from curry_train.plan import plan
from curry_train.workloads.models import mlp, transformer
from curry_train.workloads.workload import Case, batch_size

SMALL = transformer(depth=2, dim=32, length=16)


def step_with(lever, workload=SMALL, **options):
    return TrainingStep(Case(workload, **options), find_lever(lever))


@pytest.mark.parametrize(
    ("lever", "changed"),
    [
        ("full", ["layers.0", "layers.1"]),
        ("sac_matmuls", ["layers.0", "layers.1"]),
        ("chunked_loss", ["head"]),
        ("compile:eager", [""]),
        ("chunked_loss + full+accumulate=2", ["head", "layers.0", "layers.1"]),
    ],
)
def test_levers_apply_the_techniques_that_their_names_promise_in_order(lever, changed):
    assert step_with(lever).changed == changed


@pytest.mark.parametrize(
    ("lever", "sizes"),
    [("accumulate=3", [3, 3, 2]), ("accumulate=1", [8]), ("full+accumulate=2", [4, 4])],
)
def test_a_batch_is_cut_into_microbatches(lever, sizes):
    assert list(map(batch_size, step_with(lever, batch_size=8).window)) == sizes
    assert find_lever(lever).name == lever


def test_half_precision_is_that_of_the_weights_or_of_the_products():
    assert next(step_with("bf16").model.parameters()).dtype == torch.bfloat16
    cast = step_with("autocast")
    assert next(cast.model.parameters()).dtype == torch.float32
    assert cast.dtype_of_products == torch.bfloat16
    product = replace(SMALL, loss=lambda *_: torch.ones(1, 1) @ torch.ones(1, 1))
    for name, dtype in (("autocast", torch.bfloat16), ("none", torch.float32)):
        assert step_with(name, product).loss(None, None).dtype == dtype


def test_a_backend_is_named_or_the_compilers_own():
    assert holds_compiled_code(step_with("compile:eager").model)
    backends = []
    model = SimpleNamespace(compile=lambda backend: backends.append(backend))
    find_lever("compile").changes[0](model, None)
    assert backends == ["inductor"]


def test_a_plan_from_a_file_is_a_lever(tmp_path):
    found = plan(mlp(depth=2), 2**30, device="cpu", without=["sac"], chunked_loss=False)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found.to_json()))
    changed = [name for name, option in found.options.items() if option.kind != "none"]
    assert step_with(f"plan={path}", mlp(depth=2)).changed == changed


def test_a_batch_of_fewer_samples_than_microbatches_is_refused_with_the_reason():
    message = "can't be cut into 4 microbatches: use --batch-size 4 or more"
    with pytest.raises(ValueError, match=message):
        step_with("accumulate=4", mlp(), batch_size=2)
