"""Judge a mixture of experts whose recomputed blocks must choose the experts of the first run."""

from evals_grading import Work, guard, peak_bytes, point


def trained(checkpointing: bool):
    """Return the losses, and a sum of each tensor of the model."""
    import moe

    losses, model = moe.train(12, checkpointing)
    state = model.state_dict()
    return losses, {name: one.double().sum().item() for name, one in state.items()}


def own_loop(checkpointing: bool):
    """Return gradients and biases of steps in a loop that knows the model alone."""
    import moe
    import torch

    torch.manual_seed(3)
    model = moe.Model(checkpointing)
    found = []
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(4, moe.TOKENS, moe.WIDTH)).square().mean().backward()
        found += [one.grad.double().sum().item() for one in model.parameters()]
        found += [one.double().sum().item() for one in model.buffers()]
    return found


def peak(checkpointing: bool) -> int:
    import moe

    return peak_bytes(lambda: moe.train(2, checkpointing))


@point(3)
def same_training(work: Work) -> None:
    """With checkpointing `train` gives the losses and the model of training without it."""
    assert work.call(trained, True) == work.call(trained, False), "they differ"


@point(3)
def same_in_other_loops(work: Work) -> None:
    """In a loop of somebody else gradients and biases are the same too."""
    assert work.call(own_loop, True) == work.call(own_loop, False), "they differ"


@guard(2)
def memory_is_saved(work: Work) -> None:
    """With checkpointing less than half of the memory is needed."""
    share = work.call(peak, True) / work.call(peak, False)
    assert share < 0.5, f"{share:.0%}"


@guard(1)
def plain_training_stays(work: Work) -> None:
    """Without checkpointing the training is that of the untouched script."""
    assert work.call(trained, False) == work.original(trained, False), "it changed"
