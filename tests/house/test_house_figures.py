"""Count the figures of an edition correctly on a module with known figures.

Run: `python -m pytest tests/house/test_house_figures.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import measure
import pytest
from small_tree import write_small_tree
from tree import PACKAGE

SOURCE = '''"""Hold
two lines.
"""

# A comment.
TEXT = """one

two"""  # not on its own line


def public(values):
    """Return it."""
    return [_once(value) for value in values] + _twice() + _twice()


def _once(value):
    return {value: value for _ in "ab"}


def _twice():
    return []


def _long():
    x = 1
    x = 2
    x = 3
    return x


_long()
'''


@pytest.fixture
def tree_of_one(tmp_path):
    path = tmp_path / PACKAGE / "one.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_lines_are_counted_by_kind(tree_of_one):
    assert measure.measure_size(tree_of_one) == {
        "modules": 1,
        "files": 1,
        "all_lines": 31,
        "lines_with_text": 19,
        "code_lines": 15,
        "median_lines": 31,
        "longest_lines": 31,
    }


def test_writing_is_counted(tree_of_one):
    found = measure.measure_writing(tree_of_one)
    assert found["comprehensions_per_1000_lines"] == round(2 / 0.019, 1)
    assert found["own_line_comments_per_1000_lines"] == round(1 / 0.019, 1)
    assert found["short_private_functions_with_one_caller"] == 1  # not _twice, not _long
    assert (found["functions"], found["median_function_lines"]) == (4, 2.5)
    broken = {"count": 2, "first_lines_that_break_the_rule": 1}
    assert found["docstrings"]["package"] == broken


def test_names_used_twice_are_counted(tree_of_one):
    two = "class A: ...\nclass B: ...\ndef public(): ...\ndef _once(): ...\n"
    (tree_of_one / PACKAGE / "two.py").write_text(two, encoding="utf-8")
    (tree_of_one / PACKAGE / "three.py").write_text(two, encoding="utf-8")
    found = measure.measure_writing(tree_of_one)
    assert found["class_names_used_twice"] == 2
    assert found["public_function_names_used_twice"] == 1


SCAFFOLD = """
import pathlib, sys

command, name, *_ = sys.argv[1:]
if name == "sac":
    sys.exit("no such technique")
pathlib.Path("made/deep").mkdir(parents=True)
pathlib.Path("made/deep/x.py").write_text("x = 1\\n" * 5)
pathlib.Path("made/wheel").write_bytes(b"\\xff\\n")
pathlib.Path("README.md").write_text("two\\nlines\\n")
"""


def test_written_files_are_counted_and_a_refusal_is_kept(tmp_path):
    write_small_tree(tmp_path)
    (tmp_path / "scripts/scaffold.py").write_text(SCAFFOLD, encoding="utf-8")
    written = {"files": 3, "lines": 7, "python_files": 1, "python_lines": 5}
    assert measure._new(tmp_path) == written
    assert measure._add(tmp_path, "grad-accum") == written
    assert measure._add(tmp_path, "sac") == {"refused": "no such technique"}


def test_the_table_is_printed_and_written(tmp_path):
    write_small_tree(tmp_path / "tree")
    script = Path(measure.__file__)
    out = tmp_path / "figures.json"
    options = ["--without", "calls", "--without", "copies", "--json", str(out)]
    command = [sys.executable, str(script), str(tmp_path / "tree"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert f"size.modules {figures['size']['modules']}" in " ".join(done.stdout.split())
    assert set(figures) > {"command", "date", "device", "torch", "python", "size", "violations"}
    assert not any(figures["violations"].values())


def test_a_record_keeps_the_earlier_figures_beside_the_new_ones(tmp_path):
    write_small_tree(tmp_path / "tree")
    earlier, record = tmp_path / "earlier.json", tmp_path / "record.json"
    earlier.write_text('{"commit": "abc", "size": {"modules": 240}}')
    options = ["--without", "calls", "--without", "copies", "--record", str(record)]
    command = [sys.executable, measure.__file__, str(tmp_path / "tree"), *options]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, "--before" in refused.stderr) == (2, True)

    for more in (["--before", str(earlier)], []):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        found = json.loads(record.read_text(encoding="utf-8"))
        assert found["before"] == {"commit": "abc", "size": {"modules": 240}}
        assert f"size.modules 240 {found['after']['size']['modules']}" in " ".join(
            done.stdout.split()
        )
        assert {"command", "date", "device", "torch", "python"} < set(found)


def test_a_root_without_a_package_is_refused(tmp_path):
    command = [sys.executable, measure.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "has no package" in done.stderr) == (2, True)
