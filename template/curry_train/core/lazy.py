"""Public names of a package, imported on first use (PEP 562).

`import curry_train.primitives` stays cheap. A project that holds only some techniques gets an error
that names the missing one when a name of it is used, instead of a failed import.

Proof: `python -m pytest tests/core/test_lazy.py`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class MissingTechnique(ImportError):
    """A public name whose technique was not added to this project."""


def lazy_names(
    package: str,
    names: Mapping[str, Sequence[str]],
    *,
    technique_of: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    `names` lists the public names of each module. A module belongs to the technique of the same
    name (`grad_accum` to `grad-accum`), unless `technique_of` gives another.
    """
    home = {name: module for module, public in names.items() for name in public}

    def getattr_(name: str) -> Any:
        module = home.get(name, name if name in names else None)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = f"{package}.{module}"
        if importlib.util.find_spec(path) is None:
            technique = (technique_of or {}).get(module, module.replace("_", "-"))
            folder = package.rsplit(".", 1)[0].replace(".", "/")
            raise MissingTechnique(
                f"{name} belongs to the technique {technique}, which this project does not have. "
                f"Add it with: scripts/scaffold.py add {technique} --into {folder}",
                name=path,
            )
        loaded = importlib.import_module(path)
        return loaded if name == module else getattr(loaded, name)

    public = sorted(home)
    return getattr_, lambda: public, public
