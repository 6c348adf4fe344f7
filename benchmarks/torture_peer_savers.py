"""Checkpoint libraries, as the torture uses them: save a step, and load the newest one.

Each is used as its own documentation shows it, on local files and synchronously. Who resumes takes
the checkpoint with the highest step, as the scripts around these libraries do.

Proof: `python -m pytest tests/benchmarks/test_torture_peers.py`.
"""

import importlib.metadata
import re
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from curry_train import __version__
from curry_train.runs import Store, TrainingState, commit_checkpoints, load_chosen, newest_whole
from curry_train.runs.layout import FileEntry, hash_bytes, parse_manifest
from curry_train.runs.trainers import commit_file, commit_files, commit_folder

# The state that is saved: a few tensors whose values follow from the step.

SIDE = 128
NUM_LAYERS = 4
State = dict[str, Tensor]


def state_of(step: int) -> State:
    """Return the state of a step; every byte of it depends on the step."""
    generator = torch.Generator().manual_seed(step)
    state = {
        f"layer{number}": torch.randn(SIDE, SIDE, generator=generator)
        for number in range(NUM_LAYERS)
    }
    return state | {"step": torch.tensor([step])}


def step_of(state: State) -> int:
    """Return the step of a loaded state; raise ValueError if it is not of one step."""
    step = int(state["step"][0])
    expected = state_of(step)
    if any(not torch.equal(state[name], tensor) for name, tensor in expected.items()):
        raise ValueError(f"the state is not that of step {step}")
    return step


def zeros() -> State:
    """Return a state to load into."""
    return {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}


class Peer:
    """A library that saves and loads, by `save(path, state)` and `load_one(path)`.

    In a torture of saves over a save, each step has the same path.
    What a save needs is imported and built when the peer is, before processes are forked.
    """

    name = ""
    distribution = "torch"
    # The path of the checkpoint of a step, below the folder of all.
    place = "step-{}"
    # Files that hold pickles, which the torture replaces by hostile ones.
    pickled: tuple[str, ...] = ()

    def load(self, root: Path) -> State:
        """Load the newest checkpoint as a script that resumes would."""
        return self.load_one(self.newest(root))

    def path(self, root: Path, step: int) -> Path:
        return root / self.place.format(step)

    def newest(self, root: Path) -> Path:
        numbered = [
            (int(found[1]), path)
            for path in root.iterdir()
            if (found := re.fullmatch(r"(?:step|checkpoint)-(\d+)(?:\.ckpt)?", path.name))
        ]
        return max(numbered)[1]

    def forge(self, path: Path) -> None:
        """Make hashes fit after a file was replaced, as somebody hostile would."""

    def version(self) -> str:
        return importlib.metadata.version(self.distribution)


class DistributedCheckpoint(Peer):
    name = "dcp"
    pickled = (".metadata", "*.distcp")

    def save(self, path: Path, state: State) -> None:
        dcp.save(state, checkpoint_id=path)

    def load_one(self, path: Path) -> State:
        state = zeros()
        dcp.load(state, checkpoint_id=path)
        return state


class TorchCheckpointing(Peer):
    name = "torch_checkpointing"
    distribution = "torch_checkpointing"
    pickled = ("*.pt",)

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Direct I/O fails for files of other sizes than whole blocks on some file systems.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        save = SyncCheckpointSaverConfig()
        self._build = CheckpointManager.Config(save=save, storage_config=storage).build

    def save(self, path: Path, state: State) -> None:
        manager = self._build()
        manager.save(str(path), {"model": state})
        manager.close()

    def load_one(self, path: Path) -> State:
        manager = self._build()
        into = {"model": zeros()}
        found = manager.load(str(path), into=into) or into
        manager.close()
        return found["model"]


class Orbax(Peer):
    name = "orbax"
    distribution = "orbax-checkpoint"

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp

    def save(self, path: Path, state: State) -> None:
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        with self._ocp.PyTreeCheckpointer() as saver:
            saver.save(path.absolute(), arrays, force=True)

    def load_one(self, path: Path) -> State:
        with self._ocp.PyTreeCheckpointer() as saver:
            arrays = saver.restore(path.absolute())
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


class Holder(nn.Module):
    """A module that holds a state, for libraries that save modules."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in state_of(0).items():
            self.register_buffer(name, tensor)


class Accelerate(Peer):
    name = "accelerate"
    distribution = "accelerate"
    pickled = ("random_states_*.pkl", "optimizer.bin")

    def __init__(self) -> None:
        from accelerate import Accelerator

        self._holder = Holder()
        self._trainer = Accelerator(cpu=True)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], momentum=0.9)
        self._model, _ = self._trainer.prepare(self._holder, optimizer)

    def save(self, path: Path, state: State) -> None:
        self._holder.load_state_dict(state)
        self._trainer.save_state(str(path))

    def load_one(self, path: Path) -> State:
        self._trainer.load_state(str(path))
        return self._holder.state_dict()


class Lightning(Peer):
    name = "lightning"
    distribution = "lightning"
    place = "step-{}.ckpt"
    pickled = ("*.ckpt",)

    def __init__(self) -> None:
        from lightning.fabric.plugins.io import TorchCheckpointIO

        self._io = TorchCheckpointIO()

    def save(self, path: Path, state: State) -> None:
        self._io.save_checkpoint({"state_dict": state}, path)

    def load_one(self, path: Path) -> State:
        return self._io.load_checkpoint(path)["state_dict"]


class HuggingFace(Peer):
    """The Trainer of transformers; its own methods save and load, without the steps between."""

    name = "transformers"
    distribution = "transformers"
    place = "checkpoint-{}"
    pickled = ("*.pt", "*.pth", "*.bin")

    def __init__(self) -> None:
        from transformers import Trainer, TrainingArguments

        self._holder = Holder()
        self._holder.weight = nn.Parameter(torch.ones(4))
        arguments = TrainingArguments("unused", report_to=[], use_cpu=True, disable_tqdm=True)
        self._trainer = Trainer(self._holder, arguments)
        self._trainer.create_optimizer_and_scheduler(10)

    def save(self, path: Path, state: State) -> None:
        trainer = self._trainer
        # The weight that the optimizer needs is no part of the state.
        self._holder.load_state_dict(state, strict=False)
        trainer.args.output_dir = str(path.parent)
        trainer.state.global_step = int(path.name.partition("-")[2])
        events = trainer.callback_handler
        events.on_step_end(trainer.args, trainer.state, trainer.control)
        trainer._save_checkpoint(trainer.model, trial=None)
        events.on_save(trainer.args, trainer.state, trainer.control)

    def load_one(self, path: Path) -> State:
        self._trainer._load_from_checkpoint(str(path))
        self._trainer._load_optimizer_and_scheduler(str(path))
        self._trainer._load_rng_state(str(path))
        return self._holder.state_dict()


class Ours(Peer):
    name = "ours"
    place = "rollback/step-{:08d}.dcp"
    pickled = (".metadata", "*.distcp")

    def __init__(self) -> None:
        self._holder = Holder()
        self._state = TrainingState(self._holder)

    def save(self, path: Path, state: State) -> None:
        self._holder.load_state_dict(state)
        with Store(path.parents[1]) as store:
            store.save("rollback", int(path.stem.partition("-")[2]), self._state)

    def load(self, root: Path) -> State:
        load_chosen(root, self._state)
        return self._holder.state_dict()

    def load_one(self, path: Path) -> State:
        Store(path.parents[1]).load(f"rollback/{path.name}", self._state)
        return self._holder.state_dict()

    def forge(self, path: Path) -> None:
        manifest = parse_manifest((path / "manifest.json").read_bytes())
        files = {}
        for name in manifest.files:
            data = (path / name).read_bytes()
            files[name] = FileEntry(len(data), hash_bytes(data))
        (path / "manifest.json").write_bytes(replace(manifest, files=files).render())

    def version(self) -> str:
        return __version__


class Committed(Peer):
    """A library with `commit_checkpoints`, and `newest_whole` at resume."""

    def __init__(self) -> None:
        super().__init__()
        self.commit()

    def commit(self) -> None:
        commit_checkpoints(self._trainer)

    def newest(self, root: Path) -> Path:
        return Path(newest_whole(root))

    def forge(self, path: Path) -> None:
        commit_folder(path)


class CommittedAccelerate(Committed, Accelerate):
    name = "accelerate_committed"


class CommittedHuggingFace(Committed, HuggingFace):
    name = "transformers_committed"


class CommittedLightning(Committed, Lightning):
    name = "lightning_committed"

    def commit(self) -> None:
        commit_files(self._io)

    def forge(self, path: Path) -> None:
        staged = path.with_name(".forged")
        path.rename(staged)
        commit_file(staged, path)


PEERS = {
    one.name: one
    for one in (
        Ours,
        DistributedCheckpoint,
        TorchCheckpointing,
        Orbax,
        HuggingFace,
        CommittedHuggingFace,
        Accelerate,
        CommittedAccelerate,
        Lightning,
        CommittedLightning,
    )
}


def prepared(name: str) -> Peer:
    """Import a library and return it as a peer; SystemExit names the install command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return PEERS[name]()
        except ImportError as error:
            raise SystemExit(
                f"{name} is not installed ({error}): make torture PEER={name}"
            ) from error
