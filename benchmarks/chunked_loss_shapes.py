"""Peak bytes and time of the chunked loss against torch's own, in 20 shapes on the CPU.

    python benchmarks/chunked_loss_shapes.py --json evidence/chunked_loss.json

Both run forward and backward with their defaults, in turns on one thread of one process, and CPU
time is compared in pairs, so that other work on the machine affects both alike. Bytes are all that
the allocator gave out, with the gradients.
Proof: `python -m pytest tests/benchmarks/test_chunked_loss_shapes.py`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curry_train.core.measure_compiled import measure_allocated
from curry_train.core.timing import paired_ratio, time_in_turns
from curry_train.primitives import chunked_cross_entropy
from recording import Figures, record_parser, write_record

IGNORED_TARGET = -100
ROUNDS = 12


@dataclass(frozen=True)
class HeadShape:
    """An output layer with the tokens of a batch."""

    tokens: int
    width: int
    classes: int
    dtype: str = "float32"
    bias: bool = False
    # Share of the tokens that is ignored.
    ignored: float = 0.0


SHAPES = (
    HeadShape(512, 64, 1000),
    HeadShape(512, 64, 8192),
    HeadShape(1024, 128, 4096),
    HeadShape(2048, 128, 2048),
    HeadShape(2048, 256, 512),
    HeadShape(256, 256, 16384),
    HeadShape(256, 128, 32000),
    HeadShape(512, 256, 8192),
    HeadShape(4096, 64, 2048),
    HeadShape(1024, 256, 1024),
    HeadShape(128, 512, 8192),
    HeadShape(2048, 64, 16384),
    HeadShape(1024, 128, 4096, "bfloat16"),
    HeadShape(512, 256, 8192, "bfloat16"),
    HeadShape(2048, 64, 8192, "bfloat16"),
    HeadShape(256, 128, 32000, "bfloat16"),
    HeadShape(1024, 128, 4096, bias=True),
    HeadShape(512, 64, 8192, bias=True),
    HeadShape(1024, 128, 4096, ignored=0.5),
    HeadShape(2048, 128, 2048, ignored=0.25),
)


class HeadAlone(nn.Module):
    """An output layer with the hidden states of a batch, which get a gradient too."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = getattr(torch, shape.dtype)
        self.linear = nn.Linear(shape.width, shape.classes, bias=shape.bias).to(dtype)
        self.hidden = nn.Parameter(torch.randn(shape.tokens, shape.width).to(dtype))
        self.targets = torch.randint(shape.classes, (shape.tokens,))
        self.targets[torch.rand(shape.tokens) < shape.ignored] = IGNORED_TARGET


def ours(head, targets: Tensor) -> Tensor:
    return chunked_cross_entropy(head.hidden, head.linear.weight, targets, bias=head.linear.bias)


def theirs(head, targets: Tensor) -> Tensor:
    # torch 2.11 has neither of the two names.
    options = nn.LinearCrossEntropyOptions()
    linear = head.linear
    return F.linear_cross_entropy(
        head.hidden, linear.weight, targets, linear_bias=linear.bias, options=options
    )


def peak_bytes(shape: HeadShape, loss: Callable[[Any, Any], Tensor]) -> int:
    """Measure the peak of forward and backward, gradients of the hidden states included."""
    head = HeadAlone(shape)
    return measure_allocated(head, head.targets, loss).peak_bytes


def compare_shape(shape: HeadShape) -> Figures:
    """Compare the two losses on one shape; ratios below 1 are less than torch's.

    The ratio of the times is the median of the pairs.
    """
    head = HeadAlone(shape)

    def step(loss: Callable[[Any, Any], Tensor]) -> None:
        head.zero_grad()
        loss(head, head.targets).backward()

    ways = [partial(step, ours), partial(step, theirs)]
    seconds = time_in_turns(ways, rounds=ROUNDS, warmup=2, clock=time.process_time)
    return {
        "shape": asdict(shape),
        "peak_ratio": peak_bytes(shape, ours) / peak_bytes(shape, theirs),
        "time_ratio": paired_ratio(*seconds).median,
    }


def main() -> None:
    """Compare the chunked loss with torch's own in 20 shapes."""
    options = record_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found = []
    for shape in SHAPES:
        compared = compare_shape(shape)
        found.append(compared)
        print(
            f"{shape}: {compared['peak_ratio']:.3f}, time {compared['time_ratio']:.3f} of torch's"
        )
    peaks = [one["peak_ratio"] for one in found]
    times = [one["time_ratio"] for one in found]
    figures = {
        "shapes": found,
        "num_shapes": len(found),
        "most_peak_ratio": max(peaks),
        "least_peak_ratio": min(peaks),
        "most_time_ratio": max(times),
        "least_time_ratio": min(times),
    }
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
