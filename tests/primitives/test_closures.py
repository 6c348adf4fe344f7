"""What `add` copies with a technique can be read in one sitting, and works in a user's folder.

python -m pytest tests/primitives/test_closures.py
"""

import inspect
import sys
from pathlib import PurePosixPath

import pytest

from curry_train.cli.ownership import technique_modules
from curry_train.primitives import memory_budget

from ..cli.scaffold_case import OWNED, REAL

MOST_MODULES = 4
MOST_LINES = 1380


def test_the_memory_budget_of_the_package_is_the_function_and_not_a_module():
    assert inspect.isfunction(memory_budget)


def test_accumulation_is_one_module():
    assert technique_modules(REAL, OWNED["grad-accum"]) == ["primitives/grad_accum.py"]


@pytest.mark.parametrize("name", OWNED)
def test_a_technique_is_few_modules_of_few_lines_and_no_tool(name):
    modules = technique_modules(REAL, OWNED[name])
    lines = [len((REAL.package / path).read_text().splitlines()) for path in modules]
    assert len(modules) <= MOST_MODULES, modules
    assert sum(lines) <= MOST_LINES, dict(zip(modules, lines, strict=True))
    assert {path.split("/")[0] for path in modules} <= {"core", "primitives"}
    # A copy in a user's folder must not hide a module of the standard library.
    assert not {PurePosixPath(path).stem for path in modules} & set(sys.stdlib_module_names)
