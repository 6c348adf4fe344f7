"""Judge how often two ranks reduce and scatter gradients, and that they train as before."""

from evals_grading import Work, guard, point


def outcome(count, accum):
    """Return this rank's reductions and the whole weights; called on each of two ranks."""
    import torch
    import torch.distributed as dist
    from sharded import train
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reductions(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += "reduce_scatter" in str(function)
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(10 + dist.get_rank())
    batches = [(torch.randn(4, 6), torch.randn(4, 2)) for _ in range(count)]
    with Reductions() as reductions:
        train(model, batches, accum)
    for module in (model, *model):
        getattr(module, "reshard", lambda: None)()
    whole = [one.full_tensor().flatten().tolist() for one in model.parameters()]
    return reductions.number, [value for one in whole for value in one]


@point(3)
def one_reduction_per_step(work: Work) -> None:
    """Eight microbatches in windows of four are two reductions, and ten are three."""
    for count, required in ((8, 2), (10, 3)):
        measured = work.ranks(2, outcome, count, 4)[0][0]
        assert measured == required, f"{measured} reductions for {count} microbatches"


@guard(3)
def weights_as_before(work: Work) -> None:
    """The weights are those of the untouched script up to rounding."""
    required = Work(work.fixture, work.fixture, work.opened).ranks(2, outcome, 10, 4)[0][1]
    measured = work.ranks(2, outcome, 10, 4)[0][1]
    furthest = max(abs(one - other) for one, other in zip(measured, required, strict=True))
    assert furthest <= 1e-6, f"a weight is {furthest:.1e} off"
