"""From what a user types to a `Workload`: a built-in name, or their own `pkg.module:factory` or `file.py:factory`.

Proof: `python -m pytest tests/test_workload.py`.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .adapt import workload_parts
from .builtin import BUILTIN
from .key_cache import without_cache
from .nearest import did_you_mean
from .raised import describe_raised
from .untouched import seeded
from .workload import Workload, WorkloadError


def load_workload(spec: str) -> Workload:
    """A built-in workload by name, or the user's own by `pkg.module:factory` or `folder/file.py:factory`.

    The factory takes no arguments and returns an `nn.Module`, a `(module, batch)` pair or a `Workload`; modules in the
    current directory are found.
    """
    if spec in BUILTIN:
        return replace(BUILTIN[spec](), spec=spec)
    if ":" not in spec:
        others = f"use one of {', '.join(BUILTIN)}, pkg.module:factory or file.py:factory"
        raise WorkloadError(
            f"no workload is called {spec!r}; {did_you_mean(spec, BUILTIN, otherwise=others)}"
        )
    factory = _import_factory(spec)
    with seeded(0):  # an example batch is drawn here, and every process has to draw the same
        made = _call(factory, spec)
        if isinstance(made, Workload):
            return replace(made, spec=spec, build=lambda: without_cache(made.build()))
        try:
            parts = workload_parts(made)
        except ValueError as error:
            raise WorkloadError(f"{spec}: {error}") from None

    def build() -> nn.Module:
        again = _call(factory, spec)
        return without_cache(again if isinstance(again, nn.Module) else again[0])

    name = spec.rsplit(":", 1)[1]
    workload = Workload(
        name, build, parts.batch, parts.loss, parts.count, parts.mask, spec, parts.own_batch
    )
    _try_once(workload)
    return workload


def load_object(spec: str) -> Any:
    """What the user's `pkg.module:factory` returns, such as a dataset."""
    return _call(_import_factory(spec), spec)


def _import_factory(spec: str) -> Callable[[], Any]:
    named, _, attribute = spec.rpartition(":")
    file = Path(named).expanduser().resolve() if named.endswith(".py") else None
    folder, module_name = (Path.cwd(), named) if file is None else _located(file, spec)
    if (here := str(folder)) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"{spec}: can't import {error.name}. Run from the folder that holds it, or give its folder/file.py:factory"
        ) from error
    except Exception as error:  # as in `_call`
        raise WorkloadError(
            f"{spec}: the import of {module_name} raised {describe_raised(error)}"
        ) from error
    if file is not None and file != (loaded := Path(str(module.__file__)).resolve()):
        raise WorkloadError(
            f"{spec}: Python knows another {module_name} already, {loaded}: give the file another name"
        )
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = sorted(
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        )
        raise WorkloadError(
            f"{spec}: {module_name} has no callable {attribute!r}; it has {', '.join(found) or 'none'}"
        )
    return factory


def _located(file: Path, spec: str) -> tuple[Path, str]:
    """The folder from which a file can be imported, and its name there; packages have an `__init__.py`."""
    if not file.is_file():
        raise WorkloadError(f"{spec}: there is no file {file}")
    folder, names = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    return folder, ".".join(names)


def _call(factory: Callable[[], Any], spec: str) -> Any:
    try:
        return factory()
    except (
        Exception
    ) as error:  # the user's own code may raise anything: it is told as theirs, its traceback kept
        raise WorkloadError(
            f"{spec}: the factory raised {describe_raised(error, called=factory)}"
        ) from error


def _try_once(workload: Workload) -> None:
    """One forward and backward, so that a batch that does not fit the model is said here and in the user's words."""
    with seeded(0):
        module, batch = workload.build(), workload.batch(2)
        try:
            loss = workload.loss(module, batch)
        except Exception as error:  # as above
            raise WorkloadError(
                f"{workload.spec}: a forward on the batch raised {describe_raised(error)}. "
                "Of (module, batch) the batch is what forward takes, a tuple as its arguments; where the loss needs "
                "targets beside them, return a Workload(name, build, batch, loss)"
            ) from error
    if not loss.requires_grad:
        raise WorkloadError(f"{workload.spec}: the loss does not depend on any trainable parameter")
