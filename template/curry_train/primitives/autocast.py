"""Record autocast in forward, and set it again in backward.

Proof: `python -m pytest tests/primitives/test_regions.py tests/primitives/test_chunked_loss.py`.
"""

import contextlib
from collections.abc import Iterator

import torch

# The device types for which autocast is on, with their dtypes.
Autocast = dict[str, torch.dtype]


def autocast_now() -> Autocast:
    """Return the current state of autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cuda", "cpu", "cpu" if accelerator is None else accelerator.type)
    return {
        kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    }


@contextlib.contextmanager
def autocast_as(wanted: Autocast) -> Iterator[None]:
    """Set autocast to a recorded state inside the context."""
    now = autocast_now()
    with contextlib.ExitStack() as stack:
        for kind in now | wanted:
            if now.get(kind) != wanted.get(kind):
                stack.enter_context(torch.autocast(kind, wanted.get(kind), kind in wanted))
        yield
