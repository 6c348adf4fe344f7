"""An own folder for each test, and a store that writes to it.

Proof: `python -m pytest tests/runs`.
"""

import pytest

from curry_train.runs import Store


@pytest.fixture(autouse=True)
def in_an_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path) as opened:
        yield opened
