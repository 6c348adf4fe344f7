"""Collect the files that a user gets: a project, an owned technique, the wheel.

A technique is copied with the modules that it imports, found in the import graph, flat into one
folder. A project depends on the package and carries it as a wheel, or owns its run-time rooms.
Nothing is written here; `merge` writes.

Why so long: a wheel, an owned copy and a project take the same files from the same places.

Proof: `python -m pytest tests/cli/test_scaffold.py`.
"""

import ast
import base64
import email
import hashlib
import io
import keyword
import re
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

from ..core.wording import did_you_mean

PACKAGE = "curry_train"
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
DISTRIBUTION_NAME = "curry-train"
BUNDLED_FOLDER = "bundled"  # where an installed package has what lies beside it in a clone

RUN_TIME_ROOMS = ("core", "primitives", "runs")
TRAINER_MODULES = ("loop.py", "benchmark.py", "config.py", "data.py", "trainer.py")
# The run-time rooms may import these distributions; the other names on the right are pip's.
DISTRIBUTIONS_OF_IMPORTS = {"torch": "torch", "numpy": "numpy", "yaml": "pyyaml", "rich": "rich"}

PLACEHOLDER_NAME = "my_project"
PLACEHOLDER_VERSION = "0.0.0"
# Where the template names the package or its wheel, and what stands there with --own.
OWN_TEXTS = {
    "package `curry-train`, which `pyproject.toml` pins": (
        f"package `{PLACEHOLDER_NAME}`, a copy of curry-train's run-time rooms that is yours"
    ),
    " $(wildcard wheels/*.whl)": "",
    "\t.venv/bin/python -m pip install --quiet --force-reinstall --no-deps wheels/*.whl\n": "",
}
# Files that runs and builds leave in the template folder, and that no project gets.
LEFT_BY_RUNS = frozenset({"runs", "build", "wheels", "curry-train.lock"})


class ScaffoldError(ValueError):
    """The request can't be fulfilled; nothing was written."""


class Kind(Enum):
    """The way a user gets a technique: as modules of their own, as a room, or never copied."""

    OWNED = "owned"
    ROOM = "room"
    TOOL = "tool"


@dataclass(frozen=True)
class Technique:
    """One technique and its home module, relative to the package.

    `usage` is what `add` prints where it copies nothing: code for a room, a command for a tool.
    """

    name: str
    decides: str
    home: str
    kind: Kind = Kind.OWNED
    usage: tuple[str, ...] = ()

    @property
    def test(self) -> str:
        """Name the test that travels with the technique."""
        return f"test_{self.name.replace('-', '_')}.py"


SAVING_LINES = (
    "from curry_train.runs import saving",
    "",
    "run = saving(model, optimizer, scheduler, runs='runs/mine', journal=True{more})",
    "for epoch in run.epochs(range(3)):",
    "    for batch in run.batches(loader):",
    "        ...  # forward, backward, optimizer.step()",
    "        run.step(loss=loss)",
    "run.close()",
)

TECHNIQUES = (
    Technique(
        "memory-plan",
        "What to change first for GPU memory: who owns the peak (activations, optimizer, logits), "
        "the fastest plan that fits.",
        "plan/planner.py",
        Kind.TOOL,
        ("curry-train plan --model your_package.module:factory --budget 24GiB",),
    ),
    Technique(
        "recompute",
        "Activation (gradient) checkpointing: recomputes layers, blocks or segments in backward; "
        "offload to CPU, compile memory budget.",
        "primitives/recompute.py",
    ),
    Technique(
        "sac",
        "Selective activation checkpointing (SAC): a policy of which ops in a block keep outputs "
        "and which recompute.",
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
        "primitives/chunked_loss.py",
    ),
    Technique(
        "grad-accum",
        "Gradient accumulation: a large effective batch from micro batches with exactly its "
        "gradients.",
        "primitives/grad_accum.py",
    ),
    Technique(
        "grad-flow",
        "Finds the layer or module with NaN, inf, vanishing, exploding, dead or frozen values.",
        "primitives/grad_flow.py",
    ),
    Technique(
        "checkpoint-policy",
        "Saves, keeps, deletes and loads checkpoints, and resumes exactly.",
        "runs/attach.py",
        Kind.ROOM,
        tuple(line.replace("{more}", "") for line in SAVING_LINES),
    ),
    Technique(
        "loss-spike",
        "Detects loss spikes, rolls back to an earlier checkpoint and skips bad batches or "
        "samples.",
        "runs/spike.py",
        Kind.ROOM,
        tuple(line.replace("{more}", ", spike={'action': 'rollback'}") for line in SAVING_LINES),
    ),
    Technique(
        "bench",
        "Times training steps: tokens per second, throughput, MFU (FLOPs utilization).",
        "benchmark.py",
        Kind.TOOL,
        ("curry-train bench --model your_package.module:factory",),
    ),
)


@dataclass(frozen=True)
class Bundle:
    """The folders to copy from: the package, the template of a project, and the owned tests."""

    package: Path
    project: Path
    tests: Path
    techniques: tuple[Technique, ...] = field(default=TECHNIQUES, repr=False)

    def find(self, name: str) -> Technique:
        """Return the technique called `name`."""
        for technique in self.techniques:
            if technique.name == name:
                return technique
        known = [technique.name for technique in self.techniques]
        raise ScaffoldError(f"no technique is called {name!r}; {did_you_mean(name, known)}")


@dataclass(frozen=True)
class SourceFile:
    """The content for one file, and where in the bundle it comes from."""

    content: bytes
    source: str


def find_bundle(package: Path = PACKAGE_FOLDER) -> Bundle:
    """Find what is copied: inside an installed package, or beside the package of a clone."""
    inside = package / BUNDLED_FOLDER
    around = inside if inside.is_dir() else package.parent
    return Bundle(package, around / "project", around / "tests")


# The import graph


def closure(package: Path, roots: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that `roots` import, directly or not, as paths relative to `package`.

    Imports inside functions count; imports under `if TYPE_CHECKING` do not.
    """
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        tree = ast.parse((package / path).read_bytes(), filename=path)
        for_types = _type_checking_nodes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and node not in for_types:
                waiting += [home for home, _ in _homes(package, path, node) if home]
    return tuple(sorted(reached))


def public_names(package: Path, technique: Technique) -> tuple[str, ...]:
    """Return the names that users import from the home module of `technique`."""
    home = PurePosixPath(technique.home)
    handed = _names_handed_on(package / home.parent / "__init__.py")
    names = sorted(name for name, module in handed.items() if module == home.stem)
    if names:
        return tuple(names)
    tree = ast.parse((package / home).read_bytes())
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return tuple(name for name in defined if not name.startswith("_"))


def _homes(package: Path, path: str, node: ast.ImportFrom) -> list[tuple[str, list[ast.alias]]]:
    """Return the modules behind a `from ... import`, each with the names that it gives.

    The module is "" for names that the package itself defines in `__init__.py`, and the path ends
    with `/*` where the names are modules.
    """
    above = (PACKAGE, *PurePosixPath(path).parts)[: -node.level] if node.level else ()
    dotted = (*above, *(node.module or "").split(".")) if node.module else above
    inside = "/".join(dotted[1:])
    if (package / f"{inside}.py").is_file():
        return [(f"{inside}.py", node.names)]
    folder = package / inside
    if not (folder / "__init__.py").is_file():
        raise ScaffoldError(f"{path} imports {'.'.join(dotted)}, and {package} has no such module")

    handed = _names_handed_on(folder / "__init__.py")
    found: list[tuple[str, list[ast.alias]]] = []
    for alias in node.names:
        module = alias.name if (folder / f"{alias.name}.py").is_file() else handed.get(alias.name)
        home = f"{inside}/{module}.py".lstrip("/") if module else ""
        found.append((home, [alias]))
    return found


def _names_handed_on(init: Path) -> dict[str, str]:
    """Map each name in the `lazy_names(__name__, {...})` of an `__init__.py` to its module."""
    if not init.is_file():
        return {}
    for node in ast.walk(ast.parse(init.read_bytes())):
        match node:
            case ast.Call(func=ast.Name(id="lazy_names"), args=[_, ast.Dict() as table, *_]):
                modules: dict[str, tuple[str, ...]] = ast.literal_eval(table)
                return {name: module for module, names in modules.items() for name in names}
    return {}


def _type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    return {inner for block in blocks for part in block.body for inner in ast.walk(part)}


# Rewritten imports


def flatten(package: Path, path: str, *, copied: Iterable[str]) -> bytes:
    """Return the module at `path` with its relative imports made to siblings in one folder."""
    source = (package / path).read_bytes()
    tree = ast.parse(source, filename=path)
    for_types = _type_checking_nodes(tree)
    here = set(copied)
    edits: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            homes = _homes(package, path, node)
            lines = [
                _sibling_import(home, names, module=".", found=home in here)
                for home, names in homes
            ]
            missing = [home or "the package itself" for home, _ in homes if home not in here]
            if missing and node not in for_types:
                raise ScaffoldError(f"{path} imports {missing[0]}, which is not copied with it")
            edits.append((node, lines[0] if len(homes) == 1 else "\n".join(lines)))
    return _origin_for_proof(_apply_edits(source, edits), path)


def retarget_test(package: Path, source: bytes, *, target: str, copied: Iterable[str]) -> bytes:
    """Return a test that imports a flat copy called `target` instead of `curry_train`."""
    edits: list[tuple[ast.stmt, str]] = []
    here = set(copied)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or "") and not node.level:
            homes = _homes(package, "the test", _without_root(node))
            missing = [home or "curry_train itself" for home, _ in homes if home not in here]
            if missing:
                raise ScaffoldError(f"the test imports {missing[0]}, which is not copied with it")
            edits.append(
                (
                    node,
                    "\n".join(
                        _sibling_import(home, names, module=target, found=True)
                        for home, names in homes
                    ),
                )
            )
        elif isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise ScaffoldError(
                f"the test has '{ast.unparse(node)}': write it as from ... import ..."
            )
    return _apply_edits(source, edits)


def rename_package(source: bytes, *, package: str) -> bytes:
    """Return a script that imports `package`, a renamed whole copy, instead of `curry_train`."""
    edits: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or "") and not node.level:
            module = package + (node.module or "").removeprefix(PACKAGE)
            edits.append((node, _import_text(module, node.names)))
        elif isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            if any(_is_ours(alias.name) and alias.asname is None for alias in node.names):
                raise ScaffoldError(
                    f"'{ast.unparse(node)}' can't be moved to {package}: write from ... import ..."
                )
            edits.append((node, ast.unparse(node).replace(PACKAGE, package)))
    return _apply_edits(source, edits)


def _sibling_import(home: str, names: Sequence[ast.alias], *, module: str, found: bool) -> str:
    stem = PurePosixPath(home).stem
    if not found:
        # A type that only a checker reads, in a module that is not copied.
        return "\n".join(f"from typing import Any as {a.asname or a.name}" for a in names)
    if len(names) == 1 and names[0].name == stem:
        return _import_text(module, names)
    separator = "" if module == "." else "."
    return _import_text(f"{module}{separator}{stem}", names)


def _import_text(module: str, names: Sequence[ast.alias]) -> str:
    texts = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in names]
    line = f"from {module} import {', '.join(texts)}"
    if len(line) <= 92:
        return line
    return "\n".join([f"from {module} import (", *[f"    {text}," for text in texts], ")"])


def _without_root(node: ast.ImportFrom) -> ast.ImportFrom:
    """Return the import relative to the package's own folder."""
    module = (node.module or "").removeprefix(PACKAGE).removeprefix(".")
    return ast.ImportFrom(module=module or None, names=node.names, level=1)


def _apply_edits(source: bytes, edits: Iterable[tuple[ast.stmt, str]]) -> bytes:
    """Replace whole statements; everything else stays byte for byte."""
    lines = source.splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: edit[0].lineno, reverse=True):
        first = lines[node.lineno - 1]
        last = lines[(node.end_lineno or node.lineno) - 1]
        before = first[: node.col_offset]
        after = last[node.end_col_offset or 0 :]
        if not before.strip():
            # Further lines of the statement get its indentation.
            text = text.replace("\n", "\n" + before.decode())
        else:
            text = re.sub(r"\s*\n\s*", " ", text)
        ending = b"\r\n" if first.endswith(b"\r\n") else b"\n"
        replaced = before + text.encode().replace(b"\n", ending) + after
        lines[node.lineno - 1 : node.end_lineno] = [replaced]
    return b"".join(lines)


def _origin_for_proof(source: bytes, path: str) -> bytes:
    """Replace the docstring's `Proof:` of this repository by the module's origin."""
    origin = f"From curry-train: {PACKAGE}/{path}.".encode()
    return re.sub(rb"(?m)^Proof: `[^`]*`[^\n]*", lambda _: origin, source, count=1)


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


# Files that each command copies


def technique_modules(bundle: Bundle, technique: Technique) -> tuple[str, ...]:
    """Return the modules that `add` copies for `technique`, relative to the package."""
    if technique.kind is Kind.TOOL:
        return ()
    if technique.kind is Kind.ROOM:
        room = sorted(path.name for path in (bundle.package / "runs").glob("*.py"))
        return closure(bundle.package, [f"runs/{name}" for name in room if name != "__init__.py"])
    return closure(bundle.package, [technique.home])


def technique_files(
    bundle: Bundle, techniques: Sequence[Technique], *, directory: str, package: str
) -> dict[str, SourceFile]:
    """Return the files of techniques in `directory`, imported as `package`, with their tests."""
    files: dict[str, SourceFile] = {}
    origin: dict[str, str] = {}
    for technique in techniques:
        modules = technique_modules(bundle, technique)
        for path in modules:
            place = f"{directory}/{PurePosixPath(path).name}"
            if origin.setdefault(place, path) != path:
                raise ScaffoldError(f"{origin[place]} and {path} would both become {place}")
            content = flatten(bundle.package, path, copied=modules)
            files[place] = SourceFile(content, f"{PACKAGE}/{path}")
        test = bundle.tests / technique.test
        if technique.kind is Kind.OWNED and test.is_file():
            content = retarget_test(
                bundle.package, test.read_bytes(), target=package, copied=modules
            )
            files[f"tests/{technique.test}"] = SourceFile(content, f"tests/{technique.test}")
    return dict(sorted(files.items()))


def project_files(bundle: Bundle, *, name: str, own: bool) -> dict[str, SourceFile]:
    """Return the files of a new project called `name`, with the wheel or the owned rooms."""
    check_project_name(name)
    metadata = read_distribution(bundle)
    sources = list(_files_below(bundle.project, leave_out=LEFT_BY_RUNS))
    if not sources:
        raise ScaffoldError(
            f"{bundle.project} holds no project to copy; take a whole copy of curry-train"
        )
    files = {}
    for path in sources:
        content = _render((bundle.project / path).read_bytes(), name, metadata.version)
        if own:
            content = _own_text(bundle, path, content, name=name, metadata=metadata)
        files[path] = SourceFile(content, f"project/{path}")
    if own:
        files |= _own_rooms(bundle, name)
    else:
        wheel, content = build_wheel(bundle)
        files[f"wheels/{wheel}"] = SourceFile(content, "wheel")
    return dict(sorted(files.items()))


def check_project_name(name: str) -> None:
    """Refuse a name that Python or pip could not use."""
    if not is_module_name(name):
        raise ScaffoldError(
            f"{name!r} can't be a project's name: give --name a Python identifier, such as my_run"
        )
    if not name.isascii() or not name.strip("_"):
        raise ScaffoldError(
            f"{name!r} can't be a project's name: pip takes ASCII letters and digits only"
        )
    taken = {DISTRIBUTION_NAME, "pytest", "click", *DISTRIBUTIONS_OF_IMPORTS.values()}
    modules = {"train", "model", "data", "tests", *DISTRIBUTIONS_OF_IMPORTS}
    if name.strip("_").lower().replace("_", "-") in taken or name in modules:
        raise ScaffoldError(
            f"{name!r} is the name of something that the project needs itself; give another --name"
        )


def is_module_name(name: str) -> bool:
    """Check that Python can import a file or folder of this name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _render(content: bytes, name: str, version: str) -> bytes:
    replacements = {
        PLACEHOLDER_NAME: name,
        f"{DISTRIBUTION_NAME}=={PLACEHOLDER_VERSION}": f"{DISTRIBUTION_NAME}=={version}",
        f"{PACKAGE}-{PLACEHOLDER_VERSION}": f"{PACKAGE}-{version}",
    }
    for old, new in replacements.items():
        content = content.replace(old.encode(), new.encode())
    return content


def _own_text(
    bundle: Bundle, path: str, content: bytes, *, name: str, metadata: "Metadata"
) -> bytes:
    """Make a file of the project depend on its own copy of the rooms instead of the package."""
    if path.endswith(".py"):
        return rename_package(content, package=name)
    for old, new in OWN_TEXTS.items():
        content = content.replace(old.encode(), new.replace(PLACEHOLDER_NAME, name).encode())
    pin = f'"{DISTRIBUTION_NAME}=={metadata.version}"'.encode()
    if path != "pyproject.toml" or pin not in content:
        return content
    needed = _imported_distributions(bundle)
    here = {_distribution_of(found) for found in re.findall(r'"([\w.-]+)[><=!]', content.decode())}
    missing = [
        f'"{requirement}"'
        for requirement in metadata.requires
        if ";" not in requirement and _distribution_of(requirement) in needed - here
    ]
    if missing:
        return content.replace(pin, ", ".join(missing).encode())
    return re.sub(re.escape(pin) + rb",?\s*", b"", content)


def _own_rooms(bundle: Bundle, name: str) -> dict[str, SourceFile]:
    modules = [path for path in TRAINER_MODULES if (bundle.package / path).is_file()]
    modules += [
        path.relative_to(bundle.package).as_posix()
        for room in RUN_TIME_ROOMS
        for path in (bundle.package / room).rglob("*.py")
    ]
    allowed = {*RUN_TIME_ROOMS, *TRAINER_MODULES}
    for path in closure(bundle.package, modules):
        if path.split("/")[0] not in allowed:
            raise ScaffoldError(f"the run-time rooms import {path}, which --own does not copy")
    modules += [path for path in ("__init__.py", "py.typed") if (bundle.package / path).is_file()]
    files = {}
    for path in modules:
        content = _origin_for_proof((bundle.package / path).read_bytes(), path)
        files[f"{name}/{path}"] = SourceFile(content, f"{PACKAGE}/{path}")
    return files


def _imported_distributions(bundle: Bundle) -> set[str]:
    """Return the distributions that the run-time rooms import with their modules."""
    paths = [bundle.package / path for path in TRAINER_MODULES]
    paths += [path for room in RUN_TIME_ROOMS for path in (bundle.package / room).rglob("*.py")]
    found = set()
    for path in filter(Path.is_file, paths):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found |= {name.split(".")[0] for name in names}
    return {DISTRIBUTIONS_OF_IMPORTS[name] for name in found & set(DISTRIBUTIONS_OF_IMPORTS)}


def _files_below(folder: Path, *, leave_out: Collection[str] = ()) -> Iterator[str]:
    """Yield the files below `folder` except caches, hidden ones and those in `leave_out`."""
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        hidden = [part for part in names if part.startswith(".") and part != ".gitignore"]
        made = [part for part in names if part == "__pycache__" or part.endswith(".egg-info")]
        if path.is_file() and not hidden and not made and names[0] not in leave_out:
            yield "/".join(names)


# The wheel


@dataclass(frozen=True)
class Metadata:
    """The distribution's metadata, from pyproject.toml or from an installed copy."""

    version: str
    summary: str
    requires_python: str
    license: str
    license_text: bytes
    requires: tuple[str, ...]
    scripts: Mapping[str, str]


def read_distribution(bundle: Bundle) -> Metadata:
    """Read the metadata of the package that `bundle` copies from."""
    root = bundle.package.parents[1]
    if (root / "pyproject.toml").is_file():
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION_NAME:
            requires = [_sorted_requirement(text) for text in project["dependencies"]]
            for extra, texts in project.get("optional-dependencies", {}).items():
                if extra != "dev":
                    requires += [f'{_sorted_requirement(t)}; extra == "{extra}"' for t in texts]
            return Metadata(
                project["version"],
                project["description"],
                project["requires-python"],
                project["license"],
                (root / "LICENSE").read_bytes(),
                tuple(requires),
                project.get("scripts", {}),
            )
    for folder in bundle.package.parent.glob(f"{PACKAGE}-*.dist-info"):
        return _installed_metadata(folder)
    raise ScaffoldError(
        f"{bundle.package} has neither a pyproject.toml above it nor a dist-info beside it; "
        "install curry-train, or use a whole clone"
    )


def _installed_metadata(folder: Path) -> Metadata:
    fields = email.message_from_bytes((folder / "METADATA").read_bytes())
    requires = []
    for text in fields.get_all("Requires-Dist", []):
        requirement, _, marker = text.partition(";")
        if "dev" not in marker:
            separator = "; " if marker else ""
            requires.append(_sorted_requirement(requirement) + separator + marker.strip())
    scripts = {}
    if (folder / "entry_points.txt").is_file():
        for line in (folder / "entry_points.txt").read_text().splitlines():
            name, separator, target = line.partition("=")
            if separator:
                scripts[name.strip()] = target.strip()
    return Metadata(
        fields["Version"],
        fields["Summary"],
        fields["Requires-Python"],
        fields["License-Expression"],
        (folder / "licenses/LICENSE").read_bytes(),
        tuple(requires),
        scripts,
    )


def build_wheel(bundle: Bundle) -> tuple[str, bytes]:
    """Build the wheel of the package; return its file name and its bytes.

    The same sources give the same bytes on every machine. Nothing is compressed, because results
    of zlib differ between its versions, and git compresses what it stores.
    """
    metadata = read_distribution(bundle)
    stem = f"{PACKAGE}-{metadata.version}"
    files = {
        f"{PACKAGE}/{path}": (bundle.package / path).read_bytes()
        for path in _files_below(bundle.package)
        if not path.startswith(f"{BUNDLED_FOLDER}/")
    }
    for path, content in bundled_files(bundle).items():
        files[f"{PACKAGE}/{BUNDLED_FOLDER}/{path}"] = content
    files |= {f"{stem}.dist-info/{path}": content for path, content in _dist_info(metadata).items()}

    record = f"{stem}.dist-info/RECORD"
    rows = [f"{path},{_record_hash(content)},{len(content)}" for path, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as zipped:
        for path, content in files.items():
            information = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
            information.create_system = 3  # POSIX, on every machine
            information.external_attr = 0o100644 << 16
            zipped.writestr(information, content)
    return f"{stem}-py3-none-any.whl", archive.getvalue()


def bundled_files(bundle: Bundle) -> dict[str, bytes]:
    """Return the template of a project and the owned tests, as an installed package has them."""
    files = {}
    for name, folder in (("project", bundle.project), ("tests", bundle.tests)):
        for path in _files_below(folder, leave_out=LEFT_BY_RUNS):
            files[f"{name}/{path}"] = (folder / path).read_bytes()
    return files


def _dist_info(metadata: Metadata) -> dict[str, bytes]:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {DISTRIBUTION_NAME}",
        f"Version: {metadata.version}",
        f"Summary: {metadata.summary}",
        f"License-Expression: {metadata.license}",
        "License-File: LICENSE",
        f"Requires-Python: {metadata.requires_python}",
        *[f"Requires-Dist: {requirement}" for requirement in metadata.requires],
    ]
    extras = re.findall(r'extra == "([^"]+)"', "\n".join(metadata.requires))
    lines += [f"Provides-Extra: {extra}" for extra in dict.fromkeys(extras)]
    scripts = [f"{name} = {target}" for name, target in metadata.scripts.items()]
    texts = {
        "METADATA": lines,
        "WHEEL": [
            "Wheel-Version: 1.0",
            "Generator: curry-train",
            "Root-Is-Purelib: true",
            "Tag: py3-none-any",
        ],
        "entry_points.txt": ["[console_scripts]", *scripts],
        "top_level.txt": [PACKAGE],
    }
    files = {path: "\n".join([*text, ""]).encode() for path, text in texts.items()}
    return files | {"licenses/LICENSE": metadata.license_text}


def _record_hash(content: bytes) -> str:
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _sorted_requirement(text: str) -> str:
    """Write a requirement in one way: setuptools reorders the specifiers of the same."""
    found = re.match(r"\s*([\w.-]+(?:\[[^]]*\])?)\s*(.*)", text)
    if found is None:
        raise ScaffoldError(f"can't read the requirement {text!r}: write it as 'name>=1.2'")
    specifiers = [part.strip() for part in found[2].split(",")]
    return found[1] + ",".join(sorted(filter(None, specifiers)))


def _distribution_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
