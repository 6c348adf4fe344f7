"""Judge the repair of a model with modules that do not train."""

from evals_grading import Work, guard, point

CULPRITS = {"context.mix": "context", "second.up": "second"}  # a part of it, or the whole


def shapes():
    from model import Ranker

    return {name: list(one.shape) for name, one in Ranker().named_parameters()}


def untrained():
    """Return the parameters that a step of training leaves without a gradient."""
    import torch

    from model import Ranker

    torch.manual_seed(1)
    model = Ranker()
    model(torch.randn(16, 10, 6)).square().mean().backward()
    return [
        name
        for name, one in model.named_parameters()
        if one.grad is None or one.grad.norm().item() < 1e-9
    ]


def last_loss():
    from train import train

    return sum(train()[-5:]) / 5


@point(3)
def culprits_named(work: Work) -> None:
    """culprits.txt names the two modules that do not train, and no others."""
    path = work.folder / "culprits.txt"
    assert path.is_file(), "there is no culprits.txt"
    named = set(path.read_text().split())
    for module, whole in CULPRITS.items():
        allowed = {module, whole, f"{whole}.down"}
        assert named & {module, whole}, f"{module} is not named"
        named -= allowed
    assert not named, f"{sorted(named)} train well"


@point(3)
def every_parameter_trains(work: Work) -> None:
    """Every parameter gets a gradient in the first step."""
    left = work.call(untrained)
    assert not left, f"no gradient: {', '.join(left)}"


@point(2)
def loss_falls(work: Work) -> None:
    """The loss of the last steps is below 0.8."""
    loss = work.call(last_loss)
    assert loss < 0.8, f"the loss is {loss:.3f}"


@guard(1)
def same_parameters(work: Work) -> None:
    """The parameters have the same names and shapes, and train.py is as it was."""
    assert work.call(shapes) == work.original(shapes), "the parameters differ"
    work.assert_unchanged("train.py")
