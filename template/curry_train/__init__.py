"""PyTorch training in less memory, with gates that check every technique.

`curry-train validate` measures every claim.
"""

import importlib.machinery
import re
import warnings
from pathlib import Path

__version__ = "0.2.0"
TESTED_TORCH = ("2.11", "2.13", "2.14")


def warn_of_untested_torch() -> None:
    """Warn of a torch that the tests never ran with; importing it to ask takes seconds."""
    found = importlib.machinery.PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        return
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '((\d+\.\d+).*)'", text, re.MULTILINE)
    if version is not None and version[2] not in TESTED_TORCH:
        warnings.warn(
            f"curry-train is tested with torch {', '.join(TESTED_TORCH)}, and this is "
            f"{version[1]}: run `curry-train validate` on your model before you rely on it",
            stacklevel=3,
        )


warn_of_untested_torch()
