"""The commands `new`, `add`, `update`, `diff` and `list`: projects and techniques to own.

    curry-train new my-run
    curry-train add sac --into src/mylib/training
    curry-train diff my-run --patch

Proof: `python -m pytest tests/cli/test_scaffold_commands.py`.
"""

import difflib
import keyword
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click import echo

from .main import COMMANDS
from .merge import (
    LOCK_NAME,
    STAGING_PREFIX,
    Base,
    Change,
    CopiedFile,
    Lock,
    compare_files,
    content_of,
    plan_changes,
    read_lock,
    replaced,
    write_changes,
)
from .ownership import (
    DISTRIBUTION_NAME,
    NEEDED_BY_PROJECTS,
    PACKAGE,
    Bundle,
    Technique,
    build_wheel,
    check_project_name,
    find_bundle,
    project_files,
    technique_files,
    technique_modules,
    wheel_name,
)
from .parameters import argument, option
from .screen import LazyGroup, UnusableInput, echo_lines, screen_command

DRY_RUN_OPTION = option("List what would be written; write nothing.")
PROJECT_MARKERS = (LOCK_NAME, "pyproject.toml", "setup.py", "setup.cfg", ".git")


# new


@screen_command("new", example="my-run")
def new_command(
    directory: Path = argument("DIR", type=click.Path(path_type=Path)),
    name: str | None = option("Name of the project.  [default: from DIR]", "NAME"),
    own: bool = option("Copy the run-time rooms instead of the wheel."),
    dry_run: bool = DRY_RUN_OPTION,
) -> None:
    """Start a training project.

    DIR gets a training loop to read and change, model, data, configuration and tests. It depends on
    curry-train and carries it as a wheel, so that it installs where no other copy is.

    Exit status: 0 made, 2 wrong usage; nothing is written then.
    """
    bundle = find_bundle()
    root = Path(os.path.abspath(directory))
    name = root.name.replace("-", "_") if name is None else name
    check_project_name(name)
    _check_new_folder(root)
    _bring(bundle, root, Lock(bundle.version, name, own), what="a new project", dry_run=dry_run)
    if not dry_run:
        echo(f"Next:\n  cd {shlex.quote(str(directory))}\n  make test\n  make train")


def _check_new_folder(root: Path) -> None:
    """Refuse a place that can't become a new project."""
    is_empty = root.is_dir() and not root.is_symlink()
    # The next run removes the files that a killed one staged.
    is_empty &= all(one.name.startswith(STAGING_PREFIX) for one in root.glob("*"))
    if os.path.lexists(root) and (not is_empty or root == Path.cwd()):
        raise UnusableInput(
            f"{root} exists; name a new folder, use 'curry-train update' for a project, or "
            "'curry-train add' for a repository"
        )
    if not root.parent.is_dir():
        raise UnusableInput(f"{root.parent} is not a folder; create it first")


def wheel_changes(bundle: Bundle, root: Path, lock: Lock) -> list[Change]:
    """Plan to write the wheel of a project that carries one, and to delete those before it."""
    if lock.project is None or lock.own:
        return []
    path = f"wheels/{wheel_name(bundle)}"
    changes = [
        replaced(f"wheels/{old.name}", b"", None)
        for old in root.glob(f"wheels/{PACKAGE}-*.whl")
        if old != root / path
    ]
    return [*changes, replaced(path, content_of(root / path), build_wheel(bundle))]


# add


@screen_command("add", example="sac --into src/mylib/training")
def add_command(
    technique: str = argument(),
    directory: Path | None = option(
        "The package that gets it; made if missing.",
        "PACKAGE_DIR",
        "--into",
        type=click.Path(path_type=Path),
    ),
    own: bool = option("Copy the room runs/ too (saving, loss spikes)."),
    dry_run: bool = DRY_RUN_OPTION,
    overwrite: bool = option("Replace files that differ, edits too."),
) -> None:
    """Add one technique to a repository.

    Its modules and its test are copied and are yours; what was copied before is updated. For what
    is better depended on (checkpoint-policy and loss-spike without --own, memory-plan, bench) the
    lines to add are printed and nothing is written.

    Exit status: 0 added or there already, 1 with conflicts to resolve, 2 wrong usage or a file is
    in the way.
    """
    bundle = find_bundle()
    chosen = bundle.find(technique)
    if chosen.usage and not (own and chosen.rooms):
        if own or overwrite:
            raise UnusableInput(
                f"{technique} takes neither --own nor --overwrite: "
                "'curry-train list' shows what is copied"
            )
        _echo_usage(bundle, chosen)
        return
    if directory is None:
        raise UnusableInput(
            f"--into is missing: name the package that gets {chosen.name}, "
            "such as --into src/mylib/training"
        )
    target = find_target(directory, bundle.version)
    lock = with_technique(bundle, chosen, target, overwrite=overwrite)
    _bring(bundle, target.root, lock, what=chosen.name, dry_run=dry_run)
    if not chosen.rooms:
        echo(f"Next:\n  {target.test_command(chosen.test)}")
    module = "runs" if chosen.rooms else Path(chosen.home).stem
    echo(f"Use it:\n  from {lock.package} import {module}")


@dataclass(frozen=True)
class CopyTarget:
    """A project with its lock, and the folder in which Python finds the lock's package."""

    root: Path
    lock: Lock
    search_path: Path

    def test_command(self, test: str) -> str:
        """Return the command that runs a copied test, typed in the current folder."""
        command = f"python -m pytest tests/{test}"
        if self.search_path != self.root:
            place = os.path.relpath(self.search_path, self.root)
            command = f"PYTHONPATH={shlex.quote(place)} {command}"
        if Path.cwd() != self.root:
            command = f"cd {shlex.quote(os.path.relpath(self.root))} && {command}"
        return command


def _is_root(folder: Path) -> bool:
    return any((folder / marker).exists() for marker in PROJECT_MARKERS)


def find_target(directory: Path, version: str) -> CopyTarget:
    """Find the project around a package's folder, which may not exist yet.

    A project without a lock gets one of this version.
    """
    here = Path.cwd()
    directory = Path(os.path.abspath(directory))
    if _is_root(directory):
        raise UnusableInput(
            f"{directory} is a project's root, not a package in it; "
            f"use --into {directory / 'techniques'}"
        )
    root = here if here in directory.parents else directory.parent
    root = next(filter(_is_root, directory.parents), root)
    # The folder of the top package.
    above = directory.parent
    while above != root and ((above / "__init__.py").is_file() or not above.exists()):
        above = above.parent
    inside_root = directory.relative_to(root).as_posix()
    known = read_lock(root) or Lock(version)
    if known.package and known.directory == inside_root:
        # Folders that the first `add` made lack an __init__.py, and its tests import this package.
        above = directory.parents[known.package.count(".")]
    names = directory.relative_to(above).parts
    for name in names or ("",):
        if (
            not name.isidentifier()
            or keyword.iskeyword(name)
            or names[0] in (*sys.stdlib_module_names, *NEEDED_BY_PROJECTS)
        ):
            raise UnusableInput(
                f"no package of yours can be called {name!r}; --into needs a name like my_training"
            )
    for folder in (directory, *directory.parents):
        module = Path(f"{folder}.py")
        if module.is_file() and not folder.exists():
            raise UnusableInput(
                f"{module} would be hidden by the folder {folder.name}, of the same name: use "
                "--into with another one"
            )
    if known.directory not in (None, inside_root):
        raise UnusableInput(
            f"{root / LOCK_NAME} has the techniques of this project in {known.directory}; "
            f"use --into {root / str(known.directory)}, or correct the lock if they moved"
        )
    lock = replace(known, directory=inside_root, package=".".join(names))
    return CopyTarget(root, lock, above)


def with_technique(
    bundle: Bundle, technique: Technique, target: CopyTarget, *, overwrite: bool
) -> Lock:
    """Return the lock of a project with one more technique.

    With `overwrite`, what is in its files counts as copied, so that nothing of it is kept.
    """
    lock = target.lock
    files = dict(lock.files)
    alone = replace(lock, project=None, techniques=(technique.name,), files={})
    for path in files_of_lock(bundle, alone, target.root):
        place = target.root / path
        if not place.exists():
            files.pop(path, None)  # what was deleted since comes again
        elif overwrite:
            files[path] = Base(lock.version, place.read_bytes())
    techniques = tuple(sorted({*lock.techniques, technique.name}))
    return replace(lock, techniques=techniques, files=files)


INIT_TEXT = b'"""Techniques of curry-train, owned here."""\n'


def _echo_usage(bundle: Bundle, technique: Technique) -> None:
    if technique.rooms:
        pin = f'"{DISTRIBUTION_NAME}=={bundle.version}"'
        echo(f"Nothing is copied without --own.\nDependency:\n  {pin}\nIn the training loop:")
    else:
        echo(f"{technique.name} is a tool; nothing is copied. Run:")
    echo(textwrap.indent(technique.usage, "  "))
    if technique.rooms:
        echo(f"To own the code: curry-train add {technique.name} --own --into PACKAGE_DIR")


# update

PROJECT_ARGUMENT = argument(
    "[DIR]", default=".", type=click.Path(path_type=Path, resolve_path=True)
)


@screen_command("update", example="my-run --dry-run")
def update_command(root: Path = PROJECT_ARGUMENT, dry_run: bool = DRY_RUN_OPTION) -> None:
    """Merge a newer release into copied files.

    The release is the curry-train that runs; DIR is a project or a repository with techniques.
    Your edits are kept. Where both changed the same lines, both stand in the file, between
    <<<<<<< and >>>>>>>.

    Exit status: 0 merged, 1 with conflicts to resolve, 2 wrong usage.
    """
    what = "this release of curry-train"
    _bring(find_bundle(), root, _lock_of(root), what=what, dry_run=dry_run)


def _bring(bundle: Bundle, root: Path, lock: Lock, *, what: str, dry_run: bool) -> None:
    """Bring the files of a lock to this release, and print a line for each that is not the same.

    A dry run writes none of them. With conflicts the command ends here, with status 1.
    """
    if _parse_version(bundle.version) < _parse_version(lock.version):
        raise UnusableInput(
            f"{root} is from curry-train {lock.version}, and this is {bundle.version}; "
            "run a version that is as new"
        )
    lock = replace(lock, version=bundle.version)
    changes = plan_changes(root, lock, files_of_lock(bundle, lock, root))
    changes = [*wheel_changes(bundle, root, lock), *changes]
    if not dry_run:
        write_changes(root, changes)
    for change in changes:
        if change.action != "same":
            echo(f"{change.action:<11}{change.path}")
    counts = Counter(change.action for change in changes)
    if counts["same"]:
        echo(f"{'same':<11}{_format_count(counts['same'])}")
    if writes := sum(change.before != change.after for change in changes):
        done = "Dry run: would write" if dry_run else "Wrote"
        echo(f"{done} {_format_count(writes)} for {what} in {root}.")
    else:
        echo(f"Nothing to do: {what} is in {root} already.")
    if counts["conflict"]:
        echo(
            f"{_format_count(counts['conflict'])} to resolve: look between <<<<<<< and >>>>>>>",
            err=True,
        )
        raise click.exceptions.Exit(1)


def files_of_lock(bundle: Bundle, lock: Lock, root: Path) -> dict[str, bytes]:
    """Return what this bundle would write into the project that `lock` describes."""
    files: dict[str, bytes] = {}
    if lock.project is not None:
        files |= project_files(bundle, name=lock.project, own=lock.own)
    if lock.directory is not None and lock.package is not None:
        techniques = [one for one in bundle.techniques if one.name in lock.techniques]
        files |= technique_files(bundle, techniques, directory=lock.directory, package=lock.package)
        init = f"{lock.directory}/__init__.py"
        if init in lock.files or not (root / init).exists():
            files[init] = INIT_TEXT
    return files


def _lock_of(root: Path) -> Lock:
    lock = read_lock(root)
    if lock is None:
        raise UnusableInput(
            f"{root} has no {LOCK_NAME}; name the folder of a project that curry-train wrote to"
        )
    return lock


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


# diff and list


@screen_command("diff", example="my-run --patch")
def diff_command(
    root: Path = PROJECT_ARGUMENT,
    patch: bool = option("Print what turns your files into the bundle's."),
) -> None:
    """Compare copied files with their origin.

    Each file in DIR is as it came, edited, newer in bundle, both, or missing.

    Exit status: 0 compared, 2 wrong usage.
    """
    lock = _lock_of(root)
    compared = compare_files(root, lock, files_of_lock(find_bundle(), lock, root))
    for file in compared:
        echo(f"{file.state:<17}{file.path}")
        if patch:
            echo("".join(patch_lines(file)), nl=False)
    counts = Counter(file.state for file in compared)
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    echo_lines(f"{_format_count(len(compared))}: {summary}")


def patch_lines(file: CopiedFile) -> Iterator[str]:
    """Yield the unified diff from the user's file to the bundle's."""
    if file.wanted is None or file.yours == file.wanted:
        return
    before, after = (
        (side or b"").decode(errors="replace").splitlines(keepends=True)
        for side in (file.yours, file.wanted)
    )
    origin = "/dev/null" if file.yours is None else f"a/{file.path}"
    for line in difflib.unified_diff(before, after, origin, f"b/{file.path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


@screen_command("list", example="")
def list_command() -> None:
    """List the techniques and what adding each one copies."""
    bundle = find_bundle()
    for technique in bundle.techniques:
        echo(technique.name)
        echo_lines(f"  {technique.decides}")
        echo(f"  {technique.home}; {added_size(bundle, technique)}")


def added_size(bundle: Bundle, technique: Technique) -> str:
    """Describe what `add` writes for a technique."""
    modules = technique_modules(bundle, technique)
    if not modules:
        return "add: prints the command"
    lines = sum(len((bundle.package / path).read_bytes().splitlines()) for path in modules)
    count = "1 module" if len(modules) == 1 else f"{len(modules)} modules"
    if technique.rooms:
        return f"add: prints the lines; with --own {count}, {lines:,} lines"
    tests = ", 1 test" if (bundle.tests / technique.test).is_file() else ""
    return f"add: {count}, {lines:,} lines{tests}"


def _format_count(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


@click.group(
    cls=LazyGroup,
    lazy={"scaffold": COMMANDS["scaffold"]},
    example="new my-run",
)
def scaffold_group() -> None:
    """Start a training project, or own one technique in a repository."""
