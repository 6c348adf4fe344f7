"""Which files of the package a set of files needs, found by reading their imports; nothing is imported.

Also moves the imports of a copied test over to the name that the package has in the user's repository.
Proof: `python -m pytest tests/cli/test_scaffold.py -k imports`.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from .bundle import PACKAGE
from .errors import ScaffoldError


def reached_files(
    template: Path, roots: Iterable[str], *, rendered: Mapping[str, bytes]
) -> set[str]:
    """The files of the package that `roots` and `rendered` import, with the roots that lie in the package themselves.

    Each package on the way brings its `__init__.py`. Paths are relative to `template`; `rendered` has files that exist
    nowhere yet.
    """
    reached: set[str] = set()
    waiting = [*roots, *rendered]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        if path.endswith(".py"):
            source = rendered[path] if path in rendered else (template / path).read_bytes()
            waiting += _imported_files(template, path, source)
            waiting += _parent_inits(path)
    return {path for path in reached if path.startswith(f"{PACKAGE}/")}


def handed_out_names(source: bytes) -> dict[str, str]:
    """Name -> submodule, from the `lazy_names(__name__, {...})` of an `__init__.py`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="lazy_names"), args=[_, ast.Dict() as table]):
                modules: dict[str, tuple[str, ...]] = ast.literal_eval(table)
                return {name: module for module, names in modules.items() for name in names}
    return {}


def rewrite_imports(source: bytes, *, package: str) -> bytes:
    """The same file, importing from `package` instead of `curry_train`; nothing but import statements changes."""
    if package == PACKAGE:
        return source
    edits: list[tuple[int, int, str, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            edits.append(
                (node.lineno - 1, node.col_offset, rf"from\s+{PACKAGE}\b", f"from {package}")
            )
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_ours(alias.name), node.names):
                if alias.asname is None and alias.name != PACKAGE:
                    raise ScaffoldError(
                        f"'import {alias.name}' can't move to {package}: write from ... import ..."
                    )
                binding = package if alias.asname else f"{package} as {PACKAGE}"
                edits.append((alias.lineno - 1, alias.col_offset, rf"{PACKAGE}\b", binding))
    lines = source.splitlines(keepends=True)
    for line, column, old, new in sorted(
        edits, reverse=True
    ):  # from the right, so that columns stay true
        head, tail = lines[line][:column], lines[line][column:]
        lines[line] = head + re.sub(old.encode(), new.encode(), tail, count=1)
    return b"".join(lines)


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _parent_inits(path: str) -> Iterator[str]:
    for folder in PurePosixPath(path).parents:
        if folder.parts[:1] == (PACKAGE,):
            yield f"{folder}/__init__.py"


def _imported_files(template: Path, path: str, source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source, filename=path)):
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_ours(alias.name), node.names):
                yield _file_of(template, alias.name, importer=path)
        elif isinstance(node, ast.ImportFrom):
            # `from ..core import x` in curry_train/gates/y.py: two dots drop the file's name and `gates`.
            above = PurePosixPath(path).parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            if _is_ours(module):
                file = _file_of(template, module, importer=path)
                yield file
                if file.endswith("/__init__.py"):
                    yield from _submodules(
                        template, module, [alias.name for alias in node.names], importer=path
                    )


def _submodules(
    template: Path, package: str, names: Iterable[str], *, importer: str
) -> Iterator[str]:
    """The files behind `from package import names`: a submodule, or a name that `__init__.py` hands on from one."""
    folder = template / package.replace(".", "/")
    handed_out = handed_out_names((folder / "__init__.py").read_bytes())
    for name in names:
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            yield _file_of(template, f"{package}.{name}", importer=importer)
        elif name in handed_out:
            yield _file_of(template, f"{package}.{handed_out[name]}", importer=importer)


def _file_of(template: Path, module: str, *, importer: str) -> str:
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if (template / path).is_file():
            return path
    raise ScaffoldError(f"{importer} imports {module}, which {template} does not have")
