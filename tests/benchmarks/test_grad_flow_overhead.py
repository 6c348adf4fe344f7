"""The measured overhead of grad-flow counts the right operations on a small model.

python -m pytest tests/benchmarks/test_grad_flow_overhead.py
"""

from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case
from grad_flow_overhead import measure_costs

CASE = Case(transformer(depth=2, dim=32, length=16, vocabulary=64), batch_size=2)


def test_only_probed_steps_run_more_operations_than_the_plain_one():
    costs = measure_costs(CASE, repeats=1)
    assert costs["between"]["operations"] == costs["plain"]["operations"]
    assert costs["probed"]["operations"] > costs["plain"]["operations"]
