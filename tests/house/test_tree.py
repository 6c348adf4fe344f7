"""Read imports, rooms and files of a tree as Python and the rules define them.

Run: `python -m pytest tests/house/test_tree.py`.
"""

import ast

import pytest
from small_tree import write_small_tree
from tree import (
    AT_IMPORT,
    FOR_TYPES,
    IN_FUNCTION,
    PACKAGE,
    all_modules,
    files,
    handed_on,
    import_graph,
    imports,
    modules,
    nodes,
    reached,
    relative,
)


@pytest.fixture
def small_tree(tmp_path):
    write_small_tree(tmp_path)
    return tmp_path


def imports_of(root, name, text):
    """Return name, time and target of what a module with this text imports."""
    path = root / PACKAGE / f"{name.replace('.', '/')}.py"
    path.write_text(text, encoding="utf-8")
    known = all_modules(root)
    return [(found.name, found.when, found.target) for found in imports(known[name], known)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.nn as nn", ("torch.nn", AT_IMPORT, None)),
        ("from ..core.blocks import x", ("core.blocks.x", AT_IMPORT, "core.blocks")),
        ("from ..core import blocks", ("core.blocks", AT_IMPORT, "core.blocks")),
        ("from .. import core", ("core", AT_IMPORT, "core")),
        ("from .. import __version__", ("__version__", AT_IMPORT, "")),
        ("from ..runs import saving", ("runs.saving", AT_IMPORT, "runs.attach")),
        ("import curry_train.loop", ("loop", AT_IMPORT, "loop")),
        ("def f():\n    from . import planner", ("plan.planner", IN_FUNCTION, "plan.planner")),
        ("class A:\n    from . import planner", ("plan.planner", AT_IMPORT, "plan.planner")),
        ("try:\n    import rich\nexcept ImportError: ...", ("rich", AT_IMPORT, None)),
        (
            "if TYPE_CHECKING:\n    from ..loop import x\nelse:\n    y = 1",
            ("loop.x", FOR_TYPES, "loop"),
        ),
        ("if x:\n    pass\nelse:\n    import rich", ("rich", AT_IMPORT, None)),
        ("def f():\n    importlib.import_module('..loop', 'x')", ("loop", IN_FUNCTION, "loop")),
        ("from importlib import import_module", ("importlib.import_module", AT_IMPORT, None)),
    ],
)
def test_an_import_is_read_with_its_time_and_its_target(small_tree, text, expected):
    assert imports_of(small_tree, "plan.new", text + "\n") == [expected]


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("", ""),
        ("core", "core"),
        ("core.blocks", "core"),
        ("loop", "trainer"),
        ("__main__", "cli"),
        ("cli.main", "cli"),
    ],
)
def test_each_module_belongs_to_a_room(small_tree, name, room):
    assert all_modules(small_tree)[name].room == room


def test_packages_are_not_modules_and_export_names(small_tree):
    known = all_modules(small_tree)
    assert set(known) - set(modules(small_tree)) == {
        *("", "core", "primitives", "runs", "plan", "gates", "cli")
    }
    assert handed_on(known["runs"]) == {"saving": "runs.attach"}


def test_reached_follows_imports_to_the_end(small_tree):
    assert reached(import_graph(small_tree), "cli.main") == {
        *("cli.main", "cli.plan", "plan.planner", "core.blocks")
    }


def test_files_omit_environments_caches_and_build_output(small_tree):
    for name in (".venv/x.py", "scripts/__pycache__/x.pyc", "x.egg-info/y", "build/x", ".git/x"):
        (small_tree / name).parent.mkdir(parents=True, exist_ok=True)
        (small_tree / name).touch()
    found = [relative(path, small_tree) for path in files(small_tree)]
    assert {".ci/run", "scripts/scaffold.py"} < set(found)
    assert not [name for name in found if name.endswith(("/x.py", "/x.pyc", "/y", "/x"))]


def test_a_file_that_was_changed_is_read_again(small_tree):
    path = small_tree / "scripts/new.py"
    path.write_text("class A: ...\n")
    (found,) = nodes(path, ast.ClassDef)
    path.write_text("class Longer: ...\n")
    (again,) = nodes(path, ast.ClassDef)
    assert (found.name, again.name) == ("A", "Longer")
