"""More training loops with one planted fault each, of kinds that go unnoticed.

As in `loops.py`, a loop's wrong line is marked with `# here`.
"""

import copy
import itertools
import sys
from types import SimpleNamespace

import numpy
import torch
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from transformers import get_cosine_schedule_with_warmup

from .healthy_loops import (
    low_rank,
    samples_compared_with_others,
    speech,
)
from .loops import (
    Attention,
    Codes,
    Language,
    Layers,
    ModelForCausalLM,
    Seeing,
    Taught,
    Translation,
    accumulate,
    accumulate_language,
    adamw,
    adversarial,
    adversaries,
    classifier,
    clip,
    completions,
    encoder_and_head,
    fit,
    fit_and_evaluate,
    fit_epochs,
    fit_language,
    fit_masked,
    fit_padded,
    fit_scaled,
    fit_to,
    fit_values,
    follow,
    half,
    ignore_padding,
    in_half,
    keep_average,
    loader,
    loss_of,
    normed,
    of_one_label,
    of_tokens,
    padded_batches,
    padded_tokens,
    recur,
    rows_of_pixels,
    scaler_on_cpu,
    seeded_loader,
    sequences,
    shifted,
    started,
    step,
    texts,
    texts_to_their_end,
    texts_with_time_first,
    together,
    translate,
    trial_step,
    variational,
)

# Accumulation.


def mean_divided_by_the_batch_size():
    fit(loss=lambda one, labels: F.cross_entropy(one, labels) / 8)  # here


def mean_over_padding():
    fit_masked(lambda losses, mask: (losses * mask).mean())  # here: masked


def mean_over_ignored_targets():
    def loss(logits, labels):
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean() / 12  # here

    accumulate_language(completions([15, 6] * 24), loss=loss, every=12)


def window_over_the_end_of_an_epoch():
    model, optimizer = started()
    data = loader(40)
    for _ in range(8):
        accumulate(model, optimizer, data)  # here: half


def end_of_an_epoch_lost():
    model, optimizer = started()
    data = loader(40)
    for _ in range(8):
        optimizer.zero_grad()  # here
        accumulate(model, optimizer, data)


def last_loss_alone():
    model, optimizer = started()
    batches = iter(loader())
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            inputs, labels = next(batches)
            loss = F.cross_entropy(model(inputs), labels)  # here
        loss.backward()
        optimizer.step()


# Sign.


def gradient_ascent():
    fit(loss=lambda logits, labels: -F.cross_entropy(logits, labels))  # here


def not_finite():
    fit(loss=lambda one, labels: F.nll_loss((one.softmax(1) * 1e-30 * 1e-30).log(), labels))  # here


# Gradients.


def stepped_twice():
    model, optimizer = started()
    fit(model, optimizer, after=optimizer.step)  # here: after


def zeroed_by_hand_per_microbatch():
    model = classifier()

    def loss(logits, labels):
        for one in model.parameters():
            one.grad = None
        return half(logits, labels)

    accumulate(model, loss=loss)  # here: half


def gradients_of_the_generator():
    adversarial(is_zeroed_late=True)  # here: judge


# Optimizers.


def two_optimizers_for_one_layer():
    model = classifier()
    fit(model, together(adamw(model), SGD(model[3].parameters(), 0.1)))  # here


def made_in_each_epoch():
    model = classifier()
    data = loader(16).dataset
    for _ in range(4):
        fit(model, AdamW(model.parameters()), DataLoader(data, 8))  # here


def tied_by_their_data():
    model = Language()
    model.head.weight = nn.Parameter(model.embed.weight)
    fit_language(model)  # here: made


def layers_in_a_list():
    class Model(nn.Linear):
        def forward(self, inputs):
            for layer in self.layers:
                inputs = layer(inputs).relu()
            return super().forward(inputs)

    model = Model(8, 5)
    model.layers = [nn.Linear(8, 8) for _ in range(2)]
    fit(model)  # here: made


def one_parameter_twice():
    model = classifier()
    optimizer = SGD([*model.parameters(), *model[3].parameters()], 0.1)  # here
    fit(model, optimizer)


# Moves.


def updates_below_the_precision():
    model = classifier(width=32).bfloat16()
    optimizer = SGD(model.parameters(), 1e-5)  # here
    fit(model, optimizer, in_half())


def encoder_data():
    class Model(nn.Sequential):
        def forward(self, inputs):
            encoder, head = self
            return head(encoder(inputs).data)  # here

    fit(Model(*encoder_and_head()))


def weights_loaded_in_each_step():
    model = classifier()
    saved = copy.deepcopy(model.state_dict())
    fit(model, after=lambda: model.load_state_dict(saved))  # here: end


def frozen_by_decay():
    model, optimizer = started()
    for number, batch in enumerate(loader()):
        loss_of(model, batch).backward()
        optimizer.step()  # here
        optimizer.zero_grad(set_to_none=False)
        if number == 1:
            model[0].requires_grad_(False)


# Schedules, clipping, scaling.


def schedule_of_an_older_optimizer():
    model = classifier()
    fit(model, schedule=LambdaLR(adamw(model), lambda step: 0.9**step))  # here: schedule


def unscaled_per_microbatch():
    fit_scaled(every=2)  # here: unscaled


def one_of_two_losses_scaled():
    model, optimizer = started()
    scaler = scaler_on_cpu()
    for inputs, labels in loader():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        (0.1 * model(inputs).square().mean()).backward()  # here
        scaler.step(optimizer)
        scaler.update()


def half_without_a_scaler():
    class Model(nn.Sequential):
        def forward(self, inputs):
            return inputs, super().forward(inputs)

    model = Model(classifier())

    def logits(inputs):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(inputs)[1].float()

    fit(logits, adamw(model))  # here: sample


# Losses and targets.


def logarithm_of_probabilities():
    def loss(logits, labels):
        return -logits.softmax(1).log_softmax(1)[torch.arange(8), labels].mean()  # here

    fit(loss=loss)


def relu_behind_the_last_layer():
    fit(nn.Sequential(classifier(), nn.ReLU(), nn.LogSoftmax(1)), loss=F.nll_loss)  # here: sample


def each_with_each():
    fit_values(lambda one, labels: F.mse_loss(one, labels.float()))  # here


def each_with_a_table():
    fit_values(lambda one, labels: F.mse_loss(one, one.detach() - labels))  # here


def advantage_of_each_at_each():
    fit_values(lambda one, labels: (labels - one).square().mean())  # here


def advantage_of_targets_at_each():
    model, optimizer = started(classifier(classes=1))
    for inputs, _ in loader():
        wanted = inputs.sum(1) + inputs.sum(1, keepdim=True)
        step(optimizer, (model(inputs) - wanted).square().mean())  # here


def weights_clamped_for_nothing():
    model = classifier()

    def clamp():
        for one in model.parameters():
            one.data.clamp(-1, 1)  # here

    fit(model, after=clamp)


def fit_with(line):
    """Train a model that runs a line on its inputs before its own forward."""

    class Model(nn.Linear):
        def forward(self, inputs):
            line(inputs)
            return super().forward(inputs)

    fit(Model(8, 5))


def inputs_added_for_nothing():
    def line(inputs):
        inputs + 1  # here

    fit_with(line)


def inputs_divided_for_nothing():
    def line(inputs):
        inputs / 2  # here

    fit_with(line)


def rows_normalized_for_nothing():
    def line(inputs):
        F.normalize(inputs)  # here

    fit_with(line)


def activation_for_nothing():
    def line(inputs):
        F.relu(inputs)  # here

    fit_with(line)


def layer_for_nothing():
    def line(inputs):
        nn.Dropout()(inputs)  # here

    fit_with(line)


def inputs_transposed_for_nothing():
    def line(inputs):
        inputs.transpose(0, 1)  # here

    fit_with(line)


def best_weights_without_a_copy():
    model, optimizer = started()
    for batch in loader(512):
        step(optimizer, loss_of(model, batch))
        if batch:
            best_weights = model.state_dict()  # here
    model.load_state_dict(best_weights)


def average_kept_in_a_name():
    model, optimizer = started()
    average = copy.deepcopy(model)
    for batch in loader():
        step(optimizer, loss_of(model, batch))
        with torch.no_grad():
            for kept, newest in zip(average.parameters(), model.parameters(), strict=True):
                kept = 0.9 * kept + 0.1 * newest  # here


def copied_into_a_dictionary():
    model, optimizer = started()
    target = copy.deepcopy(model)
    fit(model, optimizer, after=lambda: target.state_dict().update(model.state_dict()))  # here


def mode_named_alone():
    """The useless expression that a linter would name is the fault."""
    model, optimizer = started()
    model.train  # noqa: B018 # here
    fit(model, optimizer)


def loss_that_is_one_number_weighted():
    weights = torch.rand(8)
    fit(loss=lambda logits, labels: (F.cross_entropy(logits, labels) * weights).mean())  # here


def one_layer_many_times():
    body = nn.Sequential(*[nn.Linear(8, 8)] * 3)  # here
    fit(nn.Sequential(body, nn.Linear(8, 5)))


def trained_on_what_is_set_apart():
    batches = loader()
    _, apart = random_split(batches.dataset, [0.75, 0.25])
    fit_and_evaluate(classifier(), loaders=(batches, DataLoader(apart, 16)))  # here: fetch


def betas_swapped():
    model = classifier()
    fit(model, Adam(model.parameters(), betas=(0.999, 0.9)))  # here


def teacher_inside_set_to_training_mode():
    model = Taught()
    model.teacher.eval()
    model.train()  # here
    fit(model, adamw(model.student))


def warm_up_over_the_schedule():
    model, optimizer = started()
    schedule = StepLR(optimizer, 2, 0.5)
    for number, batch in enumerate(loader(128)):
        optimizer.param_groups[0].update(lr=1e-3 * min(1, (number + 1) / 5))
        step(optimizer, loss_of(model, batch))
        schedule.step()  # here


def pixels_viewed_as_rows():
    rows_of_pixels(labels=(8, 2, 2))  # here: rows


def targets_of_another_shuffling():
    inputs = DataLoader(torch.randn(64, 8), 8, shuffle=True)
    targets = DataLoader(torch.randn(64, 1), 8, shuffle=True)
    fit(nn.Linear(8, 1), batches=zip(inputs, targets, strict=True), loss=F.mse_loss)  # here: fetch


def state_of_other_samples():
    recur(width=9)  # here: state


def warm_up_of_what_is_warmed_up():
    model, optimizer = started()
    for number, batch in enumerate(loader(128)):
        optimizer.param_groups[0]["lr"] *= min(1, (number + 1) / 10)  # here
        step(optimizer, loss_of(model, batch))


def in_order_of(draw):
    inputs, labels = torch.randn(64, 8), torch.randint(5, (64,))
    model, optimizer = started()
    for _ in range(3):
        for rows in draw().split(8):
            step(optimizer, loss_of(model, (inputs[rows], labels[rows])))


def same_order_by_hand():
    in_order_of(lambda: torch.randperm(64, generator=torch.Generator().manual_seed(0)))  # here


def same_order_of_numpy():
    in_order_of(lambda: torch.from_numpy(numpy.random.default_rng(0).permutation(64)))  # here


def stream_in_one_order():
    class Stream(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            yield from (rows[one] for one in torch.randperm(40, generator=generator))

    rows, (model, optimizer) = [*loader(40).dataset], started()
    batches = DataLoader(Stream(), 8)
    for _ in range(8):
        fit(model, optimizer, batches)  # here: fetch


def softmax_over_the_batch():
    fit(loss=lambda logits, labels: F.nll_loss(F.log_softmax(logits, dim=0), labels))  # here


def sees_the_future():
    fit(
        Seeing(),
        None,
        texts(9),
        loss=lambda one, tokens: of_tokens(one, tokens) + F.cross_entropy(one[:, 0], tokens[:, 3]),
    )  # here: tokens


def sees_the_future_with_time_first():
    fit_language(Seeing(time=0), batches=texts_with_time_first())  # here: tokens


def positions_in_another_order():
    model = Language()
    fit_language(lambda one: model(one).movedim(0, 1), adamw(model))  # here: tokens


def one_label():
    fit(batches=of_one_label())  # here: fetch


def sorted_by_class():
    fit(
        batches=DataLoader(TensorDataset(torch.randn(64, 8), torch.arange(64) // 16), 8),
        loss=lambda one, labels: F.cross_entropy(one, F.one_hot(labels, 5).float()),
    )  # here: fetch


# Mode and data.


def evaluated_in_training_mode():
    fit_and_evaluate(classifier(dropout=0.2), evaluate=lambda _: None)  # here: validation


def dropout_of_channels_in_evaluation():
    class Model(nn.Sequential):
        def forward(self, inputs):
            return super().forward(F.dropout1d(inputs[:, None], 0.1).squeeze(1))  # here

    fit_and_evaluate(Model(classifier()))


def dropout_made_in_forward():
    class Model(nn.Sequential):
        def forward(self, inputs):
            return nn.Dropout(0.1)(super().forward(inputs))  # here

    fit_and_evaluate(Model(classifier()))


def average_with_new_statistics():
    model = normed()
    average = copy.deepcopy(model).requires_grad_(False).eval()

    def update():
        follow(average, model, 0.1)
        average(torch.randn(8, 8))  # here

    fit(model, after=update)


def average_with_new_statistics_once():
    model = normed()
    average = copy.deepcopy(model).requires_grad_(False).eval()
    fit(model, after=lambda: follow(average, model, 0.1))
    average(torch.randn(8, 8))  # here


def seeded_in_each_epoch():
    model, optimizer = started()
    data = loader(40)
    for _ in range(8):
        torch.manual_seed(0)  # here
        fit(model, optimizer, ((inputs.neg(), labels) for inputs, labels in data))


def loader_seeded_in_each_epoch():
    model, optimizer = started()
    data = loader(40).dataset
    for _ in range(8):
        fit(model, optimizer, seeded_loader(data))  # here: fetch


def sampler_without_its_epoch():
    model, optimizer = started()
    data = loader(16).dataset
    batches = DataLoader(data, 8, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    for _ in range(8):
        fit(model, optimizer, batches)  # here: fetch


def one_sample():
    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.ones(8), 1

    fit(batches=DataLoader(Rows(), 8, shuffle=True))  # here: fetch


def inputs_not_finite():
    model = classifier()
    data = TensorDataset(torch.randn(64, 8) / torch.zeros(8), torch.randint(5, (64,)))
    fit(model, None, DataLoader(data, 8, shuffle=True))  # here: sample


# What is kept.


def cache_of_outputs():
    outputs = []

    def loss(logits, labels):
        outputs.append(logits.detach())  # here
        return F.cross_entropy(logits, labels)

    fit(batches=loader(320), loss=loss)


def hook_in_each_step():
    model = classifier()

    def hook(*_):
        pass

    fit(model, None, loader(200), after=lambda: model[0].register_forward_hook(hook))  # here


def callback_that_keeps_activations():
    # So that nobody imports it.
    sys.modules["absent"] = None

    class Recorder:
        def __init__(self):
            self.activations = []

        def __call__(self, module, inputs, output):
            self.activations.append(output.detach())  # here

    model, optimizer = started()
    model[0].register_forward_hook(Recorder())
    for _ in range(8):
        fit(model, optimizer, loader(40))


def running_total():
    model, optimizer = started()
    total = 0
    for number, batch in enumerate(loader()):
        total = total + loss_of(model, batch) / 4
        total.backward(retain_graph=True)  # here
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            total = 0


def attack_left_in_the_gradients():
    model, optimizer = started()
    for inputs, labels in loader():
        optimizer.zero_grad()
        inputs.requires_grad_()
        F.cross_entropy(model(inputs), labels).backward()  # here
        F.cross_entropy(model((inputs + 0.1 * inputs.grad.sign()).detach()), labels).backward()
        optimizer.step()


def second_loss_forgotten():
    body, first, second = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 1)
    optimizer = adamw(body, first, second)
    for inputs, labels in loader():
        hidden = body(inputs).relu()
        loss = F.cross_entropy(first(hidden), labels)
        side = F.mse_loss(second(hidden).squeeze(1), inputs.sum(1))  # here
        step(optimizer, loss)
        print(float(loss + side))


def extra_parameter_never_zeroed():
    model = classifier()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), temperature], 0.01)
    zeroes = SimpleNamespace(zero_grad=model.zero_grad, step=optimizer.step)
    fit(lambda inputs: model(inputs) * temperature, zeroes)  # here: zeroed


def scaled(scales):
    fit(loss=lambda logits, labels: F.cross_entropy(logits * scales, labels))


def extra_parameter_in_no_optimizer():
    scaled(nn.Parameter(torch.ones(())))  # here: made


def tensor_in_no_optimizer():
    scaled(torch.ones(5, requires_grad=True))  # here: made


def hook_that_zeroes():
    model = classifier()
    model[0].weight.register_hook(torch.zeros_like)
    fit(model)  # here: sample


def rounded_outputs():
    fit_values(lambda values, labels: F.mse_loss(values.round().squeeze(1), labels.float()))  # here


def matrices_of_zeros_multiplied():
    low_rank(nn.init.zeros_)  # here: sample


def factor_of_zero():
    low_rank(factor=0)  # here: sample


def buffer_kept_without_a_copy():
    model, optimizer = started()
    buffer = torch.zeros(8)
    kept = [buffer] * 4
    for _ in range(20):
        kept.append(buffer.copy_(torch.randn(8)))
        step(optimizer, model(torch.stack(kept[-4:])).square().mean())  # here


class OfTheFirst(Language):
    def forward(self, tokens):
        return super().forward(tokens)[:, 0]


def first_token_alone():
    fit(OfTheFirst(), None, padded_batches())  # here: sample


def same_weights_everywhere():
    model = classifier()
    for layer in (model[0], model[3]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    fit(model)  # here: end


def maximized():
    model = classifier()
    fit(model, SGD(model.parameters(), 0.1, maximize=True))  # here: end


def schedule_made_in_each_step():
    model, optimizer = started()
    fit(model, optimizer, after=lambda: CosineAnnealingLR(optimizer, 100).step())  # here


def rates_of_groups_made_equal():
    model = classifier()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[3].parameters()}]
    optimizer = AdamW(groups, 1e-2)

    def update():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3  # here

    update()
    fit(model, optimizer, after=update)


def clipped_to_nothing():
    model = classifier()
    fit(model, SGD(model.parameters(), 0.1), before=lambda: clip(model, most=0.0))  # here: clip


def targets_out_of_reach():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    fit(model, loss=lambda one, labels: F.mse_loss(one, 5.0 * (labels[:, None] - 2)))  # here


def targets_beyond_a_clamp():
    fit_values(lambda values, labels: F.mse_loss(values.clamp(0, 1)[:, 0], 3.0 + labels))  # here


def labels_of_minus_one():
    def loss(logits, labels):
        signs = (labels > 2).float() * 2 - 1
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), signs)  # here

    fit_values(loss)


def targets_as_inputs():
    fit(
        loss=lambda one, labels: F.binary_cross_entropy(  # here
            F.one_hot(labels, 5) * 0.8 + 0.1, one.sigmoid()
        )
    )


def several_labels_as_classes():
    fit(loss=lambda logits, _: F.cross_entropy(logits, (torch.rand(8, 5) > 0.5).float()))  # here


def labels_smoothed_away():
    fit(loss=nn.CrossEntropyLoss(label_smoothing=1.0))  # here: sample


def viewed_instead_of_transposed():
    fit(
        Language(),
        None,
        texts(12),
        loss=lambda logits, tokens: F.cross_entropy(logits.reshape(2, 50, 11), tokens),  # here
    )


def all_dropped():
    fit(classifier(dropout=1.0))  # here: sample


def inputs_divided_to_zero():
    batches = ((one.abs().byte() // 255 * 1.0, labels) for one, labels in loader())  # here
    fit(batches=batches)


def dropout_recomputed_anew():
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), nn.Linear(16, 5)

    def logits(inputs):
        hidden = checkpoint(first, inputs, use_reentrant=False, preserve_rng_state=False)  # here
        return second(hidden)

    fit(logits, adamw(first, second))


def same_batch_in_a_window():
    model = nn.LSTM(8, 5, 2, dropout=0.1)
    batches = (batch for batch in loader() for _ in range(2))
    accumulate(lambda inputs: model(inputs)[0], adamw(model), batches)  # here


def part_of_the_loss_as_a_number():
    fit(
        loss=lambda one, labels: F.cross_entropy(one, labels) + one.square().mean().item()  # here
    )


def penalty_without_a_graph():
    model, optimizer = started()
    for inputs, labels in loader():
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)  # here
        step(optimizer, loss + slope.square().sum())


def step_after_the_first_microbatch():
    model, optimizer = started()
    for number, (inputs, labels) in enumerate(loader(96)):
        half(model(inputs), labels).backward()
        if number % 2 == 0:
            optimizer.step()  # here
            optimizer.zero_grad()


def penalty_in_each_microbatch():
    accumulate(
        loss=lambda one, labels: half(one, labels) + 0.03 * one.square().mean()
    )  # here: half


def masked_values_over_all():
    lengths = itertools.count(4)

    def loss(logits, tokens):
        values = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        mask = torch.arange(13) < next(lengths)
        return -(values * mask).sum() / values.numel()

    fit(Language(), None, texts(14), loss=loss)  # here: sample


def changed_gradients_of_the_step_before():
    model, optimizer = started()
    for batch in loader():
        loss_of(model, batch).backward()
        for one in model.parameters():
            one.grad += 0.1 * torch.randn_like(one)
        optimizer.step()  # here


def trial_gradients_added():
    model = classifier()
    model[-1].requires_grad_(False)
    trial_step(model, is_zeroed=False)  # here: second


def trial_weights_stay():
    trial_step(is_restored=False)  # here: of a trial


def frozen_after_the_first_step():
    model = classifier()

    fit(
        lambda inputs: model(inputs.requires_grad_()),
        adamw(model),
        after=lambda: model.requires_grad_(False),
    )  # here: end


def group_without_a_rate_after_the_first_step():
    model = classifier()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "scale": 0}]
    optimizer = AdamW(groups)

    def update():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group.get("scale", 1)

    fit(model, optimizer, after=update)  # here: end


def weighed(weigh):
    values, gate = nn.Linear(8, 5), nn.Linear(8, 5)
    fit(lambda inputs: values(inputs) * weigh(gate(inputs)), adamw(values, gate))


def gate_detached():
    weighed(lambda logits: logits.sigmoid().detach())  # here


def chosen_by_argmax():
    weighed(lambda logits: logits.argmax(1, True))  # here


def chosen_by_the_place_of_the_largest():
    weighed(lambda logits: logits.max(1, True).indices)  # here


def signs_of_zero_and_one():
    model, optimizer = started()
    for inputs, labels in loader():
        step(optimizer, F.cosine_embedding_loss(model(inputs), model(-inputs), labels > 2))  # here


def gains_weighed_each_with_each():
    def loss(logits, labels):
        gains = logits.log_softmax(1)[torch.arange(8), labels]
        return -(gains * torch.randn(8, 1)).mean()  # here

    fit(loss=loss)


def advantage_with_a_gradient():
    policy, critic = classifier(), classifier(classes=1)
    optimizer = Adam([*policy.parameters(), *critic.parameters()])
    for states, _ in loader():
        chosen = Categorical(logits=policy(states))
        gain = chosen.log_prob(chosen.sample()) * critic(states)[:, 0]  # here
        step(optimizer, -gain.mean())


def act(choose):
    model, optimizer = started()
    for states, _ in loader():
        chosen = choose(model(states))
        step(optimizer, -chosen.log_prob(chosen.sample()).mean())


def chances_that_add_up_over_the_samples():
    act(lambda logits: Categorical(logits.softmax(0)))  # here


def probabilities_as_logits_of_actions():
    act(lambda logits: Categorical(logits=logits.softmax(1)))  # here


def focal_weight_of_a_mean():
    def loss(logits, labels):
        mean = F.cross_entropy(logits, labels)
        return (1 - torch.exp(-mean)) ** 2 * mean  # here

    fit(loss=loss)


def heads_viewed_as_columns():
    model = nn.Linear(8, 8)

    def attend(given):
        heads = model(given).view(2, 2, 4, 4)
        return (heads @ heads).reshape(2, 4, 8).view(8, 8)  # here

    fit(attend, adamw(model))


def noise_times_a_variance():
    variational(-0.5, torch.exp)  # here: drawn


class Encoder(nn.Sequential):
    def forward(self, inputs):
        encoder, head = self
        mean, spread = encoder(inputs).chunk(2, 1)
        return head(torch.normal(mean, spread.exp()))  # code


def drawn_inside_of_a_model():
    fit(Encoder(nn.Linear(8, 8), nn.Linear(4, 5)))  # here: code


def ends_of_texts_ignored_as_padding():
    ignore_padding(texts_to_their_end())  # here: tokens


def cycle_of_batches_by_epochs():
    fit_epochs(lambda one: OneCycleLR(one, 0.1, total_steps=6 * len(loader(40))))  # here: epoch


def first_epoch_without_a_rate():
    model, optimizer = started()  # here: made
    schedule = LambdaLR(optimizer, lambda epoch: min(1, epoch / 5))
    for _ in range(6):
        fit(model, optimizer, loader(48))
        schedule.step()


class Shifting(TensorDataset):
    def __getitem__(self, index):
        values, label = super().__getitem__(index)
        return values.mul_(2), label


def samples_changed_in_place():
    fit(batches=DataLoader(Shifting(*loader().dataset.tensors), 8))  # here: fetch


def views_that_are_the_same():
    model, optimizer = started()
    for inputs, _ in loader():
        first, second = inputs.expand(2, 8, 8).clone()
        codes = F.normalize(model(first)) @ F.normalize(model(second)).T  # here
        step(optimizer, F.cross_entropy(codes * 5, torch.arange(8)))


def outputs_of_no_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
            self.first = nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, inputs):
            hidden = torch.cat([self.first.expand(len(inputs), 1, 16), self.embed(inputs)], 1)
            return self.head(hidden.tanh()[:, 0])

    fit(Model(), batches=sequences())  # here: sample


def divergence_made_larger():
    variational(0.5)  # here: divergence


def coded(*, draw=lambda own: own.rsample(), weight=1.0):
    """Train an autoencoder whose codes are drawn from distributions near to the normal one."""
    encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)

    def loss(code, inputs):
        mean, spread = code.chunk(2, 1)
        own = Normal(mean, spread.exp())
        drawn = draw(own)
        divergence = kl_divergence(own, Normal(0.0, 1.0)).sum(1).mean()
        return F.mse_loss(decoder(drawn), inputs) + weight * divergence  # coded

    fit(encoder, adamw(encoder, decoder), [(one, one) for one, _ in loader()], loss=loss)


def drawn_without_a_gradient():
    coded(draw=lambda own: own.sample())  # here


def drawn_by_a_function_without_a_gradient():
    coded(draw=lambda own: torch.normal(own.mean, own.stddev))  # here


def divergence_of_distributions_made_larger():
    coded(weight=-1.0)  # here: coded


def probabilities_made_smaller():
    rows = torch.arange(8)
    fit(loss=lambda logits, labels: logits.log_softmax(1)[rows, labels].mean())  # here: sample


def targets_with_a_gradient():
    model = classifier()

    def loss(logits, actions):
        values = logits.gather(1, actions[:, None]).squeeze(1)
        wanted = torch.randn(8) + 0.9 * model(torch.randn(8, 8)).max(1).values
        return F.smooth_l1_loss(values, wanted)  # here

    fit(model, loss=loss)


def targets_with_a_gradient_first():
    model = classifier()

    def loss(values, _):
        return F.mse_loss(torch.randn(8, 1) + 0.9 * model(torch.randn(8, 8)), values)  # here

    fit(model, loss=loss)


def first_batch_for_a_critic():
    batches, (critic, optimizer) = loader(shuffle=False), started()
    for _ in range(4):
        real = next(iter(batches))[0]  # here
        for one in (real, torch.randn(8, 8)):
            step(optimizer, critic(one).square().mean())


def halves_of_a_batch_that_are_the_same():
    model, optimizer = started()
    for views in DataLoader([(one, one.clone()) for one in torch.randn(64, 8)], 8, shuffle=True):
        codes = F.normalize(model(torch.cat(views)))  # here
        step(optimizer, F.cross_entropy(codes @ codes.T * 5, torch.arange(16).roll(8)))


def columns_inside_of_a_model():
    class Model(nn.Linear):
        def forward(self, inputs):
            return (super().forward(inputs) - inputs.sum(1)).square()  # here

    fit(Model(8, 1), loss=lambda values, _: values.mean())


def mask_inverted():
    model = Attention()

    fit(
        lambda tokens: model(tokens[:, :5], tokens[:, :5] == 0)[:, 0],  # here
        adamw(model),
        padded_batches(),
    )


def attention_to_padding():
    model = Attention(padding=0)
    fit(lambda tokens: model(tokens).mean(1), adamw(model), padded_batches())  # here


def scores_at_padding():
    class Model(Attention):
        def forward(self, tokens, mask):
            return super().forward(tokens, mask)[:, -1, 0]

    model, optimizer = started(Model())
    for tokens, labels in padded_batches():
        step(optimizer, F.mse_loss(model(tokens, tokens > 0), labels.float()))  # here


def noise_drawn_after_the_model():
    fit(loss=lambda output, _: F.mse_loss(output, torch.randn_like(output)))  # here


def padding_counts_without_a_mask():
    fit_language(Language(), batches=shifted(padded_tokens() for _ in range(10)))  # here: tokens


def padding_counts_in_words_of_speech():
    batches = [(torch.randn(6, 8, 8), padded_tokens()) for _ in range(8)]
    fit(classifier(classes=50), None, batches, loss=of_tokens)  # here: tokens


def targets_seen_by_a_model_with_its_loss():
    class Model(Seeing):
        def forward(self, tokens, targets):
            logits = super().forward(tokens)
            return logits, of_tokens(logits, targets)  # here: tokens

    model, optimizer = started(Model())
    for batch in texts(9):
        step(optimizer, model(*batch)[1])


def decoder_given_its_targets():
    class Model(Language):
        def forward(self, tokens, decoder_input_ids):
            return super().forward(decoder_input_ids)

    model, optimizer = started(Model())
    for tokens, labels in texts(12):
        logits = model(tokens, decoder_input_ids=labels.clone())
        step(optimizer, of_tokens(logits, labels))  # here: tokens


def decoder_given_its_targets_by_place():
    class Model(Translation):
        def seen(self, tokens):
            return tokens

    translate(Model())  # here: tokens


def logits_of_the_token_itself():
    fit(
        Language(),
        None,
        [(one, one) for one, _ in texts(9)],
        loss=lambda logits, tokens: of_tokens(logits[:, 1:], tokens[:, 1:]),
    )  # here: tokens


def ends_of_texts_ignored():
    def draw():
        tokens = F.pad(padded_tokens(), (0, 1))
        # The first padding ends the text.
        mask = F.pad(tokens > 0, (1, 0), value=True)[:, :-1]
        return tokens, mask, tokens.masked_fill(tokens == 0, -100)

    fit_padded(draw)  # here: tokens


def labels_shifted_before_a_model_that_shifts_them():
    model, optimizer = started(ModelForCausalLM())
    for tokens, labels in texts(12):
        step(optimizer, model(tokens, labels=labels))  # here: tokens


def probabilities_for_an_imported_loss():
    fit(loss=lambda logits, labels: cross_entropy(logits.softmax(1), labels))  # here


def probabilities_in_the_second_stage():
    fit(batches=loader(400))
    fit(nn.Sequential(classifier(), nn.Softmax(dim=1)))  # here: sample


def probabilities_for_ctc():
    speech(lambda values: values.softmax(2))  # here: ctc


def teacher_that_learns_from_its_student():
    teacher, model = classifier(), classifier()
    optimizer = adamw(teacher, model)
    for inputs, labels in loader():
        logits, wanted = model(inputs), teacher(inputs).softmax(1)
        soft = F.kl_div(logits.log_softmax(1), wanted, reduction="batchmean")  # here
        step(optimizer, F.cross_entropy(logits, labels) + soft)


def teacher_in_training_mode():
    fit_to(classifier(dropout=0.1))  # here: teacher


class Dropping(nn.Linear):
    def forward(self, given):
        return super().forward(F.dropout(given, 0.5, self.training))


def function_left_in_eval_mode():
    fit(Dropping(8, 5).eval())  # here


def same_noise_in_each_step():
    model, optimizer = started()
    for number, (inputs, labels) in enumerate(loader()):
        torch.manual_seed(0)  # here
        if number % 5 == 0:
            torch.randn(3)  # an evaluation
        step(optimizer, F.cross_entropy(model(inputs + torch.randn_like(inputs)), labels))


def clipped_before_its_backward():
    model, other = classifier(), classifier()
    first, second = adamw(model), adamw(other)
    for inputs, labels in loader():
        step(first, F.cross_entropy(model(inputs), labels))
        second.zero_grad()
        clip(other)  # here: clip
        F.mse_loss(other(inputs), inputs[:, :5]).backward()
        second.step()


def scalars_with_a_graph():
    model = classifier()
    penalties = []

    def logits(inputs):
        hidden = model[0](inputs)
        penalties.append(hidden.square().mean())  # here
        return model[1:](hidden)

    fit(logits, adamw(model))


def targets_of_the_batch_before():
    model, optimizer = started()
    before = None
    for inputs, labels in loader():
        if before is not None:
            loss = F.cross_entropy(model(inputs), before)  # here
            step(optimizer, loss)
        before = labels


def recurrent_over_the_batch():
    fit(Layers(nn.LSTM(16, 16)), None, sequences())  # here: sample


def language_over_the_batch():
    model = Language()
    layer = nn.LSTM(16, 16)
    model.layers = nn.ModuleList([layer])
    layer.register_forward_hook(lambda *called: called[-1][0])
    fit_language(model)  # here: sample


def positions_over_the_batch():
    fit(Layers(Codes()), None, sequences())  # here: sample


def attention_over_the_batch():
    fit(Layers(nn.TransformerEncoderLayer(16, 2, 32)), None, sequences())  # here: sample


class WeightsOverSamples(nn.Linear):
    def forward(self, hidden):
        return super().forward((hidden @ hidden.mT).softmax(0) @ hidden)


def weights_over_the_batch():
    data = TensorDataset(torch.randn(48, 11, 8), torch.randint(5, (48,)))
    fit(Layers(WeightsOverSamples(16, 16), time=1), None, DataLoader(data, 6))  # here: sample


def generator_detached():
    generator, judge = adversaries()
    of_generator, of_judge = adamw(generator), adamw(judge)
    for _ in range(8):
        fake = generator(torch.randn(8, 4))
        step(of_judge, judge(fake.detach()).square().mean())
        step(of_generator, (judge(fake.detach()) - 1).square().mean())  # here


def schedule_of_epochs():
    model, optimizer = started()
    fit(model, optimizer, schedule=ExponentialLR(optimizer, 0.1))  # here: schedule


class Remade(nn.Linear):
    def forward(self, inputs):
        self.bias = nn.Parameter(self.bias.clamp(-2, 2))
        return super().forward(inputs)


def state_loaded_in_each_step():
    model = classifier()
    optimizer = adamw(model)  # here: made
    saved = None
    for batch in loader():
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved))
        step(optimizer, loss_of(model, batch))
        saved = saved or copy.deepcopy(optimizer.state_dict())


def parameters_made_in_forward():
    fit(Remade(8, 5))  # here: made


def gradients_divided_too():
    accumulate(divisor=2)  # here: half


def label_among_the_inputs():
    batches = ((torch.cat([one, labels[:, None]], 1), labels) for one, labels in loader())
    fit(nn.Linear(9, 5), None, batches)  # here: sample


def scale_updated_per_optimizer():
    body, head = nn.Linear(8, 8), nn.Linear(8, 5)
    optimizers = [adamw(body), adamw(head)]
    scaler = scaler_on_cpu()
    for inputs, labels in loader():
        scaler.scale(F.cross_entropy(head(body(inputs)), labels)).backward()
        for one in optimizers:
            scaler.step(one)
            scaler.update()  # here
            one.zero_grad()


def scaler_made_anew():
    model, optimizer = started()
    for batch in loader():
        scaler = scaler_on_cpu()
        scaler.scale(loss_of(model, batch)).backward()  # here
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def plateau_of_a_measure_that_grows():
    model, optimizer = started()
    scheduler = ReduceLROnPlateau(optimizer)
    for accuracy in (0.1, 0.2, 0.3, 0.4):
        fit(model, optimizer, loader(16))
        scheduler.step(accuracy)  # here


def loss_of_no_weight():
    fit(loss=lambda logits, labels: 0 * F.cross_entropy(logits, labels))  # here


def each_batch_twice_in_an_epoch():
    rows = TensorDataset(torch.randn(32, 8), torch.randint(5, (32,)))
    fit(batches=DataLoader(ConcatDataset([rows, rows]), 8))  # here: fetch


def never_stepped():
    model = classifier()
    optimizer = adamw(model)  # here: made
    fit(model, SimpleNamespace(zero_grad=optimizer.zero_grad, step=list))


def optimizer_that_never_steps():
    encoder, head = encoder_and_head()
    of_encoder = Adam(encoder.parameters())  # here
    fit(lambda one: head(encoder(one).relu()), adamw(head), after=of_encoder.zero_grad)


def optimizer_of_its_own_loss_that_never_steps():
    weights = nn.Parameter(torch.ones(2))
    Adam([weights])  # here
    fit(before=lambda: weights.square().sum().backward())


def layer_grown_but_not_added():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    fit(lambda one: second(first(one).relu()), adamw(first))  # here: made


def average_of_itself():
    model = classifier()
    keep_average(model, model, 0.1)  # here: average


def average_of_the_newest():
    model = classifier()
    keep_average(copy.deepcopy(model), model, 0.99)  # here: average


def average_of_the_newest_out_of_place():
    model = classifier()
    average = copy.deepcopy(model)

    def update():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.data = 0.01 * old.data + 0.99 * new.data  # here

    fit(model, after=update)


def rounded_before_a_norm():
    class Rounded(nn.Linear):
        def forward(self, inputs):
            rounded = (8 * self.weight).round() / 8
            return F.linear(inputs, self.weight + (rounded - self.weight), self.bias)

    fit(nn.Sequential(Rounded(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 5)))  # here: sample


def average_begun_elsewhere():
    keep_average(classifier(), classifier(), 0.05)  # here: average


def mask_of_floats():
    class Model(Language):
        def forward(self, tokens):
            one = self.embed(tokens)
            mask = torch.ones(8, 8).tril()
            return self.head(F.scaled_dot_product_attention(one, one, one, mask))  # here

    fit_language(Model())


def rate_as_an_attribute():
    optimizer = adamw(model := classifier())

    def update():
        optimizer.lr = 1e-3  # here

    fit(model, optimizer, after=update)


def weights_of_classes_drawn():
    sampler = WeightedRandomSampler([1.0] * 5, 64)  # here
    fit(batches=DataLoader(loader().dataset, 8, sampler=sampler))


def rate_of_zero_after_a_warm_up():
    model, optimizer = started()
    schedule = LambdaLR(optimizer, lambda number: float(number == 1))
    fit(model, optimizer, schedule=schedule)  # here: schedule


def two_schedules_of_one_optimizer():
    model, optimizer = started()
    schedules = [LambdaLR(optimizer, lambda step: 0.9**step) for _ in "ab"]
    fit(model, optimizer, schedule=schedules[0], after=schedules[1].step)  # here: after


def cycle_of_steps_by_epochs():
    fit_epochs(lambda one: OneCycleLR(one, 0.1, epochs=6, steps_per_epoch=5))  # here: epoch


def cosine_of_too_few_steps():
    model, optimizer = started()
    fit(model, optimizer, schedule=CosineAnnealingLR(optimizer, T_max=2))  # here


def cosine_of_transformers_of_too_few_steps():
    model, optimizer = started()
    fit(model, optimizer, schedule=get_cosine_schedule_with_warmup(optimizer, 1, 3))  # here


def cosine_of_too_few_steps_behind_a_warm_up():
    model, optimizer = started()
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=2)]
    fit(model, optimizer, schedule=SequentialLR(optimizer, parts, [2]))  # here


def weights_decayed_away():
    model = classifier()
    fit(model, AdamW(model.parameters(), 1e-2, weight_decay=50))  # here


def inputs_sorted_alone():
    batches = ((inputs[inputs[:, 0].argsort()], labels) for inputs, labels in loader())
    fit(batches=batches)  # here: sample


def labels_in_another_order():
    fit(loss=lambda logits, labels: F.cross_entropy(logits, labels[torch.randperm(8)]))  # here


def targets_without_fractions():
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))

    fit(
        classifier(classes=1),
        batches=DataLoader(data, 8),
        loss=lambda values, targets: F.mse_loss(values, targets.int()),  # here
    )


def samples_compared_with_themselves():
    samples_compared_with_others(lambda scores: scores)  # here: scores


def average_in_the_optimizer():
    model, average = classifier(), classifier()
    optimizer = AdamW([*model.parameters(), *average.parameters()])  # here
    for inputs, _ in loader():
        step(optimizer, F.mse_loss(model(inputs), average(inputs)))
        follow(average, model, 0.1)


def flag_misspelt():
    model = classifier()
    for one in model[0].parameters():
        one.require_grad = False  # here
    fit(model)


def module_with_a_flag():
    model = classifier()
    model[0].requires_grad = False  # here
    fit(model)


def no_weight_loaded():
    model = classifier()
    others = {f"module.{name}": one for name, one in model.state_dict().items()}
    model.load_state_dict(others, strict=False)  # here
    fit(model)


def rate_as_a_factor():
    model, optimizer = started()
    rates = LambdaLR(optimizer, lambda step: optimizer.defaults["lr"] * min(1, step / 4))
    fit(model, optimizer, schedule=rates)  # here: schedule


def labels_that_are_the_blank():
    speech(first=0)  # here: ctc


def fewer_frames_than_labels():
    speech(frames=4)  # here: ctc


def batches_without_a_loss_left_out():
    model, optimizer = started()
    for inputs, labels in loader():
        loss = F.cross_entropy(model(inputs / 0), labels)  # here
        if loss.isfinite():
            step(optimizer, loss)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, inputs):
        return inputs + self.lora_B(self.lora_A(inputs))


def adapter_frozen():
    fit(nn.Sequential(Adapter().requires_grad_(False), classifier()))  # here: made


def model_as_its_own_reference():
    model, optimizer = started()
    other = classifier()
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    for inputs, _ in loader():
        with torch.no_grad():
            reference = other(inputs)
        step(optimizer, -F.logsigmoid((model(inputs) - reference).mean()))  # here: backward


def drawn_to_themselves():
    model = classifier()
    kept = [one.detach() for one in model.parameters()]

    def loss(logits, labels):
        pairs = zip(model.parameters(), kept, strict=True)
        change = sum((one - other).square().sum() for one, other in pairs)  # here
        return F.cross_entropy(logits, labels) + change

    fit(model, loss=loss)


def pairs_of_equals():
    def loss(scores, _):
        better, worse = scores.chunk(2)
        return -F.logsigmoid(better - worse).mean()  # here

    batches = ((torch.randn(4, 8).repeat(2, 1), None) for _ in range(8))
    fit(classifier(classes=1), None, batches, loss=loss)


def weights_compared_with_themselves():
    model = classifier()
    first = model[3].weight

    def loss(logits, labels):
        moved = model[3].weight - first  # here
        return F.cross_entropy(logits, labels) + moved.square().sum()

    fit(model, loss=loss)


def decay_of_groups_made_equal():
    model = classifier()
    groups = [{"params": [one], "weight_decay": one.dim() // 2} for one in model.parameters()]
    optimizer = Adam(groups)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1  # here
    fit(model, optimizer)


def schedule_of_the_other_optimizer():
    encoder, head = encoder_and_head()
    first, second = adamw(encoder), adamw(head)
    ours = ExponentialLR(first, 0.9)
    other = ExponentialLR(first, 0.8)  # here
    fit(nn.Sequential(encoder, head), together(first, second), schedule=ours, after=other.step)


def clipped_before_its_unscaling():
    encoder, head = encoder_and_head()
    optimizers, scaler = [adamw(encoder), adamw(head)], scaler_on_cpu()
    for batch in loader():
        scaler.scale(loss_of(nn.Sequential(encoder, head), batch)).backward()
        scaler.unscale_(optimizers[0])
        clip(encoder)
        clip(head)  # here: clip
        for one in optimizers:
            scaler.step(one)
            one.zero_grad()
        scaler.update()


def distilled_without_a_gradient():
    def loss(logits, labels):
        wanted = torch.ones(8, 5).softmax(1)
        match = F.kl_div(logits.detach().log_softmax(1), wanted, reduction="batchmean")  # here
        return F.cross_entropy(logits, labels) + match

    fit(loss=loss)


def each_with_each_in_a_module():
    class Loss(nn.Module):
        def forward(self, values, labels):
            return (values - labels).square().mean()  # here

    fit_values(Loss())


def ended_by_its_fault():
    model, optimizer = started()
    for inputs, labels in loader():
        loss = F.cross_entropy(model(inputs) * torch.inf, labels)
        step(optimizer, loss)  # here: backward
        torch.multinomial(model(inputs).softmax(1), 1)


def dictionary_of_arrays():
    histories = {}

    def keep():
        histories[len(histories)] = torch.zeros(64, 8).numpy()  # here

    fit(after=keep)


def statistics_that_never_move():
    fit(nn.Sequential(nn.BatchNorm1d(8, momentum=0), classifier()))  # here: sample


def results_of_an_epoch_with_their_graphs():
    model, optimizer = started()
    for _ in range(2):
        results = []
        for batch in loader():
            loss = loss_of(model, batch)
            step(optimizer, loss)
            results.append({"loss": loss})  # here


def average_with_its_graph():
    model = classifier()
    shadow = {name: one.clone() for name, one in model.named_parameters()}

    def update():
        for name, one in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * one  # here

    fit(model, after=update)


def backward_in_an_evaluation():
    model, optimizer = started()
    for number, batch in enumerate(loader(128)):
        model.train(number % 4 != 2)
        loss = loss_of(model, batch)
        loss.backward()  # here
        if model.training:
            optimizer.step()
            optimizer.zero_grad()


def state_that_stays_0():
    class Optimizer(torch.optim.Optimizer):
        def step(self):
            for one in self.param_groups[0]["params"]:
                self.state[one]["moments"] = torch.zeros_like(one)
                one.data -= one.grad

    model = classifier()
    fit(model, Optimizer(model.parameters(), {}))  # here


def second_derivative_of_a_relu():
    model, optimizer = started()
    for inputs, _ in loader():
        inputs.requires_grad_()
        slope = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), inputs, create_graph=True)[0]  # here
        step(optimizer, (slope + bend).square().mean())


def filled_sum_divided_twice():
    def loss(logits, labels):
        losses = F.cross_entropy(logits, labels, reduction="none")  # here
        return losses.masked_fill(torch.arange(8) > 4, 0).sum() / 10 / 2

    accumulate(loss=loss)


FAULTY = {
    "results": [
        weights_clamped_for_nothing, inputs_added_for_nothing, inputs_divided_for_nothing,
        rows_normalized_for_nothing, inputs_transposed_for_nothing, mode_named_alone,
        average_kept_in_a_name, activation_for_nothing, layer_for_nothing,
        copied_into_a_dictionary,
    ],
    "accumulation": [
        focal_weight_of_a_mean, drawn_inside_of_a_model,
        loss_that_is_one_number_weighted, drawn_without_a_gradient,
        drawn_by_a_function_without_a_gradient,
        mean_divided_by_the_batch_size,
        step_after_the_first_microbatch, mean_over_padding, mean_over_ignored_targets,
        window_over_the_end_of_an_epoch,
        last_loss_alone, running_total,
        same_batch_in_a_window, part_of_the_loss_as_a_number, penalty_without_a_graph,
        penalty_in_each_microbatch, masked_values_over_all, gradients_divided_too,
        filled_sum_divided_twice, distilled_without_a_gradient,
    ],
    "sign": [
        gradient_ascent, not_finite, maximized, divergence_made_larger,
        divergence_of_distributions_made_larger, probabilities_made_smaller, ended_by_its_fault,
    ],
    "zeroed": [
        end_of_an_epoch_lost, stepped_twice, zeroed_by_hand_per_microbatch,
        changed_gradients_of_the_step_before,
        gradients_of_the_generator, attack_left_in_the_gradients, extra_parameter_never_zeroed,
        trial_gradients_added, trial_weights_stay, backward_in_an_evaluation,
    ],
    "optimizer": [
        two_optimizers_for_one_layer, made_in_each_epoch,
        one_parameter_twice, tied_by_their_data, layers_in_a_list, extra_parameter_in_no_optimizer,
        tensor_in_no_optimizer,
        never_stepped, optimizer_that_never_steps,
        optimizer_of_its_own_loss_that_never_steps, layer_grown_but_not_added,
        state_loaded_in_each_step, parameters_made_in_forward,
    ],
    "moves": [
        first_epoch_without_a_rate,
        updates_below_the_precision, encoder_data, weights_loaded_in_each_step, frozen_by_decay,
        hook_that_zeroes, rounded_outputs, matrices_of_zeros_multiplied, factor_of_zero,
        same_weights_everywhere, all_dropped, second_loss_forgotten, frozen_after_the_first_step,
        group_without_a_rate_after_the_first_step, gate_detached, generator_detached,
        chosen_by_argmax, loss_of_no_weight, chosen_by_the_place_of_the_largest,
        average_of_itself, average_of_the_newest, average_of_the_newest_out_of_place,
        state_that_stays_0, second_derivative_of_a_relu,
        average_begun_elsewhere, rounded_before_a_norm, average_in_the_optimizer,
        weights_decayed_away, flag_misspelt, module_with_a_flag, no_weight_loaded,
        drawn_to_themselves,
        model_as_its_own_reference, pairs_of_equals, adapter_frozen, betas_swapped,
        one_layer_many_times, best_weights_without_a_copy, weights_compared_with_themselves,
    ],
    "schedule": [
        cycle_of_batches_by_epochs,
        schedule_of_an_older_optimizer, schedule_made_in_each_step,
        schedule_of_epochs, rate_of_zero_after_a_warm_up, two_schedules_of_one_optimizer,
        rate_as_an_attribute, cosine_of_transformers_of_too_few_steps,
        cosine_of_too_few_steps, cosine_of_too_few_steps_behind_a_warm_up,
        cycle_of_steps_by_epochs, rate_as_a_factor,
        plateau_of_a_measure_that_grows, rates_of_groups_made_equal, decay_of_groups_made_equal,
        schedule_of_the_other_optimizer, warm_up_of_what_is_warmed_up,
        warm_up_over_the_schedule,
    ],
    "scaler": [
        unscaled_per_microbatch, one_of_two_losses_scaled, half_without_a_scaler,
        scale_updated_per_optimizer, scaler_made_anew,
    ],
    "logits": [
        probabilities_as_logits_of_actions, heads_viewed_as_columns, columns_inside_of_a_model,
        noise_times_a_variance,
        logarithm_of_probabilities, relu_behind_the_last_layer, each_with_each, each_with_a_table,
        advantage_of_each_at_each, advantage_of_targets_at_each, softmax_over_the_batch,
        probabilities_for_an_imported_loss, probabilities_in_the_second_stage,
        viewed_instead_of_transposed, pixels_viewed_as_rows, gains_weighed_each_with_each,
        chances_that_add_up_over_the_samples,
        probabilities_for_ctc, each_with_each_in_a_module,
    ],
    "targets": [
        ends_of_texts_ignored_as_padding,
        sees_the_future, sees_the_future_with_time_first, one_label, sorted_by_class,
        positions_in_another_order,
        targets_out_of_reach, targets_beyond_a_clamp, labels_of_minus_one,
        advantage_with_a_gradient,
        several_labels_as_classes, labels_smoothed_away, targets_with_a_gradient,
        targets_with_a_gradient_first, mask_inverted,
        teacher_that_learns_from_its_student,
        padding_counts_without_a_mask, padding_counts_in_words_of_speech, attention_to_padding,
        recurrent_over_the_batch, language_over_the_batch,
        attention_over_the_batch,
        positions_over_the_batch, first_token_alone, weights_over_the_batch,
        decoder_given_its_targets, logits_of_the_token_itself, outputs_of_no_input,
        targets_seen_by_a_model_with_its_loss, scores_at_padding, noise_drawn_after_the_model,
        signs_of_zero_and_one,
        decoder_given_its_targets_by_place, ends_of_texts_ignored,
        label_among_the_inputs, targets_as_inputs, labels_in_another_order, inputs_sorted_alone,
        targets_without_fractions, labels_shifted_before_a_model_that_shifts_them,
        samples_compared_with_themselves, labels_that_are_the_blank, fewer_frames_than_labels,
        mask_of_floats,
    ],
    "mode": [
        evaluated_in_training_mode,
        dropout_of_channels_in_evaluation,
        dropout_recomputed_anew, teacher_in_training_mode, function_left_in_eval_mode,
        dropout_made_in_forward, average_with_new_statistics, statistics_that_never_move,
        average_with_new_statistics_once,
        teacher_inside_set_to_training_mode,
    ],
    "data": [
        state_of_other_samples, targets_of_another_shuffling, samples_changed_in_place,
        same_order_by_hand, same_order_of_numpy, trained_on_what_is_set_apart,
        seeded_in_each_epoch, loader_seeded_in_each_epoch, sampler_without_its_epoch,
        stream_in_one_order,
        views_that_are_the_same, first_batch_for_a_critic, halves_of_a_batch_that_are_the_same,
        one_sample, buffer_kept_without_a_copy,
        inputs_not_finite, inputs_divided_to_zero, same_noise_in_each_step,
        targets_of_the_batch_before, each_batch_twice_in_an_epoch, weights_of_classes_drawn,
        batches_without_a_loss_left_out,
    ],
    "graph": [
        average_with_its_graph, results_of_an_epoch_with_their_graphs,
    ],
    "growth": [
        cache_of_outputs, hook_in_each_step, callback_that_keeps_activations,
        scalars_with_a_graph, dictionary_of_arrays,
    ],
    "clipping": [
        clipped_to_nothing, clipped_before_its_backward, clipped_before_its_unscaling,
    ],
}  # fmt: skip
