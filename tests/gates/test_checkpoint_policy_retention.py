"""Tests of the gates of retention, fallback and coinciding saves: planted faults fail.

tests/gates/test_checkpoint_policy.py tests that they hold on the right implementation.

python -m pytest tests/gates/test_checkpoint_policy_retention.py
"""

import pytest
from saboteurs import faults

from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

CASE = Case(transformer(dropout=0.1, depth=1))


# Saboteurs of retention: text order, NaN as best, a stale higher step, NaN saved as latest,
# nothing deleted.


# Saboteurs of a resume: no verification, damage unreported, stop at the first error, the oldest.


# Saboteurs of two kinds of saves at one step: both written, only the shorter, none, no best.


@pytest.mark.parametrize("saboteur", faults("faulty_retention"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
