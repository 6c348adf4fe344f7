"""Collect the files that a user gets: a project, an owned technique, the wheel.

A technique is copied with the modules that it imports, flat into one folder. A project depends on
the package and carries it as a wheel. `--own` copies whole rooms as they are. Nothing is written
here; `merge` writes.

Proof: `python -m pytest tests/cli/test_scaffold.py`.
"""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import __version__
from ..core.wording import did_you_mean
from .screen import PACKAGE_FOLDER, UnusableInput, render_template

PACKAGE = "curry_train"
DISTRIBUTION_NAME = "curry-train"
BUNDLED_FOLDER = "bundled"  # where an installed package has what lies next to it in a clone

SAVING_ROOMS = ("core", "runs")
RUN_TIME_ROOMS = (*SAVING_ROOMS, "primitives")
TRAINER_MODULES = ("__init__.py", "loop.py", "benchmark.py", "config.py", "data.py", "trainer.py")
# Packages that a project installs; the project can't have the name of one.
NEEDED_BY_PROJECTS = ("curry-train", "torch", "numpy", "pyyaml", "rich", "pytest", "tensorboard")

TEMPLATE_SUFFIX = ".jinja"

# The relative imports of a module and the imports of its test; in a copy all are siblings.
RELATIVE_IMPORT = re.compile(rb"^( *)from (\.+)((?:\w+\.)*)(\w+) import ", re.MULTILINE)
TEST_IMPORT = re.compile(rb"^from curry_train\.(?:\w+\.)*(\w+) import ", re.MULTILINE)
PROOF_PATTERN = re.compile(rb"^Proof: `[^`]*`[^\n]*", re.MULTILINE)


@dataclass(frozen=True)
class Technique:
    """One technique and its home module, relative to the package."""

    name: str
    decides: str
    home: str
    # Printed by `add` where nothing is copied: code for the training loop, or a command.
    usage: str = ""
    # Rooms that `add --own` copies then; none for a tool.
    rooms: tuple[str, ...] = ()

    @property
    def test(self) -> str:
        """Name the test that travels with the technique."""
        return f"test_{self.name.replace('-', '_')}.py"


SAVING_LINES = """from curry_train.runs import saving

run = saving(model, optimizer, scheduler, runs='runs/mine', journal=True)
for epoch in run.epochs(range(3)):
    for batch in run.batches(loader):
        ...  # forward, backward, optimizer.step()
        run.step(loss=loss)
run.close()"""

TECHNIQUES = (
    Technique(
        "memory-plan",
        "Who owns the peak of GPU memory, the fastest plan that fits, the command that checks a "
        "loop.",
        "plan/planner.py",
        "curry-train plan --model your_package.module:factory --budget 24GiB",
    ),
    Technique(
        "recompute",
        "Activation (gradient) checkpointing: recomputes layers, blocks or segments in backward; "
        "CPU offload, compile budget.",
        "primitives/recompute.py",
    ),
    Technique(
        "sac",
        "Selective activation checkpointing (SAC): a policy of which ops keep outputs and which "
        "recompute.",
        "primitives/sac.py",
    ),
    Technique(
        "regions",
        "Selective recompute by regions: which stretches between two layers run again.",
        "primitives/regions.py",
    ),
    Technique(
        "offload",
        "Offload: keeps activations of blocks in host memory between forward and backward.",
        "primitives/offload.py",
    ),
    Technique(
        "snn-timesteps",
        "Recomputes a loop over timesteps in chunks.",
        "primitives/snn_timesteps.py",
    ),
    Technique(
        "chunked-loss",
        "Chunked loss: computes logits and cross-entropy a chunk of tokens at a time.",
        "primitives/cross_entropy.py",
    ),
    Technique(
        "grad-accum",
        "Gradient accumulation: exact gradients of a large batch from micro batches.",
        "primitives/grad_accum.py",
    ),
    Technique(
        "grad-flow",
        "Finds the layer with NaN, inf, vanishing, exploding, dead or frozen values.",
        "primitives/grad_flow.py",
    ),
    Technique(
        "checkpoint-policy",
        "Saves, keeps and loads checkpoints, resumes exactly.",
        "runs/attach.py",
        SAVING_LINES,
        SAVING_ROOMS,
    ),
    Technique(
        "loss-spike",
        "Detects loss spikes, rolls back to a checkpoint and skips bad batches.",
        "runs/spike.py",
        SAVING_LINES.replace("True)", "True, spike={'action': 'rollback'})"),
        SAVING_ROOMS,
    ),
    Technique(
        "bench",
        "Times training steps: throughput, MFU (FLOPs utilization).",
        "benchmark.py",
        "curry-train bench --model your_package.module:factory",
    ),
)


@dataclass(frozen=True)
class Bundle:
    """The folders to copy from: the package, the template of a project, and the owned tests."""

    package: Path
    project: Path
    tests: Path
    techniques: tuple[Technique, ...] = TECHNIQUES
    version: str = __version__

    def find(self, name: str) -> Technique:
        """Return the technique called `name`."""
        known = {technique.name: technique for technique in self.techniques}
        if name not in known:
            raise UnusableInput(f"no technique is called {name!r}; {did_you_mean(name, known)}")
        return known[name]


def find_bundle(package: Path = PACKAGE_FOLDER) -> Bundle:
    """Find what is copied: inside an installed package, or next to the package of a clone."""
    inside = package / BUNDLED_FOLDER
    around = inside if inside.is_dir() else package.parent
    return Bundle(package, around / "project", around / "tests")


# Techniques


def closure(package: Path, home: str) -> list[str]:
    """Return a module with all that it imports, directly or not, as paths in the package."""
    reached = [home]
    # The list grows on the way.
    for path in reached:
        for _, dots, *names in RELATIVE_IMPORT.findall((package / path).read_bytes()):
            folder = PurePosixPath(path).parents[len(dots) - 1]
            found = str(folder / f"{b''.join(names).decode().replace('.', '/')}.py")
            if found not in reached:
                reached.append(found)
    return reached


def technique_modules(bundle: Bundle, technique: Technique) -> list[str]:
    """Return the modules that `add` copies for `technique`, relative to the package."""
    if technique.usage:
        return _list_modules(bundle, technique.rooms)
    return closure(bundle.package, technique.home)


def technique_files(
    bundle: Bundle, techniques: Sequence[Technique], *, directory: str, package: str
) -> dict[str, bytes]:
    """Return the files of techniques in `directory`, imported as `package`, with their tests.

    A technique of its own is flat: its relative imports become those of siblings. Rooms stay as
    they are.
    """
    files: dict[str, bytes] = {}
    for technique in techniques:
        modules = technique_modules(bundle, technique)
        for path in modules:
            content = _write_origin(bundle, path)
            place = f"{directory}/{path}"
            if not technique.usage:
                content = RELATIVE_IMPORT.sub(rb"\1from .\4 import ", content)
                place = f"{directory}/{PurePosixPath(path).name}"
            assert files.get(place, content) == content, f"two modules become {place}"
            files[place] = content
        test = bundle.tests / technique.test
        if not technique.usage and test.is_file():
            sibling = f"from {package}.".encode() + rb"\1 import "
            content = TEST_IMPORT.sub(sibling, test.read_bytes())
            files[f"tests/{technique.test}"] = content
    return files


def _write_origin(bundle: Bundle, path: str) -> bytes:
    """Return a module with its origin in place of the docstring's `Proof:` of this repository."""
    origin = f"From curry-train: {PACKAGE}/{path}.".encode()
    return PROOF_PATTERN.sub(lambda _: origin, (bundle.package / path).read_bytes(), count=1)


def _list_modules(bundle: Bundle, rooms: Sequence[str]) -> list[str]:
    return [
        f"{room}/{path.name}" for room in rooms for path in (bundle.package / room).glob("*.py")
    ]


# Projects


def project_files(bundle: Bundle, *, name: str, own: bool) -> dict[str, bytes]:
    """Return the files of a new project called `name`, with the run-time rooms if `own`."""
    files = {}
    folder = bundle.project
    # A clone gives no more than the package carries: one hidden file, and no caches.
    for place in (folder / ".gitignore", *folder.glob("[!.]*"), *folder.glob("tests/[!.]*")):
        if not place.is_file():
            continue
        path = place.relative_to(folder).as_posix()
        if place.suffix == TEMPLATE_SUFFIX:
            text = render_template(place, name=name, version=bundle.version, own=own)
            files[path.removesuffix(TEMPLATE_SUFFIX)] = text.encode()
        else:
            files[path] = place.read_bytes()
    if not files:
        raise UnusableInput(
            f"{bundle.project} holds no project to copy; take a whole copy of curry-train"
        )
    if own:
        for path in (*TRAINER_MODULES, *_list_modules(bundle, RUN_TIME_ROOMS), "py.typed"):
            files[f"{PACKAGE}/{path}"] = _write_origin(bundle, path)
    return files


def check_project_name(name: str) -> None:
    """Refuse a name that pip could not use."""
    if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", name, re.ASCII):
        raise UnusableInput(
            f"{name!r} can't be a project's name: give --name ASCII letters, digits and "
            "underscores, such as my_run"
        )
    if name.lower().replace("_", "-") in NEEDED_BY_PROJECTS:
        raise UnusableInput(
            f"{name!r} is the name of something that the project needs itself; give another --name"
        )


# The wheel

SOURCES_OF_WHEEL = ("pyproject.toml", "README.md", "LICENSE")
# The first second that a zip file can hold, so that equal sources give equal wheels.
WHEEL_TIME = 315_532_800
# Files of an installed package that belong to its installation.
WRITTEN_BY_INSTALLERS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}


def wheel_name(bundle: Bundle) -> str:
    """Return the file name of the package's wheel."""
    return f"{PACKAGE}-{bundle.version}-py3-none-any.whl"


def build_wheel(bundle: Bundle) -> bytes:
    """Build the wheel of a clone by pip, or pack the files of an installed package again."""
    for distribution in importlib.metadata.distributions(
        name=DISTRIBUTION_NAME, path=[str(bundle.package.parent)]
    ):
        if (bundle.package / BUNDLED_FOLDER).is_dir():
            return _pack_again(distribution)
    root = bundle.package.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because a build leaves folders, and takes what is left in them.
        for name in SOURCES_OF_WHEEL:
            shutil.copy(root / name, folder)
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(bundle.package.parent, Path(folder, "template"), ignore=caches)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir"]
        # By the setuptools that is here, if it is new enough: that needs no network.
        for build in (["--no-build-isolation"], []):
            done = subprocess.run(
                [*command, *build, "--wheel-dir", folder, folder],
                capture_output=True,
                text=True,
                env=os.environ | {"SOURCE_DATE_EPOCH": str(WHEEL_TIME)},
            )
            if done.returncode == 0:
                return (Path(folder) / wheel_name(bundle)).read_bytes()
        raise UnusableInput(f"pip can't build the wheel of {root}:\n{done.stderr.strip()}")


def _pack_again(distribution: importlib.metadata.Distribution) -> bytes:
    """Return the wheel that a package was installed from, by the record of the installation."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        rows = []
        record = ""
        for file in distribution.files or ():
            if file.name == "RECORD":
                record = str(file)
            if file.hash is None or ".." in file.parts or file.name in WRITTEN_BY_INSTALLERS:
                continue
            # Without the time of the file, which is that of the installation.
            packed_file = zipfile.ZipInfo(str(file))
            archive.writestr(packed_file, file.read_binary(), zipfile.ZIP_DEFLATED)
            rows.append(f"{file},{file.hash.mode}={file.hash.value},{file.size}\n")
        archive.writestr(zipfile.ZipInfo(record), "".join([*rows, f"{record},,\n"]))
    return packed.getvalue()
