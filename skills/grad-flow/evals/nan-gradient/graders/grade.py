"""Judge the repair of a model whose gradients are NaN."""

from evals_grading import Work, guard, point


def gradients():
    """Return the norm of each parameter's gradient in a step with padded lists."""
    import torch
    from pool import Scorer, lists

    torch.manual_seed(1)
    model = Scorer()
    model(lists()).square().mean().backward()
    return {name: one.grad.norm().item() for name, one in model.named_parameters()}


def outputs(padded):
    import torch
    from pool import Scorer, lists

    torch.manual_seed(1)
    model = Scorer()
    x = lists()
    return model(x if padded else x[:, :2]).tolist()


def loss():
    from pool import train

    return train()[-1]


@point(2)
def culprit_named(work: Work) -> None:
    """culprit.txt names `scale`, whose square root has no derivative at 0."""
    path = work.folder / "culprit.txt"
    assert path.is_file(), "there is no culprit.txt"
    assert path.read_text().split() == ["scale"], f"it names {path.read_text().strip()!r}"


@point(3)
def gradients_are_finite(work: Work) -> None:
    """With padded lists every parameter has a finite gradient that is not 0."""
    wrong = [name for name, norm in work.call(gradients).items() if not 1e-9 < norm < 1e9]
    assert not wrong, f"not for {', '.join(wrong)}"


@point(1)
def trains(work: Work) -> None:
    """The loss after 30 steps is finite and has fallen."""
    value = work.call(loss)
    assert value < 11, f"the loss is {value}"


@guard(2)
def same_outputs(work: Work) -> None:
    """The outputs are those of the untouched model within 1e-5, with padding and without."""
    for padded in (True, False):
        pairs = zip(work.call(outputs, padded), work.original(outputs, padded), strict=True)
        furthest = max(abs(one - other) for one, other in pairs)
        assert furthest <= 1e-5, f"an output is {furthest:.1e} off"
