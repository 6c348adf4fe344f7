"""The rules that no linter holds: functions from the root of a tree to the violations in it.

python -m pytest tests/house/test_house.py
"""

import ast
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

from ..tree import files, skills

PACKAGE = "template/curry_train"
WORKPLACE_WORD = re.compile(
    r"[/]work/|[/]tmp/w/|[/]farm/|[.][.]/shared|this[ ]session|developer[ ]session", re.IGNORECASE
)
# Ruff allows one import on a line.
ABSOLUTE_IMPORT = re.compile(r"^\s*(?:from|import)\s+curry_train\b")
TOLERATED_PRIVATE_NAMES = (
    # In private modules of torch, but in use everywhere and without a public name.
    "torch.utils._pytree.",
    "torch.utils._python_dispatch.TorchDispatchMode",
    # The schema of an operator names it, not torch.
    "torch.ops.",
)
LINK = re.compile(r"""(?:\]\(|\bsrc(?:set)?=")([^)\s#":]+)[)\s#"]""")
PRIVATE_OF_TORCH = re.compile(r"torch\.(?:\w+\.)*_[A-Za-z]\w*(?:\.\w+)*")

# Thousands of Python tokens that a reader of each folder has to hold at most. Lower a number when
# its folder has become lighter; a capability that is added takes out what it makes superfluous.
BUDGETS = {
    f"{PACKAGE}/core": 13,
    f"{PACKAGE}/primitives": 37,
    f"{PACKAGE}/runs": 46,
    f"{PACKAGE}/workloads": 17,
    f"{PACKAGE}/plan": 46,
    f"{PACKAGE}/bench": 5,
    f"{PACKAGE}/gates": 56,
    f"{PACKAGE}/cli": 43,
    PACKAGE: 270,
    "tests": 260,
    "benchmarks": 50,
}
# The tokens of Python; `tokenize` takes ten times as long for all files.
TOKEN = re.compile(
    r"""
    (?P<free> \s+ | \\\n | \#.* )
    | (?P<string> (?:\b[bBfFrRuU]{1,2})? (?:
        (?P<quotes>\"{3}|'{3}) (?: \\(?s:.) | (?s:.) )*? (?P=quotes)
        | "(?: \\(?s:.) | [^"\\\n] )*"
        | '(?: \\(?s:.) | [^'\\\n] )*'
    ) )
    | \d[\w.]*(?:(?<=[eE])[-+]\d+)? | \w+
    | [*/<>]{2}=? | \.{3} | -> | := | [-+*/%&|^@<>=!]=
    | .
    """,
    re.VERBOSE,
)

# Names that users and their agents rely on, by the module that they import them from.
PUBLIC_NAMES = {
    "curry_train.primitives": """
        Recompute CheckpointWrapper CheckpointConfig recompute_blocks recompute_segments
        GradientAccumulation train_window apply_sac apply_regions offload_blocks memory_budget
        checkpoint_timesteps apply_chunked_loss keep_routing
    """,
    "curry_train.primitives.grad_accum": "GradientAccumulation train_window",
    "curry_train.primitives.recompute": "recompute_blocks",
    "curry_train.primitives.sac": "apply_sac",
    "curry_train.plan": "MemoryProfiler ProfileReport SelectiveCheckpointer plan Plan",
    "curry_train.runs": "saving commit_checkpoints newest_whole record_training record_run",
    "curry_train.loop": "run_training_steps save_checkpoint equip",
    "curry_train.benchmark": "run_accumulated_step",
}


def missing_names(promised):
    """Public names stay where users import them from."""
    violations = []
    for module, names in promised.items():
        for name in names.split():
            try:
                pkgutil.resolve_name(f"{module}:{name}")
            except (ImportError, AttributeError):
                violations.append(
                    f"{module} has no {name}, which users import from it: put it back"
                )
    return violations


def imports_inside_the_package_are_relative(root):
    """Owned copies work under any package name."""
    return [
        f"{place} imports curry_train by name: write a relative import, so that a copy works under "
        "another name"
        for place, _ in _lines_with(ABSOLUTE_IMPORT, root, _python_files(root, PACKAGE))
    ]


def private_torch_names_stay_in_one_module(root):
    """A private name of torch is used in one module, so that a new torch breaks one place."""
    users = defaultdict(set)
    for path in _python_files(root, PACKAGE):
        for name in _private_torch_names(ast.parse(path.read_text())):
            users[name].add(path.relative_to(root).as_posix())
    return [
        f"{' and '.join(sorted(paths))} use {name}: keep it in one of them, and call that"
        for name, paths in sorted(users.items())
        if len(paths) > 1
    ]


def nothing_mentions_the_workplace(root):
    """No file has a path of a machine that it was written on, or a word on how it was written."""
    return [
        f"{place} has {found!r}: write what holds for every user"
        for place, found in _lines_with(WORKPLACE_WORD, root, files(root))
    ]


def links_lead_somewhere(root):
    """A link of README, CHANGELOG or docs/ leads to a file; skillsaw looks at the other pages."""
    return [
        f"{page.relative_to(root)} links to {target}, which is not there: correct the link"
        for page in (*root.glob("*.md"), *root.glob("docs/*.md"))
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]


def techniques_are_complete(root):
    """A skill `x-y` has a home module, the gates `x_y` and tests, and no gates lack a skill."""
    found = skills(root)
    violations = [f"skills/{skill.name} {gap}" for skill in found for gap in _gaps(skill, root)]
    techniques = {skill.technique for skill in found}
    for path in sorted((root / PACKAGE / "gates").glob("*.py")):
        if _binds_gates(path) and path.stem not in techniques:
            violations.append(f"gates/{path.name} binds GATES and has no skill: write it")
    return violations


def rooms_keep_their_budgets(root):
    """A folder has no more tokens than its budget; comments, docstrings and layout are free."""
    violations = []
    for folder, budget in BUDGETS.items():
        weight = sum(map(_num_tokens, _python_files(root, folder)))
        if weight > 1000 * budget:
            violations.append(
                f"{folder} has {weight:,} tokens of {budget},000: take out what is superfluous"
            )
    return violations


RULES = (
    imports_inside_the_package_are_relative,
    private_torch_names_stay_in_one_module,
    nothing_mentions_the_workplace,
    links_lead_somewhere,
    techniques_are_complete,
    rooms_keep_their_budgets,
)


def _num_tokens(path):
    number = 0
    before = ":"
    begins_line = True
    for found in TOKEN.finditer(path.read_text()):
        if found["free"] is not None:
            begins_line |= "\n" in found["free"]
            continue
        is_docstring = found["string"] and begins_line and before == ":"
        number += not is_docstring
        before = found[0]
        begins_line = False
    return number


def _gaps(skill, root):
    if not (root / "template" / skill.home).is_file():
        yield f"has no home: metadata.module names {skill.home}, which is not below template/"
    if not _binds_gates(root / PACKAGE / "gates" / f"{skill.technique}.py"):
        yield f"has no gates: bind GATES in {PACKAGE}/gates/{skill.technique}.py"
    names = {skill.technique, Path(skill.home).stem}
    tests = [path for name in names for path in root.glob(f"tests/*/test_{name}*.py")]
    if all(path.parent.name == "skills" for path in tests):
        yield f"has no tests: write tests/<room>/test_{skill.technique}.py"


def _binds_gates(path):
    return path.is_file() and re.search(r"^GATES\b", path.read_text(), re.MULTILINE) is not None


def _lines_with(pattern, root, paths):
    """Yield the place of each line that has a pattern, and what it has."""
    for path in paths:
        # A picture or an archive is no text.
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            if found := pattern.search(line):
                yield f"{path.relative_to(root)}:{number}", found[0]


def _python_files(root, folder):
    return [path for path in files(root, folder) if path.suffix == ".py"]


def _private_torch_names(module):
    """Yield the private names of torch that a module uses, aliases resolved."""
    nodes = list(ast.walk(module))
    aliases = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                aliases[alias.asname or name] = prefix + name
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        name = ""
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            first, dot, rest = ast.unparse(node).partition(".")
            name = f"{aliases.get(first, '')}{dot}{rest}"
        elif isinstance(node, ast.Constant):  # as in sys.modules.get("torch._dynamo")
            name = str(node.value)
        if PRIVATE_OF_TORCH.fullmatch(name) and not name.startswith(TOLERATED_PRIVATE_NAMES):
            yield name
