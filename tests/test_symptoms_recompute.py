"""Each row of the recompute skill's symptom table: the symptom is reproduced, the fix cures it, the wrong fix doesn't.

python -m pytest tests/test_symptoms_recompute.py
"""

import copy
import random
import re
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from curry_train.core.builtin import transformer
from curry_train.core.measure import count_flops, measure_memory, recompute_flops
from curry_train.core.parity import compare, record_step
from curry_train.core.ranks import run_on_ranks
from curry_train.core.workload import Case, Workload
from curry_train.gates import recompute as gates
from curry_train.plan.profiler import MemoryProfiler
from curry_train.primitives.recompute import CheckpointWrapper, Recompute, recompute_blocks
from curry_train.primitives.segments import choose_segments, recompute_segments
from house import ROOT

TESTS = {}  # by the first column of the table


def symptom(row):
    def register(test):
        TESTS[row] = test
        return test

    return register


def test_every_row_of_the_table_has_a_test():
    section = (ROOT / "skills/recompute/SKILL.md").read_text(encoding="utf-8").split("## Symptoms\n")[1]
    rows = [re.split(r" \| ", line.strip("| "))[0] for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 12
    assert sorted(rows) == sorted(TESTS)


def loss(module, batch):
    return module(batch).square().mean()


def step(module, batch, *, seed=0):
    """One step from a seed: loss, gradients, buffers and generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return record_step(module, batch, loss)


def seeded(build):
    torch.manual_seed(0)
    return build()


def blocks(*layers, depth=8):
    """A chain of equal blocks; `layers` build one."""
    return seeded(lambda: nn.Sequential(*[nn.Sequential(*[layer() for layer in layers]) for _ in range(depth)]))


linear = partial(nn.Linear, 16, 16)


@pytest.fixture
def batch():
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


# Errors.


class Attend(nn.Module):
    """Without state: keys go in, and come out longer."""

    def __init__(self):
        super().__init__()
        self.key = linear()

    def forward(self, x, keys):
        keys = torch.cat([keys, self.key(x)])
        return x + torch.softmax(x @ keys.T, -1) @ keys, keys


class Cached(nn.Module):
    """With state: the keys of earlier calls."""

    def __init__(self):
        super().__init__()
        self.attend, self.keys = Attend(), torch.zeros(0, 16)

    def forward(self, x):
        out, keys = self.attend(x, self.keys)
        self.keys = keys.detach()
        return out


@symptom("`CheckpointError`: ... different metadata")
def test_a_cache_that_grows_breaks_recompute_until_it_is_kept_outside(batch):
    plain, whole, unchecked, cured = (seeded(Cached) for _ in range(4))
    with pytest.raises(CheckpointError, match="have different metadata"):
        step(Recompute(whole), batch)
    with pytest.raises(RuntimeError, match="returned an invalid gradient"):
        step(Recompute(unchecked, determinism_check="none"), batch)
    cured.attend = Recompute(cured.attend)
    for _ in range(2):  # the second step finds a cache
        assert compare(step(plain, batch), step(cured, batch)).bit_equal


SHORT, LONG = False, True


class Route(nn.Module):
    """Takes a path that is given, or another one with each call."""

    def __init__(self, takes=()):
        super().__init__()
        self.short, self.long, self.takes = linear(), nn.Sequential(linear(), nn.GELU(), linear()), list(takes)

    def forward(self, x, go_long=None):
        if go_long is None:
            go_long = self.takes.pop(0)
        return x + torch.tanh(self.long(x) if go_long else self.short(x))


class Decides(nn.Module):
    """Chooses for its block."""

    def __init__(self, takes):
        super().__init__()
        self.route, self.takes = Route(), list(takes)

    def forward(self, x):
        return self.route(x, self.takes.pop(0))


@symptom("`CheckpointError`: A different number of tensors was saved")
def test_a_path_that_changes_breaks_recompute_until_it_is_an_argument(batch):
    plain = step(seeded(lambda: Route(takes=[LONG, SHORT])), batch)
    for options in ({}, {"determinism_check": "none"}):
        with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
            step(Recompute(seeded(lambda: Route(takes=[LONG, SHORT])), **options), batch)
    # The other way round torch stops as soon as it has as many tensors as before, and says nothing.
    found = step(Recompute(seeded(lambda: Route(takes=[SHORT, LONG]))), batch)
    assert compare(step(seeded(lambda: Route(takes=[SHORT, LONG])), batch), found).worst > 0.1
    cured = seeded(lambda: Decides(takes=[LONG, SHORT]))
    cured.route = Recompute(cured.route)
    assert compare(step(seeded(lambda: Decides(takes=[LONG, SHORT])), batch), step(cured, batch)).bit_equal
    assert torch.equal(plain.loss, step(seeded(lambda: Decides(takes=[LONG, SHORT])), batch).loss)


class FrozenStart(nn.Module):
    """Nothing trains before the first block, as with frozen embeddings under adapters."""

    def __init__(self, run=lambda block, x: block(x)):
        super().__init__()
        self.stem, self.block, self.head, self.run = linear(), nn.Sequential(linear(), nn.GELU()), linear(), run
        self.stem.requires_grad_(False)

    def forward(self, x):
        return self.head(self.run(self.block, self.stem(x)))


def reentrant(block, *args):
    return checkpoint(block, *args, use_reentrant=True)


@symptom("`None of the inputs have requires_grad=True. Gradients will be None`")
def test_reentrant_checkpointing_of_a_frozen_start_loses_gradients(batch):
    plain, broken, cured = (seeded(lambda: FrozenStart(*run)) for run in ((), (reentrant,), ()))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        found = step(broken, batch)  # the loss is right, and goes down, since the head trains
    assert found.gradients["block.0.weight"] is None
    assert found.gradients["head.weight"] is not None
    cured.block = Recompute(cured.block)
    reference = step(plain, batch)
    assert compare(reference, step(cured, batch)).bit_equal
    cured = seeded(FrozenStart)
    cured.block = CheckpointWrapper(cured.block, use_reentrant=True)
    with pytest.raises(ValueError, match="leave use_reentrant at False"):
        step(cured, batch)


@symptom("`incompatible with .grad()`, or with `inputs=` of `.backward()`")
def test_a_gradient_penalty_needs_checkpointing_that_is_not_reentrant(batch):
    block, x = seeded(lambda: nn.Sequential(linear(), nn.Tanh())), batch.requires_grad_()
    with pytest.raises(RuntimeError, match="incompatible with .grad"):
        torch.autograd.grad(reentrant(block, x).sum(), x)
    wanted = torch.autograd.grad(block(x).sum(), x, create_graph=True)[0]
    found = torch.autograd.grad(Recompute(block)(x).sum(), x, create_graph=True)[0]
    assert torch.equal(wanted, found)
    wanted.square().sum().backward()
    second = block[0].weight.grad.clone()
    block.zero_grad()
    found.square().sum().backward()
    assert torch.equal(second, block[0].weight.grad)


# Under DDP and FSDP2.


def every_gradient(model, batch):
    model.zero_grad()
    loss(model, batch).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters() if p.grad is not None]


def whole_batch():
    """Sixteen rows for each rank."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def equal(gradients, others):
    return all(map(torch.equal, gradients, others)) and len(gradients) == len(others)


class Shared(nn.Module):
    """A block that runs twice, and a head that one batch doesn't use."""

    def __init__(self, run=lambda block, x: block(x), *, times=2):
        super().__init__()
        self.stem, self.block, self.unused = linear(), nn.Sequential(linear(), nn.GELU()), linear()
        self.run, self.times = run, times

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.times):
            x = self.run(self.block, x)
        return x


def ready_once():
    """What DDP says of each setting, or whether the gradients are those without recompute."""
    batch, said = whole_batch().chunk(2)[dist.get_rank()], []
    for times, options in ((2, {}), (2, {"find_unused_parameters": True}), (1, {"find_unused_parameters": True})):
        models = [seeded(lambda run=run: Shared(*run, times=times)) for run in ((), (reentrant,), ())]
        models[2].block = Recompute(models[2].block)
        gradients = []
        for model in models:
            if not options:
                model.unused = None
            try:
                gradients.append(every_gradient(DistributedDataParallel(model, **options), batch))
            except RuntimeError as error:
                gradients.append(str(error))
        said.append([gradients[1], equal(gradients[0], gradients[2])])
    return said


@symptom("DDP: `Expected to mark a variable ready only once`")
def test_ddp_counts_what_reentrant_checkpointing_uses_twice():
    for rank in run_on_ranks(f"{__file__}:ready_once"):
        for error, cured in rank:
            assert error.startswith("Expected to mark a variable ready only once")
            assert cured


def orders():
    rank, build = dist.get_rank(), lambda: blocks(linear, nn.GELU, depth=3)
    batch, mesh = whole_batch().chunk(2)[rank], init_device_mesh("cpu", (2,))
    # What is refused, and what looks like the same thing: a second model, which DDP doesn't know.
    wrapped = DistributedDataParallel(build())
    with pytest.raises(ValueError, match="wrap the blocks before DistributedDataParallel"):
        Recompute(wrapped)
    beside = every_gradient(Recompute(wrapped.module), batch)
    gathered = [None, None]
    dist.all_gather_object(gathered, beside[0])
    # The order to keep, against DDP without recompute, and against one rank with the whole batch.
    plain, model = every_gradient(DistributedDataParallel(build()), batch), build()
    recompute_blocks(model)
    found = {"ddp": every_gradient(DistributedDataParallel(model), batch)}
    for name, technique in (("blocks", recompute_blocks), ("segments", lambda model: recompute_segments(model, 2))):
        model = build()
        technique(model)
        for block in model:
            fully_shard(block, mesh=mesh)
        found[f"fsdp2-{name}"] = every_gradient(fully_shard(model, mesh=mesh), batch)
    one = every_gradient(build(), whole_batch())
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(one, plain, strict=True))
    return {
        "beside is synced": torch.equal(*gathered),
        "as one rank": close,  # the mean over two ranks is summed in another order, so the last bits differ
        "bit-equal": [name for name, gradients in found.items() if equal(gradients, plain)],
    }


@symptom("`wrap the blocks before DistributedDataParallel`")
def test_the_order_is_recompute_and_then_ddp_or_fsdp2():
    for found in run_on_ranks(f"{__file__}:orders"):
        expected = ["ddp", "fsdp2-blocks", "fsdp2-segments"]
        assert found == {"beside is synced": False, "as one rank": True, "bit-equal": expected}


@symptom("`compiled already, and would run as compiled`")
def test_the_order_is_recompute_and_then_compile(batch):
    model = blocks(linear, nn.GELU, depth=2)
    reference = step(copy.deepcopy(model), batch)
    recompute_blocks(model)
    for block in model:
        block.compile(backend="aot_eager")
    assert compare(reference, step(model, batch), tolerance=1e-6).holds  # a compiler may sum in another order
    compiled = blocks(linear, nn.GELU, depth=2)
    compiled[0].compile(backend="aot_eager")
    with pytest.raises(ValueError, match="compiled already, and would run as compiled"):
        recompute_blocks(compiled)


# Memory that does not go down.


def memory(model, batch, *, loss=loss):
    return measure_memory(model, batch, loss)


@symptom("`sequential` saves little or nothing")
def test_one_segment_saves_nothing_and_too_many_little(batch):
    batch = batch.repeat(8, 1)
    chain = partial(blocks, linear, nn.GELU, linear, nn.GELU, depth=12)
    peaks = {}
    for count in (1, 4, 12):
        model = chain()
        recompute_segments(model, count)
        peaks[count] = memory(model, batch).peak_bytes
    plain = memory(chain(), batch).peak_bytes
    assert peaks[1] == plain
    assert peaks[12] > peaks[4]
    model = chain()
    count = choose_segments(model, batch, loss)
    recompute_segments(model, count)
    assert memory(model, batch).peak_bytes <= min(peaks.values())
    assert compare(step(chain(), batch), step(model, batch)).bit_equal


@symptom("blocks of Linear and ReLU hold as much as before")
def test_linear_and_relu_save_nothing_alone_and_something_in_runs(batch):
    build, smooth = partial(blocks, linear, nn.ReLU), blocks(linear, nn.GELU)
    plain, model = memory(build(), batch), build()
    recompute_blocks(model, preserve_rng_state=False)
    assert memory(model, batch) == plain
    recompute_blocks(smooth, preserve_rng_state=False)
    assert memory(smooth, batch) == plain  # GELU held twice as much: what recompute takes off is what it put on
    model = build()
    recompute_segments(model, 3, preserve_rng_state=False)
    assert memory(model, batch).held_bytes < 0.7 * plain.held_bytes
    assert memory(model, batch).peak_bytes < 0.8 * plain.peak_bytes
    assert compare(step(build(), batch), step(model, batch)).bit_equal


CASE = Case(transformer(vocabulary=8192))


class HeadAndLoss(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")


def loss_in_chunks(model, batch):
    """The last projection and the loss, recomputed for 32 tokens at a time."""
    tokens, targets = batch["tokens"], batch["targets"].flatten()
    hidden = model.embedding(tokens)
    for layer in model.layers:
        hidden = layer(hidden, model.cosine[: tokens.shape[1]], model.sine[: tokens.shape[1]])
    chunks = zip(model.norm(hidden).flatten(0, 1).split(32), targets.split(32), strict=True)
    part = Recompute(HeadAndLoss(model.head))
    return sum(part(*chunk) for chunk in chunks) / len(targets)


@symptom("held goes down and the peak hardly")
def test_logits_own_the_peak_until_the_loss_is_chunked():
    loss, batch, peaks = CASE.workload.mean_loss, CASE.batch(), []
    for patterns in (None, "layers.*", ["layers.*", "head"]):
        model = CASE.build()
        if patterns:
            recompute_blocks(model, blocks=patterns)
        peaks.append(memory(model, batch, loss=loss))
    plain, full, with_head = peaks
    assert full.held_bytes < 0.5 * plain.held_bytes
    assert full.peak_bytes > 0.7 * plain.peak_bytes
    assert with_head == full
    model = CASE.build()
    recompute_blocks(model)
    assert memory(model, batch, loss=loss_in_chunks).peak_bytes < 0.4 * plain.peak_bytes
    found = compare(record_step(CASE.build(), batch, loss), record_step(model, batch, loss_in_chunks), tolerance=1e-6)
    assert found.holds, found.describe()  # the loss is summed in another order


@symptom("out of memory at batch size 1 too")
def test_gradients_own_the_peak_until_each_is_used_at_once(batch):
    def build():
        return blocks(partial(nn.Linear, 256, 256), nn.GELU, depth=4)

    def descend(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    plain, model, batch = build(), build(), batch.repeat(1, 16)[:2]
    recompute_blocks(model)
    before = memory(plain, batch).peak_bytes
    assert memory(model, batch).peak_bytes > 0.95 * before
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    state = build().state_dict()
    assert memory(model, batch).peak_bytes < 0.6 * before
    model.load_state_dict(state)
    loss(model, batch).backward()
    loss(plain, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@symptom("nothing is saved after `model.eval()`")
def test_fine_tuning_in_eval_mode_recomputes_nothing(batch):
    build = partial(blocks, linear, nn.GELU, partial(nn.Dropout, 0.5), depth=4)
    plain, model, trained = build().eval(), build(), build()
    recompute_blocks(model)
    recompute_blocks(trained)
    assert memory(model.eval(), batch) == memory(plain, batch)
    reference = step(plain, batch)
    assert not compare(reference, step(trained, batch)).holds  # the dropout is back
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert memory(model, batch).held_bytes < 0.6 * memory(plain, batch).held_bytes
    assert compare(reference, step(model, batch)).bit_equal


@symptom("it fits with room to spare, and a step costs a third more")
def test_only_as_many_layers_as_the_budget_needs_are_recomputed():
    case = Case(transformer())
    loss, batch, plain, full, model = case.workload.mean_loss, case.batch(), *(case.build() for _ in range(3))
    before, held = count_flops(plain, batch, loss), memory(plain, batch, loss=loss).held_bytes
    recompute_blocks(full)
    spent = recompute_flops(before, count_flops(full, batch, loss))
    assert 0.25 < spent / before.total < 1 / 3
    budget = 0.6 * held
    names = MemoryProfiler(model).profile(batch, loss=loss).recommend_layers(budget / 2**20)
    recompute_blocks(model, blocks=names)
    assert 0 < recompute_flops(before, count_flops(model, batch, loss)) < 0.6 * spent
    assert memory(model, batch, loss=loss).held_bytes <= budget * 1.01  # a generator's state is kept for each layer
    assert compare(record_step(plain, batch, loss), record_step(model, batch, loss)).bit_equal


# Silently another training.


def through_torch(model, **options):
    """Torch's own function around each block, as people write it."""
    for block in model:
        run = block.forward
        block.forward = lambda *args, run=run: checkpoint(run, *args, use_reentrant=False, **options)
    return model


@symptom("evaluation parts from training, with BatchNorm")
def test_running_statistics_are_updated_twice(batch):
    build = partial(blocks, linear, partial(nn.BatchNorm1d, 16), nn.GELU, depth=2)
    reference, twice = step(build(), batch), step(through_torch(build()), batch)
    assert twice.buffers["0.1.num_batches_tracked"] == 2
    assert compare(reference, twice).worst > 0.1
    assert all(torch.equal(reference.gradients[name], twice.gradients[name]) for name in reference.gradients)
    halved = through_torch(build())
    for block in halved:
        block[1].momentum /= 2
    assert not compare(reference, step(halved, batch)).holds
    cured = build()
    recompute_blocks(cured)
    assert compare(reference, step(cured, batch)).bit_equal


@symptom("gradients are wrong with dropout, and no error")
def test_without_the_generators_state_dropout_draws_again(batch):
    build = partial(blocks, linear, nn.GELU, partial(nn.Dropout, 0.5), linear, depth=2)
    reference, broken, cured = step(build(), batch), build(), build()
    recompute_blocks(broken, preserve_rng_state=False)
    found = step(broken, batch)  # from a seed before the step, which does not help
    assert torch.equal(found.loss, reference.loss)
    assert compare(reference, found).worst > 0.5
    recompute_blocks(cured)
    assert compare(reference, step(cured, batch)).bit_equal


class Jitter(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = linear(), draw

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.draw()


@symptom("gradients are wrong with `random` or `numpy.random` inside a block")
@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())], ids=["python", "numpy"])
def test_only_torch_generators_are_put_back(batch, draw):
    reference, broken = step(seeded(lambda: Jitter(draw)), batch), Recompute(seeded(lambda: Jitter(draw)))
    assert compare(reference, step(broken, batch)).worst > 0.1  # both from the same seed
    reference, cured = (seeded(lambda: Jitter(lambda: torch.rand(()))) for _ in range(2))
    assert compare(step(reference, batch), step(Recompute(cured), batch)).bit_equal


class Warming(nn.Module):
    """A factor that grows with each call, or is given."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = linear(), 0

    def forward(self, x, factor=None):
        self.calls += 1
        return torch.tanh(self.inner(x)) * (self.calls if factor is None else factor) / 4


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.calls = Warming(), 0

    def forward(self, x):
        self.calls += 1
        return self.first(x, self.calls)


def gate(build, **options):
    return gates.parity(
        Case(Workload("own", build, lambda size: torch.randn(size, 16), loss), **options), strategy="full"
    )


@symptom("training is worse with recompute, and no error")
def test_state_inside_a_block_is_seen_by_the_gate_only(batch):
    model = Recompute(seeded(Warming))
    assert compare(step(seeded(Warming), batch), step(model, batch)).worst > 0.1  # torch checks shapes, not values
    verdict = gate(lambda: nn.Sequential(Warming()), blocks="0")
    assert verdict.passed is False
    assert "keeps state between calls" in verdict.hint
    verdict = gate(Given, blocks="first")
    assert verdict.passed, verdict
    spectral = partial(nn.utils.parametrizations.spectral_norm, linear())
    verdict = gate(
        lambda: nn.Sequential(*[nn.Sequential(spectral(), nn.Tanh()), nn.Sequential(linear(), nn.Tanh())]),
        blocks="*[01]",
    )
    assert verdict.passed is False


@symptom("`_checkpoint_wrapped_module` in parameter names")
def test_names_are_those_of_the_bare_model(batch):
    theirs, ours = blocks(linear, nn.GELU, depth=2), blocks(linear, nn.GELU, depth=2)
    names = [name for name, _ in ours.named_parameters()]
    apply_activation_checkpointing(theirs, check_fn=lambda module: module in list(theirs.children()))
    assert "0._checkpoint_wrapped_module.0.weight" in dict(theirs.named_parameters())
    assert list(theirs.state_dict()) == names  # so a saved state looks right, and groups by name are wrong
    recompute_blocks(ours)
    assert [name for name, _ in ours.named_parameters()] == list(ours.state_dict()) == names
