"""Try hostile checkpoints: pickles that call code, at each place, and paths that escape.

Each is loaded, resumed from, listed, shown, verified and compared. A canary shows whether any code
was run, and an audit hook whether anything outside was read.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import dataclasses
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from curry_train.cli.main import main
from curry_train.runs import RunError, SavedRun, Store, load_chosen
from curry_train.runs.layout import MANIFEST_FILE_NAME, FileEntry, hash_bytes, parse_manifest
from curry_train.runs.store import STATE_FILE_NAME
from curry_train.runs.values import dump, load
from torture_shapes import calls, places
from torture_training import Training

COMMANDS = (
    "list",
    "show",
    "verify",
    "diff",
    "inspect",
    "export",
)  # commands of `runs` that read checkpoints
GROUPS = ("calls", "state", "paths")
STEP = "rollback/step-00000002.dcp"
_watched: set[str] = set()
_opened: list[str] = []
_hooked: list[bool] = []


class Ground:
    """A run with two states, the second forged, next to files that must stay unchanged."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "runs/victim"
        self.secret, self.canary = root / "secret", root / "canary"
        self.secret.mkdir(parents=True)
        (self.secret / "data").write_bytes(b"not for you")
        training = Training()
        with Store(self.run) as store:
            for step in (1, 2):
                training.step()
                store.save("rollback", step, training.state)
                store.save("best-k", step, training.state, metric=("dev_loss", 1.0 / step))
        self.kept = root / "kept"
        shutil.copytree(self.run, self.kept, symlinks=True)
        self.best = f"best-k/{next(self.run.glob('best-k/*00000002.dcp')).name}"
        self.metadata = pickle.loads((self.run / STEP / ".metadata").read_bytes())
        _watched.add(str(self.secret))
        if not _hooked:
            sys.addaudithook(_watch)
            _hooked.append(True)

    def renew(self) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(self.kept, self.run, symlinks=True)

    def forge(self, folder: str, name: str, data: bytes) -> None:
        """Replace a file and its manifest: hashes find damage, not forgery."""
        place = self.run / folder
        manifest = parse_manifest((place / MANIFEST_FILE_NAME).read_bytes())
        (place / name).write_bytes(data)
        entry = FileEntry(len(data), hash_bytes(data))
        (place / MANIFEST_FILE_NAME).write_bytes(
            dataclasses.replace(manifest, files={**manifest.files, name: entry}).render()
        )

    def forge_index(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Forge the index of the tensors in the state next to them."""
        content = load((self.run / STEP / STATE_FILE_NAME).read_bytes())
        change(content["index"])
        self.forge(STEP, STATE_FILE_NAME, dump(content))

    def tried(self, *, loads: bool = False) -> list[str]:
        """List what is wrong after every reader was tried; `loads` if the state may be loaded."""
        wrong = []
        for folder in (STEP, self.best):
            training = Training()
            before = training.live()
            try:
                SavedRun(self.run).load(folder, training.state)
            except (RunError, ValueError, OSError):
                wrong += (
                    ["it was refused after something was changed"]
                    if training.live() != before
                    else []
                )
            except Exception as error:  # noqa: BLE001 - unforeseen errors are what this looks for
                wrong.append(f"a load ended with {error!r}")
            else:
                wrong += [] if loads or folder == self.best else ["it was loaded"]
        for what in ("latest", "best", f"{self.run}@latest", str(self.run / STEP)):
            try:
                load_chosen(self.run, Training().state, what)
            except (RunError, ValueError, OSError):
                continue
            except Exception as error:  # noqa: BLE001
                wrong.append(f"a resume from {what} ended with {error!r}")
        return wrong + self.commands_tried() + self.touched()

    def commands_tried(self) -> list[str]:
        wrong = []
        exported = self.root / "exported"
        links = any(one.is_symlink() for one in (self.run / STEP, *(self.run / STEP).iterdir()))
        for command in COMMANDS:
            # It reads through links: folders that the Hub has filled hold nothing else.
            if command == "inspect" and links:
                continue
            words = {
                "list": [str(self.run.parent)],
                "diff": [str(self.run), str(self.run)],
                "inspect": [str(self.run / STEP)],
                "export": [str(self.run), STEP, "--out", str(exported)],
            }
            done = CliRunner().invoke(main, ["runs", command, *words.get(command, [str(self.run)])])
            shutil.rmtree(exported, ignore_errors=True)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                wrong.append(f"runs {command} ended with {done.exception!r}")
        return wrong

    def touched(self) -> list[str]:
        wrong = ["the code in it was run"] if os.path.lexists(self.canary) else []
        if wrong:
            shutil.rmtree(self.canary, ignore_errors=True)
            self.canary.unlink(missing_ok=True)
        wrong += [f"{path} was opened" for path in _opened]
        _opened.clear()
        if [path.name for path in self.secret.iterdir()] != ["data"]:
            wrong.append("something outside of the run was changed")
        return wrong


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | os.PathLike):
        given = os.fsdecode(arguments[0])
        if (
            Path(given).is_symlink()
            and isinstance(arguments[2], int)
            and arguments[2] & os.O_NOFOLLOW
        ):
            return  # the kernel refuses it
        path = os.path.realpath(given)
        if any(path.startswith(f"{folder}/") for folder in _watched):
            _opened.append(path)


def hostile(
    root: Path,
    *,
    every: int = 1,
    groups: tuple[str, ...] = GROUPS,
    progress: Callable[[int], None] = print,
) -> dict[str, Any]:
    """Try each shape of these groups, or every n-th one."""
    ground = Ground(root)
    wrong = list[str]()
    counts = dict.fromkeys(GROUPS, 0)
    try:
        for number, (group, name, act, loads) in enumerate(shapes(ground)):
            if number % every or group not in groups:
                continue
            ground.renew()
            try:
                act()
            except (pickle.PicklingError, TypeError, AttributeError):
                continue  # can't be pickled
            counts[group] += 1
            wrong += [f"{group}, {name}: {fault}" for fault in ground.tried(loads=loads)]
            progress(sum(counts.values()))
    finally:
        _watched.clear()
    return {"shapes": sum(counts.values()), **counts, "wrong": wrong}


def shapes(ground: Ground) -> Iterator[tuple[str, str, Callable[[], None], bool]]:
    """Yield group, name, the forging function, and whether a load may succeed."""
    canary = str(ground.canary)
    for title, call in calls(canary).items():
        # A load does not read torch's index, and other tools of ours do not unpickle it.
        for place, metadata in places(ground.metadata, call):
            for protocol in (0, 2, 4, 5):
                yield (
                    "calls",
                    f"{title} in {place}",
                    lambda it=metadata, by=protocol: ground.forge(
                        STEP, ".metadata", pickle.dumps(it, by)
                    ),
                    True,
                )
        yield (
            "state",
            f"{title} in the state",
            lambda it=call: ground.forge_index(lambda index: index.update(call=it)),
            False,
        )
    yield from _paths(ground)


def _paths(ground: Ground) -> Iterator[tuple[str, str, Callable[[], None], bool]]:
    secret, place = str(ground.secret / "data"), ground.run / STEP
    for path in (
        "../../../../secret/data",
        secret,
        "..",
        ".",
        "",
        "a/../../../../../secret/data",
        "link",
        "__0_0.distcp/x",
    ):

        def leads_away(path: str = path) -> None:
            def lead_away(index: dict[str, Any]) -> None:
                for _, _, pieces in index.values():
                    for piece in pieces:
                        piece[2] = path

            (place / "link").symlink_to(secret)
            ground.forge_index(lead_away)

        def named(path: str = path) -> None:
            manifest = parse_manifest((place / MANIFEST_FILE_NAME).read_bytes())
            files = {**manifest.files, path: FileEntry(11, "00")}
            (place / MANIFEST_FILE_NAME).write_bytes(
                dataclasses.replace(manifest, files=files).render()
            )

        yield "paths", f"index to {path!r}", leads_away, False
        yield "paths", f"manifest to {path!r}", named, False
    for name in ("__0_0.distcp", ".metadata", "state.pt", MANIFEST_FILE_NAME):
        yield "paths", f"{name} is a link", lambda name=name: _link(place / name, secret), False
    yield "paths", "the checkpoint is a link", lambda: _link(place, str(ground.secret)), False
    yield (
        "paths",
        "latest is a link",
        lambda: _link(ground.run / "latest", str(ground.secret)),
        True,
    )
    yield (
        "paths",
        "a kind is a link",
        lambda: _link(ground.run / "recovery", str(ground.secret)),
        True,
    )
    for branches in (["../../../secret"], [str(ground.secret)], [[1]], [1.5], "latest"):

        def goes_back(branches: Any = branches) -> None:
            manifest = parse_manifest((place / MANIFEST_FILE_NAME).read_bytes())
            forged = dataclasses.replace(manifest, branches=branches)
            (place / MANIFEST_FILE_NAME).write_bytes(forged.render())

        yield "paths", f"went back at {branches!r}", goes_back, False


def _link(path: Path, target: str) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(target)
