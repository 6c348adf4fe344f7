"""Write the parameters of a checkpoint as Hugging Face safetensors.

    curry-train runs export RUN --out FOLDER

The files are mapped into memory and filled by the load itself, so that a model of any size needs no
memory of its own. `from_pretrained` of transformers and `load_file` of safetensors read them.

Proof: `python -m pytest tests/runs/test_export.py`.
"""

import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .format import (
    MODEL_PREFIX,
    SAFETENSORS_DTYPE_CODES,
    Contents,
    Loading,
    LoadReport,
    Snapshot,
    TensorFacts,
)
from .ranks import StateMismatch
from .store import SavedRun

MODEL_FILE_NAME = "model.safetensors"
# As transformers divides a model by default.
SHARD_BYTES = 5 * 10**9


class ShardedSafetensors:
    """New safetensors files in a folder, mapped into memory and filled through `tensors`.

    Files have at most `shard_bytes`, as far as one tensor allows it; several get an index.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, TensorFacts], *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        # The widest dtypes come first, so that every tensor starts at a multiple of its item size.
        names = sorted(facts, key=lambda name: (-facts[name].dtype.itemsize, name))
        shards: list[list[str]] = [[]]
        num_bytes = 0
        for name in names:
            size = _bytes_of(facts[name])
            if shards[-1] and num_bytes + size > shard_bytes:
                shards.append([])
                num_bytes = 0
            shards[-1].append(name)
            num_bytes += size

        self.tensors: dict[str, torch.Tensor] = {}
        self._folder = folder
        self._maps: list[mmap.mmap] = []
        self.files: dict[str, list[str]] = {}
        for number, shard in enumerate(shards, start=1):
            file_name = MODEL_FILE_NAME
            if len(shards) > 1:
                file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self.files[file_name] = shard
            self._make(folder / file_name, {name: facts[name] for name in shard})
        if len(shards) > 1:
            total_bytes = sum(map(_bytes_of, facts.values()))
            weights = {name: file for file, shard in self.files.items() for name in shard}
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weights}
            text = json.dumps(index, indent=1, sort_keys=True)
            (folder / f"{MODEL_FILE_NAME}.index.json").write_text(text + "\n", encoding="utf-8")

    def _make(self, path: Path, facts: Mapping[str, TensorFacts]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places: dict[str, int] = {}
        position = 0
        for name, fact in facts.items():
            if fact.dtype not in SAFETENSORS_DTYPE_CODES:
                raise ValueError(f"safetensors can't hold {name}: its dtype is {fact.dtype}")
            places[name] = position
            end = position + _bytes_of(fact)
            header[name] = {
                "dtype": SAFETENSORS_DTYPE_CODES[fact.dtype],
                "shape": list(fact.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        with path.open("x+b") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            start = stream.tell()
            # Disk space is reserved now: a full disk under a map would kill the process.
            if position and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, start + position)
            stream.truncate(start + position)
            stream.flush()
            mapped = mmap.mmap(stream.fileno(), start + position)
        self._maps.append(mapped)
        for name, fact in facts.items():
            numel = math.prod(fact.shape)
            tensor = torch.empty(fact.shape, dtype=fact.dtype)
            if numel:
                flat = torch.frombuffer(
                    mapped, dtype=fact.dtype, count=numel, offset=start + places[name]
                )
                tensor = flat.reshape(fact.shape)
            self.tensors[name] = tensor

    def finish(self) -> None:
        """Put everything on the disk; the tensors must not be used afterwards."""
        self.tensors.clear()
        for mapped in self._maps:
            mapped.flush()
        self._maps.clear()
        for name in [*self.files, ""]:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _bytes_of(fact: TensorFacts) -> int:
    return math.prod(fact.shape) * fact.dtype.itemsize


class ParametersOnly:
    """Loads the parameters and buffers of a model from a checkpoint into new safetensors files."""

    def __init__(self, folder: Path, *, strip: str = "", shard_bytes: int = SHARD_BYTES) -> None:
        self.written: ShardedSafetensors | None = None
        self._folder = folder
        self._strip = strip
        self._shard_bytes = shard_bytes

    def snapshot(self) -> Snapshot:
        raise NotImplementedError("these files are written by a load, and not saved again")

    def begin_load(self, contents: Contents, *, strict: bool = True) -> Loading:
        prefix = MODEL_PREFIX + self._strip
        chosen = {
            name: facts for name, facts in contents.tensors.items() if name.startswith(prefix)
        }
        if not chosen:
            first = min(
                (name for name in contents.tensors if name.startswith(MODEL_PREFIX)), default="none"
            )
            raise StateMismatch(
                f"no parameter's name begins with {self._strip!r}: the first is "
                f"{first.removeprefix(MODEL_PREFIX)}"
            )
        self.written = ShardedSafetensors(
            self._folder,
            {name.removeprefix(prefix): facts for name, facts in chosen.items()},
            shard_bytes=self._shard_bytes,
        )
        targets = {name: self.written.tensors[name.removeprefix(prefix)] for name in chosen}
        report = LoadReport(matched=len(targets), wanted=len(targets))
        return Loading(targets, lambda: None, report)


def export_parameters(
    run: SavedRun,
    checkpoint: str,
    folder: Path,
    *,
    config: str | None = None,
    strip: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, list[str]]:
    """Verify a checkpoint, and write its parameters into a new folder; return names by file.

    The folder appears when everything is on the disk. `config` is a config.json to copy there, and
    `strip` a prefix of the exported names that is left out.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: give a new folder")
    staged = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    staged.mkdir(parents=True)
    try:
        state = ParametersOnly(staged, strip=strip, shard_bytes=shard_bytes)
        run.load(run.folder_of(checkpoint), state)
        assert state.written is not None
        if config is not None:
            shutil.copyfile(config, staged / "config.json")
        state.written.finish()
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return state.written.files
