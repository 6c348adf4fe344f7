"""Load a workload from the command line: a name, package.module:factory or file.py:factory.

The factory is given as `pkg.module:factory` or `file.py:factory`.

Proof: `python -m pytest tests/workloads/test_workload.py`.
"""

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..core.random import seeded
from ..core.wording import did_you_mean
from .models import BUILTIN_WORKLOADS
from .workload import Workload, WorkloadError, without_cache, workload_parts

# Describe an error from the user's code, with the line of their code that it came from.

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
STANDARD_LIBRARY_FOLDER = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}


def describe_raised(error: Exception, *, called: Callable[..., Any] | None = None) -> str:
    """Format an error as `TypeError: its message (model.py:12)`.

    `called` is the user's function that was called, for an error in the call itself, before any
    line of the function ran.
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = _place(error, called)
    return f"{type(error).__name__}: {message}" + (f" ({place})" if place else "")


def _place(error: Exception, called: Callable[..., Any] | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return _short(error.filename, error.lineno)
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user_lines = [line for line in lines if _is_theirs(line[0])]
    if user_lines:
        return _short(*user_lines[-1])

    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if code is None:
        return ""
    in_called_file = [line for line in lines if line[0] == code.co_filename]
    if in_called_file:
        return _short(*in_called_file[-1])
    return _short(code.co_filename, code.co_firstlineno)


def _is_theirs(file: str) -> bool:
    path = Path(file).resolve()
    if (
        file.startswith("<")
        or path.is_relative_to(PACKAGE_FOLDER)
        or path.is_relative_to(STANDARD_LIBRARY_FOLDER)
    ):
        return False
    return INSTALLED_FOLDERS.isdisjoint(path.parts)


def _short(file: str, line: int | None) -> str:
    path = Path(file).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


# Load a `Workload` from a built-in name or from the user's own factory.


def load_workload(spec: str) -> Workload:
    """Load a built-in workload by name, or the user's own from its factory.

    A factory is given as `pkg.module:factory` or `folder/file.py:factory`; modules in the current
    directory are found. It takes no arguments and returns an `nn.Module`, a `(module, batch)` pair
    or a `Workload`.
    """
    if spec in BUILTIN_WORKLOADS:
        return replace(BUILTIN_WORKLOADS[spec](), spec=spec)
    if ":" not in spec:
        others = f"use one of {', '.join(BUILTIN_WORKLOADS)}, pkg.module:factory or file.py:factory"
        raise WorkloadError(
            f"no workload is called {spec!r}; "
            f"{did_you_mean(spec, BUILTIN_WORKLOADS, otherwise=others)}"
        )
    factory = import_callable(spec)

    # The factory may draw an example batch, which must be the same in every process.
    with seeded(0):
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
    """Return what the user's `pkg.module:factory` returns, such as a dataset."""
    return _call(import_callable(spec), spec)


def import_callable(spec: str) -> Callable[..., Any]:
    """Import `pkg.module:name` or `folder/file.py:name`; the name may be `Class.method`."""
    source, _, attribute = spec.rpartition(":")
    file = Path(source).expanduser().resolve() if source.endswith(".py") else None
    folder, module_name = (Path.cwd(), source) if file is None else _located(file, spec)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"{spec}: can't import {error.name}. Run from the folder that holds it, or give its "
            "folder/file.py:factory"
        ) from error
    except Exception as error:
        # The user's module may raise anything.
        raise WorkloadError(
            f"{spec}: the import of {module_name} raised {describe_raised(error)}"
        ) from error

    if file is not None and file != (loaded := Path(str(module.__file__)).resolve()):
        raise WorkloadError(
            f"{spec}: another module {module_name} is already imported, {loaded}: give the file "
            "another name"
        )

    factory: Any = module
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        found = sorted(
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        )
        raise WorkloadError(
            f"{spec}: {module_name} has no callable {attribute!r}; it has "
            f"{', '.join(found) or 'none'}"
        )
    return factory


def _located(file: Path, spec: str) -> tuple[Path, str]:
    """Return the folder from which a file can be imported, and its module name there.

    Folders with an `__init__.py` are packages, and part of the module name.
    """
    if not file.is_file():
        raise WorkloadError(f"{spec}: there is no file {file}")
    folder = file.parent
    names = [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def _call(factory: Callable[[], Any], spec: str) -> Any:
    try:
        return factory()
    except Exception as error:
        # The user's code may raise anything. The error names it as theirs and keeps its traceback.
        raise WorkloadError(
            f"{spec}: the factory raised {describe_raised(error, called=factory)}"
        ) from error


def _try_once(workload: Workload) -> None:
    """Run one forward, so that a batch that does not fit the model is reported here."""
    with seeded(0):
        module = workload.build()
        batch = workload.batch(2)
        try:
            loss = workload.loss(module, batch)
        except Exception as error:
            # The user's model may raise anything.
            raise WorkloadError(
                f"{workload.spec}: a forward on the batch raised {describe_raised(error)}. "
                "The batch of a (module, batch) pair is what forward takes, a tuple as its "
                "positional arguments; if the loss also needs targets, return a "
                "Workload(name, build, batch, loss)"
            ) from error
    if not loss.requires_grad:
        raise WorkloadError(f"{workload.spec}: the loss does not depend on any trainable parameter")
