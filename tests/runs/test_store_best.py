"""Best-K checkpoints are safetensors as the safetensors package writes and reads them.

python -m pytest tests/runs/test_store_best.py
"""

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from curry_train.runs.format import NOT_IN_SAFETENSORS
from curry_train.runs.values import PLAIN_DTYPES

from ..store_models import new_state, save_best


def test_the_safetensors_package_reads_every_dtype(store, tmp_path):
    dtypes = sorted(PLAIN_DTYPES - NOT_IN_SAFETENSORS, key=str)
    both = torch.randn(6)
    tensors = {
        **{f"t_{number}": torch.ones(2, 3).to(dtype) for number, dtype in enumerate(dtypes)},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 3).t(),
        "overlapping": both[:4],
        "with it": both[2:],
    }
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    state = new_state(build=lambda: nn.Sequential(nn.Linear(1, 1), module))
    path = tmp_path / save_best(store, 1, state).folder / "model.safetensors"
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
