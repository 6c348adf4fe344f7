"""Run commands in this process, and read what they have printed.

Proof: `python -m pytest tests/cli`.
"""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

from click.testing import CliRunner

from curry_train.cli.main import main

from .tree import ROOT
from .warm_python import warm_python


def ran(*words, status=0, command=main):
    """Return the result of a command, which has to end with this status.

    A text is a part of the line as it is typed, and a path is a word.
    """
    line = " ".join(one if isinstance(one, str) else shlex.quote(str(one)) for one in words)
    ended = CliRunner().invoke(command, shlex.split(line))
    assert ended.exit_code == status, (ended.output, ended.exception)
    return ended


def results(*words, **options):
    """Return the results of a command, which has nothing else on its standard output."""
    return json.loads(ran(*words, "--json -", **options).stdout)


def results_of_tests(report):
    """Yield what a report of pytest has of each test: its file's name, its own, and messages."""
    for case in ElementTree.parse(report).iter("testcase"):
        results = {child.tag: child.get("message", "") for child in case}
        yield case.get("classname").rpartition("test_")[2], case.get("name"), results


def read_json(path):
    return json.loads(Path(path).read_text())


def require_narrow(text):
    """Fail unless each line fits a screen of 80 columns."""
    assert max(map(len, text.splitlines())) <= 80


def require_picture(path):
    assert Path(path).read_bytes().startswith(b"\x89PNG")


def flat(text):
    """Return a text without the places where its lines break."""
    return " ".join(text.split())


def call(*words, status=0):
    """Return the output of a command of `runs`, whose lines fit 80 columns."""
    output = ran("runs", *words, status=status).output
    # JSON has paths as long as they are, and so has a line of one path, or one that begins so.
    lines = [line for line in output.splitlines() if " " in line.removeprefix("Error: ")]
    is_short = [len(line) <= 80 or line.lstrip()[:1] == "/" for line in lines]
    assert "--json" in str(words) or all(is_short)
    return output


def program(words, cwd, environment):
    """Return the arguments that start a program with the package on its path."""
    paths = f"{ROOT}/template:{ROOT}/benchmarks:{ROOT}"
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment = os.environ | ours | environment
    return {"args": list(map(str, words)), "cwd": cwd, "env": environment, "text": True}


def finished(*words, cwd=None, status=0, **environment):
    """Run a program, which has to end with this status, or with any where it is None.

    The package is on its path, and `environment` has more variables.
    """
    ended = subprocess.run(**program(words, cwd, environment), capture_output=True)
    assert status in (None, ended.returncode), (words, ended.stdout, ended.stderr)
    return ended


def started(*words, cwd=None, **environment):
    """Start a program in a session of its own; its output is read when it has ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    return subprocess.Popen(**program(words, cwd, environment), **pipes)


def in_python(*words, **options):
    """Run a program in a python that has imported torch."""
    return finished(warm_python(), *words, **options)


def wait_for(condition):
    until = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
