"""Violations of the rules on modules, imports and names, with a part of each message.

Proof: `python -m pytest tests/house/test_house.py`.
"""

from plants import (
    CLI,
    CORE,
    GATES,
    PLAN,
    PRIMITIVES,
    RUNS,
    Plant,
    append,
    both,
    many_modules,
    module,
    remove,
    replace,
    write,
)
from tree import PACKAGE

MODULES = {
    "package_has_few_modules": [
        (many_modules(PLAN, 128), "modules, and 127 is the most"),
        (many_modules(f"{RUNS}/deep", 128), "modules, and 127 is the most"),
    ],
    "core_has_few_modules": [
        (many_modules(CORE, 10), "core holds 11 modules, and 10 is the most"),
        (many_modules(f"{CORE}/deep", 10), "core holds 11 modules"),
    ],
    "files_have_a_readable_length": [
        (
            module(f"{PLAN}/long.py", "x = 1\n" * 600),
            "plan/long.py has 601 lines: divide it, or say",
        ),
        (
            write(
                f"{PLAN}/long.py", '"""Plan.\n\nWhy so long: one table.\n"""\n' + "x = 1\n" * 797
            ),
            "has 801 lines, and 800 is the end",
        ),
        (module("tests/runs/test_long.py", "# Why so long:\nx = 1\n" * 400), "801 lines"),
        (
            module("tests/runs/test_long.py", "# Why so long:\n" * 2 + "x = 1\n" * 600),
            "divide it, or",
        ),
    ],
    "small_modules_have_two_users": [
        (
            both(module(f"{RUNS}/lock.py"), append(f"{RUNS}/attach.py", "from . import lock\n")),
            "runs/lock.py has 1 lines and one importer, runs.attach",
        ),
        (
            both(
                module(f"{PACKAGE}/data.py", "x = 1\n" * 148),
                append(f"{PACKAGE}/loop.py", "def f():\n    from .data import x\n"),
            ),
            "curry_train/data.py has 149 lines and one importer, loop",
        ),
        (
            both(module(f"{CLI}/table.py"), append(f"{CLI}/plan.py", "from .table import x\n")),
            "cli/table.py has 1 lines and one importer, cli.plan",
        ),
        (
            both(
                module(f"{RUNS}/lock.py"),
                append(f"{RUNS}/attach.py", "from . import lock\n"),
                append(f"{RUNS}/__init__.py", "if TYPE_CHECKING:\n    from .lock import x\n"),
            ),
            "runs/lock.py has 1 lines and one importer, runs.attach",
        ),
    ],
    "core_modules_serve_two_rooms": [
        (module(f"{CORE}/alone.py"), "core/alone.py serves no room alone"),
        (
            both(
                module(f"{CORE}/alone.py"),
                append(f"{PLAN}/planner.py", "from ..core import alone\n"),
            ),
            "core/alone.py serves plan alone",
        ),
        (
            both(
                module(f"{CORE}/alone.py", "from .below import x\n"),
                module(f"{CORE}/below.py", "x = 1\n"),
                append(f"{PLAN}/planner.py", "from ..core.alone import x\n"),
            ),
            "core/below.py serves plan alone",
        ),
    ],
    "files_are_named_for_what_they_hold": [
        (module(f"{CORE}/utils.py"), "core/utils.py: name the file"),
        (module("scripts/helpers/x.py"), "scripts/helpers/x.py: name the file"),
        (module("tests/run_manager.py"), "tests/run_manager.py: name the file"),
    ],
}

IMPORTS = {
    "rooms_import_in_one_direction": [
        (
            append(f"{CORE}/blocks.py", "from ..primitives import x\n"),
            "(core) imports primitives.x from primitives",
        ),
        (
            append(f"{PRIMITIVES}/sac.py", "def f():\n    from ..gates.verdict import y\n"),
            "(primitives) imports gates.verdict.y, and gates is a tool",
        ),
        (append(f"{RUNS}/attach.py", "from ..plan import Plan\n"), "and plan is a tool"),
        (append(f"{RUNS}/attach.py", "from ..primitives import sac\n"), "from primitives: move"),
        (
            append(f"{PACKAGE}/loop.py", "from . import gates\n"),
            "(trainer) imports gates, and gates",
        ),
        (
            append(
                f"{PACKAGE}/loop.py", "import importlib\nimportlib.import_module('.plan', 'x')\n"
            ),
            "(trainer) imports plan, and plan is a tool",
        ),
        (
            append(
                f"{PLAN}/planner.py",
                "import typing\nif typing.TYPE_CHECKING:\n    from ..cli import x\n",
            ),
            "(plan) imports cli.x from cli",
        ),
        (
            append(f"{GATES}/verdict.py", "import curry_train.loop\n"),
            "(gates) imports loop from trainer",
        ),
        (append(f"{PACKAGE}/__init__.py", "from .core.blocks import x\n"), "(the package itself)"),
        (module(f"{PACKAGE}/journal/lines.py"), "stands in 'journal', which is no room"),
    ],
    "imports_form_no_cycle": [
        (
            both(
                append(f"{PLAN}/planner.py", "from .solve import x\n"),
                module(f"{PLAN}/solve.py", "def f():\n    from . import planner\n"),
            ),
            "imports form a cycle: plan.planner <- plan.solve <- plan.planner",
        ),
        (
            both(
                append(f"{RUNS}/attach.py", "from .lock import x\n"),
                module(f"{RUNS}/lock.py", "from . import saving\n"),  # handed on from attach
            ),
            "imports form a cycle: runs.attach <- runs.lock <- runs.attach",
        ),
    ],
    "imports_inside_the_package_are_relative": [
        (
            append(f"{GATES}/verdict.py", "import curry_train.core\n"),
            "imports curry_train.core: write",
        ),
        (
            append(f"{GATES}/verdict.py", "def f():\n    from curry_train.core import blocks\n"),
            "imports curry_train.core.blocks: write",
        ),
    ],
    "rooms_need_few_distributions": [
        (
            append(f"{CORE}/blocks.py", "def f():\n    import numpy as np\n"),
            "imports numpy, and core",
        ),
        (append(f"{GATES}/verdict.py", "def f():\n    from rich import print\n"), "imports rich"),
        (append(f"{RUNS}/attach.py", "import xxhash\n"), "imports xxhash with the module"),
        (
            append(f"{RUNS}/attach.py", "def f():\n    import rich.table\n"),
            "imports rich, and runs",
        ),
    ],
    "runs_stands_on_few_modules_of_core": [
        (
            both(
                append(f"{RUNS}/attach.py", "from ..core import blocks, one\n"),
                module(f"{CORE}/one.py", "from . import two\n"),
                module(f"{CORE}/two.py"),
            ),
            "3 modules of core (core.blocks, core.one, core.two)",
        ),
        (
            both(
                append(f"{RUNS}/attach.py", "from ..core import one, two\n"),
                module(f"{RUNS}/lock.py", "def f():\n    from ..core.blocks import x\n"),
                module(f"{CORE}/one.py"),
                module(f"{CORE}/two.py"),
            ),
            "3 modules of core",
        ),
    ],
    "picture_shows_the_imports": [
        (
            append(f"{PACKAGE}/loop.py", "def f():\n    from .runs import saving\n"),
            "draws no arrow from trainer to runs, and trainer imports runs",
        ),
        (
            replace("AGENTS.md", "primitives --> core", "primitives --> core\n    runs --> core"),
            "draws an arrow from runs to core; runs does not import core",
        ),
        (
            replace("AGENTS.md", "primitives --> core", "primitives --> core\n    cli --> core"),
            "draws an arrow from cli to core; cli does not import core",
        ),
        (
            both(
                append(f"{CLI}/main.py", "from ..core import blocks\n"),
                replace("AGENTS.md", "cli --> plan", "cli --> core\n    cli --> plan"),
            ),
            "draws an arrow from cli to core; a longer path implies it",
        ),
        (replace("AGENTS.md", "mermaid", "text"), "has no picture of the rooms"),
    ],
    "packages_hand_names_on_lazily": [
        (
            append(f"{PRIMITIVES}/__init__.py", "from .grad_accum import train_window\n"),
            "imports primitives.grad_accum.train_window eagerly",
        ),
        (append(f"{GATES}/__init__.py", "from ..core import blocks\n"), "core.blocks eagerly"),
    ],
    "promised_names_exist": [
        (
            replace(f"{PRIMITIVES}/grad_accum.py", "class GradientAccumulation", "class Gradient"),
            "hands on GradientAccumulation, and primitives.grad_accum does not bind it",
        ),
        (remove(f"{RUNS}/attach.py"), "hands on saving from runs.attach, which is not there"),
    ],
    "public_names_stay_where_they_are": [
        (
            replace(f"{RUNS}/__init__.py", "'saving'", "'save'"),
            "runs/__init__.py does not hand on saving",
        ),
        (remove(f"{PRIMITIVES}/sac.py"), "primitives/sac.py is gone"),
        (
            replace(f"{PACKAGE}/loop.py", "save_checkpoint()", "save()"),
            "does not bind save_checkpoint",
        ),
    ],
    "private_torch_names_stay_in_one_module": [
        (
            both(
                append(f"{CORE}/blocks.py", "torch._C._current_graph_task_id()\n"),
                append(f"{PLAN}/planner.py", "from torch import _C\n_C._current_graph_task_id()\n"),
            ),
            "uses torch._C._current_graph_task_id, as does template/curry_train/core/blocks.py",
        ),
        (
            both(
                append(f"{CORE}/blocks.py", "from torch._ops import OpOverload as O\nO\n"),
                append(f"{PLAN}/planner.py", "import torch._ops as ops\nops.OpOverload\n"),
            ),
            "uses torch._ops.OpOverload",
        ),
    ],
}

NAMES = {
    "definitions_have_one_name": [
        (append(f"{PLAN}/planner.py", "class Verdict: ...\n"), "Verdict is defined 2 times"),
        (
            append(f"{PLAN}/planner.py", "async def find_blocks(): ...\n"),
            "find_blocks is defined 2 times",
        ),
        (
            both(
                append(f"{PLAN}/planner.py", "class _Row: ...\n"),
                append(f"{CLI}/plan.py", "class _Row: ...\n"),
            ),
            "_Row is defined 2 times",
        ),
    ],
    "module_stems_are_unique": [
        (module(f"{PLAN}/blocks.py"), "blocks.py is used for"),
        (module(f"{RUNS}/grad_accum.py"), "grad_accum.py is used for"),
    ],
    "constants_name_their_thing": [
        (append(f"{CORE}/blocks.py", "MANY = 1 / 3\n"), "calls a constant MANY"),
        (append(f"{CORE}/blocks.py", "SIZES: int = 1 << 10\n"), "calls a constant SIZES"),
        (append(f"{CORE}/blocks.py", "_FOUND = ()\n"), "calls a constant _FOUND"),
        (append(f"{CORE}/blocks.py", 'A, NAMES = (1, 2), "x"\n'), "calls a constant NAMES"),
        (append(f"{CORE}/blocks.py", 'NAMES = re.compile("x")\n'), "calls a constant NAMES"),
    ],
    "imports_keep_names": [
        (
            append(f"{PLAN}/planner.py", "from ..core.blocks import find_blocks as find\n"),
            "imports find_blocks as find",
        ),
        (
            append(f"{CLI}/plan.py", "def f():\n    from ..plan import planner as _p\n"),
            "imports planner as _p",
        ),
    ],
    "classes_take_no_name_of_torch": [
        (
            append(f"{RUNS}/attach.py", "class CheckpointPolicy: ...\n"),
            "calls a class CheckpointPolicy",
        ),
        (module("tests/test_x.py", "class CheckpointPolicy(dict): ...\n"), "tests/test_x.py:2"),
    ],
    "names_are_used": [
        (append(f"{PLAN}/planner.py", "def others(): ...\n"), "defines others, which nothing uses"),
        (
            both(
                append(f"{PLAN}/planner.py", "class Others: ...\n"),
                module("tests/plan/test_others.py", "Others\n"),
            ),
            "defines Others, which nothing uses",
        ),
        (append(f"{PLAN}/planner.py", "OTHERS: int = 1\n"), "defines OTHERS, which nothing uses"),
        (append(f"{PLAN}/planner.py", "_OTHERS = 1\n"), "defines _OTHERS, which nothing uses"),
        (append(f"{PLAN}/planner.py", "def _others(): ...\n"), "defines _others"),
        (append(f"{PLAN}/planner.py", "_ONE, _TWO = 1, 2\nprint(_ONE)\n"), "defines _TWO"),
    ],
}

STRUCTURE: dict[str, list[tuple[Plant, str]]] = MODULES | IMPORTS | NAMES
