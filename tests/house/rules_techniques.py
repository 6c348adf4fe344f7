"""House rules on what belongs together by name: skills, gates, tests, scripts and manifests.

Run: `python tests/house/rules.py`.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rules_imports import bound_names
from tree import PACKAGE, Skill, modules, parse, read, relative, skills

FRONTMATTER_KEYS = {"name", "description", "license", "compatibility", "metadata"}
MOST_DESCRIPTION_CHARACTERS = 1024
MOST_DESCRIPTIONS_CHARACTERS = 2000  # together they take about 1% of an agent's context
MOST_BODY_LINES = 150
GATE_TABLE = "GATES"  # each gate module binds it; gates/verdict.py reads it

SCRIPT_BLOCK = re.compile(r"^# /// script$\n(?P<content>(?:^#(?: .*)?$\n)+?)^# ///$", re.MULTILINE)
CHECK_CALL = "environment.require(__file__)"

# Each file that carries the version: how it is written there, and how often.
JSON_VERSION = r'"version": "(.+)"'
VERSION_PLACES = {
    "plugin.json": (JSON_VERSION, 1),
    ".claude-plugin/plugin.json": (JSON_VERSION, 1),
    ".claude-plugin/marketplace.json": (JSON_VERSION, 2),
    "gemini-extension.json": (JSON_VERSION, 1),
    "pyproject.toml": (r'^version = "(.+)"', 1),
    f"{PACKAGE}/__init__.py": (r'^__version__ = "(.+)"', 1),
    "CHANGELOG.md": (r"\A(?:(?!^## ).*\n)*## (\d\S*)", 1),  # the newest heading
}


def techniques_are_complete(root: Path) -> list[str]:
    """A skill `x-y` has one home module, a gate `x_y` and the gate's tests."""
    found = skills(root)
    if not found:
        return ["skills/ holds no skill: write skills/<technique>/SKILL.md"]
    return [
        f"skills/{skill.name}: {problem}" for skill in found for problem in _missing(skill, root)
    ]


def _missing(skill: Skill, root: Path) -> Iterator[str]:
    if len(skill.homes) != 1:
        yield f"metadata.module names {len(skill.homes)} modules: name its home and nothing else"
    for home in skill.homes:
        if not (root / "template" / home).is_file():
            yield f"metadata.module names {home}, and there is no template/{home}: correct the path"
    path = f"{PACKAGE}/gates/{skill.technique}.py"
    if not (root / path).is_file():
        yield f"there is no {path}: write it"


def gates_belong_to_a_skill(root: Path) -> list[str]:
    """A module of gates/ binds GATES when it is the gate of a skill, and only then."""
    techniques = {skill.technique for skill in skills(root)}
    violations = []
    for module in modules(root).values():
        if module.room != "gates":
            continue
        is_gate = GATE_TABLE in bound_names(module.path)
        name = relative(module.path, root)
        if is_gate and module.stem not in techniques:
            violations.append(
                f"{name} binds {GATE_TABLE} and has no skill of its name: write the skill, or move "
                "the gates to the technique that they judge"
            )
        elif not is_gate and module.stem in techniques:
            violations.append(f"{name} binds no {GATE_TABLE}: bind the tuple of its gates")
    return violations


def frontmatter_is_what_every_client_takes(root: Path) -> list[str]:
    """A skill has open keys, the name of its folder, and a description that any client can show."""
    return [
        f"skills/{skill.name}/SKILL.md: {problem}"
        for skill in skills(root)
        for problem in _problems(skill)
    ]


def _problems(skill: Skill) -> Iterator[str]:
    if skill.problem:
        yield skill.problem
        return
    found = skill.frontmatter
    for key in sorted(set(found) - FRONTMATTER_KEYS):
        yield f"the key {key!r} fails the open validator: put it under metadata"
    if found.get("name") != skill.name:
        yield f"name is {found.get('name')!r} and the folder {skill.name!r}: make them equal"
    yield from _problems_of_description(found.get("description"))
    metadata = found.get("metadata", {})
    texts = [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        yield "metadata must map text to text: quote its values"


def _problems_of_description(description: Any) -> Iterator[str]:
    if not isinstance(description, str):
        yield "description must be text: write what it decides, then 'Use when ...'"
    elif not 1 <= len(description) <= MOST_DESCRIPTION_CHARACTERS:
        yield f"description must have 1 to {MOST_DESCRIPTION_CHARACTERS} characters"
    elif set("<>") & set(description):
        yield "description holds < or >, which some clients refuse: use words"


def descriptions_fit_together(root: Path) -> list[str]:
    """All descriptions are in an agent's context at once."""
    total = sum(len(str(skill.frontmatter.get("description", ""))) for skill in skills(root))
    if total < MOST_DESCRIPTIONS_CHARACTERS:
        return []
    return [
        f"the descriptions of skills/ sum to {total} characters: "
        f"shorten them to less than {MOST_DESCRIPTIONS_CHARACTERS}"
    ]


def bodies_stay_short(root: Path) -> list[str]:
    """The body of a skill is read whole; what is rarely needed goes into references/."""
    lengths = {skill.name: skill.body.count("\n") for skill in skills(root)}
    return [
        f"skills/{name}/SKILL.md has a body of {length} lines: "
        f"move what is rarely needed to references/, {MOST_BODY_LINES} is too many"
        for name, length in lengths.items()
        if length >= MOST_BODY_LINES
    ]


def template_holds_no_skill(root: Path) -> list[str]:
    """A SKILL.md below template/ would be installed as a skill."""
    return [
        f"{relative(path, root)}: move it to skills/"
        for path in (root / "template").rglob("SKILL.md")
    ]


def scripts_declare_what_they_need(root: Path) -> list[str]:
    """Each script has a PEP 723 block that agrees with pyproject.toml.

    It checks the block before its other imports, so that a missing package is one line and no
    traceback.
    """
    project = tomllib.loads(read(root / "pyproject.toml"))["project"]
    scripts = [path for path in sorted(root.glob("scripts/*.py")) if path.name != "environment.py"]
    if not scripts:
        return ["scripts/ holds no script: scaffold.py and validate_checkpointing.py are promised"]
    return [
        f"{relative(script, root)} {problem}"
        for script in scripts
        for problem in _problems_of_script(script, project)
    ]


def _problems_of_script(script: Path, project: dict[str, Any]) -> Iterator[str]:
    block = SCRIPT_BLOCK.search(read(script))
    if block is None:
        yield "has no PEP 723 block: open it with '# /// script', its requirements and '# ///'"
        return
    declared = tomllib.loads(re.sub(r"^# ?", "", block["content"], flags=re.MULTILINE))
    if declared.get("requires-python") != project["requires-python"]:
        yield f"must have pyproject.toml's requires-python, {project['requires-python']!r}"
    specifiers = {*project["dependencies"]}.union(*project["optional-dependencies"].values())
    for requirement in declared.get("dependencies", []):
        if requirement not in specifiers:
            yield f"needs {requirement}, and pyproject.toml has no such line: write its specifier"
    if not _checks_first(parse(script)):
        yield f"must call {CHECK_CALL} before any import that may fail"


def _checks_first(module: ast.Module) -> bool:
    for statement in module.body:
        if ast.unparse(statement) == CHECK_CALL:
            return True
        imported = []
        if isinstance(statement, ast.Import):
            imported = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            imported = [statement.module or "."]
        tops = {name.partition(".")[0] for name in imported}
        if tops - {"environment", *sys.stdlib_module_names}:
            return False
    return False


def versions_are_equal(root: Path) -> list[str]:
    """One version stands in every manifest, the project, the package and the changelog."""
    found: dict[str, list[str]] = {}
    violations = []
    for name, (pattern, count) in VERSION_PLACES.items():
        path = root / name
        versions = re.findall(pattern, read(path), re.MULTILINE) if path.is_file() else []
        if len(versions) != count:
            violations.append(f"{name} carries {len(versions)} versions: it must carry {count}")
        for version in versions:
            found.setdefault(version, []).append(name)
    if len(found) > 1:
        shown = "; ".join(f"{version} in {', '.join(names)}" for version, names in found.items())
        violations.append(f"versions differ: {shown}; write the same one everywhere")
    return violations
