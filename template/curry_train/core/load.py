"""From what a user types to a `Workload`: a built-in name, or `pkg.module:factory` of their own.

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
from .untouched import seeded
from .workload import Workload, WorkloadError


def load_workload(spec: str) -> Workload:
    """A built-in workload by name, or the user's own by `pkg.module:factory`.

    The factory takes no arguments and returns an `nn.Module`, a `(module, batch)` pair or a `Workload`; modules in the
    current directory are found.
    """
    if spec in BUILTIN:
        return replace(BUILTIN[spec](), spec=spec)
    if ":" not in spec:
        raise WorkloadError(f"no workload is called {spec!r}: use one of {', '.join(BUILTIN)} or pkg.module:factory")
    factory = _import_factory(spec)
    with seeded(0):  # an example batch is drawn here, and every process has to draw the same
        made = _call(factory, spec)
        if isinstance(made, Workload):
            return replace(made, spec=spec)
        try:
            parts = workload_parts(made)
        except ValueError as error:
            raise WorkloadError(f"{spec}: {error}") from None

    def build() -> nn.Module:
        again = _call(factory, spec)
        return again if isinstance(again, nn.Module) else again[0]

    workload = Workload(spec.rsplit(":", 1)[1], build, parts.batch, parts.loss, parts.count, parts.mask, spec)
    _try_once(workload)
    return workload


def load_object(spec: str) -> Any:
    """What the user's `pkg.module:factory` returns, such as a dataset."""
    return _call(_import_factory(spec), spec)


def _import_factory(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"{spec}: can't import {error.name}. Run from the folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise WorkloadError(f"{spec}: {module_name} has no callable {attribute!r}; it has {', '.join(found) or 'none'}")
    return factory


def _call(factory: Callable[[], Any], spec: str) -> Any:
    try:
        return factory()
    except Exception as error:  # the user's own code may raise anything: it is told as theirs, its traceback kept
        raise WorkloadError(f"{spec}: the factory raised {type(error).__name__}: {error}") from error


def _try_once(workload: Workload) -> None:
    """One forward and backward, so that a batch that does not fit the model is said here and in the user's words."""
    with seeded(0):
        module, batch = workload.build(), workload.batch(2)
        try:
            loss = workload.loss(module, batch)
        except Exception as error:  # as above
            raise WorkloadError(
                f"{workload.spec}: a forward on the batch raised {type(error).__name__}: {error}. "
                "Return (module, batch) with a batch that the module takes, or a Workload"
            ) from error
    if not loss.requires_grad:
        raise WorkloadError(f"{workload.spec}: the loss does not depend on any trainable parameter")
