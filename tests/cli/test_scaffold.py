"""Tests of what is copied: import graph, rewritten imports, projects, budgets.

Run: `python -m pytest tests/cli/test_scaffold.py`.
"""

import ast
import re
import tomllib

from curry_train.cli.ownership import TECHNIQUES, project_files

from ..tree import ROOT
from .scaffold_case import REAL, write

SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))


def test_table_of_techniques_has_every_skill_with_its_first_sentence():
    assert len(SKILLS) == 9
    table = {technique.name: technique for technique in TECHNIQUES}
    for skill in SKILLS:
        description = re.search(r'^description: "(.*)"$', skill.read_text(), re.MULTILINE)
        assert description is not None
        sentence = re.split(r"(?<=[.!?])\s", description[1], maxsplit=1)[0]
        technique = table[skill.parent.name]
        assert technique.decides == sentence
        assert f"module: curry_train/{technique.home}\n" in skill.read_text()


def test_a_project_leaves_what_a_run_of_the_template_left(bundle):
    before = project_files(bundle, name="run", own=False)
    for path in (
        "runs/a/journal.jsonl",
        "__pycache__/train.pyc",
        ".pytest_cache/x",
        "x.egg-info/PKG",
    ):
        write(bundle.project / path, "")
    write(bundle.package / "core/__pycache__/blocks.pyc", "")
    assert project_files(bundle, name="run", own=False) == before


def test_real_project_stays_within_its_budget():
    files = project_files(REAL, name="my_run", own=False)
    assert len(files) + 2 <= 12  # with the lock and the wheel
    texts = [file.decode() for file in files.values()]
    assert sum(len(text.splitlines()) for text in texts) <= 900
    assert len(files["train.py"].decode().splitlines()) <= 250
    assert not [text for text in texts if "my_project" in text or "{%" in text or "{{ " in text]
    assert "wheels/*.whl" in files["Makefile"].decode()
    assert f'"curry-train=={REAL.version}"' in files["pyproject.toml"].decode()


def test_real_project_owns_its_rooms_too():
    files = project_files(REAL, name="my_run", own=True)
    assert "curry_train/runs/attach.py" in files
    tools = re.compile(r"curry_train/(plan|gates|bench|cli|workloads)/")
    assert not [path for path in files if tools.match(path)]
    assert "wheels" not in files["Makefile"].decode()
    for path, file in files.items():
        for node in ast.walk(ast.parse(file)) if path.endswith(".py") else ():
            if isinstance(node, ast.ImportFrom) and node.level:
                inside = "/".join(path.split("/")[: -node.level])
                module = f"{inside}/{(node.module or '').replace('.', '/')}".rstrip("/")
                assert {f"{module}.py", f"{module}/__init__.py"} & set(files), (path, module)
    # Its requirements are those of the package for what the rooms import.
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    theirs = tomllib.loads(files["pyproject.toml"].decode())["project"]["dependencies"]
    assert set(theirs) <= set(ours)
    assert {re.split("[>=]", text)[0] for text in theirs} == {"torch", "numpy", "pyyaml", "rich"}
