"""The whole state of a run in one file per save: written beside, forced to the disk, and then given its name.

A kill leaves either the whole file or none, beside what was there before. Any number of ranks reads it.
Proof: `python -m pytest tests/test_saved_state.py`.
"""

import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

NAME = re.compile(r"step-(\d{8})\.pt")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Positioned(Protocol):
    """Data whose place is one integer, the same on every rank."""

    position: int


@dataclass
class TrainingState:
    """What a run is besides its code; of the data only the position. `config` is for whoever reads the file."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    data: Positioned
    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def write_state(folder: Path, state: TrainingState, *, keep: int | None = None) -> Path:
    """Save on all ranks together; the oldest files beyond `keep` go."""
    path = folder / f"step-{state.step:08d}.pt"
    model, optimizer = get_state_dict(state.model, state.optimizer, options=WHOLE)
    generators = _gathered(_generators())
    if _rank() == 0:
        saved = {
            "model": model,
            "optimizer": optimizer,
            "scaler": state.scaler and state.scaler.state_dict(),
            "generators": generators,
            "step": state.step,
            "position": state.data.position,
            "config": state.config,
        }
        folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        with beside.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(folder)
        for old in saved_states(folder)[: -keep if keep else 0]:
            old.unlink()
    if dist.is_initialized():
        dist.barrier()
    return path


def read_state(path: Path, state: TrainingState) -> None:
    """Put a saved state into `state`; every generator too where the number of ranks is the same. Learning rates and the
    optimizer's other settings stay those of `state`, because the configuration says them."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in _groups(state)]
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"can't read the saved state {path}: {error}") from error
    try:
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
    except (RuntimeError, KeyError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{path} was saved from another model or optimizer: {told}") from error
    for group, kept in zip(_groups(state), settings, strict=True):
        group.update(kept)
    if state.scaler is not None and saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    state.step, state.data.position = saved["step"], saved["position"]
    if len(saved["generators"]) == (dist.get_world_size() if dist.is_initialized() else 1):
        _set_generators(saved["generators"][_rank()])


def saved_states(folder: Path) -> list[Path]:
    """Oldest first, by the number of the step."""
    found = [(int(match[1]), path) for path in folder.glob("step-*.pt") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _groups(state: TrainingState) -> list[dict[str, Any]]:
    return state.optimizer.param_groups


def _generators() -> dict[str, Any]:
    version, words, spare = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": [version, list(words), spare]}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _set_generators(states: dict[str, Any]) -> None:
    version, words, spare = states["python"]
    torch.set_rng_state(states["torch"])
    random.setstate((version, tuple(words), spare))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
