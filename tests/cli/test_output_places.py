"""Commands end in one line where output can't be written, or the user's code ends Python.

python -m pytest tests/cli/test_output_places.py
"""

import sys
from pathlib import Path

import pytest

from curry_train.cli.screen import screen_command
from curry_train.core.wording import parse_bytes

from ..command_runs import finished, flat, ran

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "curry_train"]
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@needs_full_device
def test_a_full_standard_output_is_one_line():
    done = finished("sh", "-c", '"$@" > /dev/full', "sh", *COMMAND, "list", status=2)
    assert done.stderr.startswith("Error: No space left on device (")


def test_a_reader_that_has_ended_gets_no_traceback():
    waits = 'sleep 0.2; "$@"; echo "status $?" >&2'
    done = finished("sh", "-c", f"({waits}) | true", "sh", *COMMAND, "list")
    assert done.stderr == "status 1\n"


@needs_full_device
def test_results_that_do_not_fit_the_disk_are_one_line():
    done = ran("memory --model mlp --json /dev/full", status=2)
    assert done.stderr.splitlines()[-1] == "Error: /dev/full: No space left on device"
    assert done.stdout


def ended_by(work):
    """Return the error that a command prints whose work fails."""

    @screen_command("fails", example="")
    def fails():
        work()

    return flat(ran(command=fails, status=2).stderr)


def test_an_error_of_a_library_without_a_file_keeps_its_message():
    def offline():
        raise OSError("can't connect to the hub")

    assert ended_by(offline).startswith("Error: can't connect to the hub (test_output_places.py:")


def test_an_internal_error_is_a_line_with_its_place():
    error = ended_by(lambda: list(zip("ab", "c", strict=True)))
    assert error.startswith("Error: ValueError: zip() argument 2 is shorter than argument 1 (test_")
    assert ended_by(lambda: parse_bytes("much")).endswith("at least 1 byte")


def test_an_interrupt_is_no_error_of_the_factory():
    Path("stopped.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    assert ran("memory --model stopped.py:build", status=130).stderr.endswith("interrupted\n")
