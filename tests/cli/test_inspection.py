"""Anybody's checkpoint is inspected without unpickling, and damage is found.

python -m pytest tests/cli/test_inspection.py
"""

import io
import json
import math
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn, save

from curry_train.cli.runs_inspect import inspect_checkpoint as inspect
from curry_train.runs import Store
from curry_train.runs.trainers import commit_folder
from torture_shapes import Call, calls, opcodes

from ..command_runs import call
from ..store_models import flip, new_state, save_both, train


def state():
    """A state whose NaN and inf are known: two NaN and one inf in each copy of the weights."""
    torch.manual_seed(0)
    weight = torch.randn(4, 6)
    weight[1, 2] = weight[3, 5] = math.nan
    weight[0, 0] = -math.inf
    return {"model": {"weight": weight, "bias": torch.ones(5, dtype=torch.bfloat16)}, "step": 7}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint of each format."""
    root = tmp_path_factory.mktemp("checkpoints")
    save(state(), root / "zip.pt")
    save(state(), root / "legacy.pt", _use_new_zipfile_serialization=False)
    save({"pytorch-lightning_version": "2.6", "state_dict": state()["model"]}, root / "a.ckpt")
    save_file(state()["model"], root / "a.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=root / "dcp")
    for name in ("rank_files", "accelerate", "trainer", "sharded"):
        (root / name).mkdir()
    save(state()["model"], root / "rank_files/model_0.pt")
    save_file(state()["model"], root / "accelerate/model.safetensors")
    save({"random": 1}, root / "accelerate/random_states_0.pkl")
    shutil.copytree(root / "accelerate", root / "trainer", dirs_exist_ok=True)
    (root / "trainer/random_states_0.pkl").rename(root / "trainer/rng_state.pth")
    (root / "trainer/trainer_state.json").write_text("{}")
    weights = {}
    for number, (name, tensor) in enumerate(state()["model"].items()):
        weights[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, root / "sharded" / weights[name])
    (root / "sharded/model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    ours = new_state()
    train(ours, 1)
    with Store(root / "run") as store:
        save_both(store, 1, ours)
    return root


FORMATS = {
    "zip.pt": ("torch.save file", True, "CRC-32"),
    "legacy.pt": ("torch.save file (before torch 1.6)", True, ""),
    "a.ckpt": ("torch.save file", True, "CRC-32"),
    "a.safetensors": ("safetensors", True, ""),
    "dcp": ("torch.distributed.checkpoint", True, "CRC-32"),
    "rank_files": ("folder", None, "CRC-32"),
    "accelerate": ("folder", None, "CRC-32"),
    "trainer": ("folder", None, "CRC-32"),
    "sharded": ("Hugging Face folder", True, ""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_keys_shapes_dtypes_and_nan_of_each_format(checkpoints, name):
    format_name, whole, algorithm = FORMATS[name]
    found = inspect(checkpoints / name)
    assert not found.problems
    assert (found.format, found.whole) == (format_name, whole)
    assert set(found.hashed) == ({algorithm} if algorithm else set())
    by_name = {one.name.split(": ")[-1].split(".")[-1]: one for one in found.tensors}
    weight, bias = by_name["weight"], by_name["bias"]
    assert (weight.shape, weight.dtype, weight.nan, weight.inf) == ((4, 6), "float32", 2, 1)
    assert (bias.shape, bias.dtype, bias.nan, bias.inf) == ((5,), "bfloat16", 0, 0)
    # What the format can't prove is said: a flip in a file without a hash, or a missing file.
    assert (whole and algorithm) or "can't be told" in str(found.unknown)


def test_our_checkpoints_are_proven_by_their_manifest(checkpoints):
    for folder in (checkpoints / "run").glob("*/*.dcp"):
        found = inspect(folder)
        assert not found.problems
        assert (found.format, found.whole, found.unknown) == ("curry-train checkpoint", True, [])
        assert sum(found.hashed.values()) >= 2
        assert any("weight" in one.name for one in found.tensors)


class Own(nn.Linear):
    """A class of the user's, which a pickled model names."""


@pytest.mark.parametrize("zipped", [True, False])
def test_nan_is_counted_in_views_and_odd_tensors(zipped):
    wide = torch.full((3, 4), math.nan)
    values = {
        "view of a column": (wide[:, 1], 3),
        "expanded": (wide[0, :1].expand(7), 7),
        "windows": (wide[0].clone().unfold(0, 2, 1), 6),
        "empty": (torch.empty(0, 3), 0),
        "float8": (torch.tensor([1.0, math.nan]).to(torch.float8_e5m2), 1),
        "complex": (torch.tensor([complex(math.nan, 1.0), 1j]), 1),
        "sparse": (torch.tensor([[0.0, math.nan], [0.0, 0.0]]).to_sparse(), 1),
    }
    if not zipped:
        # torch.load does not know this dtype in the old format.
        del values["float8"]
    saved = {name: tensor for name, (tensor, _) in values.items()}
    save(saved, "odd.pt", _use_new_zipfile_serialization=zipped)
    found = inspect("odd.pt")
    assert not found.problems
    assert {one.name: (one.shape, one.nan) for one in found.tensors} == {
        name: (tuple(tensor.shape), number) for name, (tensor, number) in values.items()
    }


def test_a_pickled_model_is_listed_without_importing_its_class():
    save({"model": Own(2, 3)}, "model.pt")
    found = inspect("model.pt")
    assert not found.problems
    assert [one.shape for one in found.tensors] == [(3, 2), (3,)]
    assert found.imports == [f"{Own.__module__}.Own"]
    assert "whether that runs code can't be told" in str(found.unknown)


class Quantized(torch.Tensor):
    """A tensor of the user's class, as torchao's are."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).as_subclass(Quantized),
        torch.empty(2, device="meta"),
        # Its elements, written one by one, would take 2**28 bytes.
        torch.ones(2**14).unfold(0, 2**13, 1),
    ],
)
def test_a_tensor_that_cannot_be_looked_at_is_no_damage(tensor):
    save({"scale": tensor}, "odd.pt")
    commit_folder(".")
    # A manifest proves the bits, and not that none of the values is NaN.
    for path in ("odd.pt", "."):
        found = inspect(path)
        assert (found.problems, found.whole) == ([], True)
        assert "s can't be told (" in str(found.unknown)


def is_short(problems):
    return all("\n" not in one and len(one) < 600 for one in problems)


@pytest.mark.parametrize(("name", "pattern"), [("zip.pt", "zip.pt"), ("dcp", "dcp/*.distcp")])
def test_flips_in_the_weight_are_found(checkpoints, name, pattern):
    shutil.copytree(checkpoints, "all")
    (path,) = Path("all").glob(pattern)
    begin = path.read_bytes().index(state()["model"]["weight"].numpy().tobytes())
    for place in range(begin, begin + 96, 9):
        flip(path, place, 1 << place % 8)
        assert "another CRC-32" in str(inspect(f"all/{name}").problems), place
        flip(path, place, 1 << place % 8)


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "a.safetensors", "a.ckpt"])
def test_a_file_that_is_cut_off_is_not_whole(checkpoints, name):
    data = (checkpoints / name).read_bytes()
    for length in [*range(1, len(data), max(1, len(data) // 40)), len(data) - 1]:
        Path(name).write_bytes(data[:length])
        found = inspect(name)
        assert found.whole is not True, length
        assert found.problems or found.unknown


def test_missing_and_cut_files_of_folders_are_named(checkpoints):
    for name in ("dcp", "sharded", "run/rollback/step-00000001.dcp"):
        folder = Path(name.replace("/", "-"))
        shutil.copytree(checkpoints / name, folder)
        (victim, *_) = sorted([*folder.glob("*.distcp"), *folder.glob("model-0*")])
        victim.write_bytes(victim.read_bytes()[:-20])
        assert inspect(folder).whole is False
        victim.unlink()
        found = inspect(folder)
        assert found.whole is False
        assert any(f"{victim.name} is missing" in one for one in found.problems)


def saved(value, **options):
    stream = io.BytesIO()
    save(value, stream, **options)
    return stream.getvalue()


def zipped(data, compression=zipfile.ZIP_STORED):
    """Return an archive whose pickle is `data`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
    return stream.getvalue()


def hostile_files():
    """Yield a title and a hostile file, or folder, of each kind."""
    canary = "canary"
    for title, forged in calls(canary).items():
        yield f"{title} in a zip", saved({"model": torch.ones(2), "x": forged})
        yield (
            f"{title} in a legacy file",
            saved({"x": [forged]}, _use_new_zipfile_serialization=False),
        )
        yield f"{title} in a pickle", pickle.dumps(forged, 2)
    for title, data in opcodes(canary).items():
        if data.startswith(b"\x80"):
            yield title, data
            yield f"{title} in a zip", zipped(data)


def test_hostile_files_run_nothing_and_are_not_called_well():
    path = Path("hostile.pt")
    num_files = 0
    for title, data in hostile_files():
        path.write_bytes(data)
        found = inspect(path)
        assert found.problems or found.imports or "what is allowed" in title, title
        assert is_short(found.problems)
        folder = Path("folder")
        folder.mkdir(exist_ok=True)
        (folder / ".metadata").write_bytes(data)
        assert inspect(folder).problems, title
        assert not os.path.lexists("canary"), title
        num_files += 1
    assert num_files >= 30


def safetensors(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def doubled(times):
    value = []
    for _ in range(times):
        value = [value, value]
    return value


def with_two_records_of_a_name():
    stream = io.BytesIO(saved(torch.ones(2)))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data/1", b"other")
    return stream.getvalue().replace(b"data/1", b"data/0")


BOMBS = {
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{" + b" " * 100,
    "a header nested deep": safetensors(b'{"a":' + b"[" * 100_000),
    "a shape of 2**61": safetensors(
        {"a": {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 2**63]}}
    ),
    "a compressed record": zipped(b"\0" * 10_000_000, zipfile.ZIP_DEFLATED),
    "two records of a name": with_two_records_of_a_name(),
    "a list that contains itself": saved((lambda one: one.append([one, 1]) or one)([])),
    "lists that contain each other often": saved(doubled(40)),
}


@pytest.mark.parametrize("title", BOMBS)
def test_a_bomb_is_refused_in_a_line_and_in_bounded_memory(title):
    path = Path("bomb")
    path.write_bytes(BOMBS[title])
    found = inspect(path)
    assert found.problems
    assert is_short(found.problems)


@pytest.mark.parametrize("module", ["io", "code", "inspect"])
def test_a_class_in_a_users_module_is_no_sign_of_a_hostile_file(module):
    line = b"cmy_project." + module.encode() + b"\nSettings\n."
    Path("settings.pkl").write_bytes(b"\x80\x02" + line)
    found = inspect("settings.pkl")
    assert found.imports == [f"my_project.{module}.Settings"]
    assert not found.problems


def test_links_pipes_and_paths_out_of_the_folder_are_not_followed(checkpoints):
    os.mkfifo("pipe.pt")
    with pytest.raises(OSError, match="no regular file"):
        inspect("pipe.pt")
    folder = Path("sharded")
    folder.mkdir()
    shutil.copy(checkpoints / "a.safetensors", ".")
    weights = {"weight_map": {"weight": "../a.safetensors", "bias": "/etc/hostname"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    found = inspect(folder)
    assert found.whole is False
    assert found.tensors == []


def test_what_holds_no_tensors_is_no_whole_checkpoint():
    Path("text").write_text("hello, this is no checkpoint at all")
    assert inspect("text").whole is False
    Path("empty").mkdir()
    assert inspect("empty").whole is False
    Path("run/checkpoint-3").mkdir(parents=True)
    Path("run/checkpoint-3/model.safetensors").touch()
    assert "such as run/checkpoint-3" in str(inspect("run").problems)


def test_a_manifest_of_another_program_does_not_matter(checkpoints):
    shutil.copytree(checkpoints / "accelerate", "state")
    Path("state/manifest.json").write_text('{"name": "something else"}')
    found = inspect("state")
    assert (found.format, found.problems) == ("folder", [])


# The command.


def test_inspect_prints_tensors_hashes_and_whether_it_is_whole():
    save({"a": torch.ones(3), "b": torch.tensor([[1.0, math.nan]]), "epoch": 3}, "a.pt")
    text = call("inspect a.pt")
    # Tensors with NaN come first.
    assert text.splitlines()[1].split() == ["b", "1x2", "float32", "1"]
    assert "other values: epoch: 3" in text
    assert "NaN: 1, inf: 0" in text
    assert "CRC-32 match" in text
    assert text.splitlines()[-1] == "whole: yes"

    text = call("inspect a.pt --json -")
    found = json.loads(text[text.index("\n{") :])
    assert (found["whole"], found["format"]) == (True, "torch.save file")
    assert [one["nan"] for one in found["tensors"]] == [0, 1]


def test_a_hostile_file_ends_with_1_and_runs_nothing():
    save({"\x1b[2J\n" * 3: Call(os.mkdir, "canary")}, "a.pt")
    text = call("inspect a.pt", status=1)
    assert "wrong: it is hostile: loading it would call posix.mkdir" in text
    assert text.splitlines()[-1] == "whole: no"
    assert "\x1b" not in text
    assert not Path("canary").exists()
