"""Healthy loops of other kinds, written before the rules were mended for them."""

import copy
import itertools
from collections import deque

import torch
from loops import Language, accumulate, adamw, classifier, fit, loader, step
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence


def value_learning_with_replay():
    model = classifier()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    memory = deque(maxlen=64)
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


def denoising():
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
    optimizer = adamw(model)
    for clean, _ in loader():
        time = torch.rand(len(clean), 1)
        noise = torch.randn_like(clean)
        noisy = (1 - time).sqrt() * clean + time.sqrt() * noise
        step(optimizer, F.mse_loss(model(torch.cat([noisy, time], 1)), noise))


def vector_quantized():
    encoder, decoder, codes = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(16, 4)
    optimizer = adamw(nn.ModuleList([encoder, decoder, codes]))
    for inputs, _ in loader():
        hidden = encoder(inputs)
        chosen = codes(torch.cdist(hidden, codes.weight).argmin(1))
        straight = hidden + (chosen - hidden).detach()
        loss = F.mse_loss(decoder(straight), inputs)
        loss = loss + F.mse_loss(chosen, hidden.detach())
        loss = loss + 0.25 * F.mse_loss(hidden, chosen.detach())
        step(optimizer, loss)


def siamese():
    encoder, predictor = classifier(classes=8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], 0.05)
    for inputs, _ in loader():
        first = encoder(inputs + 0.1 * torch.randn_like(inputs))
        second = encoder(inputs + 0.1 * torch.randn_like(inputs))
        alike = F.cosine_similarity(predictor(first), second.detach()).mean()
        alike = alike + F.cosine_similarity(predictor(second), first.detach()).mean()
        step(optimizer, -alike / 2)


def speech():
    model = nn.LSTM(8, 12, batch_first=True)
    head = nn.Linear(12, 6)
    optimizer = adamw(nn.ModuleList([model, head]))
    for _ in range(6):
        sounds = torch.randn(4, 20, 8)
        logs = head(model(sounds)[0]).log_softmax(2).transpose(0, 1)
        texts = torch.randint(1, 6, (4, 5))
        step(optimizer, F.ctc_loss(logs, texts, torch.full((4,), 20), torch.full((4,), 5)))


def nodes_of_one_graph():
    first, second = nn.Linear(8, 16), nn.Linear(16, 3)
    model = nn.ModuleList([first, nn.Dropout(0.5), second])
    features, classes = torch.randn(40, 8), torch.randint(3, (40,))
    edges = (torch.rand(40, 40) < 0.1).float() + torch.eye(40)
    known = torch.rand(40) < 0.5
    optimizer = adamw(model)

    def run():
        hidden = model[1](first(edges @ features).relu())
        return second(edges @ hidden)

    for _ in range(12):
        model.train()
        step(optimizer, F.cross_entropy(run()[known], classes[known]))
        model.eval()
        with torch.no_grad():
            (run().argmax(1) == classes)[~known].float().mean().item()


def physics():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = adamw(model)
    for _ in range(8):
        points = torch.rand(16, 1, requires_grad=True)
        values = model(points)
        (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (curves,) = torch.autograd.grad(slopes.sum(), points, create_graph=True)
        edge = model(torch.zeros(1, 1)).square().mean()
        step(optimizer, (curves + values).square().mean() + 10 * edge)


def flow():
    shift = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = adamw(shift)
    for inputs, _ in loader():
        left, right = inputs.chunk(2, dim=1)
        scale, move = shift(left).chunk(2, dim=1)
        moved = right * scale.tanh().exp() + move
        prior = torch.distributions.Normal(0, 1)
        likelihood = prior.log_prob(left).sum(1) + prior.log_prob(moved).sum(1)
        step(optimizer, -(likelihood + scale.tanh().sum(1)).mean())


def tensors_alone():
    weight, bias = torch.zeros(8, 5, requires_grad=True), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], 0.1)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(inputs @ weight + bias, labels))


def ensemble_by_vmap():
    models = [classifier() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(list(parameters.values()), 1e-2)

    def loss(own, others, inputs, labels):
        return F.cross_entropy(torch.func.functional_call(base, (own, others), inputs), labels)

    for inputs, labels in loader():
        slopes = torch.vmap(torch.func.grad(loss), (0, 0, None, None), randomness="different")(
            parameters, buffers, inputs, labels
        )
        for name, one in parameters.items():
            one.grad = slopes[name]
        optimizer.step()


def federated():
    server = classifier()
    parts = [loader(24) for _ in range(2)]
    for _ in range(4):
        local = []
        for part in parts:
            client = copy.deepcopy(server)
            optimizer = torch.optim.SGD(client.parameters(), 0.1)
            for inputs, labels in part:
                step(optimizer, F.cross_entropy(client(inputs), labels))
            local.append(client.state_dict())
        server.load_state_dict({name: (local[0][name] + local[1][name]) / 2 for name in local[0]})


def several_models_one_batch():
    models = [classifier() for _ in range(3)]
    optimizers = [adamw(model) for model in models]
    for inputs, labels in loader():
        for model, optimizer in zip(models, optimizers, strict=True):
            step(optimizer, F.cross_entropy(model(inputs), labels))


class Lookahead(torch.optim.Optimizer):
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


def optimizer_around_another():
    model = classifier()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    fit(model, optimizer)


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    average = self.state[one].setdefault("average", torch.zeros_like(one))
                    one.add_(average.lerp_(one.grad, 0.1).sign(), alpha=-group["lr"])


def own_optimizer():
    model = classifier()
    optimizer = Signs(model.parameters(), 1e-3)
    fit(model, optimizer)


def differentially_private():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in loader():
        sums = [torch.zeros_like(one) for one in model.parameters()]
        for given, label in zip(inputs, labels, strict=True):
            model.zero_grad()
            F.cross_entropy(model(given[None]), label[None]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for total, one in zip(sums, model.parameters(), strict=True):
                total += one.grad
        for total, one in zip(sums, model.parameters(), strict=True):
            one.grad = (total + 0.5 * torch.randn_like(total)) / len(inputs)
        optimizer.step()


def masters_in_full_precision():
    model = classifier().bfloat16()
    masters = [one.detach().float().clone().requires_grad_() for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-3)
    for inputs, labels in loader():
        model.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()).float(), labels).backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            master.grad = one.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)


def soft_actor_and_critic():
    actor, critic = classifier(classes=4), nn.Linear(10, 1)
    target = copy.deepcopy(critic)
    logarithm = torch.zeros((), requires_grad=True)
    optimizers = [adamw(actor), adamw(critic), torch.optim.Adam([logarithm], 1e-2)]

    def act(states):
        mean, deviation = actor(states).chunk(2, dim=1)
        choice = torch.distributions.Normal(mean, F.softplus(deviation) + 1e-3)
        action = choice.rsample()
        return action.tanh(), choice.log_prob(action).sum(1)

    for states, _ in loader():
        with torch.no_grad():
            action, likelihood = act(states)
            wanted = target(torch.cat([states, action], 1)).squeeze(1) - likelihood
        taken = torch.rand(len(states), 2) * 2 - 1
        value = critic(torch.cat([states, taken], 1)).squeeze(1)
        step(optimizers[1], F.mse_loss(value, torch.randn(len(states)) + 0.9 * wanted))
        action, likelihood = act(states)
        critic.requires_grad_(False)
        gain = critic(torch.cat([states, action], 1)).squeeze(1)
        step(optimizers[0], (logarithm.exp().detach() * likelihood - gain).mean())
        critic.requires_grad_(True)
        step(optimizers[2], -(logarithm * (likelihood.detach() - 2)).mean())
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 0.05)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(context, given):
        context.save_for_backward(given)
        return (given > 0).float()

    @staticmethod
    def backward(context, slope):
        (given,) = context.saved_tensors
        return slope / (1 + given.abs()).square()


def spikes():
    first, second = nn.Linear(8, 16), nn.Linear(16, 5)
    optimizer = adamw(nn.ModuleList([first, second]))
    for inputs, labels in loader():
        potential, counts = torch.zeros(len(inputs), 16), 0
        for _ in range(5):
            potential = 0.9 * potential + first(inputs)
            spike = Sign.apply(potential - 1)
            potential = potential - spike.detach()
            counts = counts + second(spike)
        step(optimizer, F.cross_entropy(counts / 5, labels))


def normed_weights():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(16, 5)),
    )
    fit(model)


def pictures_of_zeros_and_ones():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8), nn.Sigmoid())
    optimizer = adamw(model)
    for inputs, _ in loader():
        pixels = inputs.sigmoid()
        step(optimizer, F.binary_cross_entropy(model(pixels), pixels))


def tags():
    model = classifier()
    optimizer = adamw(model)
    for inputs, _ in loader():
        wanted = (inputs[:, :5] > 1).float()
        weight = torch.full((5,), 6.0)
        losses = nn.BCEWithLogitsLoss(pos_weight=weight)
        step(optimizer, losses(model(inputs), wanted))


def boxes():
    body, where, what = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)
    optimizer = adamw(nn.ModuleList([body, where, what]))
    for number, (inputs, _) in enumerate(loader()):
        hidden = body(inputs).relu()
        found = torch.randint(3, (len(inputs),)) if number % 3 else torch.zeros(len(inputs)).long()
        hit = found > 0
        losses = {"class": F.cross_entropy(what(hidden), found)}
        wanted = torch.rand(int(hit.sum()), 4)
        box = F.smooth_l1_loss(where(hidden)[hit], wanted, reduction="sum")
        losses["box"] = box / max(1, len(wanted))
        step(optimizer, sum(losses.values()))


def packed_sequences():
    table, model, head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = adamw(nn.ModuleList([table, model, head]))
    for _ in range(6):
        lengths = torch.randint(2, 12, (6,)).sort(descending=True).values
        tokens = torch.randint(50, (6, int(lengths[0])))
        packed = pack_padded_sequence(table(tokens), lengths, batch_first=True)
        _, (hidden, _) = model(packed)
        step(optimizer, F.cross_entropy(head(hidden[-1]), torch.randint(2, (6,))))


def restarts_by_parts_of_an_epoch():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1)
    batches = loader(40)
    for epoch in range(4):
        for number, (inputs, labels) in enumerate(batches):
            step(optimizer, F.cross_entropy(model(inputs), labels))
            scheduler.step(epoch + (number + 1) / len(batches))


def weights_of_a_network_by_another():
    small, maker = nn.Linear(8, 4), nn.Linear(4, 8 * 5)
    optimizer = adamw(nn.ModuleList([small, maker]))
    for inputs, labels in loader():
        weights = maker(small(inputs.mean(0))).view(5, 8)
        step(optimizer, F.cross_entropy(F.linear(inputs, weights), labels))


def energy():
    model = classifier(classes=1)
    optimizer = adamw(model)
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


def last_layer_of_zeros():
    model = classifier()
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    fit(model)


def rewarded():
    model = Language()
    head = nn.Linear(50, 1)
    optimizer = adamw(nn.ModuleList([model, head]))
    for _ in range(6):
        better, worse = torch.randint(50, (2, 4, 9))
        scores = head(model(torch.cat([better, worse]))[:, -1]).squeeze(1)
        step(optimizer, -F.logsigmoid(scores[:4] - scores[4:]).mean())


def distilled_in_log_space():
    teacher, model = classifier(dropout=0.1).eval(), classifier(dropout=0.1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        with torch.no_grad():
            soft = (teacher(inputs) / 2).log_softmax(1)
        own = model(inputs)
        alike = F.kl_div((own / 2).log_softmax(1), soft, reduction="batchmean", log_target=True)
        step(optimizer, 0.5 * F.cross_entropy(own, labels) + 0.5 * 4 * alike)


def rates_by_depth():
    model = classifier()
    groups = [
        {"params": [layer.weight, layer.bias], "lr": rate, "weight_decay": 0.0}
        for layer, rate in ((model[0], 1e-4), (model[3], 1e-2))
    ]
    optimizer = torch.optim.AdamW(groups)
    total = 30
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-4, 1e-2], total_steps=total)
    for _ in range(3):
        for inputs, labels in loader():
            step(optimizer, F.cross_entropy(model(inputs), labels))
            scheduler.step()


def climb(model, changes=None):
    """Add changes to the weights, in the direction of the gradients where none are given."""
    changes = changes or [0.05 * one.grad for one in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), changes)
    return changes


def trial_step():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        changes = climb(model)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        climb(model, [-one for one in changes])
        optimizer.step()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens, mask):
        hidden = self.embed(tokens)
        hidden, _ = self.attention(hidden, hidden, hidden, ~mask, need_weights=False)
        return self.head(hidden)


def padded_tokens():
    lengths = torch.tensor([[3], [5], [8], [4], [8], [7]])
    return torch.randint(1, 50, (6, 8)).masked_fill(torch.arange(8) >= lengths, 0)


def attention_with_a_mask():
    model = Attention()
    optimizer = adamw(model)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    for _ in range(10):
        tokens = padded_tokens()
        step(optimizer, criterion(model(tokens, tokens != 0).flatten(0, 1), tokens.flatten() % 5))


def biases_before_a_norm():
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fit(model, optimizer)


def averaged_teacher_in_training_mode():
    model = classifier(dropout=0.1)
    teacher = copy.deepcopy(model)
    optimizer = adamw(model)
    for inputs, _ in loader():
        with torch.no_grad():
            wanted = teacher(inputs)
        step(optimizer, F.mse_loss(model(inputs), wanted))
        for one, new in zip(teacher.parameters(), model.parameters(), strict=True):
            one.data.lerp_(new.data, 0.1)


def tasks_one_after_the_other():
    body, heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
    model = nn.ModuleList([body, heads])
    optimizer = adamw(model)
    for inputs, labels in loader():
        for head in heads:
            (F.cross_entropy(head(body(inputs)), labels) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_divided_by_hand():
    accumulate(loss=F.cross_entropy, every=4, divisor=4)


def logits_normalized():
    fit(nn.Sequential(classifier(), nn.LogSoftmax(1)))


def microbatches_without_advantage():
    gains = itertools.cycle([0.0, 1.0, -1.0])

    def loss(logits, actions):
        logs = logits.log_softmax(1).gather(1, actions[:, None])
        return -(logs * torch.full((8, 1), next(gains))).mean() / 2

    accumulate(loss=loss)


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


def sequences():
    return [(torch.randn(6, 11, 8), torch.randint(5, (6,))) for _ in range(8)]


def time_first():
    fit(Layers(nn.TransformerEncoderLayer(16, 2, 32), time=1), None, sequences())
    fit(Layers(nn.LSTM(16, 16), time=1), None, sequences())


class AmongSamples(nn.Module):
    """Attends from each sample to the others, on purpose."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 5)

    def forward(self, inputs):
        hidden = inputs[:, None]
        return self.head(self.attention(hidden, hidden, hidden, need_weights=False)[0][:, 0])


def samples_that_see_each_other():
    fit(AmongSamples())


def losses_of_equal_gradients():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        logits = model(inputs)
        first = F.cross_entropy(logits, labels)
        first.backward(retain_graph=True)
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        step(optimizer, first / norm + 0.1 * logits.square().mean())


def range_of_rates():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 ** (step / 2))
    fit(model, optimizer, schedule=schedule)


def fetched_ahead():
    model = classifier()
    optimizer = adamw(model)
    batches = iter(loader(96))
    ahead = next(batches)
    while ahead:
        inputs, labels = ahead
        ahead = next(batches, None)
        step(optimizer, F.cross_entropy(model(inputs), labels))


def scaled_by_hand():
    accumulate(loss=lambda logits, labels: 512 * F.cross_entropy(logits, labels), divisor=1024)


def gradients_by_autograd():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        loss = F.cross_entropy(model(inputs), labels)
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        for one, slope in zip(model.parameters(), slopes, strict=True):
            one.grad = slope
        optimizer.step()


def each_batch_echoed():
    fit(batches=itertools.chain.from_iterable([batch, batch] for batch in loader()))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, given):
        return given.view_as(given)

    @staticmethod
    def backward(context, slope):
        return -slope


def adversarial_domains():
    body, label, domain = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 1)
    optimizer = adamw(nn.ModuleList([body, label, domain]))
    for inputs, labels in loader():
        hidden = body(inputs).relu()
        where = domain(Reversed.apply(hidden)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(where, (labels > 2).float())
        step(optimizer, loss + F.cross_entropy(label(hidden), labels))


HEALTHY = [
    value_learning_with_replay, denoising, vector_quantized, siamese, speech, nodes_of_one_graph,
    physics, flow, tensors_alone, ensemble_by_vmap, federated, several_models_one_batch,
    optimizer_around_another, own_optimizer, differentially_private, masters_in_full_precision,
    soft_actor_and_critic, spikes, normed_weights, pictures_of_zeros_and_ones, tags, boxes,
    packed_sequences, restarts_by_parts_of_an_epoch, weights_of_a_network_by_another, energy,
    last_layer_of_zeros, rewarded, distilled_in_log_space, rates_by_depth,
    trial_step, attention_with_a_mask, biases_before_a_norm, averaged_teacher_in_training_mode,
    tasks_one_after_the_other, gradients_divided_by_hand, logits_normalized,
    microbatches_without_advantage, time_first, samples_that_see_each_other,
    losses_of_equal_gradients, range_of_rates, fetched_ahead, scaled_by_hand,
    gradients_by_autograd, each_batch_echoed, adversarial_domains,
]  # fmt: skip
