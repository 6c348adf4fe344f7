"""Tests of the tests that `add` copies: right copies pass, faulty ones fail.

All copies are tested by one run of pytest in which curry_train can't be imported.
"""

import re
import sys

import pytest

from curry_train.cli.ownership import technique_files

from ..command_runs import in_python, results_of_tests
from .scaffold_case import OWNED, REAL

GENERATORS_LEFT_AS_THEY_ARE = (
    'settings["preserve_rng_state"] = False\n        output = checkpoint(call,'
)
ACTIVE = "(module is None or module.training) and torch.is_grad_enabled()"

FAULTS = {
    "grad-accum": [
        ("value = value / window.loss_divisor", "value = value / len(window)"),
        ("if not (math.isfinite(total) and", "if False and not (math.isfinite(total) and"),
    ],
    "recompute": [
        ("output = checkpoint(call,", GENERATORS_LEFT_AS_THEY_ARE),
        ("module.momentum = 0.0", "module.momentum = module.momentum"),
    ],
    "sac": [
        ("keep = operation in policy.save", "keep = operation in policy.save and context is None"),
        ("if not skips and not any(map(any, kept.values())):", "if False:"),
    ],
    "regions": [
        ("F.gelu(node._saved_self, approximate=node._saved_approximate)", "node._saved_self"),
        (ACTIVE, "False"),
    ],
    "offload": [
        (
            "self.moved.ask(self).view(self.dtype).as_strided(*self.view)",
            "self.moved.ask(self).view(self.dtype).as_strided(*self.view).flip(0)",
        ),
        ("keep_last: int = 1", "keep_last: int = 2"),
    ],
    "snn-timesteps": [
        ("set_generator_states(drawn_from)", "pass"),
        (
            "state = _take_steps(step, timesteps, state, first.pop())",
            "state = _take_steps(step, timesteps, state, first.pop()).detach()",
        ),
    ],
    "chunked-loss": [
        ("factor = gradient\n", "factor = gradient.sign()\n"),
        ("self.targets == options.ignore_index", "self.targets == -100"),
    ],
    "grad-flow": [
        ("if not (self._read_at and self._find_with_gradient() <= self._read):", "if True:"),
        ("self.next_step % self.every == 0", "self.next_step % 1 == 0"),
    ],
}

# Without the package, and with one failure of a file for each faulty copy.
CONFTEST = """
import sys
import pytest

sys.modules["curry_train"] = None
failed = set()

def pytest_runtest_logreport(report):
    if report.failed:
        failed.add(report.location[0])

def pytest_runtest_setup(item):
    if item.location[0] in failed:
        pytest.skip("one failure is enough")
"""
PYTEST = ["-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]


def copies():
    """Yield the name of each copy with its technique and its fault; the first has none."""
    for technique, faults in FAULTS.items():
        stem = technique.replace("-", "_")
        yield f"{stem}_right", technique, ("", "")
        for index, fault in enumerate(faults):
            yield f"{stem}_fault_{index}", technique, fault


def own(folder, name, technique, fault):
    """Copy a technique as `add` does, with its test; a fault must be found in the copy."""
    files = technique_files(REAL, [OWNED[technique]], directory=name, package=name)
    (folder / f"test_{name}.py").write_bytes(files.pop(f"tests/{OWNED[technique].test}"))
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    assert any(fault[0] in content.decode() for content in files.values()), fault
    for path, content in files.items():
        (folder / path).write_text(
            content.decode().replace(*fault) if fault[0] else content.decode()
        )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Test all copies; return the results of the tests of each: nothing for one that passed."""
    folder = tmp_path_factory.mktemp("owned")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    for copy in copies():
        own(folder, *copy)
    report = folder / "report.xml"
    words = (*PYTEST, f"--junitxml={report}", folder)
    in_python(*words, cwd=folder, status=1, PYTHONPATH=str(folder))
    found = {name: [] for name, _, _ in copies()}
    for name, test, results in results_of_tests(report):
        assert "error" not in results, f"{name}, {test}: {results}"
        found[name].append(results)
    return found


@pytest.mark.parametrize("technique", OWNED)
def test_an_owned_copy_passes_its_test_without_the_package(technique, outcomes):
    tests = outcomes[f"{technique.replace('-', '_')}_right"]
    assert [results for results in tests if "failure" in results] == []
    assert sum(not results for results in tests) >= 4


@pytest.mark.parametrize("name", [name for name, _, fault in copies() if fault[0]])
def test_a_faulty_copy_fails_its_test(name, outcomes):
    assert any("failure" in results for results in outcomes[name]), "it passes with this fault"


def test_every_owned_technique_has_a_short_test_and_two_faults():
    assert FAULTS.keys() == OWNED.keys()
    assert all(len(faults) >= 2 for faults in FAULTS.values())
    for technique in OWNED.values():
        text = (REAL.tests / technique.test).read_text()
        assert len(text.splitlines()) <= 180
        imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        assert imported - sys.stdlib_module_names <= {"torch", "pytest", "curry_train"}
