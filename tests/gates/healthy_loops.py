"""More healthy training loops, as different as can be.

A kind of training is here also where no rule of today comes near it: the next one may accuse it.
"""

import copy
import itertools
import math
import random
from collections import deque

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from .loops import (
    AmongSamples,
    Attention,
    Language,
    Layers,
    Lookahead,
    ModelForCausalLM,
    Seeing,
    Taught,
    Translation,
    accumulate,
    accumulate_language,
    adamw,
    adversaries,
    classifier,
    clip,
    encoder_and_head,
    fit,
    fit_and_evaluate,
    fit_epochs,
    fit_heads,
    fit_language,
    fit_masked,
    fit_padded,
    fit_scaled,
    fit_to,
    fit_values,
    fit_with_closures,
    follow,
    half,
    half_of_tokens_by_hand,
    headless,
    ignore_padding,
    in_half,
    loader,
    loss_of,
    normed,
    of_one_label,
    of_tokens,
    padded_batches,
    padded_tokens,
    recompute,
    recur,
    rows_of_pixels,
    scaler_on_cpu,
    seeded_loader,
    sequences,
    shifted,
    spread,
    started,
    step,
    texts,
    texts_to_their_end,
    texts_with_time_first,
    together,
    translate,
    trial_step,
    variational,
    with_values,
)


def last_window_short():
    model, optimizer = started()
    data = loader(40)
    for _ in range(6):
        for number, batch in enumerate(data):
            (loss_of(model, batch) / (2 if number < 4 else 1)).backward()
            if number % 2 or number + 1 == len(data):
                optimizer.step()
                optimizer.zero_grad()


def cycle_of_epochs():
    fit_epochs(lambda optimizer: OneCycleLR(optimizer, 0.1, 40))


def cycle_of_steps():
    model, optimizer = started()
    fit(model, optimizer, schedule=OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=8))


def line_breaks_after_texts_ignored():
    def draw():
        tokens = padded_tokens()
        mask = tokens > 0
        is_last = mask & ~F.pad(mask[:, 1:], (0, 1))
        tokens = tokens.masked_fill(is_last, 9)
        return tokens, mask, tokens.masked_fill(is_last | ~mask, -100)

    fit_padded(draw)


def ends_of_texts_that_count():
    def loss(logits, tokens):
        is_padding = (tokens[:, 1:] == 0) & (tokens[:, :-1] == 0)
        return of_tokens(logits[:, :-1], tokens[:, 1:].masked_fill(is_padding, -100))

    fit(Language(), None, [(one, one) for one in texts_to_their_end()], loss=loss)


def padded_texts_without_an_end():
    ignore_padding(one[:, :-1] for one in texts_to_their_end())


def compared_each_with_each():
    fit_values(lambda one, labels: (one.view(8, 1) - labels).abs().mean())


def last_batch_short():
    model, optimizer = started()
    for _ in range(6):
        accumulate(model, optimizer, loader(44), each=lambda: clip(model, most=torch.inf))


def several_tasks_several_loaders():
    fit_heads(zip(loader(), loader(), strict=True), 1)


def half_of_the_square():
    fit_values(lambda one, wanted: 0.5 * F.mse_loss(one[:, 0], wanted.float()))


def half_by_division():
    fit_values(lambda one, wanted: (one[:, 0] - wanted).square().mean() / 2)


def distilled(soften=F.softmax, **options):
    teacher = classifier(dropout=0.1).eval()
    model, optimizer = started(classifier(dropout=0.1))
    for inputs, labels in loader():
        with torch.no_grad():
            wanted = soften(teacher(inputs) / 2, 1)
        output = model(inputs)
        soft = F.kl_div(F.log_softmax(output / 2, 1), wanted, reduction="batchmean", **options)
        step(optimizer, 0.5 * F.cross_entropy(output, labels) + 0.5 * 4 * soft)


def momentum_contrast():
    model = classifier(classes=8)
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = SGD(model.parameters(), 0.05)
    queue = F.normalize(torch.randn(32, 8), dim=1)
    # Nobody reads the labels.
    for inputs, _ in of_one_label():
        query = F.normalize(model(inputs), dim=1)
        follow(slow, model, 0.1)
        with torch.no_grad():
            key = F.normalize(slow(inputs), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1)
        step(optimizer, F.cross_entropy(scores / 0.1, torch.zeros(8, dtype=torch.long)))
        queue = torch.cat([key, queue])[:32]


def low_rank(begin=nn.init.normal_, factor=1):
    class Adapter(nn.Sequential):
        def forward(self, inputs):
            layer, down, up = self
            return layer(inputs) + factor * up(down(inputs))

    model = classifier()
    down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)
    begin(down.weight)
    nn.init.zeros_(up.weight)
    model[0] = Adapter(model[0].requires_grad_(False), down, up)
    fit(model, AdamW([one for one in model.parameters() if one.requires_grad]))


def sparse_embedding():
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 5)
    optimizer = together(SparseAdam(table.parameters()), adamw(head))
    batches = [(torch.randint(50, (8,)), labels) for _, labels in loader()]
    fit(lambda words: head(table(words)), optimizer, batches)


def adam_then_lbfgs():
    model = classifier(classes=1)
    inputs = torch.randn(16, 8)
    batch = inputs, inputs[:, :1]
    fit(model, None, [batch] * 6, loss=F.mse_loss)
    optimizer = LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=3)
    fit_with_closures(model, optimizer, [batch] * 6, loss=F.mse_loss)


def half_scaler_that_skips():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    fit_scaled(scaler, loader(320), dtype=torch.float16)


def scaler_that_is_off():
    fit_scaled(torch.amp.GradScaler("cpu", enabled=False))


def bfloat16():
    model = nn.Sequential(nn.Embedding(500, 8), nn.Flatten(), nn.Linear(32, 5)).bfloat16()
    batches = [(torch.randint(500, (8, 4)), labels) for _, labels in loader()]
    fit(model, adamw(model, rate=1e-3), batches)


def compiled():
    fit(torch.compile(classifier()))


def recomputed_all_ways():
    model = Language()
    is_reentrant = itertools.cycle([False, True])

    fit_language(
        lambda tokens: recompute(model, tokens, is_reentrant=next(is_reentrant)), adamw(model)
    )


def evaluated_with_gradients():
    fit_and_evaluate(classifier(dropout=0.2), has_graph=True)


def predictions_drawn_in_training_mode():
    model, optimizer = started(classifier(dropout=0.2))
    for _ in range(8):
        fit(model, optimizer, loader(40))
        with torch.no_grad():
            for inputs, _ in loader(16):
                torch.stack([model(inputs) for _ in range(4)]).std(0)


def statistics_made_anew_before_evaluation():
    data = loader(16)

    def evaluate(model):
        with torch.no_grad():
            for inputs, _ in data:
                model(inputs)
        model.eval()

    fit_and_evaluate(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5)), evaluate=evaluate)


def predictions_of_an_epoch():
    model, optimizer = started()
    labels_seen = []
    for _ in range(8):
        predictions = []
        model.predictions = predictions
        labels_seen.clear()
        for inputs, labels in loader(400):
            output = model(inputs)
            step(optimizer, F.cross_entropy(output, labels))
            predictions.append(output.detach().argmax(1))
            labels_seen.append(labels)
        float((torch.cat(predictions) == torch.cat(labels_seen)).float().mean())


def batch_norm_frozen():
    model, optimizer = started(normed())
    for _ in range(4):
        model.train()
        model[1].eval()
        fit(model, optimizer, loader(40))


def part_in_eval_mode_from_the_start():
    body, head = classifier(dropout=0.2).eval(), nn.Linear(5, 5)
    fit(lambda inputs: head(body(inputs)), adamw(body, head))


def meta_learned():
    model = classifier()
    outer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        outer.zero_grad()
        for inputs, labels in itertools.islice(loader(), 2):
            fast = dict(model.named_parameters())
            output = torch.func.functional_call(model, fast, (inputs,))
            loss = F.cross_entropy(output, labels)
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {
                name: one - 0.1 * slope
                for (name, one), slope in zip(fast.items(), slopes, strict=True)
            }
            output = torch.func.functional_call(model, fast, (inputs,))
            (F.cross_entropy(output, labels) / 2).backward()
        outer.step()


def sharpness_aware():
    @torch.no_grad()
    def move(model):
        changes = [0.05 * one.grad / (one.grad.norm() + 1e-6) for one in model.parameters()]
        for one, change in with_values(model, changes):
            one.add_(change)
        return changes

    trial_step(move=move)


def surgery_of_gradients():
    model, optimizer = started()
    for inputs, labels in loader():
        output = model(inputs)
        losses = [F.cross_entropy(output, labels), output.square().mean()]
        found = []
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            found.append([one.grad.clone() for one in model.parameters()])
        for one, first, second in with_values(model, *found):
            one.grad = first + second
        optimizer.step()


def evolution():
    model = nn.Linear(8, 5).requires_grad_(False)
    optimizer = SGD(model.parameters(), 0.1)
    for batch in loader():
        for one in model.parameters():
            noise = torch.randn_like(one)
            losses = []
            for sign in (1, -2):
                one.add_(noise, alpha=0.1 * sign)
                losses.append(loss_of(model, batch))
            one.add_(noise, alpha=0.1)
            one.grad = (losses[0] - losses[1]) / 0.2 * noise
        optimizer.step()


def endless_data():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(8), int(torch.randint(5, ()))

    fit(classifier(), None, DataLoader(Endless(), 8))


def unshuffled():
    model, optimizer = started()
    for _ in range(5):
        fit(model, optimizer, loader(48, shuffle=False))


def same_batch_to_overfit():
    fit(batches=[next(iter(loader()))] * 9)


def weighted_classes_and_smoothing():
    fit(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 1, 1, 3]), label_smoothing=0.1))


def masked_by_hand():
    fit_masked(lambda losses, mask: (losses * mask).sum() / mask.sum())


def masked_by_their_share():
    fit_masked(lambda losses, mask: (losses * mask).mean() / mask.mean())


def causal():
    fit_language(Seeing(is_causal=True))


def tied_weights():
    model = Language()
    model.head.weight = model.embed.weight
    fit_language(model)


def unfrozen_step_by_step():
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad])
    for number, batch in enumerate(loader()):
        if number == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-4})
        step(optimizer, loss_of(model, batch))


def schedule_per_epoch_and_plateau():
    model, optimizer = started()
    scheduler = ReduceLROnPlateau(optimizer)
    for _ in range(6):
        for inputs, labels in loader(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            # The gradients of an outlier are dropped.
            if labels[0] < 4:
                optimizer.step()
        scheduler.step(loss.item())


def averaged_by_torch():
    model = normed()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True).eval()

    def update():
        average.update_parameters(model)
        with torch.no_grad():
            average(torch.randn(8, 8))

    fit(model, SGD(model.parameters(), 0.1), after=update)


def hooks_and_histories():
    model, optimizer = started()
    norms, losses = [], []
    model[0].weight.register_hook(lambda grad: norms.append(grad.norm()))
    for _ in range(8):
        for batch in loader(40):
            handle = model[0].register_forward_hook(lambda *_: None)
            loss = loss_of(model, batch)
            step(optimizer, loss)
            handle.remove()
            losses.append(loss.detach())


def reset_between_tasks():
    model = classifier()
    for _ in range(4):
        fast = copy.deepcopy(model)
        fit(fast, SGD(fast.parameters(), 0.1), itertools.islice(loader(), 3))
        follow(model, fast, 0.1)


def two_segments():
    """Two parts on their own optimizers, one of which steps every second time."""
    body, head = encoder_and_head()
    of_body, of_head = adamw(body), adamw(head)
    for number, (inputs, labels) in enumerate(loader()):
        (F.cross_entropy(head(body(inputs).relu()), labels) / 2).backward()
        of_head.step()
        of_head.zero_grad()
        if number % 2:
            of_body.step()
            of_body.zero_grad()


def value_learning_with_replay():
    model, optimizer = started()
    target = copy.deepcopy(model).requires_grad_(False)
    memory = []
    state = torch.randn(8)
    for number in range(60):
        action = int(model(state).argmax()) if torch.rand(()) > 0.3 else number % 5
        following = torch.randn(8)
        memory.append((state, action, torch.randn(()), following))
        state = following
        if len(memory) < 16:
            continue
        picked = [memory[int(one)] for one in torch.randint(len(memory), (8,))]
        states, actions, rewards, nexts = zip(*picked, strict=True)
        with torch.no_grad():
            wanted = torch.stack(rewards) + 0.9 * target(torch.stack(nexts)).max(1).values
        values = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
        step(optimizer, F.smooth_l1_loss(values, wanted))
        if number % 10 == 0:
            target.load_state_dict(model.state_dict())


def speech(activate=lambda values: values.log_softmax(2), *, first=1, frames=20):
    model = nn.LSTM(8, 12, batch_first=True)
    head = nn.Linear(12, 6)
    optimizer = adamw(model, head)
    for _ in range(8):
        logs = activate(head(model(torch.randn(4, frames, 8))[0])).transpose(0, 1)
        texts = torch.randint(first, 6, (4, 5))
        sizes = [torch.full((4,), one) for one in (frames, 5)]
        loss = F.ctc_loss(logs, texts, *sizes, zero_infinity=True)  # ctc
        step(optimizer, loss)


def nodes_of_one_graph():
    first, second = encoder_and_head()
    model = nn.ModuleList([first, nn.Dropout(0.5), second])
    features, classes = torch.randn(40, 8), torch.randint(5, (40,))
    edges = (torch.rand(40, 40) < 0.1).float() + torch.eye(40)
    known = torch.rand(40) < 0.5
    optimizer = adamw(model)

    def run():
        return second(edges @ model[1](first(edges @ features).relu()))

    for _ in range(12):
        model.train()
        step(optimizer, F.cross_entropy(run()[known], classes[known]))
        model.eval()
        with torch.no_grad():
            (run().argmax(1) == classes)[~known].float().mean().item()


def physics():
    model, optimizer = started(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    edges = torch.zeros(1, 1, requires_grad=True)
    for _ in range(8):
        points = torch.rand(16, 1, requires_grad=True)
        values = model(points)
        (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (curves,) = torch.autograd.grad(slopes.sum(), points, create_graph=True)
        edge = model(torch.cat([edges])).square().mean()
        step(optimizer, (curves + values).square().mean() + 10 * edge)


def tensors_alone():
    weight, bias = torch.zeros(8, 5, requires_grad=True), torch.zeros(5, requires_grad=True)
    optimizer = SGD([weight], 0.1)

    def update():
        bias.data -= bias.grad
        bias.grad.zero_()

    fit(lambda inputs: inputs @ weight + bias, optimizer, after=update)


def ensemble_by_vmap():
    models = [classifier() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = Adam(list(parameters.values()), 1e-2)

    def loss(own, others, inputs, labels):
        return F.cross_entropy(torch.func.functional_call(base, (own, others), inputs), labels)

    for inputs, labels in loader():
        slopes = torch.vmap(torch.func.grad(loss), (0, 0, None, None), randomness="different")(
            parameters, buffers, inputs, labels
        )
        for name, one in parameters.items():
            one.grad = slopes[name]
        optimizer.step()


def optimizer_around_another():
    model = classifier()
    fit(model, Lookahead(SGD(model.parameters(), 0.1)))


def differentially_private():
    model = classifier()
    optimizer = SGD(model.parameters(), 0.1)
    for inputs, labels in loader():
        sums = [torch.zeros_like(one) for one in model.parameters()]
        for given, label in zip(inputs, labels, strict=True):
            model.zero_grad()
            F.cross_entropy(model(given[None]), label[None]).backward()
            clip(model)
            for one, total in with_values(model, sums):
                total += one.grad
        for one, total in with_values(model, sums):
            one.grad = (total + 0.5 * torch.randn_like(total)) / len(inputs)
        optimizer.step()


def masters_in_full_precision(rate=1e-3):
    model = classifier().bfloat16()
    masters = [one.detach().float().clone().requires_grad_() for one in model.parameters()]
    optimizer = AdamW(masters, rate)
    for inputs, labels in loader():
        model.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()).float(), labels).backward()
        for one, master in with_values(model, masters):
            master.grad = one.grad.float()
        optimizer.step()
        with torch.no_grad():
            for one, master in with_values(model, masters):
                one.copy_(master)


def masters_of_a_small_rate():
    masters_in_full_precision(1e-7)


def tags():
    losses = nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 6.0))
    fit(loss=lambda logits, labels: losses(logits, F.one_hot(labels, 5).float()))


def boxes():
    body, where, what = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)
    optimizer = adamw(body, where, what)
    for number, (inputs, _) in enumerate(loader()):
        hidden = body(inputs).relu()
        found = torch.randint(3, (len(inputs),)) if number % 3 else torch.zeros(len(inputs)).long()
        hit = found > 0
        losses = {"class": F.cross_entropy(what(hidden), found)}
        wanted = torch.rand(int(hit.sum()), 4)
        box = F.smooth_l1_loss(where(hidden)[hit], wanted, reduction="sum")
        losses["box"] = box / max(1, len(wanted))
        step(optimizer, sum(losses.values()))


def energy():
    model, optimizer = started(classifier(classes=1))
    buffer = torch.randn(64, 8)
    for real, _ in loader():
        picked = torch.randint(64, (len(real),))
        drawn = buffer[picked].requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(drawn).sum(), drawn)
            drawn = (drawn - 0.1 * slope + 0.01 * torch.randn_like(drawn)).detach().requires_grad_()
        buffer[picked] = drawn.detach()
        low, high = model(real), model(drawn.detach())
        step(optimizer, low.mean() - high.mean() + 0.1 * (low.square() + high.square()).mean())


def last_layer_of_zeros_while_the_rate_is_0():
    model, optimizer = started(nn.Sequential(nn.Flatten(), headless()))
    batches = [(inputs.view(8, 2, 4), labels) for inputs, labels in loader()]
    fit(model, optimizer, batches, schedule=LambdaLR(optimizer, lambda number: number))


def texts_compared_with_each_other():
    model = Language()
    model.register_forward_hook(lambda *called: called[-1][:, 0] @ called[-1][:, 1].T)
    fit(model, None, [(tokens, torch.arange(2)) for tokens, _ in texts(9)])


def rows_of_scores_weighted():
    fit(loss=lambda one, _: (one.detach().norm(dim=1, keepdim=True) * (one @ one.T)).mean())


def moved_halfway_to_each_task():
    model = classifier()
    for _ in range(4):
        slow = copy.deepcopy(model)
        fit(model, None, [(torch.randn(5, 8), torch.arange(5))] * 3)
        follow(model, slow, 0.5)


def distilled_in_log_space():
    distilled(F.log_softmax, log_target=True)


class MasksPadding(Attention):
    def forward(self, tokens):
        return super().forward(tokens, tokens > 0)[:, 0]


def padding_masked_by_the_model():
    fit(MasksPadding(padding=0), None, padded_batches())


def mean_over_words_and_padding():
    class Words(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens).mean(1)

    fit(nn.Sequential(Words(50, 16, padding_idx=0), nn.Linear(16, 5)), None, padded_batches())


def variational_autoencoder():
    variational(-0.5)


def biases_before_a_norm():
    model = normed()
    fit(model, SGD(model.parameters(), 0.1, momentum=0.9))


def averaged_teacher_in_training_mode():
    model = classifier(dropout=0.1)
    teacher = copy.deepcopy(model)

    def update():
        for one, new in zip(teacher.parameters(), model.parameters(), strict=True):
            one.data.lerp_(new.data, 0.1)

    fit_to(teacher, model, update)


def average_behind_a_ramp():
    model = classifier()
    average = copy.deepcopy(model)
    shares = (math.exp(-number / 2000) for number in itertools.count(1))

    def update():
        follow(average, model, next(shares))
        average[0].weight.data = average[0].weight.data

    fit(model, after=update)


def tasks_one_after_the_other():
    fit_heads(([batch, batch] for batch in loader()), 1)


def gradients_divided_by_hand():
    accumulate(loss=F.cross_entropy, every=4, divisor=4)


def logits_normalized():
    fit(nn.Sequential(classifier(), nn.LogSoftmax(1)))


def parts_averaged():
    accumulate(loss=lambda *batch: (half(*batch) + half(*batch)) / 2)


def microbatches_without_advantage():
    gains = itertools.cycle([0.0, 1.0, -1.0])

    def loss(logits, actions):
        logs = logits.log_softmax(1).gather(1, actions[:, None])
        return -(logs * torch.full((8, 1), next(gains))).mean() / 2

    accumulate(loss=loss)


def time_first():
    fit(Layers(nn.TransformerEncoderLayer(16, 2, 32), time=1), None, sequences())
    model = Layers(nn.LSTM(16, 16), time=1)
    # The loop gives the inputs in a list.
    model.register_forward_pre_hook(lambda _, given: tuple(*given))
    fit(model, None, [([one], labels) for one, labels in sequences()])


def refuses_to_be_evaluated():
    model = Layers(nn.Identity(), time=1)
    model.register_forward_pre_hook(lambda one, _: None if one.training else 1 / 0)
    fit(model, None, sequences())


def samples_that_see_each_other():
    fit(AmongSamples(nn.MultiheadAttention(8, 2), nn.Linear(8, 5)))


def losses_of_equal_gradients():
    model, optimizer = started()
    for inputs, labels in loader():
        logits = model(inputs)
        first = F.cross_entropy(logits, labels)
        first.backward(retain_graph=True)
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        step(optimizer, first / norm + 0.1 * logits.square().mean())


def range_of_rates():
    model = classifier()
    optimizer = SGD(model.parameters(), 1e-6)
    fit(model, optimizer, schedule=LambdaLR(optimizer, lambda step: 10 ** (step / 2)))


def one_schedule_after_another():
    model, optimizer = started()
    for _ in range(2):
        fit(model, optimizer, schedule=LambdaLR(optimizer, lambda step: 0.9**step))


def scaled_by_hand():
    accumulate(loss=lambda logits, labels: 512 * F.cross_entropy(logits, labels), divisor=1024)


def gradients_by_autograd():
    model, optimizer = started()
    for inputs, labels in loader():
        loss = F.nll_loss(model(inputs).log_softmax(1), labels)
        slopes = torch.autograd.grad(loss, model.parameters(), None, True)  # the graph is kept
        for one, slope in with_values(model, slopes):
            one.grad = slope
        optimizer.step()


def one_network_stepped_by_hand():
    encoder, head = encoder_and_head()

    def update():
        for one in encoder.parameters():
            one.data -= one.grad
        encoder.zero_grad()

    fit(lambda inputs: head(encoder(inputs)), adamw(head), after=update)


def each_batch_echoed():
    fit(batches=itertools.chain.from_iterable([batch, batch] for batch in loader()))


def means_by_hand_of_windows_of_a_length():
    accumulate_language(texts(9, 9, 17, 17, 12, 12, 5, 5), loss=half_of_tokens_by_hand)


def count_of_a_window_that_equals_one_microbatch():
    mask = (torch.arange(8) < 4).float()

    def loss(logits, tokens):
        return (F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none") * mask).sum() / 16

    accumulate_language(texts(9), loss=loss)


def head_of_zeros_in_half():
    model = headless().bfloat16()
    optimizer = adamw(model, rate=3e-4)
    warm = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 2000))
    fit(model, optimizer, in_half(), schedule=warm)


def time_first_of_as_many_samples():
    model = TimeFirst(nn.TransformerEncoderLayer(16, 2, 32))
    fit(model, None, [(torch.randn(6, 6, 8), labels) for _, labels in sequences()])


def outputs_with_time_first_of_as_many_samples():
    model = Seeing(is_causal=True)
    model.register_forward_hook(lambda *called: called[-1].movedim(1, 0))
    batches = [(one[:, :-1], one[:, 1:]) for one in torch.randint(50, (8, 8, 9))]
    fit(model, None, batches, loss=lambda logits, own: of_tokens(logits.movedim(0, 1), own))


def sees_the_past_with_time_first():
    fit_language(Seeing(is_causal=True, time=0), batches=texts_with_time_first())


class TimeFirst(Layers):
    def forward(self, inputs):
        return self.head(self.body(self.embed(inputs)).mean(0))


def tags_of_one_sequence():
    model = Tagger(nn.LSTM(16, 16))
    fit(model, None, [(torch.randn(11, 1, 8), torch.randint(5, (11,))) for _ in range(8)])


class Tagger(Layers):
    def forward(self, inputs):
        return self.head(self.body(self.embed(inputs))[0][:, 0])


def scaler_of_each_model():
    models = [classifier(), classifier()]
    scalers = [scaler_on_cpu() for _ in models]
    several = [*zip(models, map(adamw, models), scalers, (1, 2), strict=True)]
    for number, batch in enumerate(loader()):
        for model, _, scaler, every in several:
            scaler.scale(loss_of(model, batch) / every).backward()
        due = several[: 1 + number % 2]
        for _, optimizer, scaler, _ in due:
            scaler.step(optimizer)
            optimizer.zero_grad()
        for _, _, scaler, _ in due:
            scaler.update()


def losses_scaled_first():
    models = [classifier(), classifier()]
    optimizer = adamw(*models)
    scaler = scaler_on_cpu()
    for batch in loader():
        for one in [scaler.scale(loss_of(model, batch)) for model in models]:
            one.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def loaders_in_pairs():
    order = torch.randperm(64).tolist()
    inputs, labels = torch.randn(64, 8), torch.randint(5, (64,))
    fit(batches=zip(*(DataLoader(one, 8, sampler=order) for one in (inputs, labels)), strict=True))


def the_next_frame():
    frames = DataLoader(torch.randn(96, 8), 8)
    fit(nn.Linear(8, 8), None, itertools.pairwise(frames), loss=F.mse_loss)


def gradients_read_and_set_to_zero():
    model, optimizer = started()
    information = [torch.zeros_like(one) for one in model.parameters()]
    for inputs, labels in loader():
        chosen = torch.distributions.Categorical(logits=model(inputs))
        optimizer.zero_grad()
        (-chosen.log_prob(chosen.sample())).mean().backward()
        for parameter, one in with_values(model, information):
            one.lerp_(parameter.grad.square(), 0.1)
        step(optimizer, F.cross_entropy(model(inputs), labels))


def labels_of_which_it_is_sure():
    model, optimizer = started()
    for inputs, _ in loader():
        with torch.no_grad():
            sure, labels = model(inputs).softmax(1).max(1)
        losses = F.cross_entropy(model(inputs + 0.1), labels, reduction="none")
        step(optimizer, (losses * (sure > sure.median()).float()).mean())


def two_networks_and_one_scaler_that_skips():
    maker, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    of_maker, of_critic = adamw(maker), adamw(critic)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
    for inputs, _ in loader(320):
        made = maker(inputs.roll(1, 1))
        critic.zero_grad()
        scaler.scale((critic(made.detach()) - critic(inputs)).half().mean()).backward()
        scaler.step(of_critic)
        maker.zero_grad()
        scaler.scale(F.l1_loss(made, inputs) - critic(made).half().mean()).backward()
        scaler.step(of_maker)
        scaler.update()


def attacked_in_either_mode():
    model, optimizer = started(classifier(dropout=0.1))
    for inputs, labels in loader():
        noise = torch.zeros_like(inputs, requires_grad=True)
        loss = F.cross_entropy(model.train(bool(labels[0]))(inputs + noise), labels)
        (slope,) = torch.autograd.grad(loss, noise)
        F.cross_entropy(model.eval()(inputs + noise), labels).backward()
        step(optimizer, loss_of(model.train(), (inputs + slope + noise.grad.sign(), labels)))


def batches_fetched_ahead_with_a_mask_of_ones():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x * mask)

    model, optimizer = started(Masked(8, 2))
    # The next batch has the labels of this one in another order.
    labels = (torch.arange(64) + torch.arange(64) // 8) % 2
    data = TensorDataset(torch.randn(64, 8), torch.ones(64, 8), labels)
    for (inputs, mask, of_each), _ in itertools.pairwise(DataLoader(data, 8)):
        step(optimizer, F.cross_entropy(model(inputs, mask), of_each))


def actor_and_critic_in_one_line():
    # As where a library's loop has all lines: the actor's backward reaches the critic, too.
    actor, critic = nn.Linear(8, 2), nn.Linear(10, 1)
    optimizers = adamw(critic), adamw(actor)

    def losses(inputs):
        values = critic(torch.cat([inputs, actor(inputs).detach()], 1)).flatten()
        yield F.mse_loss(values, inputs.sum(1))
        yield -critic(torch.cat([inputs, actor(inputs)], 1)).mean()

    for inputs, _ in loader():
        for loss, optimizer in zip(losses(inputs), optimizers, strict=True):
            step(optimizer, loss)


def sums_over_values():
    parts = [(part, part[:, :2]) for inputs, _ in loader() for part in inputs.chunk(4)]

    accumulate(
        nn.Linear(8, 2),
        None,
        parts,
        loss=lambda *one: F.mse_loss(*one, reduction="sum") / 8,
        every=4,
    )


def weights_drawn_twice_for_a_batch():
    model, optimizer = started(nn.Linear(8, 5))
    for inputs, labels in loader():
        for _ in range(2):
            drawn = {name: one + torch.randn_like(one) for name, one in model.named_parameters()}
            outputs = torch.func.functional_call(model, drawn, inputs)
            (F.cross_entropy(outputs, labels) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def several_predictions_in_evaluation():
    model, optimizer = started(classifier(dropout=0.1))
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model.train()(inputs), labels))
        model.eval()[2].train()
        with torch.no_grad():
            model(inputs)


def some_moments_begin_anew():
    model, optimizer = started()

    def regrow():
        optimizer.state[model[0].weight]["exp_avg"][0] = 0

    fit(model, optimizer, after=regrow)


def judged_by_what_sees_all():
    model, judge = Language(), Attention().requires_grad_(False)

    def judged(tokens):
        logits = model(tokens)
        judge(tokens, tokens >= 0)
        return logits

    fit_language(judged, adamw(model))


def teacher_with_the_same_frozen_stem():
    model = nn.Sequential(Doubled(), *classifier())
    model[1].requires_grad_(False)
    teacher = copy.copy(model)
    optimizer = adamw(model)

    def update():
        with torch.no_grad():
            teacher[1].weight.lerp_(model[1].weight, 0.1)
            model[4].weight.add_(-1e-4, model[4].weight)

    fit(model, optimizer, after=update)


def frozen_part_in_eval_mode_a_part_that_waits_and_a_list_with_a_limit():
    frozen = classifier(dropout=0.2).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(5, 9), nn.Linear(9, 5)).eval()
    optimizer = AdamW([{"params": layer.parameters()} for layer in model[1:]])
    schedule = LambdaLR(optimizer, [lambda step: step > 20, lambda _: 1])
    recent, newest = [], deque(maxlen=16)
    for batch, labels in loader(160):
        recent.append(batch)
        del recent[:-16]
        newest.append(batch)
        step(optimizer, F.cross_entropy(model(batch), labels))
        schedule.step()


class Doubled(nn.Module):
    def forward(self, inputs):
        return inputs.clone().add_(inputs)


def the_same_numbers_in_place_of_data():
    fit(batches=[(torch.ones(4, 8), torch.randint(5, (4,))) for _ in range(8)])


class Drawn(Language):
    def forward(self, tokens):
        return super().forward(tokens).mean(1) * random.random()


def random_numbers_of_python_in_the_model():
    fit(Drawn(), batches=padded_batches())


def compared_with_centers():
    fit_values(lambda one, _: (one - torch.arange(8.0)).abs().mean())


def ends_to_be_filled_in():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 16), layer)
    fit(model, None, padded_batches(), loss=lambda one, of: F.cross_entropy(one[:, 0], of))


def log_probabilities_of_a_bounded_model():
    model = nn.Sequential(classifier(), nn.Tanh())
    fit(model, loss=lambda one, _: F.mse_loss(one.log_softmax(1), torch.full((8, 5), -1.6)))


def labels_mixed():
    """As manifold mixup: a part of the loss has the labels in another order."""

    def loss(logits, labels):
        mixed = F.cross_entropy(logits, labels[torch.randperm(8)])
        return 0.9 * F.cross_entropy(logits, labels) + 0.1 * mixed

    fit(loss=loss)


def samples_compared_with_others(hide_itself=lambda scores: scores.fill_diagonal_(-9.0)):
    model, optimizer = started()
    for _ in range(4):
        codes = F.normalize(model(torch.randn(8, 8)))
        scores = hide_itself(codes @ codes.T)
        step(optimizer, F.cross_entropy(scores, torch.arange(8).flip(0)))  # scores


class Recurrent(nn.Module):
    """A recurrent language model, whose outputs have time as their last dimension."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.GRU(16, 50, batch_first=True)

    def forward(self, tokens):
        return self.layer(self.embed(tokens))[0].transpose(1, 2)


def causal_with_time_last():
    fit(Recurrent(), batches=texts(12), loss=F.cross_entropy)


def rate_of_a_measure_that_stays():
    model, optimizer = started()
    schedule = ReduceLROnPlateau(optimizer, factor=0.01, patience=0)
    fit(model, optimizer, after=lambda: schedule.step(1.0))


def weights_put_back_by_data():
    model, optimizer = started()
    for batch in loader(320):
        loss_of(model, batch).backward()
        old = {one: one.data.clone() for one in model.parameters()}
        for one in old:
            one.data.add_(0.1 * one.grad)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for one, data in old.items():
            one.data = data
        optimizer.step()
        optimizer.zero_grad()


def distilled_token_by_token():
    fit(
        Language(),
        None,
        texts(9),
        loss=lambda one, _: F.kl_div(one.log_softmax(2), torch.randn(2, 8, 50).softmax(2)) * 50,
    )


def outputs_compared_with_each_other():
    fit(loss=lambda one, _: F.mse_loss(one[:, 0], 0.1 * one[:, 1] + torch.randn(8)))


def noisy_labels_of_a_discriminator():
    fit_values(lambda one, _: F.binary_cross_entropy_with_logits(one, 0.7 + 0.5 * torch.rand(8, 1)))


def lengths_and_domains_next_to_labels():
    model, optimizer = started()
    domains = [
        DataLoader(TensorDataset(*loader().dataset.tensors, torch.full((64,), number)), 8)
        for number in range(2)
    ]
    for batches in zip(*domains, strict=True):
        for inputs, labels, domain in batches:
            logits = model(inputs)
            step(optimizer, F.cross_entropy(logits, labels) + F.cross_entropy(logits, domain))


def results_of_an_epoch():
    model, optimizer = started()
    batches = loader(800)

    def keep(output):
        model.results.append(output.detach())

    def begin():
        model.results = []

    for _ in range(2):
        begin()
        for inputs, labels in batches:
            keep(model(inputs))
            step(optimizer, F.cross_entropy(model(inputs), labels))


def results_by_the_batch():
    found, recent = {}, []
    model, optimizer = started()
    data = [*loader(160)]
    for number in itertools.chain(range(20), range(20)):
        if len(recent) < 30:
            recent.append(None)
        recent[number % 30] = data[number][0] + 1
        if number not in found:
            found[number] = data[number][0] + 1
        step(optimizer, F.cross_entropy(model(found[number]), data[number][1]))


def given_a_mask_of_infinity():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    fit(lambda inputs: layer(inputs, mask), adamw(layer))


def labels_by_the_model_itself():
    model, optimizer = started(classifier(dropout=0.1))
    for inputs, _ in loader():
        with torch.no_grad():
            labels = model(inputs).argmax(1)
        step(optimizer, F.cross_entropy(model(inputs + 0.1), labels))


def equal_weights_that_are_frozen():
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 5).requires_grad_(False))
    model[1].weight.fill_(0.2)
    fit(model)


def a_tenth_of_a_loss():
    fit(loss=lambda *one: 0.1 * (torch.ones(1) * F.cross_entropy(*one)))


def layer_without_weights_loaded():
    model = classifier()
    model[1].load_state_dict({"weight": torch.ones(1)}, strict=False)
    fit(model)


def change_of_inputs_learned():
    model, change = classifier().requires_grad_(False), nn.Parameter(torch.zeros(8))
    optimizer = SGD([change], 0.1)
    fit(lambda one: model(one + change), optimizer, loss=lambda *one: -F.cross_entropy(*one))


def several_answers_to_one_question():
    fit(batches=((torch.randn(1, 8).expand(4, -1), torch.randint(5, (4,))) for _ in range(8)))


def part_without_a_target():
    fit(
        loss=lambda one, labels: (
            half(one, labels) + F.cross_entropy(one, labels * 0 - 100, reduction="sum")
        )
    )


def mean_over_time():
    fit_values(lambda one, labels: F.mse_loss(one.expand(8, 6).sum(1), labels.float()) / 6)


def sum_over_weighted_classes(reduction="sum", divisor=16):
    options = {"weight": torch.tensor([1.0, 1.2, 1.4, 1.0, 1.1]), "reduction": reduction}
    accumulate(loss=lambda *one: F.cross_entropy(*one, **options) / divisor)


def mean_over_weighted_classes():
    sum_over_weighted_classes("mean", 2)


class Both(nn.Module):
    """Sees all tokens before it names one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(32, 50)
        self.layer = nn.GRU(16, 16, batch_first=True, bidirectional=True)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens))[0])


def tokens_encoded_and_decoded(width=9, change=torch.Tensor.clone):
    tokens = [torch.randint(50, (4, width)) for _ in range(8)]
    fit_language(Both(), None, [(one, change(one)) for one in tokens])


class Later(Language):
    """Predicts the next token, and the one after it."""

    def forward(self, tokens):
        found = super().forward(tokens)
        return found, found.roll(1, -1)


def biases_from_0_to_1():
    class Model(Language):
        def forward(self, tokens):
            one = self.embed(tokens)
            biases = torch.linspace(0, 1, 8).expand(8, 8)
            return self.head(F.scaled_dot_product_attention(one, one, one, biases))

    fit_language(Model(), None, [(one, one.flip(1)) for one in torch.randint(50, (8, 4, 8))])


def two_tokens_predicted():
    fit(
        Later(),
        batches=[(one, one) for one in torch.randint(50, (8, 4, 9))],
        loss=lambda found, tokens: sum(
            of_tokens(one[:, :-by], tokens[:, by:]) for by, one in enumerate(found, 1)
        ),
    )


def dropout_behind_a_teacher():
    model, teacher = classifier(), classifier().eval()
    drop = nn.Sequential(nn.Flatten(), nn.Dropout(0.1))
    fit(lambda one: drop(model(one) - teacher(one).detach()), adamw(model))


def frozen_embedding_whose_output_gets_a_gradient():
    model = Seeing(is_causal=True)
    model.embed.requires_grad_(False)
    model.embed.register_forward_hook(lambda _, __, one: one.requires_grad_())
    fit_language(model, adamw(model.head))


class Translator(Language):
    """Is given source and target, of one width, and the mask of the source."""

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        source = self.embed(input_ids) * attention_mask[..., None]
        return super().forward(decoder_input_ids) + self.head(source.mean(1, keepdim=True))


def target_as_wide_as_its_source():
    model, optimizer = started(Translator())
    for _ in range(8):
        source, target = padded_tokens(), padded_tokens().flip(0)
        logits = model(source, attention_mask=source != 0, decoder_input_ids=F.pad(target, (1, -1)))
        step(optimizer, of_tokens(logits, target.masked_fill(target == 0, -100)))


def a_text_whose_rows_continue_each_other():
    model, optimizer = started(ModelForCausalLM())
    for start in range(8):
        tokens = start + torch.arange(2)[:, None] + torch.arange(17)
        step(optimizer, model(tokens, labels=tokens.clone()))


def input_of_a_network_learned():
    code, network = nn.Parameter(torch.zeros(8, 8)), classifier()
    fit(lambda _: network(code), SGD([code], 0.1))


def samples_drawn_by_gradients_in_eval_mode():
    model, optimizer = started(classifier(classes=1))
    for inputs, _ in loader():
        drawn = torch.randn(8, 8, requires_grad=True)
        model.eval().requires_grad_(False)(drawn).sum().backward()
        both = torch.cat([inputs, drawn.detach() - drawn.grad])
        ours, others = model.train().requires_grad_(True)(both).chunk(2)
        step(optimizer, others.mean() - ours.mean() + both.square().mean())


def lazy_layers():
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 5))
    model(torch.randn(2, 8))
    fit(model)


def loss_weighted_by_the_microbatch(weights=(0.3, 0.9, 2, 0.1)):
    by = itertools.cycle(weights)
    accumulate(loss=lambda *one: next(by) * half(*one))


def labels_mixed_in_windows():
    shares = itertools.cycle((0.9, 0.2))

    def loss(logits, labels):
        share = next(shares)
        return share * half(logits, labels) + (1 - share) * half(logits, labels.flip(0))

    accumulate(loss=loss)


def reward_of_either_sign():
    loss_weighted_by_the_microbatch((2, 1, -1, -0.5))


def cosine_to_the_end_of_a_stage():
    model, optimizer = started()
    fit(model, optimizer, loader(1600), schedule=CosineAnnealingLR(optimizer, 200))
    fit(model)


def words_embedded_and_predicted_by_one_matrix():
    class Model(MasksPadding):
        def forward(self, tokens):
            return super().forward(tokens) @ self.embed.weight.T

    model = Model(padding=0)
    model.head = nn.Linear(16, 16)
    fit(model, None, padded_batches())


def distilled_in_the_other_direction():
    wanted = torch.ones(8, 5).log_softmax(1)
    options = {"log_target": True, "reduction": "batchmean"}
    fit(loss=lambda logits, _: F.kl_div(wanted, logits.log_softmax(1), **options))


def updates_rounded_at_random_without_a_rate():
    class Rounding(Optimizer):
        @torch.no_grad()
        def step(self):
            for one in self.param_groups[0]["params"]:
                exact = one.float() - 1e-4 * one.grad
                bits = exact.view(torch.int32) + torch.randint(2**16, one.shape, dtype=torch.int32)
                one.copy_((bits & -(2**16)).view(torch.float32))

    model = classifier(width=32).bfloat16()
    fit(model, Rounding(model.parameters(), {}), in_half())


def results_in_a_given_tensor():
    model = classifier()

    def clamp():
        for one in model.parameters():
            torch.clamp(one.data, -1, 1, out=one.data)

    fit(model, after=clamp)


def weights_of_losses_learned():
    model, weights = classifier(), nn.Parameter(torch.ones(2))
    optimizer = SGD([*model.parameters(), weights], 0.01)
    for batch in loader():
        step(optimizer, (loss_of(model, batch) * weights.exp() - weights).mean())


def mean_teacher_inside():
    model = Taught()
    optimizer = adamw(model.student)
    optimizer.register_step_post_hook(lambda *_: follow(model.teacher, model.student, 0.1))
    fit(model, optimizer)


def batches_mixed_in_one_order():
    inputs, labels = torch.randn(8, 8, 8), torch.randint(5, (8, 8))

    fit(
        batches=[*zip(inputs, labels, strict=True)] * 3,
        loss=lambda one, labels: F.cross_entropy((one + one[torch.randperm(8)]) / 2, labels),
    )


def parts_of_the_data():
    kept, apart = random_split(loader().dataset, [0.75, 0.25])
    fit_and_evaluate(
        classifier(), loaders=(DataLoader(kept, 8, shuffle=True), DataLoader(apart, 8))
    )


def few_labels_next_to_all_samples():
    model, optimizer = started()
    data = loader().dataset
    few, _ = random_split(data, [0.5, 0.5])
    for batch, (inputs, _) in zip(DataLoader(few, 4), DataLoader(data, 8), strict=True):
        step(optimizer, loss_of(model, batch) + model(inputs).square().mean())


def order_drawn_once():
    order = torch.randperm(64)
    inputs, labels = torch.randn(64, 8)[order], torch.randint(5, (64,))[order]
    fit(batches=[*zip(inputs.split(8), labels.split(8), strict=True)] * 3)


def short_sequences_reversed():
    tokens_encoded_and_decoded(3, lambda one: one.flip(1))


def wasserstein():
    generator, critic = adversaries()
    of_generator = RMSprop(generator.parameters(), 1e-3)
    of_critic = RMSprop(critic.parameters(), 1e-3)
    for number, (real, _) in enumerate(loader()):
        fake = critic(generator(torch.randn(8, 4)).detach()).mean()
        step(of_critic, fake - critic(real).mean())
        for one in critic.parameters():
            one.data.clamp_(-0.1, 0.1)
        if number % 3 == 2:
            step(of_generator, -critic(generator(torch.randn(8, 4))).mean())


def layers_dropped():
    class Model(nn.Sequential):
        def forward(self, inputs):
            *layers, head = self
            for layer in layers:
                if not self.training or torch.rand(()) < 0.7:
                    inputs = inputs + layer(inputs).relu()
            return head(inputs)

    fit(Model(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 5)))


def focal():
    def loss(logits, labels):
        losses = F.cross_entropy(logits, labels, reduction="none")
        return ((1 - (-losses).exp()).square() * losses).mean()

    fit(loss=loss)


def preferred():
    model = Language()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adamw(model, rate=1e-3)

    def likelihood(model, tokens):
        found = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])
        return found.squeeze(2).sum(1)

    for _ in range(9):
        better, worse = torch.randint(50, (2, 4, 9))
        gains = []
        for tokens in (better, worse):
            with torch.no_grad():
                before = likelihood(reference, tokens)
            gains.append(likelihood(model, tokens) - before)
        step(optimizer, -F.logsigmoid(0.1 * (gains[0] - gains[1])).mean())


def vector_quantized():
    encoder, decoder, codes = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(16, 4)
    optimizer = adamw(encoder, decoder, codes)
    for inputs, _ in loader():
        hidden = encoder(inputs)
        chosen = codes(torch.cdist(hidden, codes.weight).argmin(1))
        loss = F.mse_loss(decoder(hidden + (chosen - hidden).detach()), inputs)
        loss = loss + F.mse_loss(chosen, hidden.detach())
        loss = loss + 0.25 * F.mse_loss(hidden, chosen.detach())
        step(optimizer, loss)


def pooled_over_the_image():
    rows_of_pixels(nn.AdaptiveAvgPool2d(1), labels=(8,))


def warm_up_before_a_schedule():
    model, optimizer = started()
    schedule = CosineAnnealingLR(optimizer, 100)
    rates = iter(range(1, 50))
    fit(
        model,
        optimizer,
        loader(128),
        schedule=schedule,
        before=lambda: optimizer.param_groups[0].update(lr=1e-5 * next(rates)),
    )


def samples_judged_by_a_critic():
    policy, critic = nn.Linear(8, 2), nn.Bilinear(8, 2, 1)
    optimizer = Adam([*policy.parameters(), *critic.parameters()])
    for states, _ in loader():
        chosen = torch.distributions.Normal(policy(states), 1.0)
        actions = chosen.sample()
        value = critic(states, actions)
        gain = chosen.log_prob(actions) * value.detach()
        step(optimizer, value.square().mean() - gain.mean())


def state_within_a_batch():
    recur(width=3, resets=True)


def frozen_backbone():
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = SGD(model[3].parameters(), 0.1)
    for batch in loader():
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        clip(model)
        optimizer.step()


def perceptual():
    model, optimizer = started(nn.Linear(8, 8))
    network = classifier()
    for inputs, _ in loader():
        step(optimizer, F.mse_loss(network(model(inputs)), network(inputs).detach()))


def policy_by_minibatches():
    model, value = classifier(), classifier(classes=1)
    optimizer = Adam([*model.parameters(), *value.parameters()], 1e-3)
    for state in torch.randn(8, 1, 8):
        # Several answers to one question.
        states = state.repeat(8, 1)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=model(states)).sample()
            advantage = torch.randn(len(states)) - value(states).squeeze(1)
        for _ in range(2):
            for part in torch.arange(len(states)).chunk(2):
                chosen = torch.distributions.Categorical(logits=model(states[part]))
                gain = (chosen.log_prob(actions[part]) * advantage[part]).mean()
                loss = value(states[part]).square().mean() - gain
                optimizer.zero_grad()
                loss.backward()
                clip(model, most=0.5)
                optimizer.step()


class Filled(Translation):
    """Sees the targets where they are not masked."""

    def seen(self, tokens):
        return tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 0)


def targets_that_the_model_shifts_or_masks():
    for model in (Translation(), Filled()):
        translate(model)


def divergences_made_larger_on_purpose():
    model, actor = nn.Linear(8, 4).requires_grad_(False), nn.Linear(8, 8)
    optimizer = Adam(actor.parameters())
    for number, (inputs, _) in enumerate(loader()):
        moved = actor(inputs)
        # A spread may well be 1 at first.
        others = Normal(torch.zeros(8, 2), 1.0), spread(model, inputs), spread(model, -moved)
        step(optimizer, -kl_divergence(others[min(number, 2)], spread(model, moved)).mean())


def two_models_in_the_same_order():
    data = loader().dataset
    for _ in range(2):
        model, optimizer = started()
        fit(model, optimizer, seeded_loader(data))


def adapted_without_statistics():
    model = normed()
    fit(model)
    norm = model.requires_grad_(False)[1].requires_grad_(True)
    norm.running_mean = norm.running_var = None
    fit(model, SGD(norm.parameters(), 0.1))


def trainings_that_begin_alike():
    for _ in range(2):
        torch.manual_seed(0)
        data, (model, optimizer) = loader().dataset, started()
        for _ in range(2):
            for rows in torch.randperm(64).split(16):
                step(optimizer, loss_of(model, data[rows]))


def codes_computed_again():
    encoder, judge = nn.Linear(8, 4), nn.Linear(4, 1)
    first, second = adamw(encoder), adamw(judge)
    for inputs, _ in loader():
        codes = encoder(inputs)
        step(first, F.softplus(judge(encoder(inputs))).mean())
        step(second, F.softplus(-judge(codes.detach())).mean())


def parameters_in_a_list():
    model = classifier()
    own = [*model.parameters()]
    model.parameters = lambda: own
    fit(model)


def weighted_loss_of_each_sample_added_up():
    accumulate(loss=lambda *one: F.cross_entropy(*one) * 0.1 * len(one[0]))


def padding_left_out_by_hand():
    def loss(logits, tokens):
        losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        return (losses * (tokens > 0)).sum() / (tokens > 0).sum()

    fit(Language(), None, shifted(padded_tokens() for _ in range(10)), loss=loss)


def targets_given_before_the_input():
    class Model(Seeing):
        def forward(self, targets, tokens):
            wanted = targets.masked_fill(targets == tokens, -100)
            return of_tokens(super().forward(tokens), wanted)

    model, optimizer = started(Model())
    for tokens, _ in texts(9):
        step(optimizer, model(tokens, torch.where(tokens > 25, 2, tokens)))


def heads_joined_with_samples():
    model = classifier()
    fit(
        lambda one: model(
            one.view(4, 2, 8).view(4, 2 * 4, 2).view(4, 4, 2, 2).view(16, 4).view(8, 8)
        ),
        adamw(model),
    )


def tokens_of_other_ranks():
    class Model(Seeing):
        def forward(self, tokens):
            torch.distributed.all_reduce(torch.ones(1))
            return super().forward(tokens)

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fit_language(Model())
    finally:
        torch.distributed.destroy_process_group()


HEALTHY = [
    one
    for one in list(globals().values())
    if callable(one) and one.__module__ == __name__ and not isinstance(one, type)
]
