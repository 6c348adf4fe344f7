"""The manifests of agent clients, the version and the scripts' requirements follow pyproject.toml.

python -m pytest tests/house/test_manifests.py
"""

import re
import shutil

import pytest

import manifests

from ..tree import ROOT


def test_manifests_version_and_requirements_are_what_make_manifests_writes():
    differ = [
        name
        for name, text in manifests.contents(ROOT).items()
        if (ROOT / name).is_symlink() or (ROOT / name).read_text() != text
    ]
    assert not differ, "run make manifests"


def test_the_newest_heading_of_the_changelog_has_the_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f'"version": "{heading[1]}"' in (ROOT / "plugin.json").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (".claude-plugin/marketplace.json", '"version": "', '"version": "9'),
        ("template/curry_train/__init__.py", '__version__ = "', '__version__ = "9'),
        ("scripts/plan_memory.py", '"click>=', '"click>=9'),
        ("gemini-extension.json", "AGENTS.md", "CLAUDE.md"),
    ],
)
def test_a_difference_is_written_over(tmp_path, capsys, name, old, new):
    for file in ("pyproject.toml", *manifests.contents(ROOT)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    manifests.write(tmp_path)
    assert capsys.readouterr().out == f"wrote {name}\n"
    assert (tmp_path / name).read_text() == text
