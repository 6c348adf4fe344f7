"""Train the user's model with the user's optimizer, and print their state to the bit.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_checkpoint_policy.py`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..core.digest import digest
from ..core.measure import local_tensors
from ..plan.optimizers import make_optimizer
from ..workloads.workload import Case
from .same_training import REFUSALS
from .verdict import NotApplicable, error_in_a_line


def make_training(case: Case) -> tuple[nn.Module, Optimizer]:
    """Build the model, and the user's optimizer or AdamW."""
    model = case.build()
    optimizer = make_optimizer(case.workload.optimizer or "adamw", model)
    for group in optimizer.param_groups:
        # Left by a schedule, which no gate steps.
        group.pop("initial_lr", None)
    return model, optimizer


def draw_batch(case: Case) -> Any:
    """Draw a batch from the generators of this moment."""
    return case.place(case.workload.batch(case.batch_size))


def take_user_step(case: Case, model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    """Train one step on a batch, and return its loss."""
    loss = case.workload.mean_loss(model, batch)
    loss.backward()
    try:
        optimizer.step()
    except REFUSALS as error:
        why = f"the optimizer takes no step here ({error_in_a_line(error)})"
        raise NotApplicable(why) from error
    optimizer.zero_grad()
    return loss.detach()


def describe_state(model: nn.Module, optimizer: Optimizer, **more: Any) -> dict[str, str]:
    """Return every value of a training as text, by its name; tensors as digests of this rank."""
    sources: Mapping[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **more,
    }
    return {
        f"{kind}{keystr(path)}": (
            " ".join(map(digest, local_tensors(value)))
            if isinstance(value, Tensor)
            else repr(value)
        )
        for kind, source in sources.items()
        for path, value in tree_flatten_with_path(source)[0]
    }


def find_differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return the names of the values that differ, or that only one side has."""
    return [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
