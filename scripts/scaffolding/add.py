"""Plans one technique into a package that exists, and says how to import and test it there.

Proof: `python -m pytest tests/cli/test_scaffold_add.py`.
"""

import ast
from pathlib import PurePosixPath

from .bundle import Bundle, Technique
from .contents import package_contents, test_contents
from .errors import ScaffoldError
from .imports import handed_out_names
from .lock import LOCK, Lock, read_lock
from .plan import Plan, State, make_plan
from .target import Target


def plan_addition(bundle: Bundle, technique: Technique, target: Target, *, overwrite: bool) -> Plan:
    """The plan for `technique` in `target`; its test goes to `tests/` of the project."""
    known = read_lock(target.root)
    if known is not None and known.directory != target.inside_root:
        raise ScaffoldError(
            f"{target.root / LOCK} says that this project keeps its techniques in {known.directory}; "
            f"use --into {target.root / known.directory}, or correct the lock if you moved them"
        )
    inside = package_contents(bundle, [technique])
    init = target.directory / "__init__.py"
    if init.is_file() and init.read_bytes() != inside["__init__.py"]:
        # The package is the user's, and so is what marks it: py.typed would speak for code that is not ours.
        inside = {
            path: content for path, content in inside.items() if "/" in path or path.endswith(".py")
        }
    contents = {f"{target.inside_root}/{path}": content for path, content in inside.items()}
    contents |= test_contents(bundle, [technique], package=target.package)
    lock = Lock(
        bundle.version, known.project if known else None, target.inside_root, target.package
    )
    spared = [f"{target.inside_root}/__init__.py"]
    return make_plan(target.root, contents, lock=lock, overwrite=overwrite, spared=spared)


def conflict_advice(plan: Plan, target: Target) -> str:
    """How to get around the files that are in the way."""
    foreign = [
        entry.path for entry in plan.having(State.CONFLICT) if entry.reason.startswith("yours")
    ]
    apart = read_lock(target.root) is None  # a project keeps its techniques in one package
    if apart and any(path.startswith(f"{target.inside_root}/") for path in foreign):
        return f"keep yours apart from ours with --into {target.directory / 'curry_train'}"
    return "see 'scaffold.py diff --patch'; --overwrite takes the bundle's version of these files"


def import_line(bundle: Bundle, technique: Technique, target: Target) -> str:
    """The line with which the user's code gets at the technique's public names."""
    home = PurePosixPath(technique.home)
    folder = ".".join((target.package, *home.parent.parts[1:]))
    handed_out = handed_out_names((bundle.template / home.parent / "__init__.py").read_bytes())
    names = sorted(name for name, module in handed_out.items() if module == home.stem)
    if names:
        return f"from {folder} import {', '.join(names)}"
    tree = ast.parse((bundle.template / home).read_bytes())
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names = [name for name in defined if not name.startswith("_")]
    return f"from {folder}.{home.stem} import {', '.join(names) or '*'}"
