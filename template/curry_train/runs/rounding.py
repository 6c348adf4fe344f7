"""Tell differences of two runs that rounding explains from all others.

Both programs run again. A's keeps its values. Then A's runs with noise in the last bit of whatever
a module, gradient or optimizer gets, and of what each operation computes, and B's as it is; after
each comparison both get A's values back. So each module is compared on equal inputs, and the noise
measures what rounding does to it, also where terms cancel, as in the bias of keys of attention.

Proof: `python -m pytest tests/runs/test_rounding.py`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.digest import is_plain
from ..core.generators import unwatched
from .values import elements_of

# Largest difference of the elements with this binary exponent. A smaller value has a smaller
# rounding error in some modules, and not in others.
Distances = dict[str, float]
# Of one rank: for each place of an observation A's digests, with the precision of noise there.
Expected = dict[Any, dict[str, tuple[str, float]]]
# Runs with noise, as one alone may draw too little of it for a small tensor.
NUM_NOISES = 5
# How much more than the noise may B differ by: sums of many numbers round more than their terms.
FACTOR = 4.0
# Noise of elements up to so many times larger (as a power of two) excuses an element.
NEARBY_EXPONENTS = 2
# Elements that are smaller by so many powers of two than the largest are taken together: they may
# be what is left of terms as large as others, as in the tail of a GELU.
MOST_EXPONENTS = 4
# Operations whose results are not computed from what they are given, or are exactly that.
NOT_ROUNDED = ("_like", "new_", "empty", "full", "ones", "zeros", "rand", "bernoulli", "clone")
# Exponent for tensors of zeros; two to its power is zero.
OF_ZERO = -1100


class Exchange:
    """Keeps A's values in a folder, or compares with them and gives them back.

    `expected` are, rank by rank, A's digests by the places of the run that is compared.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        expected: Sequence[Expected] = (),
        noise: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        # The digests that `expected_values` returns for this rank.
        self.expected = expected[int(os.environ.get("RANK", "0"))] if expected else None
        # The precision of B's results where it is less than that of A's, else 0.
        self.coarser = max(
            (
                epsilon
                for place, of_names in (self.expected or {}).items()
                for digest, epsilon in of_names.values()
                if place[0] == "exit" and epsilon > epsilon_of(digest)
            ),
            default=0.0,
        )
        # The seed of the noise; None for none.
        self.noise = noise
        self.generator = torch.Generator().manual_seed(noise or 0)

    def meet(
        self, place: Any, tensors: Mapping[str, Tensor], digests: Mapping[str, str]
    ) -> tuple[dict[str, Distances], dict[str, Tensor]]:
        """Return how far tensors are from those of A, and A's values where they differ."""
        distances: dict[str, Distances] = {}
        values: dict[str, Tensor] = {}
        with unwatched(), torch.no_grad():
            for name, own in tensors.items():
                if not is_plain(tensor := elements_of(own)):
                    continue
                if self.expected is None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    if not (path := self._path(digests[name])).exists():
                        # A view would be written with all of its storage.
                        torch.save(tensor.detach().cpu().clone(), path)
                    continue
                wanted, epsilon = self.expected.get(place, {}).get(name, ("", 0.0))
                if not wanted or (self.noise is None and wanted == digests[name]):
                    continue
                # Of less precision B has the nearest values.
                value = torch.load(self._path(wanted)).to(tensor.device, tensor.dtype)
                distances[name] = distances_of(tensor.detach(), value)
                if value.shape == tensor.shape:
                    values[name] = self._add_noise_to(value, epsilon).to(tensor.dtype)
        return distances, values

    def _path(self, digest: str) -> Path:
        return self.folder / digest.replace(" ", "").replace(":", "-")

    def _add_noise_to(self, value: Tensor, epsilon: float) -> Tensor:
        if self.noise is None or not value.is_floating_point():
            return value
        draws = torch.rand(value.shape, dtype=torch.float64, generator=self.generator)
        return value.double() * (1 + epsilon * (2 * draws.to(value.device) - 1))

    def add_noise(self, func: Any, output: Any) -> None:
        """Change what an operation has computed by the precision of its type, or of B's."""
        name = func._schema.name.partition("::")[2]
        has_own_memory = all(one.alias_info is None for one in func._schema.returns)
        is_exact = any(word in name for word in NOT_ROUNDED)
        if self.noise is None or is_exact or not has_own_memory:
            return
        for one in tree_leaves(output):
            is_float = isinstance(one, Tensor) and one.is_floating_point()
            if is_float and is_plain(one) and 0 not in one.stride():
                one.copy_(self._add_noise_to(one, max(torch.finfo(one.dtype).eps, self.coarser)))


def distances_of(tensor: Tensor, value: Tensor) -> Distances:
    """Return the largest difference of the elements of each binary exponent of a value."""
    if tensor.shape != value.shape or tensor.is_complex():
        return {"0": 0.0 if torch.equal(tensor, value) else float("inf")}
    one, other = tensor.double().flatten(), value.double().flatten()
    difference = (one - other).abs().nan_to_num(float("inf"), float("inf"))
    difference[one.isclose(other, rtol=0, atol=0, equal_nan=True)] = 0.0
    sizes = other.abs().nan_to_num(0.0, 0.0)
    # Zeros alone have no rounding error.
    has_sizes = (sizes > 0).any()
    lowest = int(sizes.max().frexp().exponent) - MOST_EXPONENTS if has_sizes else OF_ZERO
    exponents = torch.where(sizes > 0, sizes.frexp().exponent.clamp(min=lowest), lowest)
    found: Distances = {}
    for exponent in exponents.unique().tolist():
        largest = float(difference[exponents == exponent].max())
        if largest:
            found[str(exponent)] = largest
    return found


def is_rounding(
    found: Distances, noises: Sequence[Distances], epsilon: float, num_terms: float
) -> bool:
    """Return whether noise explains how far the values of two runs are from each other.

    A value may be the sum of so many terms.
    """
    # Where terms cancel, partial sums are larger than the terms whose noise was measured.
    factor = max(FACTOR, num_terms**0.75)
    for exponent, distance in found.items():
        limit = int(exponent) + NEARBY_EXPONENTS
        nearby = [size for one in noises for other, size in one.items() if int(other) <= limit]
        # The last bit of such elements.
        unit = epsilon * 2.0 ** (int(exponent) - 1)
        if distance > factor * max([*nearby, unit]):
            return False
    return True


def num_elements(digest: str) -> int:
    """Return the number of elements of the tensor that a digest is of."""
    sizes = digest.partition("[")[2].partition("]")[0]
    return math.prod(int(size) for size in sizes.split(",") if size)


def epsilon_of(*digests: str) -> float:
    """Return the precision of the coarsest dtype among digests; 0 for integers."""
    dtypes = [getattr(torch, one.partition("[")[0], torch.int64) for one in digests]
    return max((torch.finfo(one).eps for one in dtypes if one.is_floating_point), default=0.0)
