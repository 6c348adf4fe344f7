"""Public names, modules, lines and running files that a technique brings along.

python -m pytest tests/primitives/test_closures.py
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import curry_train
from curry_train.primitives.offload import offload_blocks
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.regions import apply_regions
from curry_train.primitives.sac import apply_sac

PACKAGE = Path(curry_train.__path__[0])
# The most lines of a technique with all that it imports. Regions are longer than others: recipes
# with the report of what they do not reach.
MOST_LINES = {
    **dict.fromkeys(
        ("recompute", "sac", "offload", "snn_timesteps", "chunked_loss", "grad_flow"), 1500
    ),
    "regions": 1550,
}
PACKAGES = [
    found.name
    for found in pkgutil.walk_packages(curry_train.__path__, "curry_train.")
    if found.ispkg
]


def names_hidden_by_modules(package):
    """Return public names that `from package import name` may resolve to a submodule."""
    stems = {found.name for found in pkgutil.iter_modules(package.__path__)}
    public = getattr(package, "__all__", None) or [
        name for name, value in vars(package).items() if not inspect.ismodule(value)
    ]
    return sorted(stems & set(public))


def test_packages_are_found():
    assert len(PACKAGES) >= 8


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_of_a_package_is_the_name_of_one_of_its_modules(name):
    """Check that none is hidden: `import_module` sets a module as attribute of the package."""
    assert names_hidden_by_modules(importlib.import_module(name)) == []


def test_a_module_named_like_a_public_function_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "planted_room"
    folder.mkdir()
    (folder / "__init__.py").write_text('__all__ = ["memory_budget", "other"]\n')
    (folder / "memory_budget.py").write_text("def memory_budget():\n    return 1\n")
    (folder / "sound.py").write_text("def other():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    planted = importlib.import_module("planted_room")
    assert names_hidden_by_modules(planted) == ["memory_budget"]


def test_the_memory_budget_of_the_package_is_the_function():
    importlib.import_module("curry_train.primitives.compile_budget")
    from curry_train.primitives import memory_budget

    assert inspect.isfunction(memory_budget)


# The modules that are copied with a technique: its own and those that they import.


def imported_modules(path):
    """Return the modules of the package that a module imports, in functions too."""
    tree = ast.parse((PACKAGE / path).read_text())
    for_types_only = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for_types_only |= set(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or node in for_types_only:
            continue
        folder = (PACKAGE / path).parents[node.level - 1]
        base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
        if base.with_suffix(".py").is_file():
            found.add(base.with_suffix(".py").relative_to(PACKAGE).as_posix())
            continue
        for alias in node.names:
            candidates = (
                base / f"{alias.name}.py",
                base / alias.name / "__init__.py",
                base / "__init__.py",
            )
            home = next(path for path in candidates if path.is_file())
            found.add(home.relative_to(PACKAGE).as_posix())
    return found


def closure_of(path):
    """Return a module and all modules of the package that it needs."""
    found = []
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.append(path)
            waiting += sorted(imported_modules(path))
    return found


def num_lines(paths):
    return sum(len((PACKAGE / path).read_text().splitlines()) for path in paths)


def test_accumulation_is_one_module():
    assert closure_of("primitives/grad_accum.py") == ["primitives/grad_accum.py"]


@pytest.mark.parametrize("technique", MOST_LINES)
def test_a_technique_is_at_most_four_modules_of_few_lines(technique):
    modules = closure_of(f"primitives/{technique}.py")
    assert len(modules) <= 4, modules
    assert num_lines(modules) <= MOST_LINES[technique], {
        path: num_lines([path]) for path in modules
    }


def names_of_the_standard_library(paths):
    """Return the modules that would hide one of the standard library in a user's folder."""
    return sorted({Path(path).stem for path in paths} & set(sys.stdlib_module_names))


@pytest.mark.parametrize("technique", ["grad_accum", *MOST_LINES])
def test_a_copied_module_hides_none_of_the_standard_library(technique):
    assert names_of_the_standard_library(closure_of(f"primitives/{technique}.py")) == []
    assert names_of_the_standard_library(["core/random.py", "core/blocks.py"]) == ["random"]


def test_no_technique_imports_the_tools():
    rooms = {
        path.split("/")[0]
        for module in (PACKAGE / "primitives").glob("*.py")
        for path in closure_of(f"primitives/{module.name}")
    }
    assert rooms == {"core", "primitives"}


def test_an_import_inside_a_function_counts_and_one_for_types_does_not(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    for name, text in {
        "a": "def act():\n    from .b import act\n",
        "b": "if TYPE_CHECKING:\n    from .c import Kind\n",
        "c": "",
    }.items():
        (tmp_path / "room" / f"{name}.py").write_text(text)
    assert closure_of("room/a.py") == ["room/a.py", "room/b.py"]


# The files of the package that execute.


def files_that_run(act):
    """Return the files of the package whose functions are called while `act` runs."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    threading.setprofile(note)  # backward may run in a thread of its own
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.parametrize(
    "apply",
    [apply_sac, recompute_blocks, apply_regions, offload_blocks],
    ids=lambda act: act.__name__,
)
def test_applying_a_technique_and_a_training_step_run_at_most_six_files(apply):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))

    def act():
        apply(model)
        model(torch.randn(4, 8)).sum().backward()

    files = files_that_run(act)
    assert 2 <= len(files) <= 6, files
    assert f"primitives/{apply.__module__.rpartition('.')[2]}.py" in files


def test_files_that_execute_are_counted_and_imported_ones_are_not():
    from curry_train.core.wording import format_bytes

    assert files_that_run(lambda: format_bytes(1)) == {"core/wording.py"}
    assert files_that_run(lambda: None) == set()
