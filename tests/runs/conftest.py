"""A store that the tests of this folder write to.

Proof: `python -m pytest tests/runs`.
"""

import pytest

from curry_train.runs import Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path) as opened:
        yield opened
