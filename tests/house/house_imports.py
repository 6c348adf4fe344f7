"""House rules on what imports what inside curry_train; `tests/house/house.py` runs them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from house_tree import PACKAGE, package_files, parse, relative

FLOORS = {
    "__init__": -1,  # the version, for everyone
    "core": 0,
    "primitives": 1,
    "data": 1,
    "plan": 2,
    "runs": 2,
    "gates": 3,
    "loop": 4,
    "training": 4,
    "parts": 4,
    "distribute": 4,
    "datasets": 4,
    "evaluation": 4,
    "progress": 4,
    "journal_hook": 4,
    "resume_check": 4,
    "run_folder": 4,
    "runs_command": 4,
    "runs_resume_check_command": 4,
    "runs_diff_command": 4,
    "runs_estimate_command": 4,
    "runs_plot": 4,
    "runs_plot_command": 4,
    "runs_plot_events": 4,
    "runs_story": 4,
    "runs_table": 4,
    "runs_spike_check_command": 4,
    "spike_check": 4,
    "spike_watch": 4,
    "schedule": 4,
    "train_command": 4,
    "typed_fields": 4,
    "benchmark": 4,
    "accumulation_cost": 4,
    "bench_command": 4,
    "bench_plot": 4,
    "bench_table": 4,
    "config": 4,
    "plots": 4,
    "options": 4,
    "largest_batch": 4,
    "savings": 4,
    "savings_plot": 4,
    "savings_row": 4,
    "gate_rows": 4,
    "gate_table": 4,
    "grad_flow_command": 4,
    "grad_flow_overhead": 4,
    "grad_flow_plot": 4,
    "plan_command": 4,
    "plan_plot": 4,
    "savings_table": 4,
    "store_benchmark": 4,
    "cadence_benchmark": 4,
    "testgen": 4,
    "__main__": 4,
}
TOP = max(FLOORS.values())
ONE_FILE_PER_TECHNIQUE = {
    "primitives",
    "gates",
}  # a project may hold one file without its neighbours
IMPORTED_BELOW_TOP = {"torch", "numpy", *sys.stdlib_module_names}
IMPORTED_WHERE_NEEDED = {
    "runs": {"fsspec", "xxhash"}
}  # in the function that needs it, which says when it is missing

KEPT_PROMISES = """
import importlib, sys
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for name in module.__all__:
        try:
            getattr(module, name)
        except (ImportError, AttributeError) as error:
            print(f"{package} promises {name}, which cannot be imported ({error}): correct its __init__.py")
"""


def imports_run_only_downwards(root: Path) -> list[str]:
    """A module imports from lower floors, and from its own folder where a project holds that folder whole."""
    violations = []
    for path in package_files(root):
        own = path.relative_to(root / PACKAGE).parts[0].removesuffix(".py")
        if own not in FLOORS:
            violations.append(
                f"{relative(path, root)} is on no floor: give {own!r} one in tests/house/house_imports.py"
            )
            continue
        for line, target in _relative_imports(path, root):
            downwards = FLOORS[target] < FLOORS[own] or FLOORS[target] == FLOORS[own] == TOP
            if downwards or (target == own and own not in ONE_FILE_PER_TECHNIQUE):
                continue
            violations.append(
                f"{relative(path, root)}:{line} ({own}, floor {FLOORS[own]}) imports {target} "
                f"(floor {FLOORS[target]}): import downwards, or move what both need to a lower floor"
            )
    return violations


def _relative_imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each relative import and the top folder or module of curry_train that it reaches."""
    folders = path.relative_to(root / PACKAGE).parts[:-1]
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = folders[: len(folders) - node.level + 1]
        modules = [node.module] if node.module else [alias.name for alias in node.names]
        for module in modules:
            first = (*base, *module.split("."))[0]
            yield (
                node.lineno,
                first if first in FLOORS else "__init__",
            )  # a name of curry_train itself


def imports_inside_the_package_are_relative(root: Path) -> list[str]:
    """The package works under any name that a user's repository gives it."""
    return [
        f"{relative(path, root)}:{line} imports {name}: write it as a relative import"
        for path in package_files(root)
        for line, name in _absolute_imports(parse(path))
        if name.split(".")[0] == "curry_train"
    ]


def lower_floors_need_only_torch(root: Path) -> list[str]:
    """Below the top floor nothing is imported but torch, numpy and the standard library; core imports numpy lazily.

    `runs` imports a few more, inside of the function that needs them.
    """
    violations = []
    for path in package_files(root):
        own = path.relative_to(root / PACKAGE).parts[0].removesuffix(".py")
        if FLOORS.get(own, TOP) == TOP:
            continue
        module = parse(path)
        at_import = ast.Module(
            [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        where_needed = IMPORTED_WHERE_NEEDED.get(own, set())
        violations += [
            f"{relative(path, root)}:{line} imports {name}: below the top floor only torch, numpy and the stdlib are"
            for line, name in _absolute_imports(module)
            if name.split(".")[0] not in {*IMPORTED_BELOW_TOP, *where_needed, "curry_train"}
        ]
        violations += [
            f"{relative(path, root)}:{line} imports {name} with the module: import it in the function that needs it"
            for line, name in _absolute_imports(at_import)
            if name.split(".")[0] in where_needed
        ]
        violations += [
            f"{relative(path, root)}:{line} imports numpy with the module: import it in the function that needs it"
            for line, name in _absolute_imports(at_import)
            if own == "core" and name.split(".")[0] == "numpy"
        ]
    return violations


def _absolute_imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.lineno, node.module


def packages_hand_names_on_lazily(root: Path) -> list[str]:
    """Each package below curry_train binds `__getattr__`, and importing it imports none of its modules."""
    violations = []
    for path in (root / PACKAGE).rglob("*/__init__.py"):
        module = parse(path)
        bound = {
            node.id
            for node in ast.walk(module)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if "__getattr__" not in bound:
            violations.append(
                f"{relative(path, root)} binds no __getattr__: use lazy_names from core/lazy.py"
            )
        violations += [
            f"{relative(path, root)}:{node.lineno} imports eagerly: list the name in lazy_names instead"
            for node in module.body
            if isinstance(node, ast.ImportFrom)
            and node.level
            and [alias.name for alias in node.names] != ["lazy_names"]
        ]
    return violations


def promised_names_can_be_imported(root: Path) -> list[str]:
    """Every public name of every package is there, in a fresh interpreter."""
    folders = [path.parent for path in sorted((root / PACKAGE).rglob("*/__init__.py"))]
    packages = [".".join(folder.relative_to(root / "template").parts) for folder in folders]
    done = subprocess.run(
        [sys.executable, "-c", KEPT_PROMISES, *packages],
        cwd=root / "template",
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return [
            f"a package of curry_train cannot be imported: {done.stderr.strip().splitlines()[-1]}"
        ]
    return done.stdout.splitlines()
