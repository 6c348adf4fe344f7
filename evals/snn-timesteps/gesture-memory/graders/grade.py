"""Judge a loop over time that must need less memory and train the same."""

from evals_grading import Work, guard, peak_bytes, point


def losses(timesteps):
    from snn import train

    return train(steps=3, timesteps=timesteps)


def peak():
    from snn import train

    return peak_bytes(lambda: train(steps=1))


def reach():
    """Return how much the first frame's gradient is, of the loss of a step."""
    import torch
    from snn import Gestures

    torch.manual_seed(1)
    frames = torch.rand(96, 4, 12, requires_grad=True)
    Gestures()(frames).square().sum().backward()
    return frames.grad[:12].abs().sum().item()


@point(3)
def less_memory(work: Work) -> None:
    """The peak of a step is below 40% of what it was."""
    share = work.call(peak) / work.original(peak)
    assert share < 0.4, f"the peak is {share:.0%}"


@guard(3)
def same_losses(work: Work) -> None:
    """The losses are bit-equal, also with a number of timesteps that no chunk divides."""
    for timesteps in (96, 37):
        assert work.call(losses, timesteps) == work.original(losses, timesteps), "losses changed"


@guard(1)
def gradients_through_time(work: Work) -> None:
    """The first frames get the gradient that they got before."""
    assert work.call(reach) == work.original(reach), "the gradient of the first frames changed"
