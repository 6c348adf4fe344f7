"""More healthy training loops, as different as can be."""

import copy
import itertools
from collections import deque

import torch
from loops import Language, adamw, classifier, fit, loader, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def short(num_batches=5):
    return loader(8 * num_batches)


def last_window_short():
    model = classifier()
    optimizer = adamw(model)
    data = short()
    for _ in range(6):
        for number, (inputs, labels) in enumerate(data):
            size = 2 if number < 4 else 1
            (F.cross_entropy(model(inputs), labels) / size).backward()
            if number % 2 or number + 1 == len(data):
                optimizer.step()
                optimizer.zero_grad()


def last_window_short_and_divided_by_all():
    model = classifier()
    optimizer = adamw(model)
    data = short()
    for _ in range(6):
        for number, (inputs, labels) in enumerate(data):
            (F.cross_entropy(model(inputs), labels) / 2).backward()
            if number % 2 or number + 1 == len(data):
                optimizer.step()
                optimizer.zero_grad()


def last_batch_short():
    model = classifier()
    optimizer = adamw(model)
    for _ in range(6):
        for number, (inputs, labels) in enumerate(loader(44)):
            (F.cross_entropy(model(inputs), labels) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def several_tasks_one_batch():
    body, heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(3))
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()])
    for inputs, labels in loader():
        hidden = body(inputs).relu()
        optimizer.zero_grad()
        for head in heads:
            F.cross_entropy(head(hidden), labels).backward(retain_graph=True)
        optimizer.step()


def several_tasks_several_loaders():
    body, heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(2))
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()])
    for batches in zip(loader(), loader(), strict=True):
        optimizer.zero_grad()
        for head, (inputs, labels) in zip(heads, batches, strict=True):
            F.cross_entropy(head(body(inputs).relu()), labels).backward()
        optimizer.step()


def half_of_the_square():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, _ in loader():
        step(optimizer, 0.5 * F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))


def half_by_division():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, _ in loader():
        step(optimizer, (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / 2)


def distilled():
    teacher, model = classifier(width=32).eval(), classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        with torch.no_grad():
            wanted = F.softmax(teacher(inputs) / 2, dim=1)
        output = model(inputs)
        soft = F.kl_div(F.log_softmax(output / 2, dim=1), wanted, reduction="batchmean")
        step(optimizer, 0.5 * F.cross_entropy(output, labels) + 0.5 * 4 * soft)


def variational():
    encoder, decoder = nn.Linear(8, 8), nn.Linear(4, 8)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    for inputs, _ in loader():
        mean, spread = encoder(inputs).chunk(2, dim=1)
        output = decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        rebuilt = F.mse_loss(output, inputs, reduction="sum") / len(inputs)
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        step(optimizer, rebuilt + divergence)


def self_supervised_without_gradient():
    body, head = classifier(classes=8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.05)
    for inputs, _ in loader():
        one, other = (body(inputs + 0.1 * torch.randn_like(inputs)) for _ in range(2))
        loss = -F.cosine_similarity(head(one), other.detach()).mean() / 2
        loss = loss - F.cosine_similarity(head(other), one.detach()).mean() / 2
        step(optimizer, loss)


def momentum_contrast():
    model = classifier(classes=8)
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    queue = F.normalize(torch.randn(32, 8), dim=1)
    for inputs, _ in loader():
        query = F.normalize(model(inputs), dim=1)
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            key = F.normalize(slow(inputs), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1)
        step(optimizer, F.cross_entropy(scores / 0.1, torch.zeros(8, dtype=torch.long)))
        queue = torch.cat([key, queue])[:32]


def wasserstein():
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    critic = classifier(classes=1)
    of_generator = torch.optim.RMSprop(generator.parameters(), 1e-3)
    of_critic = torch.optim.RMSprop(critic.parameters(), 1e-3)
    for number, (real, _) in enumerate(loader()):
        fake = generator(torch.randn(8, 4)).detach()
        step(of_critic, critic(fake).mean() - critic(real).mean())
        for one in critic.parameters():
            one.data.clamp_(-0.1, 0.1)
        if number % 3 == 2:
            step(of_generator, -critic(generator(torch.randn(8, 4))).mean())


def saturating_adversary():
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    judge = classifier(classes=1)
    of_generator, of_judge = adamw(generator), adamw(judge)
    ones = torch.ones(8, 1)
    for real, _ in loader():
        fake = generator(torch.randn(8, 4))
        loss = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), 0 * ones)
        step(of_judge, loss / 2)
        step(of_generator, -F.binary_cross_entropy_with_logits(judge(fake), 0 * ones))


def gradient_penalty():
    critic = classifier(classes=1)
    optimizer = adamw(critic)
    for real, _ in loader():
        fake = torch.randn_like(real)
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        step(optimizer, critic(fake).mean() - critic(real).mean() + penalty)


def layers_dropped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
            self.head = nn.Linear(8, 5)

        def forward(self, inputs):
            for layer in self.layers:
                if not self.training or torch.rand(()) < 0.7:
                    inputs = inputs + layer(inputs).relu()
            return self.head(inputs)

    fit(Model())


def early_stop_and_curriculum():
    model = classifier()
    optimizer = adamw(model)
    best, patience = float("inf"), 0
    generator = torch.Generator().manual_seed(0)
    for size in (2, 4, 8, 16):
        fit(model, optimizer, loader(48, size))
        with torch.no_grad():
            now = float(model(torch.randn(16, 8, generator=generator)).square().mean())
        patience = 0 if now < best else patience + 1
        best = min(best, now)
        if patience > 3:
            break


def low_rank():
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down = nn.Linear(layer.in_features, 2, bias=False)
            self.up = nn.Linear(2, layer.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, inputs):
            return self.layer(inputs) + self.up(self.down(inputs))

    model = classifier()
    model[0], model[3] = Adapter(model[0]), Adapter(model[3])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    fit(model, optimizer)


def embedding_alone():
    model = Language()
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    optimizer = torch.optim.SparseAdam(nn.Embedding(4, 4, sparse=True).parameters())
    optimizer = torch.optim.AdamW(model.embed.parameters())
    for _ in range(5):
        tokens = torch.randint(50, (2, 9))
        logits = model(tokens[:, :-1]).flatten(0, 1)
        step(optimizer, F.cross_entropy(logits, tokens[:, 1:].flatten()))


def sparse_embedding():
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 5)
    optimizers = [torch.optim.SparseAdam(table.parameters()), adamw(head)]
    for _ in range(9):
        loss = F.cross_entropy(head(table(torch.randint(50, (8,)))), torch.randint(5, (8,)))
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()


def adam_then_lbfgs():
    model = classifier(classes=1)
    inputs = torch.randn(16, 8)
    first = adamw(model)
    for _ in range(6):
        step(first, F.mse_loss(model(inputs), inputs[:, :1]))
    second = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=3)

    def closure():
        second.zero_grad()
        loss = F.mse_loss(model(inputs), inputs[:, :1])
        loss.backward()
        return loss

    for _ in range(6):
        second.step(closure)


def half_scaler_that_skips():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    for inputs, labels in loader(320):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(inputs)
        scaler.scale(F.cross_entropy(output.half(), labels)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def scaler_that_is_off():
    model = classifier()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for inputs, labels in loader():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def bfloat16():
    model = nn.Sequential(nn.Embedding(500, 8), nn.Flatten(), nn.Linear(32, 5)).bfloat16()
    optimizer = adamw(model, rate=1e-3)
    for _, labels in loader():
        step(optimizer, F.cross_entropy(model(torch.randint(500, (len(labels), 4))), labels))


def compiled():
    fit(torch.compile(classifier()))


def recomputed_all_ways():
    model = Language()
    optimizer = adamw(model)
    for number in range(9):
        tokens = torch.randint(50, (2, 9))
        hidden = model.embed(tokens[:, :-1])
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=bool(number % 2))
        logits = model.head(hidden).flatten(0, 1)
        step(optimizer, F.cross_entropy(logits, tokens[:, 1:].flatten()))


def evaluated_with_gradients():
    model = classifier(dropout=0.2)
    optimizer = adamw(model)
    training, validation = short(), short(2)
    for _ in range(8):
        model.train()
        fit(model, optimizer, training)
        model.eval()
        right = 0
        for inputs, labels in validation:
            output = model(inputs)
            right += int((output.argmax(1) == labels).sum())
            F.cross_entropy(output, labels).item()


def predictions_of_an_epoch():
    model = classifier()
    optimizer = adamw(model)
    for _ in range(8):
        predictions, labels_seen = [], []
        for inputs, labels in loader(80):
            output = model(inputs)
            step(optimizer, F.cross_entropy(output, labels))
            predictions.append(output.detach().argmax(1))
            labels_seen.append(labels)
        float((torch.cat(predictions) == torch.cat(labels_seen)).float().mean())


def batch_norm_frozen():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = adamw(model)
    for _ in range(4):
        model.train()
        model[1].eval()
        fit(model, optimizer, short())


def actor_and_critic():
    actor, critic = classifier(classes=3), classifier(classes=1)
    of_actor, of_critic = adamw(actor), adamw(critic)
    memory = deque(maxlen=64)
    for _ in range(20):
        state = torch.randn(8)
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(state)).sample()
        memory.append((state, action, torch.randn(())))
        states, actions, rewards = map(torch.stack, zip(*list(memory)[-8:], strict=True))
        values = critic(states).squeeze(1)
        step(of_critic, F.mse_loss(values, rewards))
        chosen = torch.distributions.Categorical(logits=actor(states))
        gain = chosen.log_prob(actions) * (rewards - values).detach()
        step(of_actor, -gain.mean() - 0.01 * chosen.entropy().mean())


def meta_learned():
    model = classifier()
    outer = torch.optim.SGD(model.parameters(), 0.1)
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
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            moved = [0.05 * one.grad / (one.grad.norm() + 1e-6) for one in model.parameters()]
            for one, by in zip(model.parameters(), moved, strict=True):
                one.add_(by)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for one, by in zip(model.parameters(), moved, strict=True):
                one.sub_(by)
        optimizer.step()


def surgery_of_gradients():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        output = model(inputs)
        losses = [F.cross_entropy(output, labels), output.square().mean()]
        found = []
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            found.append([one.grad.clone() for one in model.parameters()])
        for one, first, second in zip(model.parameters(), *found, strict=True):
            one.grad = first + second
        optimizer.step()


def evolution():
    model = nn.Linear(8, 5).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in loader():
        for one in model.parameters():
            noise = torch.randn_like(one)
            losses = []
            for sign in (1, -2):
                one.add_(noise, alpha=0.1 * sign)
                losses.append(F.cross_entropy(model(inputs), labels))
            one.add_(noise, alpha=0.1)
            one.grad = (losses[0] - losses[1]) / 0.2 * noise
        optimizer.step()


def recurrent_by_parts():
    model, head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    state = None
    for inputs, labels in loader():
        output, state = model(inputs[:, None], state)
        state = state.detach()
        step(optimizer, F.cross_entropy(head(output[:, -1]), labels))


def endless_data():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(8), int(torch.randint(5, ()))

    fit(classifier(), None, DataLoader(Endless(), 8))


def unshuffled():
    model = classifier()
    optimizer = adamw(model)
    for _ in range(5):
        fit(model, optimizer, loader(48, shuffle=False))


def same_batch_to_overfit():
    model = classifier()
    optimizer = adamw(model)
    inputs, labels = next(iter(loader()))
    for _ in range(9):
        step(optimizer, F.cross_entropy(model(inputs), labels))


def mixed_labels():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        share = torch.rand(())
        order = torch.randperm(len(inputs))
        output = model(share * inputs + (1 - share) * inputs[order])
        loss = share * F.cross_entropy(output, labels)
        step(optimizer, loss + (1 - share) * F.cross_entropy(output, labels[order]))


def weighted_classes_and_smoothing():
    model = classifier()
    optimizer = adamw(model)
    weight = torch.tensor([1.0, 2, 1, 1, 3])
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    for inputs, labels in loader():
        step(optimizer, criterion(model(inputs), labels))


def focal():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        step(optimizer, ((1 - (-losses).exp()).square() * losses).mean())


def hardest_samples():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        step(optimizer, losses.topk(4).values.mean())


def masked_by_hand():
    model = Language()
    optimizer = adamw(model)
    for _ in range(9):
        tokens = torch.randint(1, 50, (3, 12))
        mask = torch.ones(3, 11)
        mask[1:, 6:] = 0
        logits = model(tokens[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
        step(optimizer, (losses * mask).sum() / mask.sum())


def causal():
    class Model(Language):
        def forward(self, tokens):
            hidden = self.embed(tokens)
            seen = F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
            return self.head(hidden + seen)

    model = Model()
    optimizer = adamw(model)
    for _ in range(9):
        tokens = torch.randint(50, (2, 9))
        logits = model(tokens)[:, :-1].flatten(0, 1)
        step(optimizer, F.cross_entropy(logits, tokens[:, 1:].flatten()))


def tied_weights():
    model = Language()
    model.head.weight = model.embed.weight
    optimizer = adamw(model)
    for _ in range(9):
        tokens = torch.randint(50, (2, 9))
        logits = model(tokens[:, :-1]).flatten(0, 1)
        step(optimizer, F.cross_entropy(logits, tokens[:, 1:].flatten()))


def unfrozen_step_by_step():
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters())
    for number, (inputs, labels) in enumerate(loader()):
        if number == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-4})
        step(optimizer, F.cross_entropy(model(inputs), labels))


def schedule_per_epoch_and_plateau():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(6):
        for inputs, labels in short():
            loss = F.cross_entropy(model(inputs), labels)
            step(optimizer, loss)
        scheduler.step(loss.item())


def averaged_by_torch():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels))
        average.update_parameters(model)
        with torch.no_grad():
            average(inputs)


def hooks_and_histories():
    model = classifier()
    optimizer = adamw(model)
    norms, losses = [], []
    model[0].weight.register_hook(lambda grad: norms.append(grad.norm()))
    for _ in range(8):
        for inputs, labels in short():
            handle = model[0].register_forward_hook(lambda *_: None)
            loss = F.cross_entropy(model(inputs), labels)
            step(optimizer, loss)
            handle.remove()
            losses.append(loss.detach())


def images_into_images():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    optimizer = adamw(model)
    data = torch.rand(40, 1, 8, 8)
    for _ in range(5):
        for (clean,) in DataLoader(TensorDataset(data), 8, shuffle=True):
            noise = torch.randn_like(clean)
            step(optimizer, F.mse_loss(model(clean + noise), noise))


def nested_batches():
    class Rows(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"inputs": torch.randn(8), "targets": {"label": index % 5, "name": str(index)}}

    model = classifier()
    optimizer = adamw(model)
    for _ in range(3):
        for batch in DataLoader(Rows(), 8, shuffle=True):
            step(optimizer, F.cross_entropy(model(batch["inputs"]), batch["targets"]["label"]))


def style_of_an_image():
    network = nn.Conv2d(3, 8, 3)
    wanted = network(torch.rand(1, 3, 8, 8)).detach()
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([image], 0.05)
    for _ in range(9):
        step(optimizer, F.mse_loss(network(image), wanted))


def ranked():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        scores = model(inputs).squeeze(1)
        above = labels[:, None] > labels[None, :]
        step(optimizer, F.softplus(scores[None, :] - scores[:, None])[above].mean())


def preferred():
    model = Language()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adamw(model, 1e-3)

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


def reset_between_tasks():
    model = classifier()
    for _ in range(4):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), 0.1)
        for inputs, labels in itertools.islice(loader(), 3):
            step(inner, F.cross_entropy(fast(inputs), labels))
        with torch.no_grad():
            for one, other in zip(model.parameters(), fast.parameters(), strict=True):
                one.lerp_(other, 0.1)


def two_segments():
    """Two parts on their own optimizers, one of which steps every second time."""
    body, head = nn.Linear(8, 16), nn.Linear(16, 5)
    of_body, of_head = adamw(body), adamw(head)
    for number, (inputs, labels) in enumerate(loader()):
        (F.cross_entropy(head(body(inputs).relu()), labels) / 2).backward()
        of_head.step()
        of_head.zero_grad()
        if number % 2:
            of_body.step()
            of_body.zero_grad()


HEALTHY = [
    one
    for name, one in list(globals().items())
    if callable(one) and one.__module__ == __name__ and name not in ("short", "step")
]
