"""Silence loggers for a while. `python -m pytest tests/core/test_quiet.py`."""

import logging

import pytest

from curry_train.core.wording import unheard


def test_only_the_named_loggers_are_silent_and_only_inside_the_context(caplog):
    first, second = logging.getLogger("quiet.first"), logging.getLogger("quiet.second")

    def fails():
        with unheard("quiet.first"):
            first.warning("not heard")
            second.warning("heard")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    first.warning("heard again")
    assert [record.message for record in caplog.records] == ["heard", "heard again"]
