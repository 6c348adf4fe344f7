"""Best-K checkpoints are safetensors as the safetensors package writes and reads them.

python -m pytest tests/runs/test_store_best.py
"""

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from store_models import new_state, tensors_of, train
from torch import nn

from curry_train.runs import Store
from curry_train.runs.files import Files
from curry_train.runs.format import SAFETENSORS_DTYPES, SafetensorsReader
from curry_train.runs.layout import hash_bytes

METRIC = ("dev_loss", 0.25)


def holding(tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def of_every_dtype():
    generator = torch.Generator().manual_seed(0)
    found = {}
    for letters, dtype in SAFETENSORS_DTYPES.items():
        data = torch.randint(0, 2, (2, 3, 8), generator=generator, dtype=torch.uint8)
        found[f"t_{letters}"] = data.to(dtype)
    return {
        **found,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 3).t(),
    }


def test_the_safetensors_package_reads_every_dtype(tmp_path):
    tensors = of_every_dtype()
    state = new_state(build=lambda: nn.Sequential(nn.Linear(1, 1), holding(tensors)))
    with Store(tmp_path) as store:
        saved = store.save("best-k", 1, state, metric=METRIC)
    path = tmp_path / saved.folder / "model.safetensors"
    found = load_file(path)
    assert found.keys() == {"0.weight", "0.bias", *(f"1.{name}" for name in tensors)}
    for name, tensor in tensors.items():
        assert found[f"1.{name}"].dtype == tensor.dtype
        assert torch.equal(
            found[f"1.{name}"].view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        )
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_files_of_the_safetensors_package_are_read(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in of_every_dtype().items()}
    (tmp_path / "best-k").mkdir()
    save_file(tensors, tmp_path / "best-k/model.safetensors")
    reader = SafetensorsReader(Files(tmp_path), "best-k")
    targets = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reader.read_into(targets)
    for name, tensor in tensors.items():
        assert torch.equal(
            targets[f"model.{name}"].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )


def test_only_the_model_is_saved_and_loaded(tmp_path):
    state, other = new_state(), new_state(seed=1)
    train(state, 2)
    with Store(tmp_path) as store:
        best = store.save("best-k", 2, state, metric=METRIC)
        whole = store.save("recovery", 2, state)
        assert best.num_bytes < whole.num_bytes / 2
        before = tensors_of(other)
        report = store.load(best, other)
    after = tensors_of(other)
    for name, tensor in tensors_of(state).items():
        if name.startswith("model."):
            assert torch.equal(after[name], tensor)
        elif name in before:
            assert torch.equal(after[name], before[name])
    assert report.notes == ["parameters only: optimizer, generators and position are as they were"]


def test_the_hash_in_the_manifest_is_of_the_file(tmp_path):
    with Store(tmp_path) as store:
        saved = store.save("best-k", 1, new_state(), metric=METRIC)
        manifest = store.verify(saved)
        data = (tmp_path / saved.folder / "model.safetensors").read_bytes()
        assert manifest.files["model.safetensors"].hash == hash_bytes(manifest.algorithm, data)
        assert saved.metric.value == 0.25


def test_a_tensor_that_safetensors_has_no_form_for_is_saved_as_bytes(tmp_path):
    phases = torch.randn(2, dtype=torch.complex128)

    def state_with(tensor):
        return new_state(build=lambda: nn.Sequential(nn.Linear(1, 1), holding({"c": tensor})))

    other = state_with(torch.zeros_like(phases))
    with Store(tmp_path) as store:
        saved = store.save("best-k", 1, state_with(phases.clone()), metric=METRIC)
        found = load_file(tmp_path / saved.folder / "model.safetensors")["1.c"]
        assert found.dtype is torch.uint8
        assert torch.equal(found, phases.view(torch.uint8))
        store.load(saved, other)
    assert torch.equal(other.model[1].c, phases)
