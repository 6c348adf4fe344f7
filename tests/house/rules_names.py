"""House rules on names: one name stands for one thing, and says which.

Run: `python tests/house/rules.py`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rules_imports import PUBLIC_FILES
from tree import FUNCTIONS, Module, modules, nodes, python_files, read, relative, skills, top_level

TAKEN_CLASS_NAMES = {"CheckpointPolicy": "torch has one, and it means something else"}

ONE_WORD = re.compile(r"_?(?P<word>[A-Z][A-Z0-9]*)")
# Units are their own noun; the others name one thing in every Python project.
COMPLETE_WORDS = {*("KB", "MB", "GB", "TB", "KIB", "MIB", "GIB", "TIB", "PACKAGE", "ROOT")}
NOT_CONSTANTS = {"TypeVar", "ParamSpec", "TypeVarTuple", "NewType"}
WORD = re.compile(r"\b[A-Za-z_]\w*")
CLASS_STATEMENT = re.compile(r"\s*class (\w+)")


def definitions_have_one_name(root: Path) -> list[str]:
    """No class and no public function at the top of a module has the name of another one."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules(root).values():
        for node in top_level(module.path, ast.ClassDef, *FUNCTIONS):
            if isinstance(node, ast.ClassDef) or not node.name.startswith("_"):
                places[node.name].append(f"{relative(module.path, root)}:{node.lineno}")
    return [
        f"{name} is defined {len(found)} times ({', '.join(found)}): give each thing its own name"
        for name, found in places.items()
        if len(found) > 1
    ]


def module_stems_are_unique(root: Path) -> list[str]:
    """No two modules have the same file name, with two exceptions.

    A gate has the name of its technique, because it is found by that name. A command has the name
    that users type, because its file is looked for by that name, and may share it with what it
    runs.
    """
    by_stem: dict[str, list[Module]] = defaultdict(list)
    for module in modules(root).values():
        by_stem[module.stem].append(module)
    techniques = {skill.technique for skill in skills(root)}
    violations = []
    for stem, found in by_stem.items():
        alike = [module for module in found if not _may_share(module, techniques)]
        if len(alike) > 1:
            names = ", ".join(relative(module.path, root) for module in alike)
            violations.append(f"the file name {stem}.py is used for {names}: rename all but one")
    return violations


def _may_share(module: Module, techniques: Iterable[str]) -> bool:
    return module.room in ("cli", "gates")


def constants_name_their_thing(root: Path) -> list[str]:
    """A constant of one word is a plural noun for a collection, or a unit.

    `GATES = (...)` says what it holds; `MANY`, `FOUND`, `LEVELS = 1024` and `NAME = "x"` do not.
    """
    return [
        f"{relative(module.path, root)}:{line} calls a constant {name}: add the noun, or the unit "
        "and what is counted, as in MOST_SAMPLES, LOCK_NAME, WAIT_SECONDS"
        for module in modules(root).values()
        for name, line in _one_word_constants(module.path)
    ]


def _one_word_constants(path: Path) -> Iterator[tuple[str, int]]:
    for node in top_level(path, ast.Assign, ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name, value in _pairs(target, node.value):
                found = ONE_WORD.fullmatch(name)
                if found and not _is_complete(found["word"], value):
                    yield name, node.lineno


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each assigned name with the expression that it gets."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        for number, element in enumerate(target.elts):
            yield from _pairs(element, parts[number] if number < len(parts) else None)


def _is_complete(word: str, value: ast.expr | None) -> bool:
    if word in COMPLETE_WORDS:
        return True
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        if called in NOT_CONSTANTS:
            return True
        if called == "re.compile":
            return False
    is_plural = word.endswith("S") and not word.endswith("SS")
    return is_plural and not _is_number_or_text(value)


def _is_number_or_text(value: ast.expr | None) -> bool:
    """Return whether a value is a number, a calculation with numbers, or text."""
    if isinstance(value, ast.BinOp):
        return _is_number_or_text(value.left) and _is_number_or_text(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_number_or_text(value.operand)
    return isinstance(value, ast.Constant | ast.JoinedStr)


def imports_keep_names(root: Path) -> list[str]:
    """A name of ours is imported under its own name, so that a search finds all its uses."""
    return [
        f"{relative(module.path, root)}:{node.lineno} imports {alias.name} as {alias.asname}: "
        "import it under its own name, or rename it where it is defined"
        for module in modules(root).values()
        for node in nodes(module.path, ast.ImportFrom)
        if node.level
        for alias in node.names
        if alias.asname and alias.asname != alias.name
    ]


def classes_take_no_name_of_torch(root: Path) -> list[str]:
    """No class has a name that means something else in torch."""
    return [
        f"{relative(path, root)}:{number} calls a class {found[1]}: "
        f"{TAKEN_CLASS_NAMES[found[1]]}, so rename it"
        for path in python_files(root)
        for number, line in enumerate(read(path).splitlines(), start=1)
        if (found := CLASS_STATEMENT.match(line)) and found[1] in TAKEN_CLASS_NAMES
    ]


def names_are_used(root: Path) -> list[str]:
    """A name at the top of a module occurs a second time where the package is used.

    That is the package itself, what is rendered, the scripts and the recorders; a name that only
    tests use is dead. A decorator registers what it decorates, and promised names are for users.
    """
    counts: dict[str, int] = defaultdict(int)
    for path in python_files(root, ["template", "scripts", "benchmarks"]):
        for word in WORD.findall(read(path)):
            counts[word] += 1
    promised = {name for names in PUBLIC_FILES.values() for name in names}
    return [
        f"{relative(module.path, root)}:{line} defines {name}, which nothing uses: remove it"
        for module in modules(root).values()
        for name, line in _definitions(module.path)
        if counts[name] < 2 and name not in promised
    ]


def _definitions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, but for special ones and decorated ones."""
    for node in top_level(path, ast.ClassDef, *FUNCTIONS):
        if isinstance(node, ast.ClassDef) or not node.decorator_list:
            yield node.name, node.lineno
    for node in top_level(path, ast.Assign, ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name, _ in _pairs(target, None):
                if not name.startswith("__") and name != "_":
                    yield name, node.lineno
