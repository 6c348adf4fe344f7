"""Folder of a run, such as `runs/<name>-001`, with its configuration.

Proof: `python -m pytest tests/test_run_folder.py`.
"""

import re
from pathlib import Path

from .config import Config
from .runs.names import BEST, KINDS, step_of, what_runs_there_are


def new_run(config: Config) -> Path:
    """Make the folder for the next run of this name and write the configuration into it."""
    root = Path(config.runs)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [
        int(match[1])
        for path in root.iterdir()
        if (match := _numbered(config.name).fullmatch(path.name))
    ]
    number = max(numbers, default=0)
    while True:
        number += 1
        folder = root / f"{config.name}-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # another run took this number at the same moment
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        return folder


def note_resumed(folder: Path, config: Config, *, step: int) -> None:
    """Write the configuration of a resumed run beside the first one, if they differ."""
    text = config.to_yaml()
    first = folder / "config.yaml"
    if not first.is_file() or first.read_text(encoding="utf-8") != text:
        (folder / f"config-from-step-{step:08d}.yaml").write_text(text, encoding="utf-8")


def run_to_resume(config: Config, resume: str) -> tuple[Path | None, str]:
    """Return the folder of the run to resume, and which of its states to load.

    `resume` is `latest` of the runs of this name, a run by name or path, a step of it as RUN@500,
    or the path of a checkpoint. RUN@best holds parameters only and starts a new run: the folder is
    None.
    """
    root = Path(config.runs)
    path = Path(resume)
    if path.parent.name in KINDS and (step := step_of(path.parent.name, path.name)) is not None:
        return (None, resume) if path.parent.name == BEST else (path.parent.parent, str(step))
    place, _, inside = resume.partition("@")
    runs = [root / place, Path(place)] if place != "latest" else _newest_first(root, config.name)
    for folder in runs:
        if _is_run(folder):
            return (None, f"{folder}@best") if inside == "best" else (folder, inside or "latest")

    # A path is searched for in its own parent folder.
    searched = root
    if place != "latest" and Path(place).parent.name:
        searched = Path(place).parent
    names = [folder.name for folder in searched.glob("*/") if _is_run(folder)]
    wanted = config.name if place == "latest" else Path(place).name
    known = f"no run in {searched} has one"
    if names:
        known = what_runs_there_are(wanted, names, root=searched)
    raise ValueError(f"there is no saved state to resume from for {resume!r}: {known}")


def _is_run(folder: Path) -> bool:
    return any(True for kind in KINDS for _ in (folder / kind).glob("*.dcp"))


def _newest_first(root: Path, name: str) -> list[Path]:
    found = [
        (int(match[1]), path)
        for path in root.glob("*/")
        if (match := _numbered(name).fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _numbered(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(name)}-(\d{{3,}})")
