"""A benchmark's levers, bytes, FLOPs and utilisation, and its rows for setups that fail.

python -m pytest tests/bench/test_bench_steps.py
"""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from curry_train.bench import steps
from curry_train.bench.report import measure_levers
from curry_train.bench.steps import (
    Lever,
    SetupRow,
    TrainingStep,
    find_lever,
    time_setups,
)
from curry_train.core.measure_compiled import holds_compiled_code
from curry_train.plan import device as peak_rate
from curry_train.plan import plan
from curry_train.plan.device import PROFILES
from curry_train.workloads.models import mlp, transformer
from curry_train.workloads.workload import Case, WorkloadError, batch_size

from ..plan_models import squares
from ..toy_steps import all_equal, feed_forward, stacked

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = transformer(depth=2, dim=32, length=16, vocabulary=160)
ROWS = squares(lambda: stacked(lambda: feed_forward(16, 32), 2), 16)


def figures(case, *levers, **options):
    """Measure levers, or those of these names."""
    found = [find_lever(one) if isinstance(one, str) else one for one in levers]
    return measure_levers(case, found, **({"rounds": 1, "warmup": 0} | options))


def changed(name, change):
    return Lever(name, (change,))


# Bytes.


# Of weights of 16 KiB, and a batch of 2 rows: with gradients and momentum, and compiled without.
@pytest.mark.parametrize("lever", ["none", "compile:eager"])
def test_the_peak_of_a_step_has_weights_gradients_and_moments_compiled_too(lever):
    wide = squares(lambda: nn.Linear(64, 64, bias=False), 64)
    step = TrainingStep(
        Case(wide, batch_size=2),
        find_lever(lever),
        optimizer=lambda model: SGD(model.parameters(), momentum=0.9),
    )
    step()
    assert 3 <= step.peak_bytes() / 2**14 < 3.2


def test_a_step_takes_the_batch_and_the_optimizer_that_are_given():
    given = torch.ones(3, 16)
    step = TrainingStep(
        Case(ROWS), batch=given, optimizer=lambda model: SGD(model.parameters(), 0.1)
    )
    assert torch.equal(step.window.microbatches[0], given)
    assert isinstance(step.optimizer, SGD)
    assert step.optimizer.param_groups[0]["lr"] == 0
    assert not step.optimizer.state
    mean, summed = step.mean_loss(step.model, given), step.loss(step.model, given)
    torch.testing.assert_close(mean, summed / 3)
    step()
    step.drop_gradients()
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_accumulation_lowers_the_peak_and_does_the_same_work():
    plain, cut = figures(Case(SMALL, batch_size=8), "accumulate=4").rows
    assert cut.peak_bytes < 0.7 * plain.peak_bytes
    assert (cut.model_flops, cut.executed_flops, cut.num_terms) == (
        plain.model_flops,
        plain.executed_flops,
        plain.num_terms,
    )
    assert cut.num_microbatches == 4
    assert cut.loss == pytest.approx(plain.loss, rel=1e-6)


def test_steps_share_weights_and_moments_and_leave_them():
    plain = TrainingStep(Case(SMALL))
    plain()
    before = [parameter.clone() for parameter in plain.model.parameters()]
    other = TrainingStep(Case(SMALL), find_lever("full"), like=plain)
    for one, two in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert one.data_ptr() == two.data_ptr()
        assert plain.optimizer.state[one]["exp_avg"] is other.optimizer.state[two]["exp_avg"]
    for _ in range(3):
        other()
        plain()
    assert all_equal(before, plain.model.parameters())
    half = TrainingStep(
        Case(SMALL), find_lever("bf16"), like=plain
    )  # a different dtype shares nothing
    assert not half.optimizer.state


def test_compiled_code_is_measured_without_a_dispatch_mode():
    plain, compiled, cut = figures(
        Case(ROWS, batch_size=8), "compile:eager", "compile:eager+accumulate=2"
    ).rows
    assert (plain.outcome, compiled.outcome, cut.outcome) == ("measured",) * 3
    assert compiled.executed_flops == plain.executed_flops
    assert cut.peak_bytes is None
    assert "can't be followed" in cut.notes[0]


def test_a_lever_gets_the_named_blocks_and_a_microbatch():
    seen = []
    lever = Lever("look", (lambda model, sample: seen.append(sample) or [],), accumulate=2)
    TrainingStep(Case(SMALL, batch_size=4, blocks=("layers.1",)), lever)
    (sample,) = seen
    assert sample.blocks == ("layers.1",)
    assert batch_size(sample.batch) == 2


# Utilisation.


@pytest.mark.parametrize(
    ("named", "dtype", "tera"),
    [  # from the data sheets
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
    ],
)
def test_the_peak_rate_is_that_of_the_data_sheet_not_the_one_that_products_reach(
    monkeypatch, named, dtype, tera
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: named)
    found = peak_rate.peak_rate(CUDA, dtype)
    assert found.flops_per_second == pytest.approx(tera * 1e12)
    assert "data sheet" in found.source
    monkeypatch.setattr(peak_rate, "_measure_once", lambda *_: PROFILES["cpu"])
    assert "measured here" in peak_rate.peak_rate(CUDA, dtype, given="measured").source


def test_a_given_or_measured_peak_rate_is_used(monkeypatch):
    assert peak_rate.peak_rate(CPU, torch.float32, given=5e12) == peak_rate.PeakRate(
        5e12, "as given"
    )
    monkeypatch.setattr(peak_rate, "_measure_once", lambda *_: PROFILES["cpu"])
    found = peak_rate.peak_rate(CPU, torch.float32, given="measured")
    assert (found.flops_per_second, found.source) == (
        165e9,
        "large products in float32, measured here",
    )
    assert peak_rate.peak_rate(CPU, torch.float64, given="measured").flops_per_second is None
    for wrong in (0.0, -1.0, "fast"):
        with pytest.raises(ValueError, match="the peak"):
            peak_rate.peak_rate(CPU, torch.float32, given=wrong)


def ticking(*seconds):
    """A clock that is read twice per step, and makes the steps take these times."""
    times = itertools.chain.from_iterable((0.0, taken) for taken in itertools.cycle(seconds))
    return lambda: next(times)


def test_mfu_counts_the_models_flops_once_and_hfu_all_that_ran():
    plain, full = figures(Case(ROWS), "full", peak=1e9, clock=ticking(0.5)).rows
    assert plain.mfu == plain.hfu == plain.model_flops / 0.5 / 1e9
    assert full.mfu == plain.mfu
    assert full.hfu == full.executed_flops / 0.5 / 1e9 > full.mfu
    assert full.terms_per_second == 4 / 0.5
    above = figures(Case(ROWS), peak=1e3, clock=ticking(0.5)).rows[0]
    assert "above the peak (as given)" in above.notes[0]


# Rows.


def outgrow_later(model, sample):
    """Run out of memory in a later step, as on a device with fragmented memory."""
    calls = itertools.count()

    def fail(*_):
        if next(calls) == 4:
            raise torch.OutOfMemoryError("out of memory")

    model[1].register_forward_hook(fail)
    return ["1"]


def blow_up(model, sample):
    model[1].register_forward_hook(lambda module, args, output: output * float("nan"))
    return ["1"]


def skip_a_block(model, sample):
    model[1].register_forward_hook(lambda module, args, output: args[0])
    return ["1"]


def test_each_step_is_announced_prepared_and_waited_for(monkeypatch):
    events = []
    dropped = []
    monkeypatch.setattr(steps, "wait_for", lambda device: events.append(device.type))
    monkeypatch.setattr(steps, "seed_generators", lambda seed: events.append("before"))
    rows = [SetupRow("one"), SetupRow("two")]
    made = [
        SimpleNamespace(name=row.name, drop_gradients=lambda: dropped.append(1)) for row in rows
    ]
    time_setups(
        list(zip(rows, made, strict=True)),
        Case(SMALL),
        run=lambda step: events.append(step.name),
        rounds=2,
        warmup=1,
        clock=lambda: float(sum({"one": 1, "two": 9, "before": 50}.get(one, 0) for one in events)),
        tell=events.append,
    )
    assert " | ".join(events[:20]) == (
        "one: warm-up | before | cpu | one | cpu | two: warm-up | before | cpu | two | cpu | "
        "two: step 1 of 2 | before | cpu | two | cpu | one: step 1 of 2 | before | cpu | one | cpu"
    )
    assert [row.seconds for row in rows] == [[1, 1], [9, 9]]
    assert rows[0].ratio is None
    assert rows[1].ratio.median == 9
    # Of both, before each of six turns and at the end.
    assert len(dropped) == 2 * 7


@pytest.mark.parametrize(
    ("change", "outcome", "message"),
    [
        (outgrow_later, "out of memory", "4 samples do not fit into the memory of cpu"),
        (blow_up, "refused", "not finite: microbatch 0 of 1"),
    ],
)
def test_a_setup_that_fails_gets_a_row_and_the_others_are_measured(change, outcome, message):
    rows = figures(Case(ROWS), changed("planted", change), "full", rounds=6).rows
    assert [row.outcome for row in rows] == ["measured", outcome, "measured"]
    assert message in rows[1].why
    assert rows[1].step is None
    assert rows[2].ratio.lower is not None


def test_a_plain_step_that_fails_is_an_error():
    build = ROWS.build

    def built():
        model = build()
        blow_up(model, None)
        return model

    with pytest.raises(WorkloadError, match=r"squares, batch size 4: a plain step: .* not finite"):
        figures(Case(replace(ROWS, build=built)))


def test_a_lever_that_skips_work_is_found_by_its_loss():
    rows = figures(Case(ROWS), changed("fast", skip_a_block), "full").rows
    assert "changes the training result" in rows[1].notes[0]
    assert rows[1].notes[0].startswith(f"loss {rows[1].loss:.5g}, plain {rows[0].loss:.5g}")
    assert rows[2].notes == []
    assert "changes nothing here" in figures(Case(ROWS), "none").rows[1].notes[0]


def test_unreliable_times_get_a_note():
    assert figures(Case(ROWS), "full", rounds=6, clock=ticking(1.0)).notes == []
    spread = figures(Case(ROWS), rounds=6, clock=ticking(1.0, 2.0, 3.0))
    assert any("the steps of plain spread over more than 25%" in one for one in spread.notes)


# Another model.


def test_two_models_are_compared_on_the_same_batch():
    wider = replace(transformer(depth=2, dim=64, length=16, vocabulary=160), name="wider")
    plain, other = figures(Case(SMALL), against=[wider]).rows
    assert other.name == "wider"
    assert other.num_terms == plain.num_terms
    assert other.model_flops == other.executed_flops > plain.model_flops
    # Its loss is not compared, but whether it does the same work.
    share = other.executed_flops / plain.executed_flops
    assert other.notes == [f"executes {share:.0%} of the FLOPs of the plain step"]


@pytest.mark.cuda
def test_on_cuda_bytes_come_from_the_allocator_and_the_clock_waits_for_the_device():
    plain, full = measure_levers(Case(SMALL, device=CUDA), [find_lever("full")], rounds=6).rows
    assert full.peak_bytes < plain.peak_bytes
    assert plain.step.median > 0


# Levers.


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
    own = step_with("none", replace(SMALL, loss=torch.autocast("cpu", torch.bfloat16)(SMALL.loss)))
    own.count_flops()
    assert own.dtype_of_products == torch.bfloat16
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
