"""Inspect anybody's checkpoint: whole or not, its tensors, NaN and inf, and its hashes.

    curry-train runs inspect PATH

A path is a file, or a folder: one of ours, of torch.distributed.checkpoint, torch_checkpointing,
Hugging Face, its Trainer, Accelerate, or any folder of such files. Nothing is unpickled. Where a
format can't prove something, the result says that it can't be told.

Proof: `python -m pytest tests/cli/test_inspection.py`.
"""

import dataclasses
import fnmatch
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch._weights_only_unpickler import _get_allowed_globals

from ..core.unpickle import PickleReader
from ..core.wording import format_bytes, some_of
from ..runs.journal import printable
from ..runs.layout import HASH_NAME, MANIFEST_FILE_NAME, parse_manifest
from ..runs.ranks import RunError
from ..runs.trainers import read_commit, verify_commit
from .parameters import argument
from .runs import is_run
from .screen import Ended, echo_lines, screen_command, table
from .tensor_files import (
    DAMAGE,
    FoundTensor,
    Inspection,
    add_names,
    in_a_line,
    open_regular,
    read_tensor_file,
    read_tensors,
    read_whole,
)

# Judge the names of classes and functions that loading a checkpoint would import.

# fmt: off
# Names, as globs, that a checkpoint of tensors may need besides those that torch allows without
# being asked; none of them runs what a file contains.
HARMLESS_NAMES = (
    "copyreg._reconstructor", "copy_reg._reconstructor", "collections.defaultdict",
    "collections.deque", "datetime.*", "pathlib.*Path", "pathlib._local.*Path",
    "decimal.Decimal", "uuid.UUID",
    "argparse.Namespace", "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO",
    "fractions.Fraction", "functools.partial",
    "torch.distributed.checkpoint.metadata.*", "torch.distributed.checkpoint.filesystem.*Info",
    "torch_checkpointing.tensor_slice.*", "torch_checkpointing.distributed_metadata.*",
    "torch_checkpointing.checkpoint_layout.*", "curry_train.runs.values.*",
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.*", "numpy.*core.multiarray._reconstruct",
    "numpy.*core.multiarray.scalar", "numpy.*core.numeric._frombuffer",
)
HARMLESS_BUILTINS = (
    "set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str", "bytes",
    "bytearray", "complex", "slice", "range", "object", "unicode", "long",
)
# A name with one of these words in it reaches functions that run commands or code.
DANGEROUS_WORDS = {
    "os", "posix", "subprocess", "importlib", "builtins", "__builtin__", "__builtins__",
    "eval", "exec", "system", "__import__", "__globals__", "__subclasses__", "__class__",
    "runstring", "_run_code",
}
# So does any other name of the standard library, and these of packages that everybody has; a user's
# own module may have such a name.
DANGEROUS_NAMES = (
    "commands.*", "pip.*", "requests.*", "torch.hub.*", "torch.jit.*", "torch.load",
    "torch.utils.cpp_extension.*", "numpy.*io.*", "torch.multiprocessing.*",
)
# fmt: on


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _is_harmless(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module in ("builtins", "__builtin__"):
        return last in HARMLESS_BUILTINS
    # A dotted rest could reach anything that the module has imported.
    globs = (glob for glob in HARMLESS_NAMES if glob.count(".") == name.count("."))
    return name in _get_allowed_globals() or _matches(name, globs)


def _is_dangerous(name: str) -> bool:
    words = name.split(".")
    is_of_python = words[0] in sys.stdlib_module_names
    return is_of_python or bool(DANGEROUS_WORDS & {*words}) or _matches(name, DANGEROUS_NAMES)


def inspect_checkpoint(path: str | os.PathLike[str]) -> Inspection:
    """Inspect a file or a folder; raise FileNotFoundError or OSError if there is none."""
    path = Path(path)
    if path.is_dir():
        found = _inspect_folder(path)
    else:
        found = read_tensor_file(path)
        found.num_bytes = path.stat().st_size
        if found.format == "unknown":
            found.problems.append(NO_FORMAT)
            found.unknown = []
        _compare_with_manifest(path, found)
    found.path = str(path)
    for name in sorted(found.names):
        if not _is_harmless(name):
            (found.dangerous if _is_dangerous(name) else found.imports).append(name[:200])
    if found.imports:
        named = some_of(found.imports, 3)
        found.unknown.append(f"loading it imports {named}: whether that runs code can't be told")
    if found.dangerous:
        found.problems.append(f"it is hostile: loading it would call {some_of(found.dangerous, 3)}")
    return found


def _compare_with_manifest(path: Path, found: Inspection) -> None:
    """Compare a file or a folder with its manifest, if it was committed."""
    try:
        if path.is_dir():
            manifest = parse_manifest(read_whole(path / MANIFEST_FILE_NAME))
            commit = dataclasses.replace(manifest, location=path)
            found.format = "curry-train checkpoint"
            found.values |= {"step": str(manifest.step), "kind": manifest.kind}
        else:
            commit = read_commit(path)
        verify_commit(commit)
    except FileNotFoundError:
        return
    except RunError as error:
        found.problems.append(in_a_line(error))
        return
    # The manifest proves each bit. What torch could not look at remains unknown: those messages end
    # with its reason.
    found.complete = True
    found.unknown = [one for one in found.unknown if not one.endswith("can't be told")]
    found.hashed = {HASH_NAME: len(commit.files)}


# Folders.

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".ptl")
DISTRIBUTED_INDEX = ".metadata"
SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
NO_FORMAT = "it is no checkpoint, or its beginning is damaged: no known format begins like this"
NO_FILES = "it holds no file of tensors in a format that is known"
MISSING_FILES_UNKNOWN = "the folder does not list its files: a missing one can't be told"


def _inspect_folder(path: Path) -> Inspection:
    found = Inspection("folder")
    files = {one.name: one for one in sorted(path.iterdir()) if one.is_file()}
    found.num_bytes = sum(one.stat().st_size for one in files.values())
    try:
        manifest = files.get(MANIFEST_FILE_NAME)
        # Also if one of its bits is damaged.
        is_ours = manifest and re.search(rb'"(files|hash)"', read_whole(manifest))
        if is_ours:
            del files[MANIFEST_FILE_NAME]
        read = _read_distributed if DISTRIBUTED_INDEX in files else _read_each
        read(files, found)
        if is_ours:
            _compare_with_manifest(path, found)
        suffixes = *TENSOR_SUFFIXES, DISTRIBUTED_INDEX
        inner = [one.parent for one in path.glob("*/*") if one.name.endswith(suffixes)]
        if inner and found.problems == [NO_FILES]:
            newest = max(inner, key=os.path.getmtime)
            found.problems = [f"{NO_FILES}: give a folder inside of it, such as {newest}"]
    except DAMAGE as error:
        found.problems.append(f"{type(error).__name__}: {in_a_line(error)}")
    return found


def _read_each(files: Mapping[str, Path], found: Inspection) -> None:
    """Read every file of tensors in a folder, or those that an index of Hugging Face lists."""
    index = next((files[name] for name in SHARD_INDEXES if name in files), None)
    add_problem = found.problems.append
    # The keys that each file should hold.
    keys: dict[str, set[str]] = {}
    if index is None:
        keys = {name: set() for name in files if name.endswith(TENSOR_SUFFIXES)}
    else:
        found.format = "Hugging Face folder"
        for key, name in json.loads(read_whole(index))["weight_map"].items():
            keys.setdefault(str(name), set()).add(key)
    is_model = index is not None or [*keys] == ["model.safetensors"]
    for name in sorted(keys):
        if name not in files:
            add_problem(f"{name:.80} is missing, with {len(keys[name]):,} tensors")
            continue
        content = read_tensor_file(files[name])
        missing = keys[name] - {tensor.name for tensor in content.tensors}
        found.add(content, "" if is_model else f"{name}: ")
        if missing:
            add_problem(f"{name:.80} lacks {min(missing)!r:.80}")
    found.problems += _find_damaged_json(files)
    if is_model:
        found.complete = True
    elif keys:
        found.unknown.append(MISSING_FILES_UNKNOWN)
    else:
        add_problem(NO_FILES)


def _find_damaged_json(files: Mapping[str, Path]) -> Iterator[str]:
    for name, file in files.items():
        if name.endswith(".json") and file.stat().st_size:
            try:
                json.loads(read_whole(file))
            except (ValueError, RecursionError, RunError) as error:
                yield f"{name}: it is no JSON ({error!s:.100})"


# torch.distributed.checkpoint: an index of tensors, and files that hold pieces of them.


def _read_distributed(files: Mapping[str, Path], found: Inspection) -> None:
    found.format = "torch.distributed.checkpoint"
    (index,) = add_names(PickleReader(read_whole(files[DISTRIBUTED_INDEX])), found)
    named = index.state["state_dict_metadata"].items()
    # A pickled value has no attributes.
    entries = {name: entry.state or {} for name, entry in named}

    # The pieces of each tensor that its files hold.
    pieces: dict[str, Inspection] = {}
    for key, place in index.state["storage_data"].items():
        content = _read_place(files, place.state)
        name = key.state["fqn"]
        pieces.setdefault(name, Inspection()).tensors += content.tensors
        if "chunks" not in entries[name]:
            content.unknown = []
        content.tensors, content.values = [], {}
        found.add(content, f"{name:.80}: ")

    found.complete = True
    for name, entry in entries.items():
        if "chunks" not in entry:
            found.values[str(name)] = "a pickled value"
            continue
        # The state of the properties is a tuple.
        dtype = entry["properties"].state[0].__name__
        own = pieces.get(name, Inspection())
        (size,) = entry["size"].args
        found.tensors.append(FoundTensor(str(name), size, dtype, own.num_nan, own.num_inf))
        if own.num_values != math.prod(size):
            found.problems.append(
                f"{name:.80} has {own.num_values:,} of {math.prod(size):,} elements"
            )
    found.unknown.append(".metadata has no hash: a changed bit in the index can't be told")


def _read_place(files: Mapping[str, Path], place: Mapping[str, Any]) -> Inspection:
    """Read one piece: a part of a file, which torch.save wrote."""
    begin, length = place["offset"], place["length"]
    file = files.get(place["relative_path"])
    if file is None:
        return Inspection(problems=[f"{place['relative_path']!s:.80} is missing"])
    if not 0 <= begin <= begin + length <= file.stat().st_size:
        return Inspection(problems=[f"it lies beyond the end of {file.name}, which is cut off"])
    with open_regular(file) as stream:
        stream.seek(begin)
        return read_tensors(io.BytesIO(stream.read(length)))


# The command, and how it prints what was found.

MOST_TENSORS_SHOWN = 40
MOST_LINES_SHOWN = 10


@screen_command("inspect", example="runs/run-001/latest")
def inspect_command(path: str = argument()) -> Ended:
    """Inspect anybody's checkpoint without unpickling it.

    PATH is a file of torch.save, safetensors or Lightning, or a folder of
    torch.distributed.checkpoint, torch_checkpointing, Hugging Face, Accelerate or ours. Exit
    status: 0 nothing wrong, 1 damaged, not whole or hostile, 2 wrong usage.
    """
    if is_run(Path(path)):
        raise ValueError(f"{path} is a run: give one of its checkpoints, such as {path}/latest")
    found = inspect_checkpoint(path)
    echo_lines(*inspection_lines(found))
    return found.to_json(), bool(found.problems)


def inspection_lines(found: Inspection) -> Iterator[str]:
    """Yield the result of an inspection, most important lines last."""
    if found.tensors:
        yield _format_tensors(found)
    hashes = [f"{number} of {algorithm} match" for algorithm, number in found.hashed.items()]
    yield (
        f"{found.format}, {format_bytes(found.num_bytes)}: {len(found.tensors)} tensors of "
        f"{found.num_values:,} values"
    )
    if found.values:
        shown = [printable(f"{key}: {text}") for key, text in found.values.items()]
        yield f"other values: {some_of(shown, 4)}"
    yield f"hashes: {', '.join(hashes) or 'none'}"
    yield f"NaN: {found.num_nan:,}, inf: {found.num_inf:,}"
    for title, lines in (("unknown", found.unknown), ("wrong", found.problems)):
        for line in lines[:MOST_LINES_SHOWN]:
            yield f"{title}: {printable(line, longest=400)}"
        if lines[MOST_LINES_SHOWN:]:
            yield f"{title}: {len(lines) - MOST_LINES_SHOWN} more, which --json has"
    yield "whole: " + {True: "yes", False: "no", None: "can't be told"}[found.whole]


def _format_tensors(found: Inspection) -> str:
    rows = [["tensor", "shape", "dtype", "NaN", "inf"]]
    # Tensors with values that are not finite come first, and the others in the file's order.
    tensors = sorted(found.tensors, key=lambda one: not (one.nan or one.inf))
    for one in tensors[:MOST_TENSORS_SHOWN]:
        shape = "x".join(map(str, one.shape)) or "scalar"
        counts = [str(number or "") for number in (one.nan, one.inf)]
        rows.append([printable(one.name), shape, one.dtype, *counts])
    if more := len(tensors[MOST_TENSORS_SHOWN:]):
        rows.append([f"and {more} more, which --json has", "", "", "", ""])
    return table(rows, texts=("dtype",))
