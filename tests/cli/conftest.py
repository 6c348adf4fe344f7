"""A small bundle to copy from, and a project made from it.

Proof: `python -m pytest tests/cli`.
"""

from pathlib import Path

import pytest
from scaffold_case import make_bundle, scaffold

from curry_train.cli.ownership import Bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def project(bundle: Bundle, tmp_path: Path) -> Path:
    scaffold(bundle, "new", "run", cwd=tmp_path)
    return tmp_path / "run"
