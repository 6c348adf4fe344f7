"""What holds for all tests: what takes long and shows nothing is done once.

Ranks are forked from a python that has imported torch. And the heap that the libraries fill is not gone through again:
measurements collect garbage first, and with all libraries loaded each collection takes a third of a second. What is
there when a test starts, with what the tests before it imported, compiled and kept, is not looked at in it.

And a test starts commands as a user does: what `make test` tells its own commands is not there for theirs.
Proof: `python -m pytest tests/core/test_measure.py tests/house/test_warm_python.py`.
"""

import gc
import os

import pytest

for said_by_make in (
    "PYTHON",
    "MAKEFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
    "MFLAGS",
    "PYTEST_ADDOPTS",
):
    os.environ.pop(said_by_make, None)


@pytest.fixture(scope="session", autouse=True)
def ranks_have_imported_torch() -> None:
    from warm_python import WarmPython

    from curry_train.gates import fixtures as ranks

    ranks.PYTHON_EXECUTABLE = WarmPython()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """All test modules are imported by now; some tests import more, such as what compiles."""
    gc.collect()
    gc.freeze()
