"""Judge which parameters an optimizer steps, and how."""

from evals_grading import Work, guard, point


def rates():
    """Return the learning rates of each parameter of the model in the optimizer."""
    from tune import setup

    model, optimizer = setup()
    found = {name: [] for name, _ in model.named_parameters()}
    for group in optimizer.param_groups:
        for one in group["params"]:
            for name, own in model.named_parameters():
                if own is one:
                    found[name].append([group["lr"], group["weight_decay"]])
    return found


def accuracy():
    from tune import train

    return sum(train()[-10:]) / 10


@point(3)
def head_is_stepped(work: Work) -> None:
    """The optimizer has each parameter of the head once, with the rate of 1e-2."""
    found = {name: one for name, one in work.call(rates).items() if name.startswith("head")}
    wrong = [name for name, one in found.items() if [rate for rate, _ in one] != [1e-2]]
    assert not wrong, f"not {', '.join(wrong)}"


@point(3)
def learns(work: Work) -> None:
    """The head is stepped, and the accuracy of the last steps is above 60%."""
    head_is_stepped(work)
    value = work.call(accuracy)
    assert value > 0.6, f"it is {value:.0%}"


@guard(2)
def backbone_as_before(work: Work) -> None:
    """The optimizer has each parameter of the backbone once, at 1e-3 and without decay."""
    found = {name: one for name, one in work.call(rates).items() if "backbone" in name}
    wrong = [name for name, one in found.items() if one != [[1e-3, 0.0]]]
    assert not wrong, f"not {', '.join(wrong)}"
