"""House rules on how code is written: limits where readers suffer.

They hold for what is installed, copied or run by users, and for the house itself; the linter holds
the rest. Run: `python tests/house/rules.py`.
"""

import ast
import tomllib
from pathlib import Path

from tree import COMPREHENSIONS, FUNCTIONS, contains, nodes, python_files, relative

LIMITED_FOLDERS = ("template", "scripts", "benchmarks", "tests/house")
MOST_FUNCTION_LINES = 60
MOST_BRANCHES = 10
MOST_PACKED_VALUES = 2
LINE_WIDTH = 100


def limited_files(root: Path) -> list[Path]:
    """List the files that the limits hold for."""
    return python_files(root, LIMITED_FOLDERS)


def functions_are_short(root: Path) -> list[str]:
    """A function fits on a screen, with its signature and docstring."""
    return [
        f"{relative(path, root)}:{node.lineno} {node.name} has {length} lines, and "
        f"{MOST_FUNCTION_LINES} is the most: divide it"
        for path in limited_files(root)
        for node in nodes(path, *FUNCTIONS)
        if (length := node.end_lineno - node.lineno + 1) > MOST_FUNCTION_LINES
    ]


def functions_are_simple(root: Path) -> list[str]:
    """A function has at most ten ways through it, counted as ruff's C901 counts them."""
    return [
        f"{relative(path, root)}:{node.lineno} {node.name} has complexity {found}, and "
        f"{MOST_BRANCHES} is the most: divide it"
        for path in limited_files(root)
        for node in nodes(path, *FUNCTIONS)
        if (found := complexity(node)) > MOST_BRANCHES
    ]


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return McCabe's cyclomatic complexity of a function, with the functions inside it."""
    return 1 + _branches(function.body)


def _branches(statements: list[ast.stmt]) -> int:
    return sum(_branches_of(statement) for statement in statements)


def _branches_of(statement: ast.stmt) -> int:
    bodies = _branches(getattr(statement, "body", []))
    bodies += _branches(getattr(statement, "orelse", []))
    match statement:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bodies
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return 1 + bodies
        case ast.Try() | ast.TryStar():
            handlers = sum(1 + _branches(handler.body) for handler in statement.handlers)
            return bodies + bool(statement.orelse) + handlers + _branches(statement.finalbody)
        case ast.Match():
            return sum(1 + _branches(each.body) for each in statement.cases)
        case _:
            return bodies


def conditionals_are_not_nested(root: Path) -> list[str]:
    """No `a if b else c` stands inside another one."""
    return [
        f"{relative(path, root)}:{node.lineno} has a conditional inside a conditional expression: "
        "write statements"
        for path in limited_files(root)
        for node in nodes(path, ast.IfExp)
        if contains(node, ast.IfExp)
    ]


def comprehensions_are_not_nested(root: Path) -> list[str]:
    """No comprehension stands inside another one."""
    return [
        f"{relative(path, root)}:{node.lineno} has a comprehension inside a comprehension: "
        "name the inner one, or write a loop"
        for path in limited_files(root)
        for node in nodes(path, *COMPREHENSIONS)
        if contains(node, *COMPREHENSIONS)
    ]


def assignments_are_not_packed(root: Path) -> list[str]:
    """A line assigns one thing; two that belong together may share it, three do not."""
    return [
        f"{relative(path, root)}:{node.lineno} assigns {len(node.value.elts)} values in one line: "
        "write a line for each"
        for path in limited_files(root)
        for node in nodes(path, ast.Assign)
        if _is_packed(node)
    ]


def _is_packed(node: ast.Assign) -> bool:
    if not isinstance(node.value, ast.Tuple | ast.List):
        return False
    unpacks = any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)
    return unpacks and len(node.value.elts) > MOST_PACKED_VALUES


def ruff_holds_the_width(root: Path) -> list[str]:
    """The linter is set to the width and reports longer lines."""
    ruff = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    violations = []
    if ruff.get("line-length") != LINE_WIDTH:
        violations.append(f"pyproject.toml: set tool.ruff.line-length to {LINE_WIDTH}")
    lint = ruff.get("lint", {})
    selected = {"E", "E5", "E501"} & set(lint.get("select", []))
    if not selected or {"E5", "E501"} & set(lint.get("ignore", [])):
        violations.append("pyproject.toml: select E in tool.ruff.lint and do not ignore E501")
    return violations
