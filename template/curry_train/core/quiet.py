"""Temporarily silence loggers.

Proof: `python -m pytest tests/test_quiet.py`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unheard(*names: str) -> Iterator[None]:
    """Disable these loggers inside the context."""
    loggers = [logging.getLogger(name) for name in names]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled
