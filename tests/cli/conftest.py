"""An own folder and 80 columns for each test, and a small bundle with a project made from it.

Proof: `python -m pytest tests/cli`.
"""

import pytest

from .scaffold_case import make_bundle, scaffold


@pytest.fixture(autouse=True)
def in_an_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def project(bundle, tmp_path, monkeypatch):
    """Make a project, and go into it."""
    scaffold(bundle, "new run")
    monkeypatch.chdir("run")
    return tmp_path / "run"
