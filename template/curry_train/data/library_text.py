"""Training text without a download: the sources of Python's standard library, as bytes.

Proof: `python -m pytest tests/test_data_tokens.py`.
"""

import sysconfig
from pathlib import Path

import numpy
from numpy.typing import NDArray


def read_library_text(folder: Path | None = None) -> NDArray[numpy.uint8]:
    """Read the top-level modules of the standard library, joined in the order of their names.

    Another version of Python has different text.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise RuntimeError(
            f"{folder} holds no Python sources to train on (this interpreter has its library in an "
            "archive, or without sources): name a token file with data.source=tokens data.path=FILE"
        )
    return numpy.frombuffer(text, dtype=numpy.uint8)
