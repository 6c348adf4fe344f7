"""The registry of the model zoo, and what its factories share.

A factory builds a small model with random weights, and a batch; nothing is downloaded. They stand
in `zoo_language.py`, `zoo_vision.py` and `zoo_science.py`. `make zoo` runs every one of them.
Proof: `python -m pytest tests/benchmarks/test_zoo.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Factory = Callable[[], Any]


@dataclass(frozen=True)
class ZooModel:
    """A factory with the library and the field that its model comes from."""

    name: str
    library: str
    field: str
    factory: Factory

    # The file of the factory, for `--model FILE:NAME`.
    path: Path

    # Whether the test suite runs it: it needs no library that the tests do not install.
    is_short: bool


ZOO: dict[str, ZooModel] = {}


def zoo_model(library: str, *, field: str, short: bool = False) -> Callable[[Factory], Factory]:
    """Register a factory under its function's name."""

    def register(factory: Factory) -> Factory:
        name = factory.__name__
        ZOO[name] = ZooModel(
            name, library, field, factory, Path(factory.__code__.co_filename), short
        )
        return factory

    return register


def tokens(vocabulary: int, *, length: int = 32, samples: int = 2) -> torch.Tensor:
    return torch.randint(1, vocabulary, (samples, length))


def images(size: int, *, channels: int = 3, samples: int = 2) -> torch.Tensor:
    return torch.randn(samples, channels, size, size)


def declare_vision_operators() -> None:
    """Declare the operators of torchvision that no build for this machine registers.

    Without its compiled extension torchvision can be imported only once they are declared. None of
    the models here calls them.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        found = find_spec("torchvision")
        assert found is not None
        assert found.origin is not None
        text = Path(found.origin).with_name("_meta_registrations.py").read_text()
        for name in sorted(set(re.findall(r"torchvision::(\w+)", text))):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")


# Before any library looks for torchvision.
declare_vision_operators()
