"""Measure an edition: its size, how far a call goes, what a user gets, how it is written.

    python tests/house/measure.py                              # this tree
    python tests/house/measure.py ROOT --json FILE             # another edition
    python tests/house/measure.py --without calls --without copies
    python tests/house/measure.py --record evidence/house.json # beside the figures of the last one

`calls` start each entry call in a fresh process (`hops.py` says what is counted), `copies` run the
tree's own scaffold command into a temporary folder. Both take a minute. Everything else is read
from the source. Lines are those of the installed package unless a figure says otherwise.
"""

import argparse
import ast
import datetime
import io
import itertools
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import hops
from rules import RULES
from rules_text import summary_problems
from tree import (
    COMPREHENSIONS,
    FUNCTIONS,
    ROOT,
    line_count,
    modules,
    nodes,
    package_files,
    python_files,
    read,
    skills,
    top_level,
)

MORE_TECHNIQUES = ("offload", "chunked-loss")  # techniques of `add` without a skill
OWNED_TECHNIQUES = ("checkpoint-policy", "loss-spike")  # which `add --own` copies
SHORT_FUNCTION_LINES = 4
SECONDS_AT_MOST = 600
LAYOUT_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}

Figures = dict[str, Any]


# Size


def measure_size(root: Path) -> Figures:
    """Count modules and lines of the package."""
    paths = package_files(root)
    lengths = [line_count(module.path) for module in modules(root).values()]
    return {
        "modules": len(lengths),
        "files": len(paths),
        "all_lines": sum(map(line_count, paths)),
        "lines_with_text": sum(map(_lines_with_text, paths)),
        "code_lines": sum(map(code_lines, paths)),
        "median_lines": statistics.median(lengths),
        "longest_lines": max(lengths),
    }


def _lines_with_text(path: Path) -> int:
    return sum(bool(line.strip()) for line in read(path).splitlines())


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no blank ones, no comments, no docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
        if token.type not in LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(path, ast.Module, ast.ClassDef, *FUNCTIONS):
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code)


# Way


def measure_calls(root: Path) -> Figures:
    """Count files that execute in each entry call, and modules that a gate loads."""
    executed = {entry: len(hops.executed_files(root, entry)) for entry in hops.MOST_FILES}
    return {
        "executed_files": executed,
        "modules_loaded_by_a_gate": len(hops.loaded_modules(root)),
    }


# Copies


def measure_copies(root: Path) -> Figures:
    """Count files and lines that `new` and each `add` write."""
    techniques = [skill.name for skill in skills(root)]
    techniques += [name for name in MORE_TECHNIQUES if name not in techniques]
    found: Figures = {"new": _new(root), "add": {name: _add(root, name) for name in techniques}}
    if "--own" in _scaffold(root, "add", "--help", folder=root).stdout:
        found["new_own"] = _new(root, "--own")
        found["add_own"] = {name: _add(root, name, "--own") for name in OWNED_TECHNIQUES}
    return found


def _new(root: Path, *options: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return _written(root, Path(folder), "new", "project", "--name", "small_run", *options)


def _add(root: Path, technique: str, *options: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "src/mylib")
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        Path(folder, "pyproject.toml").touch()
        arguments = ["add", technique, "--into", "src/mylib/training", *options]
        return _written(root, Path(folder), *arguments)


def _written(root: Path, folder: Path, *arguments: str) -> Figures:
    """Run the scaffold command in a folder and count what it wrote, or return its refusal."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    done = _scaffold(root, *arguments, folder=folder)
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    new = [path for path in folder.rglob("*") if path.is_file() and path not in before]
    python = [path for path in new if path.suffix == ".py"]
    return {
        "files": len(new),
        "lines": sum(map(_text_lines, new)),
        "python_files": len(python),
        "python_lines": sum(map(_text_lines, python)),
    }


def _text_lines(path: Path) -> int:
    """Count the lines of a text; an archive has none."""
    try:
        return len(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError:
        return 0


def _scaffold(root: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/scaffold.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS_AT_MOST
    )


# Writing


def measure_writing(root: Path) -> Figures:
    """Count what makes code hard to read."""
    paths = package_files(root)
    thousands = sum(map(_lines_with_text, paths)) / 1000
    classes = Counter(_definitions(root, ast.ClassDef))
    functions = Counter(name for name in _definitions(root, *FUNCTIONS) if name[0] != "_")
    docstrings = {
        "package": _docstrings(paths),
        "scripts": _docstrings(python_files(root, ["scripts", "benchmarks"])),
        "tests": _docstrings(python_files(root, ["tests", "template/tests"])),
    }
    return {
        "class_names_used_twice": sum(count > 1 for count in classes.values()),
        "public_function_names_used_twice": sum(count > 1 for count in functions.values()),
        "docstrings": docstrings,
        "comprehensions_per_1000_lines": _rounded(
            sum(len(nodes(path, *COMPREHENSIONS)) for path in paths) / thousands
        ),
        "own_line_comments_per_1000_lines": _rounded(sum(map(_comments, paths)) / thousands),
        "functions": sum(len(nodes(path, *FUNCTIONS)) for path in paths),
        "median_function_lines": statistics.median(
            _span(node) for path in paths for node in nodes(path, *FUNCTIONS)
        ),
        "short_private_functions_with_one_caller": sum(map(_short_and_called_once, paths)),
    }


def _rounded(value: float) -> float:
    return round(value, 1)


def _definitions(root: Path, *kinds: type[ast.AST]) -> list[str]:
    return [
        node.name for module in modules(root).values() for node in top_level(module.path, *kinds)
    ]


def _docstrings(paths: list[Path]) -> Figures:
    """Count docstrings, and those whose first line breaks the rule."""
    count = 0
    for path in paths:
        documented = nodes(path, ast.Module, ast.ClassDef, *FUNCTIONS)
        count += sum(ast.get_docstring(node) is not None for node in documented)
    return {
        "count": count,
        "first_lines_that_break_the_rule": sum(len(list(summary_problems(path))) for path in paths),
    }


def _comments(path: Path) -> int:
    """Count the lines that hold a comment alone."""
    return sum(line.strip().startswith("#") for line in read(path).splitlines())


def _span(node: ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _short_and_called_once(path: Path) -> int:
    """Count private functions of at most four lines whose name occurs once more in the module."""
    uses = Counter(node.id for node in nodes(path, ast.Name) if isinstance(node.ctx, ast.Load))
    uses.update(node.attr for node in nodes(path, ast.Attribute) if isinstance(node.ctx, ast.Load))
    private = [node for node in nodes(path, *FUNCTIONS) if _is_private(node.name)]
    return sum(_span(node) <= SHORT_FUNCTION_LINES and uses[node.name] == 1 for node in private)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# Rules


def measure_rules(root: Path) -> Figures:
    """Count the violations of each house rule."""
    return {name: len(rule(root)) for name, rule in RULES.items()}


SECTIONS = {
    "size": measure_size,
    "calls": measure_calls,
    "copies": measure_copies,
    "writing": measure_writing,
    "violations": measure_rules,
}


def origin(root: Path) -> Figures:
    """Return where the figures come from."""
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    options = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "command": shlex.join(["python", "tests/house/measure.py", *options]),
        "commit": done.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"cpu ({platform.machine()})",
        "torch": metadata.version("torch").partition("+")[0],
        "python": platform.python_version(),
    }


def flat(figures: Figures, *, prefix: str = "") -> dict[str, Any]:
    """Return nested figures with dotted names."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= flat(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def print_table(*editions: Figures) -> None:
    """Print the figures, a column for each edition."""
    columns = [flat(figures) for figures in editions]
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    width = max(map(len, names))
    for name in names:
        values = [column.get(name, "") for column in columns]
        shown = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        print(f"{name:<{width}}", *(f"{value:>12}" for value in shown))


def write_record(path: Path, before: Figures, after: Figures) -> None:
    """Write two editions beside each other, with the origin of the second one first."""
    about = {name: value for name, value in after.items() if name not in SECTIONS}
    sections = {name: value for name, value in after.items() if name in SECTIONS}
    record = about | {"before": before, "after": sections}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure a tree, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    parser.add_argument(
        "--record", type=Path, metavar="PATH", help="measure again the `after` of a record"
    )
    parser.add_argument("--before", type=Path, metavar="FILE", help="figures of an earlier edition")
    parser.add_argument("--without", action="append", default=[], choices=list(SECTIONS))
    chosen = parser.parse_args()
    root = chosen.root.resolve()
    if not modules(root):
        parser.error(f"{root} has no package: name the root of a checkout")
    before = _read_before(chosen)
    if chosen.record and before is None:
        parser.error(f"{chosen.record} is not there: give the earlier figures with --before")

    sections = {name: take for name, take in SECTIONS.items() if name not in chosen.without}
    figures = origin(root) | {name: take(root) for name, take in sections.items()}
    print_table(*([figures] if before is None else [before, figures]))
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if chosen.record:
        write_record(chosen.record, before, figures)


def _read_before(chosen: argparse.Namespace) -> Figures | None:
    """Return the figures of the earlier edition, from a file of their own or from the record."""
    if chosen.before:
        return json.loads(read(chosen.before))
    if chosen.record and chosen.record.is_file():
        return json.loads(read(chosen.record))["before"]
    return None


if __name__ == "__main__":
    main()
