"""Violations to plant in the small tree by rule, and changes that break no rule.

Proof: `python -m pytest tests/house/test_house.py`.
"""

from planted_structure import STRUCTURE
from planted_writing import WRITING
from plants import CLI, CORE, PLAN, RUNS, SCRIPT, Plant, append, both, branches, module, write
from tree import PACKAGE

PLANTED: dict[str, list[tuple[Plant, str]]] = STRUCTURE | WRITING

# Changes that look like a violation and are none.
SOUND: dict[str, list[Plant]] = {
    "files_have_a_readable_length": [
        module(f"{PLAN}/long.py", "x = 1\n" * 599),
        module(f"{PLAN}/long.py", "# Why so long: one table.\n" + "x = 1\n" * 700),
    ],
    "small_modules_have_two_users": [
        both(
            module(f"{RUNS}/lock.py", "x = 1\n" * 149),
            append(f"{RUNS}/attach.py", "from . import lock\n"),
        ),
        both(
            module(f"{RUNS}/lock.py"),
            append(f"{RUNS}/attach.py", "from . import lock\n"),
            append(SCRIPT, "from curry_train.runs.lock import x\n"),
        ),
    ],
    "core_modules_serve_two_rooms": [
        both(
            module(f"{CORE}/one.py", "from .two import x\n"),
            module(f"{CORE}/two.py"),
            append(f"{PLAN}/planner.py", "from ..core.one import x\n"),
            append(f"{RUNS}/attach.py", "from ..core import two\n"),
            append(f"{PACKAGE}/loop.py", "from .core.one import x\n"),
        )
    ],
    "rooms_import_in_one_direction": [
        append(f"{CLI}/main.py", "from .. import loop\nfrom ..gates import verdict\n"),
        append(f"{PACKAGE}/loop.py", "from . import __version__\nfrom .runs import saving\n"),
        append(f"{RUNS}/attach.py", "import plan\nfrom gates import x\n"),  # other distributions
    ],
    "imports_form_no_cycle": [
        both(
            append(f"{RUNS}/attach.py", "from .lock import x\n"),
            module(
                f"{RUNS}/lock.py",
                "import typing\nif typing.TYPE_CHECKING:\n    from .attach import saving\n",
            ),
        )
    ],
    "rooms_need_few_distributions": [
        append(f"{RUNS}/attach.py", "def f():\n    import xxhash\n"),
        append(f"{CLI}/main.py", "import click\n"),
    ],
    "picture_shows_the_imports": [
        append(f"{CLI}/main.py", "from ..core import blocks\n"),  # cli --> plan --> core
        append("AGENTS.md", "```mermaid\nflowchart LR\n    core --> cli\n```\n"),  # a second one
    ],
    "names_are_used": [
        append(f"{CLI}/plan.py", "@click.command()\ndef show_command(): ...\n"),
        both(
            append(f"{PLAN}/planner.py", "class Others: ...\n"),
            append(SCRIPT, "planner.Others\n"),
        ),
    ],
    "imports_keep_names": [
        append(
            f"{PLAN}/planner.py",
            "import numpy as np\nfrom torch.nn import functional as F\nfrom . import planner\n",
        ),
    ],
    "sections_open_with_one_line": [
        append(f"{PLAN}/planner.py", "# Solve.\n# - one\n# --- two\n"),
    ],
    "packages_hand_names_on_lazily": [
        append(
            f"{RUNS}/__init__.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .attach import saving\n",
        )
    ],
    "private_torch_names_stay_in_one_module": [
        both(
            append(f"{CORE}/blocks.py", "from torch.utils import _pytree\n_pytree.tree_map\n"),
            append(f"{PLAN}/planner.py", "from torch.utils import _pytree\n_pytree.tree_map\n"),
            append(f"{CORE}/blocks.py", "torch.ops.aten._to_copy\n"),
            append(f"{PLAN}/planner.py", "import torch\ntorch.ops.aten._to_copy\n"),
        )
    ],
    "definitions_have_one_name": [
        both(
            append(f"{CLI}/plan.py", "def _f(): ...\nclass A:\n    def find_blocks(self): ...\n"),
            append(f"{CLI}/main.py", "def _f(): ...\n"),
        )
    ],
    "constants_name_their_thing": [
        append(
            f"{CORE}/blocks.py", 'T = TypeVar("T")\nKINDS = (1, 2)\nMIB = 2**20\nMOST_BYTES = 1\n'
        ),
        append(f"{CORE}/blocks.py", "CONTAINERS = tuple(find_blocks())\n"),
    ],
    "functions_are_simple": [append(f"{PLAN}/planner.py", branches(9))],
    "conditionals_are_not_nested": [
        append(f"{PLAN}/planner.py", "x = (1 if a else 2, 1 if b else 2)\n")
    ],
    "comprehensions_are_not_nested": [
        append(f"{PLAN}/planner.py", "x = [b for a in c for b in a]\n"),
        module("tests/x.py", "x = [[b for b in a] for a in c]\n"),
    ],
    "assignments_are_not_packed": [
        append(f"{PLAN}/planner.py", "a, b = 1, 2\nx = 1, 2, 3\na, b, c = x\n"),
    ],
    "docstrings_start_with_a_summary": [
        write("tests/x.py", '"""`x` is a name."""\n'),
        write("tests/x.py", f'"""{"A" * 89}."""\n'),
        write("tests/x.py", '"""Whatever is there is returned."""\n'),
    ],
    "mentioned_paths_exist": [
        append("AGENTS.md", "tests/gates/test_<any>.py, https://host/template/gone\n"),
        append("AGENTS.md", "my/scripts/gone.py\n"),
        append(
            "README.md",
            "`python scripts/scaffold.py --out tests/test_mine.py`, evidence/FILE.json\n",
        ),
        both(
            write("template/project/tests/test_project.py.jinja", ""),
            append("README.md", "`python -m pytest tests/test_project.py`\n"),
        ),
    ],
    "links_lead_somewhere": [
        append(
            "README.md", "```\n[x](gone.md)\n```\n[a](https://host/x), [b](#part), [c](skills)\n"
        ),
    ],
    "template_runs_where_it_is_written": [
        module("template/x.py", f"{line}\n")
        for line in (
            'x = f"{{{name}}}"',
            'x = f"{{ name }}"',
            "x = {1: {2: 3}}",
            "x = {(1,), (2,)}",
        )
    ],
}
