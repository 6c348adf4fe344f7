"""The tree keeps the rules, and each rule of ours catches the violations planted for it.

python -m pytest tests/house/test_house.py
"""

import pytest
from importlinter.cli import lint_imports

from ..tree import ROOT, files, skills
from .rules import (
    PACKAGE,
    PUBLIC_NAMES,
    RULES,
    imports_inside_the_package_are_relative,
    links_lead_somewhere,
    missing_names,
    nothing_mentions_the_workplace,
    private_torch_names_stay_in_one_module,
    rooms_keep_their_budgets,
    techniques_are_complete,
)

SKILL = "---\nname: x-y\nmetadata:\n  module: curry_train/plan/home.py\n---\n"
TECHNIQUE = {
    "skills/x-y/SKILL.md": SKILL,
    f"{PACKAGE}/plan/home.py": "import torch\n",
    f"{PACKAGE}/gates/x_y.py": "GATES = ()\n",
    "tests/plan/test_home.py": "",
}
PLANTED = [
    (
        imports_inside_the_package_are_relative,
        {f"{PACKAGE}/plan/new.py": "def f():\n    from curry_train.core import blocks\n"},
        "plan/new.py:2 imports curry_train by name",
    ),
    (
        imports_inside_the_package_are_relative,
        {f"{PACKAGE}/plan/new.py": "import curry_train.core as core\n"},
        "plan/new.py:1",
    ),
    (
        private_torch_names_stay_in_one_module,
        {
            f"{PACKAGE}/plan/one.py": "import torch._ops as ops\nops.OpOverload\n",
            f"{PACKAGE}/core/two.py": "from torch._ops import OpOverload as Operation\nOperation\n",
        },
        "core/two.py and template/curry_train/plan/one.py use torch._ops.OpOverload",
    ),
    (
        private_torch_names_stay_in_one_module,
        {
            f"{PACKAGE}/plan/one.py": "import torch\ntorch._C._current_graph_task_id()\n",
            f"{PACKAGE}/core/two.py": "name = 'torch._C._current_graph_task_id'\n",
        },
        "use torch._C._current_graph_task_id",
    ),
    (
        nothing_mentions_the_workplace,
        {"README.md": "see ." + "./shared/notes\n"},
        "README.md:1 has '../" + "shared'",
    ),
    (
        nothing_mentions_the_workplace,
        {".ci/run": "# As This " + "session found\n"},
        ".ci/run:1 has 'This",
    ),
    (
        links_lead_somewhere,
        {"README.md": "[a](https://host/x), [b](#part), [c](skills), ![d](gone.png)\n"},
        "README.md links to gone.png",
    ),
    (
        links_lead_somewhere,
        {"docs/plan.md": "[a](../skills/x-y/SKILL.md#do), [b](../gone.md#part)\n"},
        "docs/plan.md links to ../gone.md",
    ),
    (techniques_are_complete, {f"{PACKAGE}/plan/home.py": None}, "skills/x-y has no home"),
    (techniques_are_complete, {f"{PACKAGE}/gates/x_y.py": "x = 1\n"}, "skills/x-y has no gates"),
    (techniques_are_complete, {"tests/plan/test_home.py": None}, "skills/x-y has no tests"),
    (
        techniques_are_complete,
        {f"{PACKAGE}/gates/other.py": "GATES: tuple = ()\n"},
        "gates/other.py binds GATES and has no skill",
    ),
    (
        rooms_keep_their_budgets,
        {f"{PACKAGE}/bench/new.py": '"""Free."""\n# Free.\n' + "x = 1\n" * 2500},
        "bench has 7,500 tokens of",
    ),
]


def plant(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if text is None else path.write_text(text)


def test_rooms_import_one_way_and_without_cycles(monkeypatch):
    # It configures logging for a command, which silences the loggers of this process.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_the_list_of_long_tests_has_no_old_names():
    for line in (ROOT / "tests/long.txt").read_text().splitlines():
        path, _, name = line.partition("::")
        function = f"def {name.partition('[')[0]}"
        assert line.startswith("#") or function in (ROOT / path).read_text(), line


def test_public_names_stay():
    assert missing_names(PUBLIC_NAMES) == []


@pytest.mark.parametrize("module", ["curry_train.loop", "curry_train.no_such_module"])
def test_a_public_name_that_moved_is_missed(module):
    (violation,) = missing_names({module: "no_such_name"})
    assert violation.startswith(module)


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    violations = rule(ROOT)
    assert not violations, "\n".join(["", *violations])


@pytest.mark.parametrize(("rule", "texts", "expected"), PLANTED)
def test_the_rule_catches_what_is_planted(tmp_path, rule, texts, expected):
    plant(tmp_path, TECHNIQUE)
    assert rule(tmp_path) == []
    plant(tmp_path, texts)
    (violation,) = rule(tmp_path)
    assert expected in violation


def test_discovery_finds_the_files_and_the_techniques():
    assert len(files(ROOT, PACKAGE)) >= 100
    assert len(skills(ROOT)) == 9
    assert {rule for rule, _, _ in PLANTED} == set(RULES)
