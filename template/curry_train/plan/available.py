"""Check that a real step fits into the memory that is available, before it runs.

    require_available(case)    # ValueError with both figures, and what to do

Proof: `python -m pytest tests/plan/test_available.py`.
"""

import torch

from ..core.generators import seeded
from ..core.measure import LiveStorages
from ..core.wording import format_bytes
from ..primitives.host_memory import available_host_bytes
from ..workloads.workload import Case
from .costs import ERRORS_OF_BLOCKS
from .shapes import NEEDS_VALUES_ERRORS, PretendedCase, pretended

# Bytes for each byte of a trained parameter: itself, its gradient, and two moments of AdamW.
BYTES_OF_TRAINED = 4


def least_bytes(case: Case) -> int:
    """Return the bytes that a step needs at least, from shapes; 0 where shapes are not enough.

    These are parameters, gradients, the state of AdamW, and what forward holds.
    """
    try:
        with pretended():
            alone = PretendedCase(**vars(case) | {"device": torch.device("cpu")})
            module = alone.build()
            batch = alone.batch()
            with seeded(0), torch.enable_grad(), LiveStorages() as storages:
                loss = case.workload.mean_loss(module, batch)
                held = storages.bytes_alive
            del loss
            for parameter in module.parameters():
                held += parameter.nbytes * (BYTES_OF_TRAINED if parameter.requires_grad else 1)
            return held
    except (*NEEDS_VALUES_ERRORS, *ERRORS_OF_BLOCKS):
        # The real step reports what is wrong with the user's code.
        return 0


def missing_room(case: Case) -> str | None:
    """Describe why a real step does not fit the machine; None where it does, or is not known."""
    available = available_host_bytes()
    if case.device.type == "cuda":
        available = torch.cuda.mem_get_info(case.device)[0]
    needed = least_bytes(case)
    if available is None or needed <= available:
        return None
    return (
        f"a step of {case.workload.name} with {case.batch_size} samples takes at least "
        f"{format_bytes(needed)}, and {format_bytes(available)} is available"
    )


def require_available(case: Case) -> None:
    """Raise an error for a step that does not fit the machine."""
    if why := missing_room(case):
        raise ValueError(
            f"{why}: curry-train plan runs it on shapes alone; here use a smaller copy of the "
            "model, with fewer layers or samples"
        )
