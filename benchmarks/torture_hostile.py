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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from store_models import equal, new_state, tensors_of, train

from curry_train.cli.main import main
from curry_train.runs import RunError, SavedRun, Store, load_chosen
from curry_train.runs.layout import MANIFEST_FILE_NAME, FileEntry, hash_bytes, parse_manifest
from curry_train.runs.store import STATE_FILE_NAME
from curry_train.runs.values import dump, load
from torture_shapes import calls, places

# The commands of `runs` that read checkpoints.
COMMANDS = ("list", "show", "verify", "diff", "inspect", "export")
STEP = "rollback/step-00000002.dcp"
Act = Callable[[], object]


class Ground:
    """A run with two states, the second forged, next to files that must stay unchanged."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.kept = root, root / "runs/victim", root / "kept"
        self.secret, self.canary = root / "secret", root / "canary"
        self.secret.mkdir(parents=True)
        (self.secret / "data").write_bytes(b"not for you")
        state = new_state()
        with Store(self.run) as store:
            for step in (1, 2):
                train(state, 1)
                store.save("rollback", step, state)
                best = store.save("best-k", step, state, metric=("dev_loss", 1.0 / step))
        shutil.copytree(self.run, self.kept)
        self.best, self.place = best.folder, self.run / STEP
        self.metadata = pickle.loads((self.place / ".metadata").read_bytes())
        self.opened: list[str] = []
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what is opened of the secret, except where the kernel refuses to follow a link."""
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            given, _, flags = arguments
            refused = Path(given).is_symlink() and isinstance(flags, int) and flags & os.O_NOFOLLOW
            if not refused and os.path.realpath(given).startswith(f"{self.secret}/"):
                self.opened.append(os.fspath(given))

    def renew(self) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(self.kept, self.run)

    def change_manifest(self, **fields: Any) -> None:
        path = self.place / MANIFEST_FILE_NAME
        manifest = parse_manifest(path.read_bytes())
        fields = {name: change(getattr(manifest, name)) for name, change in fields.items()}
        path.write_bytes(dataclasses.replace(manifest, **fields).render())

    def forge(self, name: str, data: bytes) -> None:
        """Replace a file and its hash: hashes find damage, not forgery."""
        (self.place / name).write_bytes(data)
        entry = FileEntry(len(data), hash_bytes(data))
        self.change_manifest(files=lambda files: {**files, name: entry})

    def forge_state(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Forge the file with the state that is no tensor, and the index of the tensors."""
        content = load((self.place / STATE_FILE_NAME).read_bytes())
        change(content["index"])
        self.forge(STATE_FILE_NAME, dump(content))

    def tried(self, *, loads: bool) -> list[str]:
        """List what is wrong after every reader was tried; `loads` if the state may be loaded."""
        acts: dict[str, Act] = {}
        state = new_state()
        for folder in (STEP, self.best):
            acts[f"a load of {folder}"] = lambda it=folder: SavedRun(self.run).load(it, state)
        for what in ("latest", "best", f"{self.run}@latest", str(self.place)):
            acts[f"a resume from {what}"] = lambda it=what: load_chosen(self.run, new_state(), it)
        wrong, before = [], tensors_of(state)
        for name, act in acts.items():
            try:
                act()
            except (RunError, ValueError, OSError):
                if name == f"a load of {STEP}" and not equal(before, tensors_of(state)):
                    wrong.append("it was refused after something was changed")
            except Exception as error:  # noqa: BLE001 - unforeseen errors are what this looks for
                wrong.append(f"{name} ended with {error!r}")
            else:
                if name == f"a load of {STEP}" and not loads:
                    wrong.append("it was loaded")
        return [*wrong, *self._commands_tried(), *self._touched()]

    def _commands_tried(self) -> Iterator[str]:
        exported = self.root / "exported"
        words = {command: [str(self.run)] for command in COMMANDS}
        words["list"] = [str(self.run.parent)]
        words["diff"] = [str(self.run), str(self.run)]
        words["inspect"] = [str(self.place)]
        words["export"] = [str(self.run), STEP, "--out", str(exported)]
        if any(one.is_symlink() for one in (self.place, *self.place.iterdir())):
            # It reads through links: folders that the Hub has filled hold nothing else.
            del words["inspect"]
        for command, arguments in words.items():
            done = CliRunner().invoke(main, ["runs", command, *arguments])
            shutil.rmtree(exported, ignore_errors=True)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                yield f"runs {command} ended with {done.exception!r}"

    def _touched(self) -> Iterator[str]:
        if os.path.lexists(self.canary):
            yield "the code in it was run"
            shutil.rmtree(self.canary, ignore_errors=True)
            self.canary.unlink(missing_ok=True)
        yield from (f"{path} was opened" for path in self.opened)
        self.opened.clear()
        if [path.name for path in self.secret.iterdir()] != ["data"]:
            yield "something outside of the run was changed"


def hostile(root: Path, *, every: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Try each shape of pickles, and each nth place of them in torch's index."""
    ground, counts, wrong = Ground(root), Counter[str](), list[str]()
    indexes = list(_indexes(ground))[::every]
    others = [*_states(ground), *_paths(ground), *_links(ground)]
    for group, name, act, loads in [*indexes, *others]:
        ground.renew()
        try:
            act()
        except (pickle.PicklingError, TypeError, AttributeError):
            continue  # can't be pickled
        counts[group] += 1
        wrong += [f"{group}, {name}: {fault}" for fault in ground.tried(loads=loads)]
        progress(counts.total())
    return {"shapes": counts.total(), **counts, "wrong": wrong}


Shapes = Iterator[tuple[str, str, Act, bool]]


def _indexes(ground: Ground) -> Shapes:
    """A load does not read torch's index, and other tools of ours do not unpickle it."""
    for title, call in calls(str(ground.canary)).items():
        for place, metadata in places(ground.metadata, call):
            for protocol in (0, 2, 4, 5):

                def act(metadata: Any = metadata, protocol: int = protocol) -> None:
                    ground.forge(".metadata", pickle.dumps(metadata, protocol))

                yield "calls", f"{title} in {place}", act, True


def _states(ground: Ground) -> Shapes:
    for title, call in calls(str(ground.canary)).items():

        def act(call: Any = call) -> None:
            ground.forge_state(lambda index: index.update(call=call))

        yield "state", f"{title} in the state", act, False


def _paths(ground: Ground) -> Shapes:
    secret = str(ground.secret / "data")
    outside = ["../../../../secret/data", secret, "..", ".", "", "a/../../../../../secret/data"]
    for path in [*outside, "link", "__0_0.distcp/x"]:

        def leads_away(path: str = path) -> None:
            def lead_away(index: dict[str, Any]) -> None:
                for _, _, pieces in index.values():
                    for piece in pieces:
                        piece[2] = path

            (ground.place / "link").symlink_to(secret)
            ground.forge_state(lead_away)

        def named(path: str = path) -> None:
            ground.change_manifest(files=lambda files: {**files, path: FileEntry(11, "00")})

        yield "paths", f"index to {path!r}", leads_away, False
        yield "paths", f"manifest to {path!r}", named, False
    for branches in (["../../../secret"], [str(ground.secret)], [[1]], [1.5], "latest"):

        def goes_back(branches: Any = branches) -> None:
            ground.change_manifest(branches=lambda before: branches)

        yield "paths", f"went back at {branches!r}", goes_back, False


def _links(ground: Ground) -> Shapes:
    secret = str(ground.secret / "data")
    for name, target, loads in (
        *((f"{STEP}/{name}", secret, False) for name in ("__0_0.distcp", ".metadata", "state.pt")),
        (f"{STEP}/{MANIFEST_FILE_NAME}", secret, False),
        (STEP, str(ground.secret), False),
        ("latest", str(ground.secret), True),
        ("recovery", str(ground.secret), True),
    ):

        def link(path: Path = ground.run / name, target: str = target) -> None:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.symlink_to(target)

        yield "paths", f"{name} is a link", link, loads
