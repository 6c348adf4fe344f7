"""House rules on how many modules there are, how long they are, and why each one exists.

Run: `python tests/house/rules.py`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tree import (
    PACKAGE,
    Module,
    all_modules,
    files,
    import_graph,
    importers,
    imports,
    line_count,
    modules,
    python_files,
    reached,
    read,
    relative,
    skills,
)

MOST_MODULES = 127
MOST_CORE_MODULES = 10
LINES_THAT_NEED_A_REASON = 600
MOST_LINES = 800
REASON = re.compile(r"why so long:[ \t]*\S", re.IGNORECASE)
LINES_WORTH_A_MODULE = 150
FEWEST_ROOMS_OF_A_SHARED_MODULE = 2
PUBLIC_MODULES = {
    *("primitives.grad_accum", "primitives.recompute", "primitives.sac"),
    *("loop", "benchmark", "__main__", "cli.main"),
}
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager", "common", "misc"}


def package_has_few_modules(root: Path) -> list[str]:
    """The package is small enough to know."""
    count = len(modules(root))
    if count <= MOST_MODULES:
        return []
    return [
        f"{PACKAGE} holds {count} modules, and {MOST_MODULES} is the most: "
        "move a module into the one that imports it"
    ]


def core_has_few_modules(root: Path) -> list[str]:
    """Core holds what several rooms share, and nothing else."""
    names = [name for name, module in modules(root).items() if module.room == "core"]
    if len(names) <= MOST_CORE_MODULES:
        return []
    return [
        f"core holds {len(names)} modules, and {MOST_CORE_MODULES} is the most: "
        "move what one room needs into that room"
    ]


def files_have_a_readable_length(root: Path) -> list[str]:
    """A file above 600 lines says why it is one file; 800 is the end."""
    violations = []
    for path in python_files(root):
        length, name = line_count(path), relative(path, root)
        if length > MOST_LINES:
            violations.append(f"{name} has {length} lines, and {MOST_LINES} is the end: divide it")
        elif length > LINES_THAT_NEED_A_REASON and not REASON.search(read(path)):
            violations.append(
                f"{name} has {length} lines: divide it, or say why it is one file in its docstring "
                "or in a comment that starts with 'Why so long:'"
            )
    return violations


def small_modules_have_two_users(root: Path) -> list[str]:
    """A short module that only one module of its room imports belongs into that module.

    Packages that hand a name on are no users. These may stay alone: a technique and its gate; a
    command, which a reader looks for by its name (only `cli/main` imports it); and the modules at
    promised paths.
    """
    known, outside = modules(root), used_from_outside(root)
    may_stay = {*PUBLIC_MODULES, *_homes_and_gates(root), *outside}
    violations = []
    for name, all_users in importers(root).items():
        users = all_users & set(known)
        if name not in known or name in may_stay or len(users) != 1:
            continue
        (user,) = users
        own = known[name]
        length = line_count(own.path)
        if known[user].room != own.room or length >= LINES_WORTH_A_MODULE:
            continue
        if own.room != "cli" or user != "cli.main":
            violations.append(
                f"{relative(own.path, root)} has {length} lines and one importer, {user}: "
                "move it into that module"
            )
    return violations


def _homes_and_gates(root: Path) -> Iterator[str]:
    """Yield the modules of techniques and gates by name."""
    for skill in skills(root):
        yield f"gates.{skill.technique}"
        for home in skill.homes:
            inside = home.removeprefix("template/").removeprefix("curry_train/")
            yield inside.removesuffix(".py").replace("/", ".")


def used_from_outside(root: Path) -> set[str]:
    """Return the modules that scripts, benchmarks and the project template import."""
    known = all_modules(root)
    paths = python_files(root, ["scripts", "benchmarks", "template/project"])
    scripts = [Module(path.stem, path) for path in paths]
    found = {one.target for script in scripts for one in imports(script, known)}
    return {target for target in found if target is not None}


def core_modules_serve_two_rooms(root: Path) -> list[str]:
    """A module of core has users in two rooms, directly or through another module of core."""
    known, graph = all_modules(root), import_graph(root)
    rooms_by_module = defaultdict(set)
    for name, targets in graph.items():
        room = known[name].room
        if room != "core":
            for target in set().union(*(_reached_in_core(graph, target) for target in targets)):
                rooms_by_module[target].add(room)
    return [
        f"{relative(module.path, root)} serves {' '.join(rooms_by_module[name]) or 'no room'} "
        "alone: move it there"
        for name, module in modules(root).items()
        if module.room == "core" and len(rooms_by_module[name]) < FEWEST_ROOMS_OF_A_SHARED_MODULE
    ]


def _reached_in_core(graph: dict[str, set[str]], target: str) -> set[str]:
    return reached(graph, target) if target.startswith("core.") else set()


def files_are_named_for_what_they_hold(root: Path) -> list[str]:
    """No file or folder has a name that would fit any other."""
    return [
        f"{relative(path, root)}: name the file for what it holds"
        for path in files(root)
        if VAGUE_WORDS & set(re.split(r"[_./-]", relative(path, root).lower()))
    ]
