"""A store that the tests of this folder write to.

Proof: `python -m pytest tests/runs`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from curry_train.runs import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path) as opened:
        yield opened
