"""New projects: what is in them, that they install and pass their own tests, and that the catalogue is checked."""

import ast
import json
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from scaffold_case import ROOT, make_bundle, scaffold, shell, times, tree, write

from curry_train.gates import discover
from scaffolding.bundle import Technique, read_bundle
from scaffolding.contents import package_contents, project_contents
from scaffolding.errors import ScaffoldError
from scaffolding.imports import rewrite_imports

REAL = read_bundle(ROOT)
EVERYWHERE = {
    "__init__.py",
    "core/__init__.py",
    "core/lazy.py",
    "gates/run.py",
    "primitives/__init__.py",
}
TABLES = {"core/tables/costs.json", "py.typed"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_bundle_has_techniques_whose_first_sentences_say_what_they_decide() -> None:
    assert len(REAL.techniques) >= 1
    assert "grad-accum" in [technique.name for technique in REAL.techniques]
    assert all(technique.decides.endswith(".") for technique in REAL.techniques)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: recompute", "name: other", "needs name: recompute"),
        ("metadata:", "meta:", "no metadata.module"),
        ("---\nname", "name", "does not open with a frontmatter"),
        ("license: MIT", "license: [", "is not YAML"),
        ("recompute.py", "missing.py", "needs template/curry_train/primitives/missing.py"),
    ],
)
def test_bundle_with_a_broken_skill_is_refused(
    bundle: Path, old: str, new: str, message: str
) -> None:
    skill = bundle / "skills/recompute/SKILL.md"
    skill.write_text(skill.read_text().replace(old, new, 1))
    with pytest.raises(ScaffoldError, match=message):
        read_bundle(bundle)


def test_bundle_without_skills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="not a whole copy"):
        read_bundle(tmp_path)


def test_contents_of_a_technique_are_what_it_reaches(bundle: Path) -> None:
    read = read_bundle(bundle)
    accumulation, recompute = read.techniques
    core = {
        "gates/verdict.py",
        "core/unused.py",
    }  # what `core` hands out; timing.py is reached by neither
    assert set(package_contents(read, [accumulation])) == EVERYWHERE | TABLES | core | {
        "gates/grad_accum.py",
        "primitives/grad_accum.py",
    }
    assert set(package_contents(read, [recompute])) == EVERYWHERE | TABLES | core | {
        "gates/recompute.py",
        "primitives/offload.py",
        "primitives/recompute.py",
    }


def test_contents_of_a_project_hold_what_its_scripts_import(bundle: Path) -> None:
    read = read_bundle(bundle)
    contents = project_contents(read, read.choose(["recompute"]), name="run")
    for path in (
        "benchmark.py",
        "core/timing.py",
        "primitives/grad_accum.py",
        "gates/recompute.py",
    ):
        assert f"curry_train/{path}" in contents
    assert "tests/gates/test_grad_accum.py" not in contents
    assert "curry_train/gates/grad_accum.py" not in contents
    assert "curry_train/gates/grad_accum.py" in project_contents(read, None, name="run")


def test_contents_fail_on_an_undefined_name_in_a_template(bundle: Path) -> None:
    write(bundle / "template/README.md.jinja", "# {{ nmae }}\n")
    with pytest.raises(
        ScaffoldError, match=r"README\.md\.jinja can't be rendered: 'nmae' is undefined"
    ):
        project_contents(read_bundle(bundle), None, name="run")


def test_imports_of_a_missing_module_are_told(bundle: Path) -> None:
    write(bundle / "template/curry_train/gates/recompute.py", "from ..core.gone import X\n")
    read = read_bundle(bundle)
    with pytest.raises(ScaffoldError, match=r"gates/recompute\.py imports curry_train\.core\.gone"):
        package_contents(read, read.choose(["recompute"]))


@pytest.mark.parametrize(
    ("before", "moved"),
    [
        (
            "from curry_train.core import a  # curry_train\n",
            "from lib.training.core import a  # curry_train\n",
        ),
        (
            "import curry_train.a as a, curry_train.b as b\n",
            "import lib.training.a as a, lib.training.b as b\n",
        ),
        (
            "import curry_train; x = curry_train\n",
            "import lib.training as curry_train; x = curry_train\n",
        ),
        ("é = 1; from   curry_train import a\n", "é = 1; from lib.training import a\n"),
        (
            "def f():\n    from curry_train import (\n  a)\n",
            "def f():\n    from lib.training import (\n  a)\n",
        ),
        (
            "x = 'from curry_train import a'\r\nimport curry_t\n",
            "x = 'from curry_train import a'\r\nimport curry_t\n",
        ),
    ],
)
def test_imports_move_and_nothing_else_does(before: str, moved: str) -> None:
    assert rewrite_imports(before.encode(), package="lib.training").decode() == moved
    assert rewrite_imports(before.encode(), package="curry_train").decode() == before


def test_imports_that_bind_a_dotted_name_can_not_move() -> None:
    with pytest.raises(ScaffoldError, match="write from"):
        rewrite_imports(b"import curry_train.core\n", package="lib")


@pytest.mark.parametrize("technique", REAL.techniques, ids=lambda technique: technique.name)
def test_imports_and_marks_of_a_test_are_known_in_a_users_repository_too(
    technique: Technique,
) -> None:
    """A test that leaned on the bundle's own modules or markers would pass here and fail where it is copied to."""
    imported, marks = set(), set()
    for node in ast.walk(ast.parse((ROOT / "template" / technique.test).read_bytes())):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                imported.add(module.split(".")[0])
            case ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=mark
            ):
                marks.add(mark)
    assert "curry_train" in imported
    assert imported <= {"curry_train", "numpy", "pytest", "torch"} | sys.stdlib_module_names
    assert marks <= {"filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}


def test_new_copies_code_byte_for_byte_and_twice_changes_nothing(
    bundle: Path, tmp_path: Path
) -> None:
    first = scaffold(bundle, "new", "my-run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    made = tree(tmp_path / "my-run")
    template = tree(bundle / "template")
    copied = {path for path in made if path.startswith(("curry_train/", "tests/"))}
    assert copied == {path for path in template if path.startswith(("curry_train/", "tests/"))}
    assert all(made[path] == template[path] for path in copied)
    assert made["README.md"] == b"# my_run\n"
    assert b'name = "my-run"' in made["pyproject.toml"]

    before = times(tmp_path)
    again = scaffold(bundle, "new", "my-run", cwd=tmp_path)
    assert (again.returncode, times(tmp_path)) == (0, before)
    assert again.stdout.startswith("Nothing to do")


def test_new_takes_an_empty_folder_and_leaves_a_folder_of_others(
    bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert scaffold(bundle, "new", "empty", "--name", "run", cwd=tmp_path).returncode == 0
    write(tmp_path / "theirs/notes.txt", "mine\n")
    refused = scaffold(bundle, "new", "theirs", cwd=tmp_path)
    assert refused.returncode == 2
    assert "exists and is not empty" in refused.stderr
    assert tree(tmp_path / "theirs") == {"notes.txt": b"mine\n"}


def test_new_on_an_edited_project_names_the_edits_and_writes_nothing(
    bundle: Path, tmp_path: Path
) -> None:
    scaffold(bundle, "new", "run", cwd=tmp_path)
    write(tmp_path / "run/README.md", "# Mine\n")
    (tmp_path / "run/train.py").unlink()
    before = times(tmp_path)
    refused = scaffold(bundle, "new", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "README.md: edited by you" in refused.stderr
    assert "train.py: not there" in refused.stderr
    assert times(tmp_path) == before


def test_new_dry_run_writes_nothing_and_says_what_new_then_does(
    bundle: Path, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    planned = scaffold(bundle, "new", "run", "--technique", "recompute", "--dry-run", cwd=tmp_path)
    assert tree(tmp_path) == before
    done = scaffold(bundle, "new", "run", "--technique", "recompute", cwd=tmp_path)
    listed = [line.split()[1] for line in planned.stdout.splitlines() if line.startswith("create ")]
    assert listed == [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith("create ")
    ]
    assert sorted(listed) == sorted(tree(tmp_path / "run"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own."""
    return make_environment(tmp_path_factory.mktemp("environment") / "venv")


def make_environment(place: Path) -> Path:
    """A virtual environment that sees what is installed here before what is in it, so that nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    write(
        packages / "here.pth",
        f"import sys; sys.path.insert(1, {sysconfig.get_paths()['purelib']!r})\n",
    )
    return place


@pytest.fixture(scope="module")
def project(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project with every technique, installed in that environment."""
    pytest.importorskip(
        "setuptools", minversion="77", reason="builds without isolation, to download nothing"
    )
    folder = tmp_path_factory.mktemp("new")
    assert scaffold(ROOT, "new", "my-run", cwd=folder).returncode == 0
    install = f"{environment}/bin/python -m pip install --no-deps --no-index --no-build-isolation {folder}/my-run"
    assert (done := shell(install, cwd=folder)).returncode == 0, done.stderr
    return folder / "my-run"


def pytest_in(project: Path, environment: Path, arguments: str) -> str:
    ran = shell(
        f"make test PYTHON={environment}/bin/python ARGS={shlex.quote(arguments)}", cwd=project
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def train_in(project: Path, environment: Path, words: str) -> float:
    ran = shell(
        f'make train PYTHON={environment}/bin/python ARGS="{words} --json end.json"', cwd=project
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return float(json.loads((project / "end.json").read_text())["dev_loss"])


@pytest.mark.timeout(600)
def test_new_project_installs_and_passes_its_own_tests(environment: Path, project: Path) -> None:
    """Its training and the gates of one technique; every gate is in it, and a long test runs them all."""
    where = shell(
        f'{environment}/bin/python -c "import curry_train; print(curry_train.__file__)"',
        cwd=project.parent,
    )
    installed = Path(where.stdout.strip()).parent
    assert installed.is_relative_to(environment)
    assert set(tree(installed)) >= set(tree(ROOT / "template/curry_train")) - {"__pycache__"}
    passed = pytest_in(
        project, environment, 'tests/test_project.py -k "not model_passes or grad-flow"'
    )
    assert " passed" in passed
    collected = pytest_in(project, environment, "--collect-only -q")  # they run where they lie
    assert all(f"{technique.test}::" in collected for technique in REAL.techniques)
    assert all(f"test_model_passes[{gate.name}]" in collected for gate in discover())
    assert (
        train_in(project, environment, "steps=40 evaluate.every=40") < 3.2
    )  # 5.5 for who knows nothing of text
    assert not (project / ".venv").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_new_project_passes_every_gate_and_learns_text_in_200_steps(
    environment: Path, project: Path
) -> None:
    pytest_in(project, environment, "tests/test_project.py")
    assert train_in(project, environment, "steps=200") < 2.4


@pytest.mark.timeout(600)
def test_new_project_makes_its_environment_once(tmp_path: Path) -> None:
    pytest.importorskip(
        "setuptools", minversion="77", reason="builds without isolation, to download nothing"
    )
    assert scaffold(ROOT, "new", "run", "--technique", "grad-accum", cwd=tmp_path).returncode == 0
    make_environment(tmp_path / "run/.venv")
    offline = {
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "BASE_PYTHON": sys.executable,
    }
    train = 'make train ARGS="steps=12 batch_size=4 microbatch=2 evaluate.samples=4 device=cpu"'
    made = shell(train, cwd=tmp_path / "run", **offline)
    assert made.returncode == 0, made.stdout + made.stderr
    lines = (tmp_path / "run/runs/run-001/journal.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert "-m venv" in made.stdout
    assert "-m venv" not in shell("make --dry-run train", cwd=tmp_path / "run", **offline).stdout
