"""Files, modules and imports of the tree, as the house rules and the measurements see them.

Every function takes the root of a tree, so that a rule runs on a small tree with a planted
violation, and the measurements on another edition. A module is named by its dotted path inside the
package: `core.blocks`, `loop`. Proof: `python -m pytest tests/house/test_tree.py`.
"""

import ast
import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "template/curry_train"
PACKAGE_NAME = "curry_train"
PYTHON_FOLDERS = ("template", "scripts", "benchmarks", "tests")
ROOMS = ("core", "primitives", "runs", "workloads", "plan", "bench", "gates", "cli")
TRAINER = "trainer"  # the modules at the top of the package

HIDDEN_BUT_OURS = {
    ".agents",
    ".ci",
    ".claude-plugin",
    ".codex-plugin",
    ".cursor-plugin",
    ".github",
    ".gitignore",
}
GENERATED = {"__pycache__", "build", "dist", "node_modules"}

# When an import runs: with its module, when a function is called, or never (`if TYPE_CHECKING:`).
AT_IMPORT = "at import"
IN_FUNCTION = "in a function"
FOR_TYPES = "for types"


def relative(path: Path, root: Path) -> str:
    """Return the path as messages show it."""
    return path.relative_to(root).as_posix()


def files(root: Path, folder: str = "") -> list[Path]:
    """List the project's own files below `folder`: no environment, no cache, no build output."""
    found = []
    for directory, folders, names in os.walk(root / folder):
        folders[:] = sorted(name for name in folders if _is_ours(name))
        found += [Path(directory, name) for name in sorted(names) if _is_ours(name)]
    return found


def _is_ours(name: str) -> bool:
    if name in GENERATED or name.endswith((".egg-info", ".pyc")):
        return False
    return not name.startswith(".") or name in HIDDEN_BUT_OURS


def python_files(root: Path, folders: Sequence[str] = PYTHON_FOLDERS) -> list[Path]:
    """List every Python file that is written here."""
    found = [path for folder in folders for path in files(root, folder)]
    return [path for path in found if path.suffix == ".py"]


def package_files(root: Path) -> list[Path]:
    """List the Python files of the package, `__init__.py` included."""
    return python_files(root, [PACKAGE])


def line_count(path: Path) -> int:
    """Count all lines of a file."""
    return len(read(path).splitlines())


# Files are read and parsed once for all rules. The stamp of the last change is part of the key,
# because a test writes a file, runs a rule, and writes the file again.

Stamp = tuple[int, int]


def stamp(path: Path) -> Stamp:
    """Return the time of the last change and the size of a file."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def read(path: Path) -> str:
    """Return the text of a file."""
    return _read(path, stamp(path))


@cache
def _read(path: Path, _stamp: Stamp) -> str:
    return path.read_text(encoding="utf-8")


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; a file that is not Python raises `SyntaxError`."""
    return _parse(path, stamp(path))


@cache
def _parse(path: Path, stamp: Stamp) -> ast.Module:
    gc.disable()  # a tree is all new objects and no garbage; collecting meanwhile doubles the time
    try:
        return ast.parse(_read(path, stamp), filename=str(path))
    finally:
        gc.enable()


def nodes(path: Path, *kinds: type[ast.AST]) -> list[Any]:
    """List the nodes of exactly these types, one type after the other."""
    found = _nodes_by_type(path, stamp(path))
    return [node for kind in kinds for node in found.get(kind, ())]


@cache
def _nodes_by_type(path: Path, stamp: Stamp) -> Mapping[type[ast.AST], list[ast.AST]]:
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    waiting: list[ast.AST] = [_parse(path, stamp)]
    for node in waiting:  # grows on the way; twice as fast as ast.walk
        found[type(node)].append(node)
        for field in node._fields:
            value = None if field == "ctx" else getattr(node, field, None)
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
    return dict(found)


# Modules


@dataclass(frozen=True)
class Module:
    """A Python file of the package.

    `name` is its dotted path inside the package; a package has the name of its folder, and the
    package itself the empty name.
    """

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        """Return whether this is an `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def stem(self) -> str:
        """The last part of the name."""
        return self.path.stem

    @property
    def folder(self) -> str:
        """The package that relative imports of this module start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The room that this module stands in; the top of the package is the trainer's."""
        first, _, rest = self.name.partition(".")
        if rest or self.is_package:
            return first
        return "cli" if first == "__main__" else TRAINER


def all_modules(root: Path) -> dict[str, Module]:
    """Return the modules and packages of the package by name."""
    found = {}
    for path in package_files(root):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def modules(root: Path) -> dict[str, Module]:
    """Return the modules by name, without the `__init__.py` files."""
    found = all_modules(root)
    return {name: module for name, module in found.items() if not module.is_package}


def handed_on(module: Module) -> dict[str, str]:
    """Return the modules by the public names that a package hands on with `lazy_names`."""
    homes: dict[str, str] = {}
    for call in nodes(module.path, ast.Call):
        if ast.unparse(call.func).rpartition(".")[2] != "lazy_names" or len(call.args) < 2:
            continue
        try:
            names_by_module = ast.literal_eval(call.args[1])
        except ValueError:
            continue
        for home, names in names_by_module.items():
            homes |= dict.fromkeys(names, join(module.name, home))
    return homes


def join(*names: str) -> str:
    """Join dotted names; an empty one is left out."""
    return ".".join(name for name in names if name)


# Imports


@dataclass(frozen=True)
class Import:
    """One name that an import statement binds, or one module that it loads.

    `target` is the module inside the package, or None for another distribution's. `name` is what is
    written: `torch.nn`, `core.blocks` after relative dots are resolved.
    """

    line: int
    name: str
    when: str
    target: str | None
    is_relative: bool


def imports(module: Module, known: Mapping[str, Module]) -> list[Import]:
    """List the imports of a module of `known`, in functions and for types alone included."""
    found = []
    for node, when in _all_import_nodes(module.path, stamp(module.path)):
        for name, level in _imported_names(node):
            shown, target = _resolve(name, level, module, known)
            found.append(Import(node.lineno, shown, when, target, level > 0))
    return found


@cache
def _all_import_nodes(path: Path, stamp: Stamp) -> list[tuple[ast.AST, str]]:
    """Return import statements and calls of `import_module` with the time when they run."""
    functions = [_lines(node.body) for node in nodes(path, *FUNCTIONS)]
    for_types = [_lines(node.body) for node in nodes(path, ast.If) if _is_type_checking(node.test)]
    found: list[ast.AST] = nodes(path, ast.Import, ast.ImportFrom)
    found += [node for node in nodes(path, ast.Call) if _loads_by_name(node)]
    return [(node, _when(node, functions, for_types)) for node in found]


def _lines(body: list[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or 0) + 1)


def _when(node: Any, functions: list[range], for_types: list[range]) -> str:
    if any(node.lineno in lines for lines in for_types):
        return FOR_TYPES
    return IN_FUNCTION if any(node.lineno in lines for lines in functions) else AT_IMPORT


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _loads_by_name(call: ast.Call) -> bool:
    """Return whether a call is `import_module` with the name written out."""
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if called != "import_module" or not call.args:
        return False
    first = call.args[0]
    return isinstance(first, ast.Constant) and isinstance(first.value, str)


def _imported_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what a node imports, each with its number of leading dots."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, 0
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield join(node.module or "", alias.name), node.level
    elif isinstance(node, ast.Call):
        name = ast.literal_eval(node.args[0])
        yield name.lstrip("."), len(name) - len(name.lstrip("."))


def _resolve(
    name: str, level: int, module: Module, known: Mapping[str, Module]
) -> tuple[str, str | None]:
    """Return the name without relative dots, and the module of the package that it reaches."""
    if level:
        parts = module.folder.split(".") if module.folder else []
        name = join(*parts[: len(parts) - level + 1], name)
    elif name == PACKAGE_NAME or name.startswith(f"{PACKAGE_NAME}."):
        name = name[len(PACKAGE_NAME) + 1 :]
    else:
        return name, None
    target = name
    while target not in known:
        target, _, last = target.rpartition(".")
        if target in known and known[target].is_package:
            target = handed_on(known[target]).get(last, target)
    return name, target


def import_graph(
    root: Path, *, when: Sequence[str] = (AT_IMPORT, IN_FUNCTION, FOR_TYPES)
) -> dict[str, set[str]]:
    """Return the modules that each module and each package imports."""
    known = all_modules(root)
    graph = {}
    for name, module in known.items():
        found = {one.target for one in imports(module, known) if one.when in when}
        graph[name] = {target for target in found if target is not None and target != name}
    return graph


def importers(root: Path) -> dict[str, set[str]]:
    """Return the modules and packages that import each module."""
    graph = import_graph(root)
    found: dict[str, set[str]] = {name: set() for name in graph}
    for importer, targets in graph.items():
        for target in targets:
            found[target].add(importer)
    return found


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return `start` and all that its imports lead to."""
    found, waiting = {start}, [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


# Definitions

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def top_level(path: Path, *kinds: type[ast.AST]) -> list[Any]:
    """List the definitions of these types at the top level of a module."""
    return [node for node in parse(path).body if isinstance(node, kinds)]


def contains(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    """Return whether a node of these types stands below this one."""
    return any(isinstance(child, kinds) for child in ast.walk(node) if child is not node)


# Skills


@dataclass(frozen=True)
class Skill:
    """A folder of skills/ with its SKILL.md; `problem` says why its frontmatter cannot be read."""

    name: str
    frontmatter: dict[str, Any]
    body: str
    problem: str | None = None

    @property
    def technique(self) -> str:
        """The name as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def homes(self) -> list[str]:
        """The files that `metadata.module` names; a skill has one."""
        metadata = self.frontmatter.get("metadata")
        return str((metadata if isinstance(metadata, dict) else {}).get("module", "")).split()


def skills(root: Path) -> list[Skill]:
    """List the techniques; the folders of skills/ are the only catalogue."""
    return [_read_skill(path) for path in sorted(root.glob("skills/*/SKILL.md"))]


def _read_skill(path: Path) -> Skill:
    name, text = path.parent.name, read(path)
    before, *rest = text.split("---\n", 2)
    if before or len(rest) != 2:
        return Skill(name, {}, text, "open it with frontmatter between two lines of ---")
    try:
        frontmatter = yaml.safe_load(rest[0])
    except yaml.YAMLError as error:
        return Skill(name, {}, rest[1], f"quote what YAML cannot read in the frontmatter: {error}")
    if not isinstance(frontmatter, dict):
        return Skill(name, {}, rest[1], "write the frontmatter as keys and values")
    return Skill(name, frontmatter, rest[1])
