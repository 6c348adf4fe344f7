"""A script without its requirements prints one line and exits with 2, without a traceback.

Run: `python -m pytest tests/cli/test_environment.py`.
"""

import sys
from pathlib import Path

import pytest

import environment

from ..command_runs import finished
from ..tree import ROOT

SCRIPT = '''# /// script
# requires-python = "{python}"
# dependencies = [{dependencies}]
# ///
"""A script."""

import environment

environment.require(__file__)

import curry_train

print(curry_train.__name__)
'''


def run(*, python=">=3.11", dependencies="", text=None, status=0):
    script = Path("measure.py")
    script.write_text(text or SCRIPT.format(python=python, dependencies=dependencies))
    return finished(sys.executable, script, status=status, PYTHONPATH=f"{ROOT}/scripts")


def test_with_all_requirements_the_script_runs_and_can_import_the_package():
    done = run(dependencies='"click>=8.1", "torch>=2.11"')
    assert (done.stdout, done.stderr) == ("curry_train\n", "")


def test_missing_distributions_end_in_one_line_with_the_install_command():
    done = run(dependencies='"no-such-one>=8.1", "click>=8.1", "no-such-two>=13"', status=2)
    expected = (
        "measure.py needs no-such-one, no-such-two: "
        "pip install 'no-such-one>=8.1' 'no-such-two>=13'\n"
    )
    assert (done.stdout, done.stderr) == ("", expected)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        # As text, "2.9" sorts after "2.11".
        ("2.9.1+cu124", "torch>=2.11 (found 2.9.1+cu124): pip install 'torch>=2.11'"),
        ("2.13.0+cpu", None),
        ("2.14.0a0", None),
    ],
)
def test_a_distribution_that_is_too_old_is_named_with_the_version_found(
    monkeypatch, version, expected
):
    monkeypatch.setattr(environment.metadata, "version", lambda name: version)
    assert environment.missing([("torch", "2.11")]) == expected


def test_a_python_that_does_not_fit_ends_in_one_line():
    done = run(python=">=9.1", status=2)
    running = ".".join(map(str, sys.version_info[:3]))
    expected = (
        f"measure.py needs Python >=9.1, and {sys.executable} is {running}: "
        "run it with a Python that fits\n"
    )
    assert (done.stdout, done.stderr) == ("", expected)


def test_a_script_without_a_block_gets_a_message_to_write_one():
    done = run(text="import environment\nenvironment.require(__file__)\n", status=1)
    assert done.stderr.splitlines()[-1] == (
        "ValueError: measure.py has no PEP 723 block: open it with '# /// script', "
        "its requirements, and '# ///'"
    )


def test_a_bound_of_another_kind_is_refused_not_ignored():
    assert "ValueError: invalid literal" in run(dependencies='"click!=8.1"', status=1).stderr
