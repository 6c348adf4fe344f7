"""Keep the bad step of a run in a box: the last good state, the batch and the generators.

    run = saving(model, optimizer, runs="runs/mine", box=True)

A step whose loss is not finite, or with which a spike began, is kept in
`runs/mine/boxes/step-00000180`: the checkpoint from before it, in hard links to files that are
there already, a file of each rank, and `box.json`. `curry-train runs replay BOX` repeats it.

Proof: `python -m pytest tests/runs/test_box.py`.
"""

import json
import logging
import os
import shlex
import shutil
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..core.blocks import tensors_in
from ..core.digest import digest, hash_of
from .files import StrPath, read, remove_folder, sync_folder, write
from .format import readable
from .layout import step_of
from .policy_config import BoxConfig, read_fields
from .random_state import take_random_state
from .ranks import Ranks, RunError, reading
from .spike import RECOVERIES_FILE_NAME
from .state import TrainingState
from .store import Store
from .values import CollectedTensors, Facts, Values, dump, encode, load_foreign

logger = logging.getLogger(__name__)
FOLDER = "boxes"
FACTS_FILE_NAME = "box.json"
# Of the file of one rank.
MOST_BATCH_BYTES = 2**30
# Steps whose losses a box has, to compare them with those of a replay.
MOST_LOSSES = 4096


@dataclass(frozen=True)
class BoxFacts:
    """What `box.json` holds."""

    step: int
    reason: str
    # The folder of the state that the replay begins with; None for the start of the run.
    checkpoint: str | None
    # The losses of the steps up to this one, as `float.hex` writes them.
    losses: Facts
    # A digest of the parameters after the step, where the box was made right after it.
    parameters: str | None
    world_size: int
    # The command line of the run. It is shown, and never run.
    program: str


@dataclass
class StepStart:
    """The generators with which a step began, and the batches that it has taken."""

    step: int
    generators: Facts
    # Each with the versions of its tensors, which count the changes in place.
    batches: list[tuple[Any, list[int]]] = field(default_factory=list)


class Boxes:
    """Remembers what the last steps began with, and puts a bad one into a box.

    All ranks call together. What can't be kept is named in a warning; it does not end the training.
    """

    def __init__(self, config: BoxConfig, store: Store, state: TrainingState, *, patience: int):
        self._config = config
        self._state = state
        self._store = store
        self._ranks = Ranks.on_the_host()
        self._starts = deque[StepStart](maxlen=patience + 1)
        # The losses of the last steps, by their numbers.
        self._losses = deque[tuple[int, float]](maxlen=MOST_LOSSES)

    def begin(self) -> None:
        """Note the generators at the beginning of the next step, once."""
        step = self._state.step + 1
        if not self._starts or self._starts[-1].step != step:
            self._starts.append(StepStart(step, take_random_state(self._state.generators)))

    def hand_out(self, batch: Any) -> Any:
        """Note a batch of the next step, and return it."""
        self.begin()
        self._starts[-1].batches.append((batch, versions_of(batch)))
        return batch

    def stepped(self, loss: float) -> None:
        """Note the loss of the step that was just done."""
        self._losses.append((self._state.step, loss))

    def keep(self, step: int, reason: str, *, found_at: int) -> None:
        """Write the box of a step, and remove the oldest boxes beyond the bounds."""
        ranks = self._ranks
        parameters = digest_of(self._state) if found_at == step else None
        name = f"step-{step:08d}"
        place = self._store.root / FOLDER / name
        part = place.with_name(f".{name}.part")
        losses = {step: float("nan")} | dict(self._losses)
        try:
            checkpoint = ranks.agree(lambda: self._gather(part, step))
            facts = BoxFacts(
                step,
                reason,
                checkpoint,
                {str(number): loss.hex() for number, loss in losses.items()},
                parameters,
                ranks.size,
                shlex.join([sys.argv[0], "--", *sys.argv[1:]]).removesuffix(" --"),
            )
            ranks.collect(
                lambda: self._write_rank(part, step),
                lambda _: self._commit(part, place, facts),
            )
        except (OSError, RunError, ValueError) as error:
            logger.warning("step %d was not kept in a box: %s", step, error)
            if ranks.first:
                shutil.rmtree(part, ignore_errors=True)
            return
        if ranks.first:
            command = f"curry-train runs replay {shlex.quote(str(place))} --script {facts.program}"
            logger.warning("kept step %d in a box; to repeat it: %s", step, command)

    def _gather(self, part: Path, step: int) -> str | None:
        """Begin a folder with a state from before the step; return the state's own folder."""
        remove_folder(part)
        part.mkdir(parents=True)
        root = self._store.root
        states = [one for one in self._store.states() if one.step < step]
        # With a good step between the state and the bad one the two can be compared.
        chosen = next((one for one in states if one.step < step - 1), next(iter(states), None))
        if (root / RECOVERIES_FILE_NAME).is_file():
            _link(root / RECOVERIES_FILE_NAME, part / RECOVERIES_FILE_NAME)
        if chosen is None:
            return None
        if chosen.num_bytes > self._config.most_bytes:
            raise RunError(
                f"its state takes {chosen.num_bytes:,} bytes, and box.most_bytes is "
                f"{self._config.most_bytes:,}"
            )
        shutil.copytree(chosen.location, part / chosen.folder, copy_function=_link)
        return chosen.folder

    def _write_rank(self, part: Path, step: int) -> None:
        # After a rollback there may be an older one of the same step.
        start = next((one for one in reversed(self._starts) if one.step == step), None)
        content: Facts = {"batches": None, "generators": None}
        try:
            if start is None:
                raise ValueError("it began before this start of the process")
            content["generators"] = start.generators
            if any(versions_of(one) != versions for one, versions in start.batches):
                raise ValueError("the loop has changed it in place")
            if not start.batches:
                raise ValueError("no batch was handed out by run.batches or on_batch of the stream")
            batches = [one for one, _ in start.batches]
            # Raises where a value could not be read back.
            encode({"batches": batches}, CollectedTensors())
            # A view would be written with all of its storage.
            content["batches"] = tree_map_only(Tensor, lambda one: one.detach().clone(), batches)
        except ValueError as error:
            logger.warning(
                "the batch of step %d is not in its box: %s. A replay takes it from the script's "
                "own data",
                *(step, error),
            )
        data = readable(dump(content), MOST_BATCH_BYTES, "the batch of the step")
        write(part / f"rank-{self._ranks.rank}.pt", data)

    def _commit(self, part: Path, final: Path, facts: BoxFacts) -> None:
        write(part / FACTS_FILE_NAME, json.dumps(asdict(facts)).encode())
        remove_folder(final)
        part.rename(final)
        sync_folder(final.parent)
        boxes = [one for one in final.parent.iterdir() if one.name[0] != "."]
        boxes.sort(key=lambda one: one.stat().st_mtime_ns, reverse=True)
        # A file that is in several boxes counts once.
        num_bytes: dict[int, int] = {}
        for number, box in enumerate(boxes):
            for path in box.rglob("*"):
                num_bytes[path.stat().st_ino] = path.stat().st_size
            is_too_large = number > 0 and sum(num_bytes.values()) > self._config.most_bytes
            if number >= self._config.keep or is_too_large:
                remove_folder(box)


def _link(source: StrPath, target: StrPath) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def versions_of(batch: Any) -> list[int]:
    return [0 if one.is_inference() else one._version for one in tensors_in(batch)]


def digest_of(state: TrainingState) -> str:
    """Return one digest of all parameters; every rank has to call this."""
    digests = [digest(one) for one in state.model.parameters()]
    return hash_of("".join(digests).encode())


# Read a box, which somebody else may have forged.


def read_facts(folder: StrPath) -> BoxFacts:
    """Return what a box holds; raise RunError where a folder is no box, or a damaged one."""
    if not Path(folder, FACTS_FILE_NAME).is_file():
        raise RunError(
            f"{folder} is no box: give a folder that holds {FACTS_FILE_NAME}, such as "
            "runs/run-001/boxes/step-00000180"
        )
    with reading(f"{folder} is a damaged box"):
        facts = read_fields(BoxFacts, json.loads(read(Path(folder, FACTS_FILE_NAME))))
        if facts.step < 1 or not 1 <= facts.world_size <= 2**16:
            raise ValueError(f"step {facts.step} of {facts.world_size} ranks")
        state = facts.checkpoint
        begins_at = 0 if state is None else step_of(state)
        if begins_at is None or begins_at >= facts.step:
            raise ValueError(f"{state!r:.60} is no checkpoint of an earlier step")
        for loss in facts.losses.values():
            float.fromhex(loss)
    if state is not None and not Path(folder, state).is_dir():
        raise RunError(f"{folder} has lost its state {state}: copy the whole folder of the box")
    return facts


def read_rank(folder: StrPath, rank: int) -> Values:
    """Return `batches` and `generators` of a rank, None where they are not in the box."""
    with reading(f"{folder}: rank-{rank}.pt can't be read"):
        data = read(Path(folder, f"rank-{rank}.pt"), most_bytes=MOST_BATCH_BYTES)
        content = load_foreign(data)
        found = {name: content[name] for name in ("batches", "generators")}
        if not isinstance(found["batches"], list | None):
            raise TypeError("it holds no list of batches")
    return found
