"""Training loops, each a function: healthy ones, and ones with one planted fault.

A faulty loop names the check that has to find it, and marks its wrong line with `# here`.
"""

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def classifier(width=16, *, dropout=0.0, classes=5):
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes)
    )


def normed():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))


def of_one_label():
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    return DataLoader(data, 8, shuffle=True)


def encoder_and_head():
    return nn.Linear(8, 16), nn.Linear(16, 5)


def loader(num_samples=64, batch_size=8, *, shuffle=True):
    data = TensorDataset(torch.randn(num_samples, 8), torch.randint(5, (num_samples,)))
    return DataLoader(data, batch_size, shuffle=shuffle)


def seeded_loader(data):
    return DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(0))


def scaler_on_cpu():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()  # backward
    optimizer.step()  # step


def loss_of(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def clip(model, *, most=1.0):
    nn.utils.clip_grad_norm_(model.parameters(), most)  # clip


def fit(
    model=None, optimizer=None, batches=None, *, loss=None, before=None, schedule=None, after=None
):
    """Train a model, or a classifier, in the usual way."""
    model = model or classifier()
    optimizer = optimizer or adamw(model)
    loss = loss or F.cross_entropy
    for inputs, labels in loader() if batches is None else batches:  # fetch
        optimizer.zero_grad()  # zeroed
        loss(model(inputs), labels).backward()  # sample
        if before:
            before()  # before
        optimizer.step()  # end
        if schedule:
            schedule.step()  # schedule
        if after:
            after()  # after


def half(logits, labels):
    return F.cross_entropy(logits, labels) / 2  # half


def accumulate(
    model=None, optimizer=None, batches=None, *, loss=half, every=2, each=None, divisor=1
):
    """Train on windows of microbatches."""
    model = model or classifier()
    optimizer = optimizer or adamw(model)
    for number, (inputs, labels) in enumerate(loader(96) if batches is None else batches):
        loss(model(inputs), labels).backward()  # microbatch
        if each:
            each()  # each
        if number % every == every - 1:
            for one in model.parameters() if divisor > 1 else ():
                one.grad /= divisor
            optimizer.step()
            optimizer.zero_grad()


def fit_with_closures(model, optimizer, batches, *, loss):
    for inputs, labels in batches:

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            value = loss(model(inputs), labels)
            value.backward()
            return value

        optimizer.step(closure)


def fit_scaled(scaler=None, batches=None, *, dtype=None, every=1, unscale_at=0, update=None):
    """Train with a scaler, and with clipped gradients, unscaled after a microbatch of a window."""
    model, optimizer = started()
    scaler = scaler or scaler_on_cpu()
    schedule = CosineAnnealingLR(optimizer, 100)
    for number, batch in enumerate(batches or loader()):
        with torch.autocast("cpu", dtype=dtype, enabled=bool(dtype)):
            loss = loss_of(model, batch) / every
        scaler.scale(loss).backward()  # scaled
        if number % every == unscale_at:
            scaler.unscale_(optimizer)  # unscaled
        if number % every == every - 1:
            # With a part that is frozen, and in no optimizer.
            clip(nn.ModuleList([model, nn.Linear(1, 1)]))
            scaler.step(optimizer)
            (update or scaler.update)()
            schedule.step()
            optimizer.zero_grad()


def of_tokens(logits, tokens, **options):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), **options)  # tokens


def fit_language(model, optimizer=None, batches=None):
    """Train a language model on tokens and those after them."""
    fit(model, optimizer, batches or texts(9), loss=of_tokens)


def accumulate_language(batches, **options):
    accumulate(Language(), None, batches, **options)


def fit_padded(draw):
    """Train a language model on padded tokens, which are drawn with their mask and labels."""
    model, optimizer = started(Language())
    for _ in range(4):
        tokens, mask, labels = draw()
        step(optimizer, of_tokens(model(tokens, attention_mask=mask)[:, :-1], labels[:, 1:]))


def translate(model):
    """Train a model that is given the targets too."""
    model, optimizer = started(model)
    for source, tokens in torch.randint(50, (8, 2, 4, 12)):
        step(optimizer, of_tokens(model(source, tokens), tokens))


def variational(weight, spread=lambda variance: (variance / 2).exp()):
    """Train an autoencoder whose divergence from a normal distribution has this weight."""
    encode, decode = nn.Linear(8, 16), nn.Linear(8, 8)

    def loss(code, inputs):
        mean, variance = code.chunk(2, 1)
        drawn = mean + torch.randn(mean.shape) * spread(variance)  # drawn
        divergence = (1 + variance - mean.square() - variance.exp()).sum(1).clamp(max=-0.01).mean()
        return F.mse_loss(decode(drawn), inputs) + weight * divergence  # divergence

    inputs = [(one, one) for one, _ in loader()]
    fit(encode, adamw(encode, decode), inputs, loss=loss)


def spread(model, given):
    mean, scale = model(given).chunk(2, 1)
    return Normal(mean, scale.exp())


def rows_of_pixels(*layers, labels):
    """Train on images, of which what a model gives is viewed as rows of classes."""
    model = nn.Sequential(nn.Conv2d(1, 5, 3), *layers)
    images = [(torch.randn(8, 1, 4, 4), torch.randint(5, labels)) for _ in range(8)]

    def loss(logits, labels):
        return F.cross_entropy(logits.view(-1, 5), labels.flatten())  # rows

    fit(model, batches=images, loss=loss)


def recur(*, width, resets=False):
    """Train on parts of series whose state goes on to the next part, or to other series."""
    cell, head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = adamw(cell, head)
    state = None
    for (series,) in DataLoader(TensorDataset(torch.randn(64, 9, 8)), 8, shuffle=True):
        state = None if resets else state
        for part in series.split(width, 1):
            outputs, state = cell(part, state)  # state
            state = state.detach()
            step(optimizer, F.mse_loss(head(outputs), part[..., :1] * 2))


def fit_values(loss):
    """Train a model with one value for each sample."""
    fit(classifier(classes=1), loss=loss)


def half_of_tokens(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / 2  # half of tokens


def half_of_tokens_by_hand(logits, tokens):
    return of_tokens(logits, tokens, reduction="sum") / tokens.numel() / 2


def shifted(several):
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in several]


def texts(*lengths):
    """Return tokens and those after them, of these lengths in turn."""
    return shifted(torch.randint(50, (2, one)) for one in lengths * (8 // len(lengths)))


def texts_with_time_first():
    return [(tokens.T, targets.T) for tokens, targets in texts(9)]


def completions(lengths, width=17):
    """Yield tokens and labels; those of the prompt and the padding are ignored."""
    for length in lengths:
        tokens = torch.randint(50, (2, width))
        labels = tokens[:, 1:].clone()
        labels[:, length:] = -100
        yield tokens[:, :-1], labels


def headless():
    """Return a classifier whose last layer begins at 0."""
    model = classifier()
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    return model


def in_half():
    return [(inputs.bfloat16(), labels) for inputs, labels in loader()]


def wrong_line(train):
    """Return the file and line of a fault: a line of the loop, or of what it calls there."""
    lines, first = inspect.getsourcelines(train)
    for number, line in enumerate(lines, start=first):
        _, marked, role = line.strip().partition("# here")
        if marked and role:
            return wrong_line_of(role.removeprefix(": "))
        if marked:
            return f"{Path(inspect.getsourcefile(train)).name}:{number}"
    raise ValueError(f"{train.__name__} marks no line")


def wrong_line_of(role):
    (place,) = [
        f"{path.name}:{number}"
        for path in Path(__file__).parent.glob("*loops.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith(f"  # {role}")
    ]
    return place


def adamw(*models, rate=1e-2):
    parameters = [one for model in models for one in model.parameters()]
    return AdamW(parameters, rate)  # made


def started(model=None):
    """Return a model, or a classifier, and its optimizer."""
    model = model or classifier()
    return model, adamw(model)


def together(*optimizers):
    """Return several optimizers as one."""

    def zero_grad():
        for one in optimizers:
            one.zero_grad()

    def step():
        for one in optimizers:
            one.step()

    return SimpleNamespace(zero_grad=zero_grad, step=step)


def with_values(model, *values):
    """Yield each parameter of a model with its value of each list."""
    return zip(model.parameters(), *values, strict=True)


class Language(nn.Module):
    """A small language model, which has seen each token before it predicts the next."""

    def __init__(self, width=16, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, attention_mask=None):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Translation(Language):
    """Sees the targets one place later, as its decoder shifts them."""

    def forward(self, source, tokens):
        return super().forward(self.seen(tokens))

    def seen(self, tokens):
        return F.pad(tokens, (1, -1))


class ModelForCausalLM(Language):
    """Shifts the labels itself, as those of Hugging Face."""

    def forward(self, tokens, labels):
        return of_tokens(super().forward(tokens), F.pad(labels, (0, 1), value=-100)[:, 1:])


class Seeing(Language):
    """Adds to each token those before it, or all; with time as the first dimension, or not."""

    def __init__(self, *, is_causal=False, time=1):
        super().__init__()
        self.is_causal, self.time = is_causal, time

    def forward(self, tokens):
        hidden = self.embed(tokens.movedim(self.time, 1))
        hidden = hidden + F.scaled_dot_product_attention(
            hidden, hidden, hidden, is_causal=self.is_causal
        )
        return self.head(hidden).movedim(1, self.time)


def texts_to_their_end():
    """Return batches of texts, as wide as the longest one, that end with the token 0."""
    return [F.pad(padded_tokens()[:, :width], (0, 1)) for width in (8, 7, 6, 5) * 2]


def ignore_padding(several):
    def loss(logits, tokens):
        return of_tokens(logits[:, :-1], tokens[:, 1:], ignore_index=0)

    fit(Language(), None, [(tokens, tokens) for tokens in several], loss=loss)


class Taught(nn.Module):
    """Predicts labels, next to a teacher whose outputs it is compared with."""

    def __init__(self):
        super().__init__()
        self.student = classifier(dropout=0.1)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            wanted = self.teacher(inputs)
        output = self.student(inputs)
        return output + 0 * F.mse_loss(output, wanted)


def recompute(model, tokens, blocks=None, *, is_reentrant=True):
    """Return the logits of a language model whose layers, or these blocks, recompute."""
    hidden = model.embed(tokens)
    for block in blocks or model.layers:
        hidden = checkpoint(block, hidden, use_reentrant=is_reentrant)  # checkpoint
    return model.head(hidden)


class Lookahead(Optimizer):
    def __init__(self, inner):
        self.inner, self.number = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [one.detach().clone() for one in inner.param_groups[0]["params"]]

    def step(self, closure=None):
        self.inner.step()
        self.number += 1
        if self.number % 3 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


def climb(model, changes=None):
    """Add changes to the weights, in the direction of the gradients where none are given."""
    trained = [one for one in model.parameters() if one.grad is not None]
    changes = changes or [0.05 * one.grad for one in trained]
    with torch.no_grad():
        torch._foreach_add_(trained, changes)
    return changes


class Attention(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16, padding), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens, mask=None):
        hidden, ignored = self.embed(tokens), None if mask is None else ~mask
        hidden, _ = self.attention(hidden, hidden, hidden, ignored, need_weights=False)
        return self.head(hidden)


def padded_tokens():
    lengths = torch.tensor([[3], [5], [8], [4], [8], [7]])
    return torch.randint(1, 50, (6, 8)).masked_fill(torch.arange(8) >= lengths, 0)


def padded_batches():
    return [(padded_tokens(), torch.randint(5, (6,))) for _ in range(8)]


class Layers(nn.Module):
    """A model of sequences whose layers take the first dimension for time."""

    def __init__(self, body, *, time=0):
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(8, 16), body, nn.Linear(16, 5)
        self.time = time

    def forward(self, inputs):
        hidden = self.body(self.embed(inputs.movedim(self.time, 0)))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden.movedim(0, self.time)[:, -1])


class Codes(nn.Module):
    def forward(self, hidden):
        return hidden + torch.arange(len(hidden)).view(-1, 1, 1)


@torch.no_grad()
def follow(average, model, share):
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.lerp_(new, share)  # average


def keep_average(average, model, share):
    """Train a model and an average of it, of which the newest weights are a share."""
    fit(model, after=lambda: follow(average, model, share))


def fit_masked(mean):
    """Train on a mean of the losses of the tokens that a mask keeps."""
    mask = torch.ones(2, 11)
    mask[1:, 6:] = 0

    def loss(logits, tokens):
        losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")  # masked
        return mean(losses, mask)

    fit(Language(), None, texts(12), loss=loss)


def fit_epochs(make):
    """Train with a schedule that steps once an epoch."""
    model, optimizer = started()
    schedule = make(optimizer)
    for _ in range(6):
        fit(model, optimizer, loader(40))
        schedule.step()  # epoch


def fit_and_evaluate(
    model, *, train=nn.Module.train, evaluate=nn.Module.eval, has_graph=False, loaders=None
):
    """Train with an evaluation after each epoch, and set the mode before either."""
    optimizer = adamw(model)
    training, validation = loaders or (loader(40), loader(16))
    for _ in range(8):
        train(model)
        fit(model, optimizer, training)
        evaluate(model)  # eval
        with torch.set_grad_enabled(has_graph):
            for inputs, labels in validation:
                F.cross_entropy(model(inputs), labels).item()  # validation


def fit_to(teacher, model=None, after=None):
    """Train a model on the outputs of another one."""
    model, optimizer = started(model)
    for inputs, _ in loader():
        with torch.no_grad():
            wanted = teacher(inputs)  # teacher
        step(optimizer, F.mse_loss(model(inputs), wanted))
        if after:
            after()


def fit_heads(several, weight):
    """Train a head on each of several batches, with a body for all."""
    body, heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(2))
    optimizer = adamw(body, heads)
    for batches in several:
        for head, (inputs, labels) in zip(heads, batches, strict=True):
            (weight * F.cross_entropy(head(body(inputs).relu()), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sequences():
    return [(torch.randn(6, 11, 8), torch.randint(5, (6,))) for _ in range(8)]


class AmongSamples(nn.Sequential):
    """Attends from each sample to the others, on purpose."""

    def forward(self, inputs):
        attention, head = self
        hidden = inputs[:, None]
        return head(attention(hidden, hidden, hidden, need_weights=False)[0][:, 0])


# Healthy.


def plain():
    fit(classifier())


def tokens_weighted():
    accumulate_language(
        texts(9, 17),
        loss=lambda one, tokens: of_tokens(one, tokens, reduction="sum") / (2 * (8 + 16)),
    )


def scaled():
    fit_scaled(dtype=torch.bfloat16, every=2, unscale_at=1)


def adversaries():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), classifier(classes=1)


def adversarial(*, is_zeroed_late=False):
    generator, judge = adversaries()
    of_generator, of_judge = adamw(generator), adamw(judge)
    ones = torch.ones(8, 1)
    for real, _ in loader():
        fake = generator(torch.randn(8, 4))
        if not is_zeroed_late:
            of_judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(real), ones).backward()
        F.binary_cross_entropy_with_logits(judge(fake.detach()), 0 * ones).backward()
        of_judge.step()  # judge
        (of_judge if is_zeroed_late else of_generator).zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        of_generator.step()
        if is_zeroed_late:
            of_generator.zero_grad()


def averaged():
    model, optimizer = started(classifier(dropout=0.1))
    average = copy.deepcopy(model).requires_grad_(False)
    for number, (inputs, labels) in enumerate(loader()):
        model.train()
        step(optimizer, F.cross_entropy(model(inputs), labels))
        follow(average, model, 10 / (10 + number))
        model.eval()
        with torch.no_grad():
            model(inputs)


def with_closure():
    model = classifier()
    fit_with_closures(model, LBFGS(model.parameters(), max_iter=4), loader(), loss=F.cross_entropy)


def penalized():
    model, optimizer = started(classifier(classes=1))
    for inputs, _ in loader():
        inputs.requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        step(optimizer, output.mean() + slope.square().sum(1).mean())


def masked_tokens():
    model, optimizer = started(Language())
    for _ in range(4):
        tokens = torch.randint(50, (3, 12))
        hidden = torch.rand(tokens.shape) < 0.15
        hidden[:, 0] = True
        logits = model(tokens.masked_fill(hidden, 0))
        step(optimizer, of_tokens(logits, tokens.masked_fill(~hidden, -100)))


def contrastive_with_cached_gradients():
    model, optimizer = started()
    for inputs, _ in loader():
        parts = inputs.chunk(2)
        with torch.no_grad():
            cached = torch.cat([model(part) for part in parts])
        cached.requires_grad_()
        F.cross_entropy(cached @ cached.T, torch.arange(len(cached))).backward()
        optimizer.zero_grad()
        for part, slope in zip(parts, cached.grad.chunk(2), strict=True):
            (model(part) * slope).sum().backward()
        optimizer.step()


def steps_in_hooks():
    model = classifier()
    of_each = {one: SGD([one], 0.1) for one in model.parameters()}

    def step(parameter):
        of_each[parameter].step()
        of_each[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    for batch in loader():
        loss_of(model, batch).backward()


def experts():
    gate, all_experts = nn.Linear(8, 6), nn.ModuleList(classifier() for _ in range(6))
    optimizer = adamw(gate, all_experts)
    for inputs, labels in loader():
        weight, chosen = gate(inputs).softmax(1).max(1)
        logits = torch.stack(
            [all_experts[int(index)](one) for index, one in zip(chosen, inputs, strict=True)]
        )
        step(optimizer, F.cross_entropy(logits * weight[:, None], labels))


def warmed_up_from_zero():
    model, optimizer = started()
    warm = LambdaLR(optimizer, lambda step: min(1, step / 10))
    rest = CosineAnnealingLR(optimizer, 100)
    fit(model, optimizer, schedule=SequentialLR(optimizer, [warm, rest], [10]))


def trial_step(model=None, *, move=climb, is_zeroed=True, is_restored=True):
    model, optimizer = started(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        changes = move(model)  # trial
        if is_zeroed:
            optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()  # second
        if is_restored:
            climb(model, [-one for one in changes])
        optimizer.step()  # of a trial


HEALTHY = [
    contrastive_with_cached_gradients, steps_in_hooks, experts,
    warmed_up_from_zero, plain, tokens_weighted, scaled, adversarial, averaged,
    with_closure, penalized, masked_tokens, trial_step,
]  # fmt: skip


# Faulty, by the check that finds it.


def mean_of_means():
    accumulate_language(texts(9, 17), loss=half_of_tokens)  # here: half of tokens


def never_zeroed():
    model, optimizer = started()
    for batch in loader():
        loss_of(model, batch).backward()
        optimizer.step()  # here


def zeroed_per_microbatch():
    model, optimizer = started()

    def loss(logits, labels):
        optimizer.zero_grad()  # here
        return half(logits, labels)

    accumulate(model, optimizer, loss=loss)


def zeroed_before_the_step():
    model, optimizer = started()
    fit(model, optimizer, before=optimizer.zero_grad)  # here: before


def one_layer_in_the_optimizer():
    model = classifier()
    fit(model, SGD(model[3].parameters(), 0.1))  # here


def optimizer_of_a_copy():
    model = classifier()
    fit(model, adamw(copy.deepcopy(model)))  # here: made


def no_learning_rate():
    model = classifier()
    optimizer = adamw(model, rate=0.0)  # here: made
    fit(model, optimizer)


def frozen_input_of_reentrant_checkpoints():
    model = Language()
    model.embed.requires_grad_(False)
    fit_language(lambda one: recompute(model, one), adamw(model))  # here: checkpoint


def scheduled_per_microbatch():
    models = [classifier(), classifier()]
    optimizers = [adamw(model) for model in models]
    scheduler = LambdaLR(optimizers[0], lambda step: 0.9**step)
    scaler = scaler_on_cpu()
    for number, batch in enumerate(loader()):
        for model in models:
            scaler.scale(loss_of(model, batch) / 2).backward()
        if number % 2:
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        if number:
            scheduler.step()  # here


def scheduled_first():
    model, optimizer = started()
    fit(model, optimizer, before=LambdaLR(optimizer, lambda step: 0.9**step).step)  # here: before


def clipped_after_the_step():
    model = classifier()
    fit(model, after=lambda: clip(model))  # here: clip


def clipped_per_microbatch():
    model = classifier()
    accumulate(model, each=lambda: clip(model))  # here: clip


def clipped_nothing():
    model = classifier()
    parameters = model.parameters()
    fit(model, AdamW(parameters), before=lambda: nn.utils.clip_grad_norm_(parameters, 1.0))  # here


def clipped_while_scaled():
    model, optimizer = started()
    scaler = scaler_on_cpu()
    for batch in loader():
        optimizer.zero_grad()
        (scaler.scale(loss_of(model, batch)) / 1).backward()
        clip(model)  # here: clip
        scaler.step(optimizer)
        scaler.update()


def stepped_while_scaled():
    scaler = scaler_on_cpu()
    fit(loss=lambda *one: scaler.scale(F.cross_entropy(*one)))  # here: end


def backward_under_autocast():
    model, optimizer = started()
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
            loss.backward()  # here
        optimizer.step()


def probabilities():
    fit(nn.Sequential(classifier(), nn.Softmax(dim=1)))  # here: sample


def sigmoid_twice():
    def loss(logits, labels):
        output = torch.sigmoid(logits).squeeze(1)
        return F.binary_cross_entropy_with_logits(output, (labels > 2).float())  # here

    fit_values(loss)


def targets_are_inputs():
    fit_language(Language(), batches=[(one, one) for one, _ in texts(9)])  # here: tokens


def targets_shifted_twice():
    fit(
        Language(),
        None,
        texts(12),
        loss=lambda logits, tokens: of_tokens(logits[:, :-1], tokens[:, 1:]),
    )  # here: tokens


def all_ignored():
    fit(loss=lambda logits, labels: F.cross_entropy(logits, labels.fill_(-100)))  # here


def padding_counts():
    def draw():
        tokens = torch.randint(1, 50, (3, 12))
        mask = torch.ones_like(tokens)
        mask[1:, 7:] = 0
        return tokens * mask, mask, tokens * mask

    fit_padded(draw)  # here: tokens


def left_in_eval_mode():
    model = classifier(dropout=0.2)
    fit(model, after=model.eval)  # here: after


def first_batch_for_ever():
    batches = loader(shuffle=False)
    fit(batches=(next(iter(batches)) for _ in range(4)))  # here


def losses_with_graphs():
    losses = []

    def loss(logits, labels):
        losses.append(F.cross_entropy(logits, labels))  # here
        return losses[-1]

    fit(loss=loss)


def divided_by_too_few():
    accumulate(every=4)  # here: half


def stepped_per_microbatch():
    model, optimizer = started()
    only_zeroes = SimpleNamespace(step=list, zero_grad=optimizer.zero_grad)
    accumulate(model, only_zeroes, each=optimizer.step)  # here: each


def encoder_without_gradients():
    model = Language()

    def logits(tokens):
        with torch.no_grad():
            hidden = model.layers[0](model.embed(tokens))  # here
        return model.head(hidden)

    fit_language(logits, adamw(model))


def detached_loss():
    fit(loss=lambda one, labels: F.cross_entropy(one, labels).detach().requires_grad_())  # here


def clipped_another_model():
    other = classifier()
    fit(before=lambda: clip(other))  # here: clip


def scale_never_updated():
    scaler = scaler_on_cpu()
    fit_scaled(scaler, update=lambda: scaler._per_optimizer_states.clear())  # here: scaled


FAULTY = {
    "accumulation": [divided_by_too_few, mean_of_means],
    "zeroed": [never_zeroed, stepped_per_microbatch, zeroed_per_microbatch, zeroed_before_the_step],
    "optimizer": [one_layer_in_the_optimizer],
    "moves": [
        optimizer_of_a_copy, encoder_without_gradients, detached_loss, no_learning_rate,
        frozen_input_of_reentrant_checkpoints,
    ],
    "schedule": [scheduled_per_microbatch, scheduled_first],
    "clipping": [
        clipped_after_the_step, clipped_per_microbatch, clipped_nothing, clipped_while_scaled,
        clipped_another_model,
    ],
    "scaler": [stepped_while_scaled, scale_never_updated],
    "autocast": [backward_under_autocast],
    "logits": [probabilities, sigmoid_twice],
    "targets": [targets_are_inputs, targets_shifted_twice, all_ignored, padding_counts],
    "mode": [left_in_eval_mode],
    "data": [first_batch_for_ever],
    "graph": [losses_with_graphs],
}  # fmt: skip
