"""House rules on which file must be beside which; `tests/house/house.py` runs them."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from house_tree import PACKAGE, files, parse, relative, skills

import environment

FOLDERS_OF_TECHNIQUES = ("primitives", "plan", "runs")
VAGUE = {"util", "utils", "helper", "helpers", "manager"}


def skills_have_a_gate_and_tests(root: Path) -> list[str]:
    """A skill `x-y` has gates/x_y.py and tests/test_x_y.py, and there is at least one skill."""
    found = skills(root)
    if not found:
        return ["skills/ holds no skill: write skills/<technique>/SKILL.md"]
    wanted = [
        (skill.name, path)
        for skill in found
        for path in (
            f"{PACKAGE}/gates/{skill.technique}.py",
            f"template/tests/test_{skill.technique}.py",
        )
    ]
    return [
        f"skills/{name} has no {path}: write it"
        for name, path in wanted
        if not (root / path).is_file()
    ]


def skills_name_modules_that_exist(root: Path) -> list[str]:
    """`metadata.module` names the home module first, and every module it names is there."""
    violations = []
    for skill in skills(root):
        if not skill.modules:
            violations.append(
                f"skills/{skill.name}: name the home module in the frontmatter's metadata.module"
            )
        violations += [
            f"skills/{skill.name}: metadata.module names {module}, and there is no template/{module}: correct the path"
            for module in skill.modules
            if not (root / "template" / module).is_file()
        ]
    return violations


def modules_belong_to_a_skill(root: Path) -> list[str]:
    """Nothing in the folders of techniques is without a skill that brings it."""
    found = skills(root)
    named = {f"template/{module}" for skill in found for module in skill.modules}
    violations = [
        f"{path} belongs to no skill: name it in the metadata.module of one"
        for folder in FOLDERS_OF_TECHNIQUES
        for path in (relative(path, root) for path in (root / PACKAGE / folder).rglob("*.py"))
        if path not in named and not path.endswith("__init__.py")
    ]
    techniques = {skill.technique for skill in found}
    same_name = [
        path for path in (root / PACKAGE / "gates").glob("*.py") if path.name != "__init__.py"
    ]
    same_name += (root / "template/tests").glob("test_*.py")
    return violations + [
        f"{relative(path, root)} has no skill of its name, nor does one bring it: write the skill, or name it in one"
        for path in same_name
        if path.stem.removeprefix("test_") not in techniques and relative(path, root) not in named
    ]


def scripts_say_what_they_need(root: Path) -> list[str]:
    """Each script has a PEP 723 block that agrees with pyproject.toml, and checks it before its other imports."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    specifiers = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    scripts = [path for path in sorted(root.glob("scripts/*.py")) if path.name != "environment.py"]
    if not scripts:
        return ["scripts/ holds no script: scaffold.py and validate_checkpointing.py are promised"]
    violations = []
    for script in scripts:
        name = relative(script, root)
        try:
            declared = environment.declaration(script.read_text(encoding="utf-8"), name=name)
        except ValueError as error:
            violations.append(str(error))
            continue
        if declared["requires-python"] != project["requires-python"]:
            violations.append(
                f"{name}: requires-python must be pyproject.toml's {project['requires-python']!r}"
            )
        violations += [
            f"{name} needs {requirement}, which pyproject.toml does not list: write the specifier that it lists"
            for requirement in declared["dependencies"]
            if requirement not in specifiers
        ]
        if not _checks_first(parse(script)):
            violations.append(
                f"{name}: call environment.require(__file__) before any import that may fail"
            )
    return violations


def _checks_first(module: ast.Module) -> bool:
    for statement in module.body:
        if ast.unparse(statement) == "environment.require(__file__)":
            return True
        imported = []
        if isinstance(statement, ast.Import):
            imported = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            imported = [statement.module or "."]
        if any(
            name.split(".")[0] not in {"environment", *sys.stdlib_module_names} for name in imported
        ):
            return False
    return False


def files_are_named_for_what_they_hold(root: Path) -> list[str]:
    """No file or folder is called utils, helpers or manager."""
    return [
        f"{relative(path, root)}: name the file for what it holds"
        for path in files(root)
        if any(
            VAGUE & set(re.split(r"[_.-]", part.lower())) for part in path.relative_to(root).parts
        )
    ]


def template_holds_no_skill(root: Path) -> list[str]:
    """A SKILL.md below template/ would be installed as a skill."""
    return [
        f"{relative(path, root)}: move it to skills/"
        for path in (root / "template").rglob("SKILL.md")
    ]
