"""Judge a store of checkpoints by kills, flipped bits, a full disk and other numbers of ranks.

The weights after a step are a function of its number, so that a wrong load is seen at once.
"""

import random
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from evals_grading import Broken, Work, die_writing, guard, kill, point

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def training(step: int = 0):
    """Return model and optimizer as they are after a step, sharded where there are ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(40, 100), torch.nn.Linear(100, 41))
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=step * 1e-3)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * step
    optimizer.step()
    return model, optimizer


def values(model, optimizer):
    tensors = [*model.parameters(), *(one["exp_avg_sq"] for one in optimizer.state.values())]
    return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in tensors]


def save(*steps: int, before=None):
    from store import save

    for step in steps:
        if before and step == steps[-1]:
            before()
        save("saved", step, *training(step))


def load():
    """Return the step that was loaded, and whether all values are those of this step."""
    import torch
    from store import load

    model, optimizer = training()
    step = load("saved", model, optimizer)
    right = zip(values(model, optimizer), values(*training(step or 0)), strict=True)
    return step, all(torch.equal(one, other) for one, other in right)


def assert_loads(work: Work, *steps: int) -> None:
    step, equal = work.call(load)
    assert step in steps, f"step {step} was loaded, and {' or '.join(map(str, steps))} is whole"
    assert equal, f"step {step} was loaded with other values"


def kill_at(change: int) -> None:
    """Kill this process at the nth change of the disk."""
    left = [change]

    def look(event, args):
        if event in EVENTS and (event != "open" or set(str(args[1])) & set("wax+")):
            left[0] -= 1
            if not left[0]:
                kill()

    sys.addaudithook(look)


def full_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@point(3)
def survives_kills(work: Work) -> None:
    """After 40 kills within a save the newest whole state is loaded, and the next save works."""
    there = work.copy()
    there.call(save, 1, 2)
    for number in range(40):
        one = there.copy()
        act = partial(kill_at, number // 2 + 1) if number % 2 else die_writing(500 + 4000 * number)
        try:
            one.call(partial(save, 3, before=act))
        except Broken:
            assert_loads(one, 2, 3)
        else:
            assert_loads(one, 3)
    one.call(save, 4)
    assert_loads(one, 4)


def flip_and_load() -> None:
    """Load with one bit after the other flipped, and raise if a wrong step or value is loaded."""
    drawn = random.Random(5)
    for _ in range(40):
        files = [path for path in sorted(Path("saved").rglob("*")) if path.is_file()]
        path = drawn.choices(files, [one.stat().st_size for one in files])[0]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        step, equal = load()
        assert step in (2, 3), f"step {step} was loaded, with a flipped bit in {path}"
        assert equal, f"step {step} was loaded with other values, with a flipped bit in {path}"
        path.write_bytes(whole)


@point(3)
def survives_flips(work: Work) -> None:
    """With one of 40 bits flipped the newest undamaged state is loaded."""
    there = work.copy()
    there.call(save, 1, 2, 3)
    there.call(flip_and_load)


@point(2)
def survives_a_full_disk(work: Work) -> None:
    """A save on a full disk ends with an error, older states stay, and the next save works."""
    there = work.copy()
    there.call(save, 1, 2)
    try:
        there.call(partial(save, 3, before=full_disk))
    except Broken as ended:
        reason = str(ended)
    else:
        raise AssertionError("nothing was raised")
    assert "Error" in reason, f"it ended so: {reason}"
    assert_loads(there, 2)
    there.call(save, 4)
    assert_loads(there, 4)


@point(2)
def loads_on_other_ranks(work: Work) -> None:
    """Two ranks load what one saved and the reverse, to the bit."""
    there = work.copy()
    there.call(save, 1)
    assert there.ranks(2, load) == [[1, True]] * 2, "two ranks did not load what one saved"
    there.ranks(2, save, 2)
    assert_loads(there, 2)


def size(work: Work) -> int:
    files = (path for path in (work.folder / "saved").rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


@guard(1)
def keeps_three(work: Work) -> None:
    """Three states are kept, and no more."""
    there = work.copy()
    there.call(save, 1)
    one = size(there)
    there.call(save, 2, 3, 4, 5)
    kept = size(there) / one
    assert 2.5 < kept < 3.5, f"{kept:.1f} states lie there"
