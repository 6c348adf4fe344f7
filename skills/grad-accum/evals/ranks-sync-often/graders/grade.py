"""Judge how often two ranks reduce gradients, and that they train as before."""

from evals_grading import Work, guard, point


def outcome(count, accum):
    """Return this rank's reductions and weights; called on each of two ranks."""
    import torch
    import torch.distributed as dist
    from parallel import train
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    def counted(state, bucket):
        reductions.append(1)
        return allreduce_hook(state, bucket)

    reductions = []
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, counted)
    torch.manual_seed(10 + dist.get_rank())
    train(model, [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(count)], accum)
    return len(reductions), [one for value in net.parameters() for one in value.flatten().tolist()]


def untouched(work: Work) -> Work:
    return Work(work.fixture, work.fixture, work.opened)


@point(3)
def one_reduction_per_step(work: Work) -> None:
    """Eight microbatches in windows of four are two reductions, and ten are three."""
    for count, required in ((8, 2), (10, 3)):
        measured = work.ranks(2, outcome, count, 4)[0][0]
        assert measured == required, f"{measured} reductions for {count} microbatches"


@guard(2)
def ranks_agree(work: Work) -> None:
    """Both ranks have the same weights after a short window."""
    (_, one), (_, other) = work.ranks(2, outcome, 10, 4)
    assert one == other, "the ranks have different weights"


@guard(2)
def weights_as_before(work: Work) -> None:
    """The weights are those of the untouched script up to rounding."""
    required = untouched(work).ranks(2, outcome, 10, 4)[0][1]
    measured = work.ranks(2, outcome, 10, 4)[0][1]
    furthest = max(abs(one - other) for one, other in zip(measured, required, strict=True))
    assert furthest <= 1e-6, f"a weight is {furthest:.1e} off"
