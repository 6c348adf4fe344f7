"""Each public call executes few files, and one more file is counted.

Run: `python -m pytest tests/house/test_hops.py`.
"""

import shutil
import sys
from pathlib import Path

import entry_calls
import hops
import pytest
from hops import MOST_FILES, MOST_LOADED_MODULES, executed_files, loaded_modules, over_budget
from tree import PACKAGE, ROOT, all_modules, handed_on
from warm_python import warm_python

# A planted extra file, and the line that makes a public call execute it.
EXTRA_MODULE = '''"""An extra file that a call executes."""

GATES = ()


def pass_on(function):
    """Call `function` from this file."""
    return lambda *args, **kwargs: function(*args, **kwargs)
'''
DETOUR = "\nfrom .extra_hop import pass_on as _pass_on\n\n{name} = _pass_on({name})\n"
# The entry's package and its public name.
PUBLIC_CALLS = {
    "apply_sac_and_step": ("primitives", "apply_sac"),
    "save_and_resume": ("runs", "saving"),
    "plan_memory": ("plan", "plan"),
}
SMALL_MODEL = "mlp"


@pytest.fixture(autouse=True)
def start_quickly(monkeypatch):
    monkeypatch.setattr(hops, "CHILD_PYTHON", warm_python())


@pytest.fixture
def copy(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=ignored)
    return tmp_path


def plant(path: Path, addition: str) -> None:
    """Add to a module, and put the extra file beside it."""
    path.write_text(path.read_text(encoding="utf-8") + addition, encoding="utf-8")
    (path.parent / "extra_hop.py").write_text(EXTRA_MODULE, encoding="utf-8")


@pytest.mark.parametrize("entry", MOST_FILES)
def test_a_call_executes_few_files(entry):
    found = executed_files(ROOT, entry)
    assert len(found) >= 2, "nothing was counted: has the entry call moved?"
    message = over_budget(found, MOST_FILES[entry], what=f"files that execute in {entry}")
    assert message is None, message


@pytest.mark.parametrize("entry", MOST_FILES)
def test_one_more_executed_file_is_counted(copy, entry):
    package, name = PUBLIC_CALLS[entry]
    known = all_modules(copy)
    home = known[handed_on(known[package])[name]]
    plant(home.path, DETOUR.format(name=name))
    found = executed_files(copy, entry, model=SMALL_MODEL)
    assert f"{package}/extra_hop.py" in found
    assert over_budget(found, len(found) - 1, what=entry)


def test_a_gate_loads_few_modules():
    found = loaded_modules(ROOT)
    assert len(found) >= 10, "nothing was counted: has the command moved?"
    message = over_budget(found, MOST_LOADED_MODULES, what="modules that one gate loads")
    assert message is None, message


def test_one_more_module_that_a_gate_imports_is_counted(copy):
    plant(copy / PACKAGE / "gates/recompute.py", "\nfrom . import extra_hop as _extra_hop\n")
    found = loaded_modules(copy, gate="recompute/off")
    assert "curry_train.gates.extra_hop" in found
    assert over_budget(found, len(found) - 1, what="modules")


# What is counted, shown on a package of a few lines.

SOURCES = {
    "__init__": "",
    "first": "from . import second\n\n\ndef call():\n    second.call()\n",
    "second": "def call():\n    pass\n",
    "imported": "def call():\n    pass\n\n\ncall()\n\n\nclass Body:\n    x = 1\n",
    "loads": "def call():\n    from . import imported\n",
    "generated": "import dataclasses\n\n\n@dataclasses.dataclass\nclass Point:\n    x: int\n",
    "makes": "from .generated import Point\n\n\ndef call():\n    Point(1)\n",
    "thread": (
        "import threading\nfrom . import second\n\n\ndef call():\n"
        "    thread = threading.Thread(target=second.call)\n"
        "    thread.start()\n    thread.join()\n"
    ),
    "raises": "from . import second\n\n\ndef call():\n    second.call()\n    raise KeyError\n",
}


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    folder = tmp_path / f"small_{tmp_path.name}"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("first", ["first.py", "second.py"]),
        ("second", ["second.py"]),
        ("loads", ["loads.py"]),  # an import during the call counts as loading
        ("makes", ["makes.py"]),  # a generated `__init__` has no file
        ("thread", ["second.py", "thread.py"]),
    ],
)
def test_files_count_when_their_functions_are_called(small_package, module, expected):
    call = __import__(f"{small_package.name}.{module}", fromlist=["call"]).call
    assert entry_calls.executed_files(call, small_package) == expected


def test_a_call_that_fails_is_not_counted_as_a_short_one(small_package):
    call = __import__(f"{small_package.name}.raises", fromlist=["call"]).call
    with pytest.raises(KeyError):
        entry_calls.executed_files(call, small_package)


def test_a_command_that_fails_loads_too_little_to_be_counted(small_package, monkeypatch):
    (small_package / "__main__.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.setattr(entry_calls, "PACKAGE_NAME", small_package.name)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit, match="validate ended with 3"):
        entry_calls.loaded_modules(["validate"])


def test_a_failing_child_process_is_an_error():
    with pytest.raises(RuntimeError, match="KeyError: 'no_such_entry'"):
        executed_files(ROOT, "no_such_entry")
