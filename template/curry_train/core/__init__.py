"""Code that two rooms or more need; it imports torch and the standard library only.

Every package hands its public names on with `lazy_names`: they are imported on first use (PEP 562),
so that importing a package stays cheap. Proof: `python -m pytest tests/core/test_lazy_names.py`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    `names` lists the public names of each module.
    """
    home = {name: module for module, public in names.items() for name in public}

    def getattr_(name: str) -> Any:
        module = home.get(name, name if name in names else None)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded = importlib.import_module(f"{package}.{module}")
        return loaded if name == module else getattr(loaded, name)

    public = sorted(home)
    return getattr_, lambda: public, public
