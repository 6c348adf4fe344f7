"""Check that a real step fits into the memory that is available, before the model is made.

    require_available("models.py:build", make_case)    # ValueError with both figures

Proof: `python -m pytest tests/plan/test_available.py`.
"""

from collections.abc import Callable

import torch

from ..core.wording import format_bytes
from ..primitives.offload import available_host_bytes
from ..workloads.models import import_callable, is_taken, load_workload
from ..workloads.shrink import split_shrink
from ..workloads.workload import Case, Workload
from .costs import ERRORS_OF_BLOCKS
from .estimate import held_by_forward
from .shapes import NEEDS_VALUES_ERRORS, PretendedCase, pretended

# Bytes for each byte of a trained parameter: itself, its gradient, and two moments of AdamW.
BYTES_OF_TRAINED = 4
# Makes the case of a workload.
MakeCase = Callable[[Workload], Case]


def _least_bytes(case: Case) -> int:
    """Return what a step needs at least: parameters, gradients, AdamW's state, held bytes."""
    alone = PretendedCase(**vars(case) | {"device": torch.device("cpu")})
    module = alone.build()
    held = held_by_forward(case, module, alone.batch())
    for parameter in module.parameters():
        held += parameter.nbytes * (BYTES_OF_TRAINED if parameter.requires_grad else 1)
    return held


def missing_room(workload: Workload | str, make_case: MakeCase) -> str | None:
    """Describe why a real step does not fit the machine; None where it does, or is not known.

    A factory, given by its name, is called on shapes alone. Give a trainer or a script, which have
    made their model already, as a workload.
    """
    name = split_shrink(workload)[0] if isinstance(workload, str) else ""
    if ":" in name and "=" not in name:
        # The tensors that the user's file makes at its import need values: the real step uses them
        # too. The name of a configuration has a "=", and nothing to import.
        import_callable(name)
    try:
        with pretended():
            case = make_case(load_workload(workload))
            needed = _least_bytes(case)
    except (*NEEDS_VALUES_ERRORS, *ERRORS_OF_BLOCKS):
        # Shapes are not enough, or the real step reports what is wrong with the user's code.
        return None
    available = available_host_bytes()
    if case.device.type == "cuda":
        available = torch.cuda.mem_get_info(case.device)[0]
    if available is None or needed <= available:
        return None
    return (
        f"a step of {case.workload.name} with a batch of {case.batch_size} takes at least "
        f"{format_bytes(needed)}, and {format_bytes(available)} is available"
    )


def require_available(workload: Workload | str, make_case: MakeCase) -> None:
    """Raise an error for a step that does not fit the machine."""
    if why := missing_room(workload, make_case):
        raise ValueError(
            f"{why}: curry-train plan runs it on shapes alone; here use a smaller copy of the "
            "model, with fewer layers or samples"
        )


def load_that_fits(spec: str, make_case: MakeCase) -> Case:
    """Load a workload and make its case; a model that does not fit the machine is not made."""
    require_available(load_workload(spec) if is_taken(spec) else spec, make_case)
    return make_case(load_workload(spec))
