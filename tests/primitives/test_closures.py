"""What importing and owning a technique brings along: public names, modules, lines, files that run.

python -m pytest tests/primitives/test_closures.py
"""

import importlib
import inspect
import pkgutil

import pytest

import curry_train

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


def test_there_are_packages_to_look_at():
    assert len(PACKAGES) >= 8


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_of_a_package_is_the_name_of_one_of_its_modules(name):
    """The module would win: `import_module` sets it as an attribute of the package."""
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
