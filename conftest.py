"""What holds for all tests: the heap that the libraries fill is not gone through again at each measurement.

Measurements collect garbage first, and with all libraries loaded each collection takes a quarter of a second.
Proof: `python -m pytest tests/test_measure.py`.
"""

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """All test modules, and so the libraries that they use, are imported by now."""
    gc.collect()
    gc.freeze()
