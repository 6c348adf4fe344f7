"""The forked `python` runs a file, a module and a text as a new interpreter does.

python -m pytest tests/core/test_warm_python.py
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from warm_python import warm_python

SEES = (
    "import json, os, sys; "
    "print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get('MINE'), __name__, "
    "'curry_train' in sys.modules])); "
    "print('error', file=sys.stderr); print(sys.stdin.read(), end=''); import beside; beside.say()"
)


@pytest.fixture
def folder(tmp_path):
    """Write a program in three forms, and a module beside it that it imports."""
    (tmp_path / "program.py").write_text(SEES.replace("; ", "\n"))
    (tmp_path / "beside.py").write_text("def say(): print('beside')\n")
    return tmp_path


@pytest.mark.parametrize(
    "how", [["program.py"], ["-m", "program"], ["-c", SEES]], ids=lambda how: how[0]
)
def test_its_arguments_environment_and_output_are_those_of_a_new_interpreter(folder, how):
    options = dict(
        cwd=folder, env=os.environ | {"MINE": "1"}, input="in\n", capture_output=True, text=True
    )
    warm, new = (
        subprocess.run([python, *how, "a", "--b"], **options)
        for python in (warm_python(), sys.executable)
    )
    assert (warm.returncode, warm.stdout, warm.stderr) == (new.returncode, new.stdout, new.stderr)
    assert json.loads(warm.stdout.splitlines()[0]) == [
        ["a", "--b"],
        str(folder),
        "1",
        "__main__",
        False,
    ]
    assert warm.stdout.splitlines()[1:] == ["in", "beside"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'end')", 0),
    ],
)
def test_it_ends_as_a_new_interpreter_does(text, status):
    warm, new = (
        subprocess.run([python, "-c", text], capture_output=True, text=True)
        for python in (warm_python(), sys.executable)
    )
    assert warm.returncode == new.returncode == status
    assert warm.stdout == new.stdout
    assert warm.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
