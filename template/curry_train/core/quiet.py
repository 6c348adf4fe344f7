"""What is said on the way where the end says it better: loggers that are silent for a while.

Proof: `python -m pytest tests/test_quiet.py`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unheard(*names: str) -> Iterator[None]:
    """These loggers say nothing inside."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
