"""Every agent client loads every skill, by the commands that the README has.

`make clients` installs their packages, 1.4 GB; a client that is not installed is skipped.
Run: `python -m pytest tests/skills/test_clients.py`.
"""

import re
from unittest import mock

import pytest

from clients import CLIENTS, copy_bundle, loaded_skills, problems

from ..command_runs import read_json
from ..tree import ROOT
from .client_packages import Unavailable
from .pages import RECORD_KEYS

NAMES = {path.name for path in (ROOT / "skills").iterdir() if path.is_dir()}
README = (ROOT / "README.md").read_text()


def loaded_by(name, bundle):
    try:
        return loaded_skills(name, bundle)
    except Unavailable as error:
        pytest.skip(str(error))


# These have no option to leave folders of a repository out.
WHOLE_REPOSITORY = ("Gemini CLI", "Copilot CLI")


@pytest.mark.parametrize("name", CLIENTS)
def test_every_skill_is_loaded(name, tmp_path):
    bundle = copy_bundle(tmp_path / "a bundle")
    loaded, output, _ = loaded_by(name, bundle)
    assert problems(loaded, bundle) == [], output


@pytest.mark.parametrize("name", CLIENTS)
def test_the_readme_has_the_install_commands_that_were_run(name):
    source = re.compile(r"(?:https://github\.com/)?curry-train/curry-train")
    # A client that installs nothing.
    typed = mock.Mock(**{"say.return_value": ""})
    CLIENTS[name].install(typed, "SOURCE")
    row = re.search(
        rf"^\| {'others' if name == 'npx skills' else name} \|(.*\|\n(?:\| \|.*\|\n)*)",
        README,
        re.MULTILINE,
    )[1]
    prefix = "npx skills " if name == "npx skills" else f"{CLIENTS[name].executable} "
    shown = [source.sub("SOURCE", line) for line in re.findall(r"`([^`]+ [^`]+)`", row)]
    tried = [" ".join(call.args) for call in typed.say.call_args_list]
    assert len(shown) == len(tried)
    for line, words in zip(shown, tried, strict=True):
        assert f"{prefix}{words} ".startswith(f"{line} ")


def test_the_record_has_the_current_clients_and_skills():
    record = read_json(ROOT / "evidence/clients.json")
    assert set(record) >= RECORD_KEYS
    assert [(row["client"], row["package"]) for row in record["rows"]] == [
        (name, client.package) for name, client in CLIENTS.items()
    ], "run `make clients` again"
    assert all(set(row["loaded"]) == NAMES for row in record["rows"]), "run `make clients` again"


def test_clients_that_take_parts_of_a_repository_get_neither_tests_nor_answers():
    rows = read_json(ROOT / "evidence/clients.json")["rows"]
    parts = [row for row in rows if row["client"] not in WHOLE_REPOSITORY]
    assert len(parts) == 3
    assert all(0 < row["megabytes"] <= 3.2 for row in parts), parts
