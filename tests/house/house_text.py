"""House rules on what a file may say and how long it may be; `tests/house/house.py` runs them."""

import ast
import re
from pathlib import Path

from house_tree import files, parse, python_files, relative

LONGEST_MODULE = 250
LONGEST_TEST = 450  # a technique's saboteurs stand beside the gate that they fail
JINJA = re.compile(r"\{\{|\{%|\{#")
TAKEN_CLASS_NAMES = {"CheckpointPolicy": "torch has one, and it means something else"}
WORKPLACE = re.compile(
    r"[/]work/|[/]tmp/w/|[/]farm/|[.][.]/shared|this[ ]session|developer[ ]session", re.IGNORECASE
)


def modules_say_what_they_are_for(root: Path) -> list[str]:
    """Every module opens with a docstring."""
    return [
        f"{relative(path, root)} has no docstring: say what it is for, and the command that proves it"
        for path in python_files(root)
        if not ast.get_docstring(parse(path))
    ]


def modules_stay_short(root: Path) -> list[str]:
    """No module is longer than one idea needs."""
    violations = []
    for path in python_files(root):
        length, most = path.read_text(encoding="utf-8").count("\n"), LONGEST_MODULE
        if path.name.startswith("test_"):
            most = LONGEST_TEST
        if length > most:
            violations.append(
                f"{relative(path, root)} has {length} lines and {most} is the most: divide it by idea"
            )
    return violations


def classes_take_no_name_of_torch(root: Path) -> list[str]:
    """No class carries a name that means something else in torch."""
    return [
        f"{relative(path, root)}:{node.lineno} calls a class {node.name}: {TAKEN_CLASS_NAMES[node.name]}, so rename it"
        for path in python_files(root)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and node.name in TAKEN_CLASS_NAMES
    ]


def template_runs_where_it_is_written(root: Path) -> list[str]:
    """No Jinja in a path or a module of template/: what is rendered is a *.jinja file and nothing else.

    Read from the syntax tree, because the braces of an f-string are Python: Jinja outside a string does not parse or
    is a set that holds a set, and inside a string it is in the string's value, where an f-string has one brace left.
    """
    violations = []
    for path in files(root / "template"):
        name = relative(path, root)
        if JINJA.search(name):
            violations.append(f"{name} has Jinja in its path: give the file a plain name")
        if path.suffix != ".py":
            continue
        try:
            module = parse(path)
        except SyntaxError as error:
            violations.append(
                f"{name}:{error.lineno} is not Python ({error.msg}): render a *.jinja file instead"
            )
            continue
        violations += [
            f"{name}:{node.lineno} has Jinja in a module: render a *.jinja file instead"
            for node in ast.walk(module)
            if _is_jinja(node)
        ]
    return violations


def _is_jinja(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and JINJA.search(node.value) is not None
    return isinstance(node, ast.Set) and any(
        isinstance(inner, ast.Set | ast.Dict) for inner in node.elts
    )


def nothing_mentions_the_workplace(root: Path) -> list[str]:
    """The project speaks to its users: no path of a machine it was written on, no word of how that was done."""
    violations = []
    for path in files(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture says nothing
        violations += [
            f"{relative(path, root)}:{number} says {found[0]!r}: write what holds on a user's machine"
            for number, line in enumerate(lines, start=1)
            if (found := WORKPLACE.search(line))
        ]
    return violations
