"""Time an accumulated step, and several alternatives in turns.

Run with `python -m pytest tests/trainer/test_benchmark.py`.
"""

import torch

from curry_train import benchmark
from curry_train.benchmark import compare_steps, run_accumulated_step
from curry_train.primitives import GradientAccumulation

from ..core.test_timing import Clock
from ..store_models import linear_training
from ..toy_steps import square_sum


def test_an_accumulated_step_trains_once_and_returns_terms_and_time():
    model, optimizer = linear_training()
    data = list(torch.randn(6, 2, 2))
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    found = run_accumulated_step(model, optimizer, data, square_sum, count=len)
    assert (found.num_microbatches, found.result.num_terms, len(steps)) == (6, 12, 1)
    assert found.seconds > 0
    first = run_accumulated_step(
        model, optimizer, data, square_sum, accumulation=GradientAccumulation(steps=2)
    )
    assert first.num_microbatches == 2


def test_an_accumulated_step_waits_for_the_device_before_and_after(monkeypatch):
    """Wait twice: for the window's loss, and for the optimizer step launched after it."""
    waited = []
    monkeypatch.setattr(benchmark, "wait_for_device", lambda: waited.append(1))
    model, optimizer = linear_training()
    optimizer.register_step_post_hook(lambda *_: waited.append(0))
    run_accumulated_step(model, optimizer, [torch.randn(2, 2)], square_sum)
    assert waited == [1, 0, 1]


def test_steps_are_compared_with_the_first():
    clock, waited = Clock(), []
    steps = {
        "ours": lambda: clock.take(2.0),
        "theirs": lambda: clock.take(3.0),
        "again": lambda: clock.take(2.0),
    }
    found = compare_steps(steps, rounds=8, warmup=1, clock=clock, wait=lambda: waited.append(1))
    assert len(waited) == 2 * 3 * 9
    assert (
        "".join(f"{one}.\n" for one in found.values())
        == """\
ours: 2e+03 ms a step (10% and 90%: 2e+03, 2e+03).
theirs: 3e+03 ms a step (10% and 90%: 3e+03, 3e+03), 1.5 of the first (1.5 to 1.5): \
slower than the first.
again: 2e+03 ms a step (10% and 90%: 2e+03, 2e+03), 1 of the first (1 to 1): no difference seen.
"""
    )
    few = compare_steps(steps, rounds=2, warmup=0, clock=clock, wait=lambda: None)
    assert str(few["theirs"]).endswith("1.5 of the first, too few rounds to tell")


def test_timing_waits_for_cuda_if_it_was_used(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    compare_steps({"one": lambda: None}, rounds=1, warmup=0)
    assert len(waited) == 2
