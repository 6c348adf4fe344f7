"""A reader holds what it reads, and lets go however it ends. `python -m pytest tests/test_reading.py`."""

import subprocess
import sys

from curry_train.runs import SavedRun, Store
from curry_train.runs.files import LocalFiles
from curry_train.runs.reading import is_being_read, reading
from house import ROOT
from store_models import new_state

FOLDER = "rollback/step-00000001.dcp"
HOLD = """
import sys
from curry_train.runs.files import LocalFiles
from curry_train.runs.reading import reading
with reading(LocalFiles(sys.argv[1]), sys.argv[2]) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def saved(folder):
    with Store(folder) as store:
        store.save("rollback", 1, new_state())
    return LocalFiles(folder)


def test_held_by_several_and_free_after_the_last(tmp_path):
    files = saved(tmp_path)
    with reading(files, FOLDER), reading(files, FOLDER) as held:
        assert held
        assert is_being_read(files, FOLDER)
    assert not is_being_read(files, FOLDER)


def test_another_process_holds_it_until_it_is_killed(tmp_path):
    files = saved(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path), FOLDER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT / "template")}
    )
    with process:
        assert process.stdout.readline() == "True\n"
        assert is_being_read(files, FOLDER)
        process.kill()
    assert not is_being_read(files, FOLDER)


def test_what_is_not_there_or_elsewhere_is_not_held(tmp_path, request):
    files = saved(tmp_path)
    with reading(files, "rollback/step-00000002.dcp") as held:
        assert not held
    assert not is_being_read(files, "rollback/step-00000002.dcp")
    objects = SavedRun(f"memory://{request.node.name}").files
    with reading(objects, FOLDER) as held:
        assert not held
    assert not is_being_read(objects, FOLDER)


def test_nothing_is_written_by_a_reader(tmp_path):
    files = saved(tmp_path)
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with reading(files, FOLDER):
        assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
