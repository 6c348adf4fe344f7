"""House rules on what imports what inside the package.

The direction of the rooms is read from every import statement, also from those in functions and
those for types alone. Run: `python tests/house/rules.py`.
"""

import ast
import graphlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tree import (
    AT_IMPORT,
    FOR_TYPES,
    IN_FUNCTION,
    PACKAGE,
    PACKAGE_NAME,
    TRAINER,
    Import,
    Module,
    all_modules,
    handed_on,
    import_graph,
    imports,
    modules,
    nodes,
    parse,
    reached,
    read,
    relative,
)

TRAINING = ("core", "primitives", "runs")  # what a training step and its checkpoints stand on
TOOLS = ("workloads", "plan", "bench", "gates", "cli")  # each may import those before it
MAY_IMPORT = {
    "": set(),  # the package's own __init__.py holds the version
    "core": {"core"},
    "primitives": {"core", "primitives"},
    "runs": {"core", "runs"},
    TRAINER: {*TRAINING, TRAINER},
    **{room: {*TRAINING, *TOOLS[: TOOLS.index(room) + 1]} for room in TOOLS},
    "cli": {*TRAINING, TRAINER, *TOOLS},
}

# What each room imports besides the standard library. The trainer and the command line are free.
DISTRIBUTIONS = {
    "core": {"torch"},
    "primitives": {"torch", "numpy"},
    "runs": {"torch", "numpy"},
    "workloads": {"torch", "numpy"},
    "plan": {"torch", "numpy"},
    "bench": {"torch", "numpy"},
    "gates": {"torch", "numpy"},
}
# Not needed by every user, so imported in the function that needs them.
DISTRIBUTIONS_IN_FUNCTIONS = {
    "primitives": {"cut_cross_entropy", "liger_kernel"},
    "runs": {"fsspec", "safetensors", "xxhash"},
    "workloads": {"transformers"},
    "bench": {"pynvml"},
}

PICTURE_PAGE = "AGENTS.md"
MOST_CORE_MODULES_OF_RUNS = 2  # `add checkpoint-policy --own` copies the room and these

# Names that users rely on; they do not move.
PUBLIC_FILES = {
    "primitives/grad_accum.py": ("GradientAccumulation", "train_window"),
    "primitives/recompute.py": ("recompute_blocks",),
    "primitives/sac.py": ("apply_sac",),
    "loop.py": ("run_training_steps", "save_checkpoint"),
    "benchmark.py": ("run_accumulated_step",),
}
PUBLIC_NAMES = {
    "primitives": (
        *("Recompute", "CheckpointWrapper", "CheckpointConfig", "recompute_blocks"),
        *("recompute_segments", "GradientAccumulation", "train_window", "apply_sac"),
        *("apply_regions", "offload_blocks", "memory_budget", "checkpoint_timesteps"),
        "apply_chunked_loss",
    ),
    "plan": ("MemoryProfiler", "ProfileReport", "SelectiveCheckpointer", "plan", "Plan"),
    "runs": ("saving",),
}

# In private modules of torch, but in use everywhere and without a public name.
TOLERATED_PRIVATE_NAMES = ("torch.utils._pytree.", "torch.utils._python_dispatch.TorchDispatchMode")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")


def rooms_import_in_one_direction(root: Path) -> list[str]:
    """A room imports the rooms below it; techniques, runs and the trainer import no tool."""
    known = all_modules(root)
    violations = []
    for module in known.values():
        if module.room not in MAY_IMPORT:
            violations.append(
                f"{relative(module.path, root)} stands in {module.room!r}, which is no room: "
                f"move it to one of {', '.join(sorted(set(MAY_IMPORT) - {'', TRAINER}))}"
            )
            continue
        for found in imports(module, known):
            room = None if found.target is None else known[found.target].room
            if room and room not in MAY_IMPORT[module.room]:
                place = f"{relative(module.path, root)}:{found.line}"
                violations.append(_wrong_direction(place, module, found.name, room))
    return violations


def _wrong_direction(place: str, module: Module, name: str, room: str) -> str:
    """Return the message for an import that goes up or sideways."""
    own = module.room or "the package itself"
    if room in TOOLS and own not in TOOLS:
        return (
            f"{place} ({own}) imports {name}, and {room} is a tool: tools import what trains, "
            "never the other way; pass in what is needed, or move it down"
        )
    return f"{place} ({own}) imports {name} from {room}: move what both need to a room below both"


def imports_form_no_cycle(root: Path) -> list[str]:
    """No module reaches itself through imports that run."""
    graph = import_graph(root, when=(AT_IMPORT, IN_FUNCTION))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = " <- ".join(name or PACKAGE_NAME for name in error.args[1])
        return [f"imports form a cycle: {cycle}; move what both need into a module of its own"]
    return []


def imports_inside_the_package_are_relative(root: Path) -> list[str]:
    """Owned copies work under any package name."""
    known = all_modules(root)
    return [
        f"{relative(module.path, root)}:{found.line} imports {PACKAGE_NAME}.{found.name}: "
        "write it as a relative import, so that a copy works under another name"
        for module in known.values()
        for found in imports(module, known)
        if found.target is not None and not found.is_relative
    ]


def rooms_need_few_distributions(root: Path) -> list[str]:
    """Core imports torch and the standard library; no room below the command line much more."""
    known = all_modules(root)
    return [
        f"{relative(module.path, root)}:{found.line} {problem}"
        for module in known.values()
        if module.room in DISTRIBUTIONS
        for found in imports(module, known)
        if (problem := _distribution_problem(found, module.room))
    ]


def _distribution_problem(found: Import, room: str) -> str | None:
    """Return what is wrong with the import of another distribution."""
    top = found.name.partition(".")[0]
    if found.target is not None or found.is_relative or found.when == FOR_TYPES:
        return None
    if top in DISTRIBUTIONS[room] or top in sys.stdlib_module_names:
        return None
    if top not in DISTRIBUTIONS_IN_FUNCTIONS.get(room, set()):
        shown = " and ".join(sorted(DISTRIBUTIONS[room]))
        return (
            f"imports {top}, and {room} needs {shown} besides the standard library: "
            "move this to cli, or do without"
        )
    if found.when == AT_IMPORT:
        return f"imports {top} with the module: import it in the function that needs it"
    return None


def runs_stands_on_few_modules_of_core(root: Path) -> list[str]:
    """A project that owns `runs/` copies at most two modules of core with it."""
    graph = import_graph(root, when=(AT_IMPORT, IN_FUNCTION))
    known = modules(root)
    runs = [name for name, module in known.items() if module.room == "runs"]
    everything = set().union(*(reached(graph, name) for name in runs))
    needed = sorted(name for name in everything & set(known) if known[name].room == "core")
    if len(needed) <= MOST_CORE_MODULES_OF_RUNS:
        return []
    return [
        f"runs stands on {len(needed)} modules of core ({', '.join(needed)}), and "
        f"{MOST_CORE_MODULES_OF_RUNS} is the most: move what runs alone needs into runs"
    ]


def picture_shows_the_imports(root: Path) -> list[str]:
    """The picture of the rooms in AGENTS.md has an arrow for each import between two rooms.

    An arrow that a longer path implies is not drawn.
    """
    page = root / PICTURE_PAGE
    drawn = drawn_arrows(read(page)) if page.is_file() else None
    if not drawn:
        return [f"{PICTURE_PAGE} has no picture of the rooms: draw it as a mermaid flowchart"]
    arrows = room_imports(root)
    needed = {(start, end) for start, ends in without_shortcuts(arrows).items() for end in ends}
    missing = [
        f"{PICTURE_PAGE} draws no arrow from {start} to {end}, and {start} imports {end}: draw it"
        for start, end in sorted(needed - drawn)
    ]
    superfluous = [
        f"{PICTURE_PAGE} draws an arrow from {start} to {end}; {_why_no_arrow(start, end, arrows)}"
        for start, end in sorted(drawn - needed)
    ]
    return missing + superfluous


def _why_no_arrow(start: str, end: str, arrows: Mapping[str, set[str]]) -> str:
    if end in arrows.get(start, set()):
        return "a longer path implies it: remove the arrow"
    return f"{start} does not import {end}: remove the arrow"


def drawn_arrows(text: str) -> set[tuple[str, str]]:
    """Return the arrows of the first mermaid flowchart of a page; `a --> b --> c` has two."""
    found = re.search(r"^```mermaid\nflowchart .*\n(?P<lines>(?:.*\n)*?)```$", text, re.MULTILINE)
    arrows = set()
    for line in found["lines"].splitlines() if found else []:
        ends = [end.strip() for end in line.split("-->")]
        arrows.update(itertools.pairwise(ends))
    return arrows


def room_imports(root: Path) -> dict[str, set[str]]:
    """Return the rooms that each room imports; every package has `lazy_names` of core in it."""
    known = all_modules(root)
    found: dict[str, set[str]] = {module.room: set() for module in known.values() if module.room}
    for name, targets in import_graph(root).items():
        room = known[name].room
        rooms = {known[target].room for target in targets if target != "core"}
        if room:
            found[room] |= rooms - {room, ""}
    return found


def without_shortcuts(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows that no longer path implies."""
    found = {}
    for start, ends in arrows.items():
        implied = set()
        for end in ends:
            implied |= reached(arrows, end) - {end}
        found[start] = ends - implied
    return found


def packages_hand_names_on_lazily(root: Path) -> list[str]:
    """Importing a package of a room imports none of its modules."""
    known = all_modules(root)
    return [
        f"{relative(module.path, root)}:{found.line} imports {found.name} eagerly: "
        "list the name in lazy_names instead (core/__init__.py)"
        for module in known.values()
        if module.is_package and module.name
        for found in imports(module, known)
        if found.when == AT_IMPORT and found.target not in (None, "core")
    ]


def promised_names_exist(root: Path) -> list[str]:
    """Every name in a `lazy_names` table is bound in the module that the table names."""
    known = all_modules(root)
    violations = []
    for package in known.values():
        if not package.is_package:
            continue
        for name, home in handed_on(package).items():
            place = relative(package.path, root)
            if home not in known:
                violations.append(
                    f"{place} hands on {name} from {home}, which is not there: correct the table"
                )
            elif name not in bound_names(known[home].path):
                violations.append(
                    f"{place} hands on {name}, and {home} does not bind it: correct the table"
                )
    return violations


def bound_names(path: Path) -> set[str]:
    """Return the names that a module binds at its top level."""
    return {name for statement in parse(path).body for name in _bound_by(statement)}


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):  # below `if`, `try` and `with`
            yield from _bound_by(child)
        else:
            names = (node for node in ast.walk(child) if isinstance(node, ast.Name))
            yield from (node.id for node in names if isinstance(node.ctx, ast.Store))


def public_names_stay_where_they_are(root: Path) -> list[str]:
    """Files and names that users and their agents import are at the promised places."""
    violations = []
    for file, names in PUBLIC_FILES.items():
        path = root / PACKAGE / file
        if not path.is_file():
            violations.append(f"{PACKAGE}/{file} is gone: users import from it, so put it back")
            continue
        violations += [
            f"{PACKAGE}/{file} does not bind {name}, which users import from it: put it back"
            for name in names
            if name not in bound_names(path)
        ]
    known = all_modules(root)
    for package, names in PUBLIC_NAMES.items():
        promised = handed_on(known[package]) if package in known else {}
        violations += [
            f"{PACKAGE}/{package}/__init__.py does not hand on {name}: users import it from there"
            for name in names
            if name not in promised
        ]
    return violations


def private_torch_names_stay_in_one_module(root: Path) -> list[str]:
    """Each private name of torch is used in one module, so that a new torch breaks one place."""
    users: dict[str, dict[str, int]] = defaultdict(dict)
    for module in modules(root).values():
        for name, line in private_torch_names(module.path):
            users[name].setdefault(relative(module.path, root), line)
    return [
        f"{place}:{line} uses {name}, as does {', '.join(sorted(set(places) - {place}))}: "
        "keep a private name of torch in one module and call that"
        for name, places in sorted(users.items())
        if len(places) > 1
        for place, line in sorted(places.items())[1:]
    ]


def private_torch_names(path: Path) -> list[tuple[str, int]]:
    """List the private names of torch that a module uses, aliases resolved, with their lines."""
    aliases = _torch_aliases(path)
    if not aliases:
        return []
    used = []
    inner = {id(node.value) for node in nodes(path, ast.Attribute)}  # part of a longer name
    for node in nodes(path, ast.Attribute, ast.Name):
        text = "" if id(node) in inner else ast.unparse(node)
        first, dot, rest = text.partition(".")
        if first in aliases and DOTTED.fullmatch(text):
            used.append((f"{aliases[first]}{dot}{rest}", node.lineno))
    for node in nodes(path, ast.Constant):  # as in sys.modules.get("torch._dynamo")
        if isinstance(node.value, str) and node.value.startswith("torch."):
            used.append((node.value, node.lineno))
    return [(name, line) for name, line in used if _is_private(name)]


def _torch_aliases(path: Path) -> dict[str, str]:
    """Return what each name that torch's imports bind stands for."""
    aliases = {}
    for node in nodes(path, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
    for node in nodes(path, ast.ImportFrom):
        if not node.level and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _is_private(name: str) -> bool:
    """Return whether a dotted name has a private part; an operator's schema names it, not torch."""
    if not DOTTED.fullmatch(name) or name.startswith(("torch.ops.", *TOLERATED_PRIVATE_NAMES)):
        return False
    return any(re.match(r"_[A-Za-z]", part) for part in name.split("."))
