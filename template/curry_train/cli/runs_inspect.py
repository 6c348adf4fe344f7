"""Inspect anybody's checkpoint: whole or not, its tensors, NaN and inf, and its hashes.

    curry-train runs inspect PATH

A path is a file, or a folder: one of ours, of torch.distributed.checkpoint, torch_checkpointing,
Hugging Face, its Trainer, Accelerate, or any folder of such files. Nothing is unpickled. Where a
format can't prove something, the result says that it can't be told.

Proof: `python -m pytest tests/cli/test_inspection.py tests/cli/test_runs_inspect.py`.
"""

import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from ..core.unpickle import RefusedPickle, StandIn
from ..core.wording import format_bytes
from ..runs.files import Files
from ..runs.format import ALLOWED_GLOBALS
from ..runs.journal import printable
from ..runs.layout import MANIFEST_FILE_NAME, parse_manifest, verify_files
from ..runs.ranks import RunError
from ..runs.trainers import read_commit
from .options import UnusableInput, json_option
from .runs import end, is_run
from .screen import ScreenCommand, fill_screen, table
from .tensor_files import (
    MOST_PICKLE_BYTES,
    FileContent,
    FoundTensor,
    add_names,
    in_a_line,
    open_regular,
    read_index,
    read_piece,
    read_tensor_file,
)

# The result of an inspection.

# Names that loading a checkpoint of tensors may need; none of them runs what a file contains.
HARMLESS_NAMES = {
    "_codecs.encode",
    *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "deque", "Counter")),
    *(f"{module}._reconstructor" for module in ("copyreg", "copy_reg")),
    *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
    *("argparse.Namespace", "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO"),
    *("decimal.Decimal", "fractions.Fraction", "functools.partial", "uuid.UUID"),
    *("torch.Size", "torch.Tensor", "torch.device", "torch.storage.UntypedStorage"),
    *ALLOWED_GLOBALS,
    *("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    *("numpy.ndarray", "numpy.dtype"),
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")
        for name in (
            *("set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str"),
            *("bytes", "bytearray", "complex", "slice", "range", "object", "unicode", "long"),
        )
    ),
}
HARMLESS_PREFIXES = (
    # Beginnings of the functions that a pickled tensor would call.
    *("torch._utils._rebuild_", "torch._tensor._rebuild_"),
    "torch.distributed.checkpoint.metadata.",
    "torch_checkpointing.distributed_metadata.",
    "torch_checkpointing.tensor_slice.",
    "torch_checkpointing.checkpoint_layout.",
    *("curry_train.runs.values.", "numpy.dtypes."),
)
# A name with one of these words in it reaches functions that run commands or code.
DANGEROUS_WORDS = {
    *("os", "posix", "subprocess", "importlib", "builtins", "__builtin__", "__builtins__"),
    *("eval", "exec", "system", "__import__", "__globals__", "__subclasses__", "__class__"),
    *("runstring", "_run_code"),
}
# So do these in packages that everybody has; a user's own module may have such a name.
DANGEROUS_MODULES = {
    *("nt", "sys", "shutil", "pty", "commands", "socket", "signal", "runpy", "code", "codeop"),
    *("pickle", "_pickle", "marshal", "ctypes", "inspect", "asyncio", "multiprocessing"),
    *("webbrowser", "urllib", "http", "requests", "operator", "_operator", "io", "_io"),
    *("tempfile", "pydoc", "timeit", "pip", "ensurepip", "hub", "jit", "cpp_extension"),
}
COMMON_PACKAGES = {*sys.stdlib_module_names, "commands", "pip", "requests", "torch", "numpy"}


@dataclass
class Inspection:
    """Findings about one checkpoint."""

    path: str
    format: str
    tensors: list[FoundTensor] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    # Damage, and what else speaks against loading it.
    problems: list[str] = field(default_factory=list)
    # Questions that can't be answered, with the reason.
    unknown: list[str] = field(default_factory=list)
    # Classes and functions that loading it would import, other than those of plain checkpoints.
    imports: list[str] = field(default_factory=list)
    # Imports that run commands, code or files.
    dangerous: list[str] = field(default_factory=list)
    # Whether every part is there; None if the format does not list its parts.
    complete: bool | None = None
    # Records or files whose hash was compared, by algorithm.
    hashed: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def well(self) -> bool:
        return not self.problems and not self.dangerous

    @property
    def whole(self) -> bool | None:
        """True if all of it is there, False if something is missing or damaged, None: unknown."""
        return False if self.problems else self.complete

    @property
    def num_nan(self) -> int:
        return sum(one.nan or 0 for one in self.tensors)

    @property
    def num_inf(self) -> int:
        return sum(one.inf or 0 for one in self.tensors)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found |= {"whole": self.whole, "nan": self.num_nan, "inf": self.num_inf}
        return found

    def add(self, content: FileContent, *, prefix: str = "") -> None:
        """Add what one file holds, its keys behind `prefix`."""
        for tensor in content.tensors:
            tensor.name = prefix + tensor.name
            self.tensors.append(tensor)
        self.values |= {prefix + key: text for key, text in content.values.items()}
        self.problems += [prefix + one for one in content.problems]
        self.unknown += [prefix + one for one in content.unknown]
        self.count_hashed(content)
        self.judge(content.names)

    def count_hashed(self, content: FileContent) -> None:
        if content.num_hashed:
            self.hashed["CRC-32"] = self.hashed.get("CRC-32", 0) + content.num_hashed

    def judge(self, names: set[str]) -> None:
        """Sort the names that pickles import into harmless, other and dangerous ones."""
        for name in sorted(names):
            if _is_harmless(name):
                continue
            target = self.dangerous if _is_dangerous(name) else self.imports
            if name not in target:
                target.append(name[:200])


def _is_harmless(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module == "torch" and not last.startswith("_"):
        types = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
        if last.endswith("Storage") or isinstance(getattr(torch, last, None), types):
            return True
    # A dotted rest could reach anything that the module has imported.
    has_prefix = any(
        name.startswith(one) and "." not in name[len(one) :] for one in HARMLESS_PREFIXES
    )
    return name in HARMLESS_NAMES or has_prefix


def _is_dangerous(name: str) -> bool:
    words = name.split(".")
    is_common = words[0] in COMMON_PACKAGES and not DANGEROUS_MODULES.isdisjoint(words)
    return is_common or not DANGEROUS_WORDS.isdisjoint(words) or name == "torch.load"


def inspect_checkpoint(path: str | os.PathLike[str], *, values: bool = True) -> Inspection:
    """Inspect a file or a folder; raise FileNotFoundError or OSError if there is none.

    Without `values` the tensors' values are not read, so that NaN and inf are not counted.
    """
    path = Path(path)
    if path.is_dir():
        found = _inspect_folder(path, values=values)
    else:
        found = Inspection(str(path), "")
        content = read_tensor_file(path, values=values)
        found.format = content.format
        found.add(content)
        # These formats list their parts, in an index at one end of the file.
        listed = content.format != "pickle" and content.format != "unknown"
        found.complete = True if listed else None
        found.num_bytes = path.stat().st_size
        _add_commit(path, found)
    if found.imports:
        named = ", ".join(found.imports[:3])
        found.unknown.append(f"loading it imports {named}: whether that runs code can't be told")
    if found.dangerous:
        named = ", ".join(found.dangerous[:3])
        found.problems.append(f"it is hostile: loading it would call {named}")
    return found


def _add_commit(path: Path, found: Inspection) -> None:
    """Compare a file with the manifest beside it, if one was committed."""
    try:
        commit = read_commit(path)
        commit.verify()
    except FileNotFoundError:
        return
    except RunError as error:
        found.problems.append(in_a_line(error))
        return
    found.hashed[commit.manifest.algorithm] = 1
    found.unknown = [one for one in found.unknown if "a changed bit" not in one]


# Folders.

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".ptl")
MOST_FILES = 10_000
# A file for each item and rank, as torch_checkpointing writes them.
RANK_FILE_PATTERN = re.compile(r".+_\d+\.pt")
SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _inspect_folder(path: Path, *, values: bool) -> Inspection:
    found = Inspection(str(path), "folder")
    files = {one.name: one for one in sorted(path.iterdir()) if one.is_file()}
    if len(files) > MOST_FILES:
        found.problems.append(f"it has {len(files):,} files, which are too many for a checkpoint")
        return found
    found.num_bytes = sum(one.stat().st_size for one in files.values())
    readers: dict[str, Callable[..., None]] = {
        MANIFEST_FILE_NAME: _read_manifest,
        ".metadata": _read_distributed,
        **dict.fromkeys(SHARD_INDEXES, _read_shards),
        "metadata.pkl": _read_rank_files,
    }
    try:
        for name, reader in readers.items():
            if name in files and (name != MANIFEST_FILE_NAME or _is_ours(files[name])):
                reader(path, files, found, values)
                break
        else:
            _read_each(path, files, found, values)
    except (RefusedPickle, RunError, OSError, ValueError, zipfile.BadZipFile) as error:
        found.problems.append(in_a_line(error))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        found.problems.append(f"its index can't be read ({type(error).__name__}: {error!s:.200})")
    return found


def _is_ours(manifest: Path) -> bool:
    """Return whether a manifest.json is ours, also if one of its bits is damaged."""
    text = _bytes_of(manifest)
    return b'"algorithm"' in text or b'"hash"' in text


def _read_each(path: Path, files: Mapping[str, Path], found: Inspection, values: bool) -> None:
    """Read every file of tensors in a folder whose format lists no files."""
    names = [name for name in files if name.endswith(TENSOR_SUFFIXES)]
    found.format = _folder_format(files)
    only_model = names == ["model.safetensors"]
    for name in names:
        content = read_tensor_file(files[name], values=values)
        found.add(content, prefix="" if only_model else f"{name}: ")
    for name in files:
        if name.endswith(".json") and files[name].stat().st_size:
            try:
                read_index(files[name])
            except ValueError as error:
                found.problems.append(f"{name}: it is no JSON ({error!s:.100})")
    if not names:
        found.unknown.append("it holds no file of tensors in a format that is known")
    elif only_model:
        found.complete = True
    else:
        found.unknown.append("the folder does not list its files: a missing one can't be told")


def _folder_format(files: Mapping[str, Path]) -> str:
    if all(RANK_FILE_PATTERN.fullmatch(name) for name in files) and files:
        return "torch_checkpointing checkpoint"
    if "trainer_state.json" in files:
        return "Hugging Face Trainer checkpoint"
    if any(name.startswith("random_states_") for name in files):
        return "Accelerate state"
    if "config.json" in files:
        return "Hugging Face folder"
    return "folder of files"


def _read_shards(path: Path, files: Mapping[str, Path], found: Inspection, values: bool) -> None:
    """Read a model of Hugging Face in several files, by its index."""
    found.format = "Hugging Face folder"
    index_name = next(name for name in SHARD_INDEXES if name in files)
    weights = read_index(files[index_name])["weight_map"]
    by_file: dict[str, set[str]] = {}
    for key, file_name in weights.items():
        by_file.setdefault(str(file_name), set()).add(key)
    found.complete = True
    for file_name, keys in sorted(by_file.items()):
        if file_name not in files:
            found.problems.append(f"{file_name:.80} is missing, with {len(keys):,} tensors")
            continue
        content = read_tensor_file(files[file_name], values=values)
        missing = keys - {tensor.name for tensor in content.tensors}
        found.add(content)
        if missing:
            found.problems.append(f"{file_name:.80} lacks {min(missing)!r:.80}")


def _read_rank_files(
    path: Path, files: Mapping[str, Path], found: Inspection, values: bool
) -> None:
    """Read a folder of torch_checkpointing: a file for each item and rank."""
    found.format = "torch_checkpointing checkpoint"
    content = FileContent()
    add_names(_bytes_of(files["metadata.pkl"]), content)
    found.judge(content.names)
    for name in files:
        if name.endswith(TENSOR_SUFFIXES) and name != "metadata.pkl":
            found.add(read_tensor_file(files[name], values=values), prefix=f"{name}: ")
    found.unknown.append("the folder does not list its files: a missing one can't be told")


def _bytes_of(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read(MOST_PICKLE_BYTES + 1)


def _read_manifest(path: Path, files: Mapping[str, Path], found: Inspection, values: bool) -> None:
    """Read a checkpoint of ours, or a trainer's folder with our manifest."""
    manifest = parse_manifest(_bytes_of(files[MANIFEST_FILE_NAME]))
    found.format = "curry-train checkpoint"
    unlisted = sorted(set(files) - set(manifest.files) - {MANIFEST_FILE_NAME})
    missing = sorted(name for name in manifest.files if not (path / name).is_file())
    found.problems += [f"{name} is missing" for name in missing]
    found.problems += [f"{name} is not in the manifest" for name in unlisted]
    local = Files(path.parent)
    num_proven = 0
    for name in sorted(set(manifest.files) - set(missing)):
        try:
            verify_files(local, path.name, manifest, [name])
            num_proven += 1
        except RunError as error:
            found.problems.append(str(error))
    found.complete = True
    found.values |= {"step": str(manifest.step), "kind": manifest.kind}
    rest = {name: file for name, file in files.items() if name != MANIFEST_FILE_NAME}
    if ".metadata" in rest:
        _read_distributed(path, rest, found, values)
    else:
        _read_each(path, rest, found, values)
    # The manifest proves each bit, so that nothing is left that the inner format can't tell.
    found.format = "curry-train checkpoint"
    found.complete = True
    found.unknown = [one for one in found.unknown if "can't be told" not in one or "NaN" in one]
    found.hashed = {manifest.algorithm: num_proven}


# torch.distributed.checkpoint: an index of tensors, and files that hold pieces of them.

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"


def _read_distributed(
    path: Path, files: Mapping[str, Path], found: Inspection, values: bool
) -> None:
    found.format = "torch.distributed.checkpoint"
    content = FileContent()
    try:
        metadata = add_names(_bytes_of(files[".metadata"]), content)
    finally:
        found.judge(content.names)
    index = _fields(metadata, "Metadata")
    places = {}
    for key, place in index["storage_data"].items():
        identity = _fields(key, "MetadataIndex")
        offset = identity.get("offset")
        where = None if offset is None else _size(offset)
        places[identity["fqn"], where] = _fields(place, "_StorageInfo")

    found.complete = True
    for name, entry in index["state_dict_metadata"].items():
        if entry.named == f"{_METADATA_MODULE}.BytesStorageMetadata":
            place = places.get((name, None))
            found.values[str(name)] = "a pickled value"
            _add_piece(files, place, str(name), None, found, values=False)
            continue
        fields = _fields(entry, "TensorStorageMetadata")
        tensor = FoundTensor(str(name), _size(fields["size"]), _dtype_name(fields["properties"]))
        found.tensors.append(tensor)
        _read_pieces(tensor, fields["chunks"], places, files, found, values)
    found.unknown.append(".metadata has no hash: a changed bit in the index can't be told")


def _read_pieces(
    tensor: FoundTensor,
    chunks: list[Any],
    places: Mapping[Any, Mapping[str, Any]],
    files: Mapping[str, Path],
    found: Inspection,
    values: bool,
) -> None:
    """Read all pieces of a tensor and count what is not finite."""
    num_elements = 0
    nan = 0
    inf = 0
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        sizes = _size(fields["sizes"])
        num_elements += math.prod(sizes)
        place = places.get((tensor.name, _size(fields["offsets"])))
        piece = _add_piece(files, place, tensor.name, sizes, found, values=values)
        if piece is None or piece.nan is None:
            values = False
        else:
            nan += piece.nan
            inf += piece.inf or 0
    if num_elements != tensor.numel:
        found.problems.append(
            f"{tensor.name:.80} has {num_elements:,} of {tensor.numel:,} elements"
        )
    if values:
        tensor.nan = nan
        tensor.inf = inf


def _add_piece(
    files: Mapping[str, Path],
    place: Mapping[str, Any] | None,
    name: str,
    sizes: tuple[int, ...] | None,
    found: Inspection,
    *,
    values: bool,
) -> FoundTensor | None:
    """Read one piece: a part of a file, which torch.save or safetensors wrote."""
    if place is None:
        found.problems.append(f"{name:.80} is in the index without a place")
        return None
    file = files.get(str(place["relative_path"]))
    offset = place["offset"]
    length = place["length"]
    if file is None:
        found.problems.append(f"{place['relative_path']!s:.80} is missing, with {name:.80}")
        return None
    if place.get("transform_descriptors"):
        found.unknown.append(f"{name:.80} is compressed: its values can't be told")
        return None
    if not 0 <= offset <= offset + length <= file.stat().st_size:
        found.problems.append(f"{name:.80} lies beyond the end of {file.name}: it is cut off")
        return None

    with open_regular(file) as stream:
        stream.seek(offset)
        content = read_piece(stream.read(length), values=values)
    found.problems += [f"{name:.80}: {one}" for one in content.problems]
    found.judge(content.names)
    found.count_hashed(content)
    if content.unknown and sizes is not None:
        found.unknown += [f"{name:.80}: {one}" for one in content.unknown]
    if sizes is None or content.problems:
        return None
    if len(content.tensors) != 1 or content.tensors[0].shape != sizes:
        found.problems.append(f"{name:.80}: the file holds another tensor than the index says")
        return None
    return content.tensors[0]


def _fields(node: Any, name: str) -> dict[str, Any]:
    """Return the fields of an unbuilt dataclass of torch's index."""
    found = getattr(node, "named", type(node).__name__)
    if found.rpartition(".")[2] != name or type(node.state) is not dict:
        raise ValueError(f"the index holds {found!s:.80} in place of a {name}")
    fields: dict[str, Any] = node.state
    return fields


def _size(node: Any) -> tuple[int, ...]:
    given = node.arguments[0] if isinstance(node, StandIn) else node
    if type(given) not in (tuple, list) or any(type(one) is not int or one < 0 for one in given):
        raise ValueError(f"the index holds the size {given!r:.80}")
    return tuple(given)


def _dtype_name(properties: Any) -> str:
    first = properties.state[0] if isinstance(properties, StandIn) else None
    return str(getattr(first, "named", "unknown")).rpartition(".")[2]


# The command, and how it prints what was found.

MOST_TENSORS_SHOWN = 40
MOST_LINES_SHOWN = 10
MOST_VALUES_SHOWN = 4


@click.command("inspect", cls=ScreenCommand, example="runs/run-001/latest")
@click.argument("path", metavar="PATH")
@click.option("--values/--no-values", default=True, help="Count NaN and inf, which reads all.")
@json_option()
def inspect_command(path: str, values: bool, json_path: str | None) -> None:
    """Inspect anybody's checkpoint without unpickling it.

    PATH is a file of torch.save, safetensors or Lightning, or a folder of
    torch.distributed.checkpoint, torch_checkpointing, Hugging Face, Accelerate or ours. Exit
    status: 0 nothing wrong, 1 damaged, not whole or hostile, 2 wrong usage.
    """
    if is_run(Path(path)):
        raise UnusableInput(
            printable(
                f"{path} is a run: give one of its checkpoints, such as {path}/latest", longest=1000
            )
        )
    try:
        found = inspect_checkpoint(path, values=values)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnusableInput(printable(f"{path} can't be read ({reason})", longest=1000)) from error

    console = Console(highlight=False)
    if found.tensors:
        console.print(_tensors_table(found), markup=False)
    for line in inspection_lines(found):
        console.print(fill_screen(line), markup=False)
    end(json_path, found.to_json(), well=found.well)


def inspection_lines(found: Inspection) -> Iterator[str]:
    """Return the result of an inspection, most important lines last."""
    num_values = sum(one.numel for one in found.tensors)
    whole = {True: "yes", False: "no", None: "can't be told"}[found.whole]
    hashes = [f"{number} of {algorithm} match" for algorithm, number in found.hashed.items()]
    size = format_bytes(found.num_bytes)
    yield f"{found.format}, {size}: {len(found.tensors)} tensors of {num_values:,} values"
    if found.values:
        shown = [printable(f"{key}: {text}") for key, text in found.values.items()]
        more = f", and {len(shown) - MOST_VALUES_SHOWN} more" if shown[MOST_VALUES_SHOWN:] else ""
        yield f"other values: {', '.join(shown[:MOST_VALUES_SHOWN])}{more}"
    yield f"hashes: {', '.join(hashes) or 'none'}"
    yield f"NaN: {found.num_nan:,}, inf: {found.num_inf:,}"
    for title, lines in (("unknown", found.unknown), ("wrong", found.problems)):
        for line in lines[:MOST_LINES_SHOWN]:
            yield f"{title}: {printable(line, longest=400)}"
        if lines[MOST_LINES_SHOWN:]:
            yield f"{title}: {len(lines) - MOST_LINES_SHOWN} more, which --json has"
    yield f"whole: {whole}"


def _tensors_table(found: Inspection) -> str:
    rows = [["tensor", "shape", "dtype", "NaN", "inf"]]
    # Tensors with values that are not finite come first, and the others in the file's order.
    tensors = sorted(found.tensors, key=lambda one: not (one.nan or one.inf))
    for one in tensors[:MOST_TENSORS_SHOWN]:
        shape = "x".join(map(str, one.shape)) or "scalar"
        counts = ["?" if number is None else str(number or "") for number in (one.nan, one.inf)]
        rows.append([printable(one.name), shape, one.dtype, *counts])
    if more := len(tensors[MOST_TENSORS_SHOWN:]):
        rows.append([f"and {more} more, which --json has", "", "", "", ""])
    return table(rows, texts=("dtype",))
