"""`make` and `.ci/run` name the part that failed and end with a non-zero status.

The failures are an older Python, a failing part, and tests that did not run.
Run: `python -m pytest tests/house/test_make.py`.
"""

import os
import shutil

import pytest

from ..command_runs import finished
from ..tree import ROOT

# Replaces pytest: writes the report that PYTEST_ADDOPTS names.
REPORTING = """
report=${{PYTEST_ADDOPTS%% *}}
echo '<testsuite tests="{passed}" skipped="0" failures="0" errors="0"/>' \
    >"${{report#--junitxml=}}"
exit {status}
"""
ALL_RIGHT = REPORTING.format(passed=9999, status=0)


def test_an_older_python_is_refused_in_one_line(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1 && exit\n[ "$1" = -c ] && exit 1\n'
    )
    python.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = finished("make", "test", cwd=tmp_path, status=2, PATH=path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert lines == [
        "curry-train needs Python 3.11 or newer and python3 is Python 3.10.1: "
        "put a newer one first on PATH, "
        "or name one that has everything with make PYTHON=/path/to/python"
    ]
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("test", "static", "expected"),
    [
        pytest.param(ALL_RIGHT, "true", 0, id="all right"),
        pytest.param(REPORTING.format(passed=9999, status=1), "true", 1, id="a test fails"),
        pytest.param(ALL_RIGHT, "false", 1, id="another check fails"),
        pytest.param(REPORTING.format(passed=1, status=0), "true", 1, id="discovery lost tests"),
        pytest.param("true", "true", 1, id="pytest never ran"),
        pytest.param(f"read line || exit 1\n{ALL_RIGHT}", "true", 1, id="a question is asked"),
    ],
)
def test_ci_fails_when_any_of_its_commands_fails(tmp_path, test, static, expected):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "test.sh").write_text(test)
    (tmp_path / "Makefile").write_text(f"test:\n\t@sh test.sh\nstatic:\n\t@{static}\n")
    finished(".ci/run", cwd=tmp_path, status=expected)
