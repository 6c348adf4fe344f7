"""Judge a count of the FLOPs that a model needs."""

from evals_grading import Work, guard, point


def counted(width, depth, checkpointing, frozen=0):
    """Return the count, and whether anything of the model was changed by counting."""
    import torch
    from report import Net, model_flops

    torch.manual_seed(0)
    model = Net(width, depth, checkpointing)
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    if frozen:
        model.embed.requires_grad_(False)
    before = torch.get_rng_state().tolist()
    tokens = torch.randint(100, (4, 6), generator=torch.Generator().manual_seed(1))
    total = model_flops(model, tokens)
    clean = all(one.grad is None for one in model.parameters()) and model.training
    clean = clean and model.checkpointing == checkpointing
    return total, clean and torch.get_rng_state().tolist() == before


def by_hand(width, depth, frozen=0):
    """Count products: forward, the gradient of the weights, and that of the inputs."""
    layer = 2 * 24 * width * 4 * width * 2
    head = 2 * 24 * width * 100
    trained = depth - frozen
    first_input = 2 * 24 * width * 4 * width if frozen else 0  # a frozen start needs none
    return layer * depth + head + 2 * layer * trained - first_input + 2 * head


@point(3)
def same_with_checkpointing(work: Work) -> None:
    """With checkpointing the count is that without, for two sizes."""
    for width, depth in ((16, 3), (24, 5)):
        measured, required = work.call(counted, width, depth, True)[0], by_hand(width, depth)
        assert measured == required, f"{measured:,} instead of {required:,}"


@point(2)
def frozen_layers_count_less(work: Work) -> None:
    """With checkpointing two frozen layers at the start count for their forward alone."""
    measured, required = work.call(counted, 16, 4, True, 2)[0], by_hand(16, 4, 2)
    assert measured == required, f"{measured:,} instead of {required:,}"


@point(1)
def nothing_is_left_behind(work: Work) -> None:
    """The count is right, and gradients, mode and generators are as before."""
    same_with_checkpointing(work)
    for checkpointing in (True, False):
        assert work.call(counted, 16, 3, checkpointing)[1], "the model or a generator changed"


@guard(1)
def right_without_checkpointing(work: Work) -> None:
    """Without checkpointing the count is as before."""
    assert work.call(counted, 16, 3, False)[0] == by_hand(16, 3), "the count changed"
