"""The measured overhead of grad-flow counts the right operations on a small model.

python -m pytest tests/benchmarks/test_grad_flow_overhead.py
"""

from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case
from grad_flow_overhead import measure_costs, measure_counting

CASE = Case(transformer(depth=2, dim=32, length=16, vocabulary=64), batch_size=2)


def test_only_probed_steps_run_more_operations_than_the_plain_one():
    costs = measure_costs(CASE, repeats=1)
    assert costs["between"]["operations"] == costs["plain"]["operations"]
    assert costs["probed"]["operations"] > costs["plain"]["operations"]


def test_hooks_by_hand_count_twice_under_recompute():
    calls = measure_counting(CASE)
    assert calls["bare"]["by_hand"] == calls["bare"]["grad_flow"] == calls["recompute"]["grad_flow"]
    assert calls["recompute"]["by_hand"] > 1.5 * calls["bare"]["by_hand"]
