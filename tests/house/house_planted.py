"""Violations to plant in a copy of the tree, by the rule that must catch them; tests/house/test_house.py plants them.

A plant spoils the copy whose root it is given; beside it stands what the rule must say.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

Plant = Callable[[Path], None]

PACKAGE = "template/curry_train"
CORE, PRIMITIVES, GATES = f"{PACKAGE}/core", f"{PACKAGE}/primitives", f"{PACKAGE}/gates"
PLAN, RUNS = f"{PACKAGE}/plan", f"{PACKAGE}/runs"
SKILL = "skills/grad-accum/SKILL.md"
SCRIPT = "scripts/scaffold.py"


def write(path: str, text: str) -> Plant:
    def plant(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")

    return plant


def append(path: str, text: str) -> Plant:
    return lambda root: write(path, (root / path).read_text(encoding="utf-8") + text)(root)


def replace(path: str, old: str, new: str) -> Plant:
    def plant(root: Path) -> None:
        text = (root / path).read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r} to spoil: plant another violation"
        write(path, text.replace(old, new, 1))(root)

    return plant


def remove(path: str) -> Plant:
    return lambda root: (
        shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()
    )


def skill(name: str, frontmatter: str) -> Plant:
    return write(f"skills/{name}/SKILL.md", f"---\nname: {name}\n{frontmatter}\n---\n")


LAYOUT = {
    "skills_have_a_gate_and_tests": [
        (
            remove(f"{GATES}/grad_accum.py"),
            "grad-accum has no template/curry_train/gates/grad_accum.py",
        ),
        (
            remove("tests/gates/test_grad_accum.py"),
            "grad-accum has no tests/gates/test_grad_accum.py",
        ),
        (remove("skills"), "holds no skill"),
    ],
    "skills_name_modules_that_exist": [
        (
            replace(SKILL, "primitives/grad_accum.py", "primitives/x.py"),
            "no template/curry_train/primitives/x.py",
        ),
        (replace(SKILL, "module:", "modul:"), "name the home module"),
    ],
    "modules_belong_to_a_skill": [
        (write(f"{PRIMITIVES}/x.py", ""), "primitives/x.py belongs to no skill"),
        (write(f"{PLAN}/x.py", ""), "plan/x.py belongs to no skill"),
        (write(f"{RUNS}/x.py", ""), "runs/x.py belongs to no skill"),
        (write(f"{GATES}/x.py", ""), "gates/x.py has no skill"),
        (write("template/tests/test_x.py", ""), "tests/test_x.py has no skill"),
    ],
    "scripts_say_what_they_need": [
        (write("scripts/x.py", ""), "scripts/x.py has no PEP 723 block"),
        (replace(SCRIPT, "click>=", "click>"), "scaffold.py needs click>"),
        (replace(SCRIPT, 'python = ">=3.11"', 'python = ">=3.9"'), "requires-python must be"),
        (
            replace(SCRIPT, "import environment\n", "import click, environment\n"),
            "before any import that may fail",
        ),
        (replace(SCRIPT, "environment.require(__file__)", ""), "before any import that may fail"),
    ],
    "files_are_named_for_what_they_hold": [
        (write(f"{CORE}/utils.py", ""), "core/utils.py: name the file"),
        (write("scripts/helpers/x.py", ""), "scripts/helpers/x.py: name the file"),
        (write("tests/run_manager.py", ""), "tests/run_manager.py: name the file"),
    ],
    "template_holds_no_skill": [(write("template/skills/x/SKILL.md", ""), "move it to skills/")],
}

IMPORTS = {
    "imports_run_only_downwards": [
        (
            append(f"{CORE}/verdict.py", "from ..primitives import x\n"),
            "(core, floor 0) imports primitives (floor 1)",
        ),
        (
            append(f"{CORE}/verdict.py", "def f():\n    from ..gates.x import y\n"),
            "imports gates (floor 3)",
        ),
        (
            write(f"{PRIMITIVES}/x.py", "from .grad_accum import Window\n"),
            "(primitives, floor 1) imports primitives",
        ),
        (
            write(f"{PLAN}/x.py", "from ..runs.store import y\n"),
            "(plan, floor 2) imports runs (floor 2)",
        ),
        (write(f"{PACKAGE}/journal.py", ""), "journal.py is on no floor"),
    ],
    "imports_inside_the_package_are_relative": [
        (
            append(f"{GATES}/grad_accum.py", "import curry_train.core\n"),
            "write it as a relative import",
        ),
        (
            append(f"{GATES}/grad_accum.py", "from curry_train import core\n"),
            "write it as a relative import",
        ),
    ],
    "lower_floors_need_only_torch": [
        (
            append(f"{GATES}/grad_accum.py", "def f():\n    from rich import print\n"),
            "imports rich",
        ),
        (append(f"{CORE}/verdict.py", "import numpy as np\n"), "imports numpy with the module"),
        (append(f"{RUNS}/digests.py", "import xxhash\n"), "imports xxhash with the module"),
        (append(f"{RUNS}/digests.py", "def f():\n    import rich\n"), "imports rich"),
    ],
    "packages_hand_names_on_lazily": [
        (
            append(f"{PRIMITIVES}/__init__.py", "from .grad_accum import Window\n"),
            "imports eagerly",
        ),
        (write(f"{PLAN}/__init__.py", '"""Plans."""\n'), "plan/__init__.py binds no __getattr__"),
    ],
    "promised_names_can_be_imported": [
        (
            replace(f"{PRIMITIVES}/__init__.py", '"GradientAccumulation"', '"Accumulation"'),
            "curry_train.primitives promises Accumulation",
        ),
        (
            write(f"{CORE}/__init__.py", "import no_such_module\n"),
            "No module named 'no_such_module'",
        ),
    ],
}

TEXT = {
    "modules_say_what_they_are_for": [
        (write("scripts/x.py", "x = 1\n"), "scripts/x.py has no docstring")
    ],
    "modules_stay_short": [(write("tests/x.py", "x = 1\n" * 251), "tests/x.py has 251 lines")],
    "classes_take_no_name_of_torch": [
        (write(f"{RUNS}/x.py", "class CheckpointPolicy: ...\n"), "class CheckpointPolicy")
    ],
    "template_runs_where_it_is_written": [
        (write("template/{{ name }}/x.py", ""), "Jinja in its path"),
        (write("template/x.py", "{% if x %}\n"), "is not Python"),
        (write("template/x.py", "x = {{ name }}\n"), "Jinja in a module"),
        (write("template/x.py", "x = '{{ name }}'\n"), "Jinja in a module"),
    ],
    "nothing_mentions_the_workplace": [
        (append("LICENSE", "/wo" + "rk/main\n"), "LICENSE:22 says"),
        (append(".ci/run", "# in this " + "session\n"), ".ci/run:"),
    ],
}

SKILLS = {
    "frontmatter_is_what_every_client_takes": [
        (
            replace(SKILL, "license:", "allowed-tools: Bash\nlicense:"),
            "the key 'allowed-tools' fails",
        ),
        (replace(SKILL, "name: grad-accum", "name: x"), "name is 'x' and the folder 'grad-accum'"),
        (replace(SKILL, "description: ", "description: a: b: "), "quote what YAML cannot read"),
        (write(SKILL, "# Title\n"), "open it with frontmatter"),
        (skill("x", "description: a <b>"), "description holds < or >"),
        (skill("x", "license: MIT"), "description must be text of 1 to 1024"),
        (skill("x", f"description: {'a' * 1025}"), "description must be text of 1 to 1024"),
        (skill("x", "description: a\nmetadata: {floor: 1}"), "metadata must map text to text"),
    ],
    "descriptions_fit_together": [
        (skill("x", f"description: {'a' * 2000}"), "shorten them to less than 2000")
    ],
    "bodies_stay_short": [(append(SKILL, "line\n" * 150), "move what is rarely needed")],
    "mentioned_paths_exist": [
        (append("AGENTS.md", "run scripts/gone.py\n"), "names scripts/gone.py"),
        (append(SKILL, "see curry_train/core/gone.py\n"), "names curry_train/core/gone.py"),
        (append("README.md", "`template/gone`\n"), "names template/gone"),
        (append("README.md", "template/<any>.gone\n"), "names template/<any>.gone"),
        (remove("README.md"), "README.md is missing"),
    ],
}

PLANTED: dict[str, list[tuple[Plant, str]]] = LAYOUT | IMPORTS | TEXT | SKILLS
