"""More training loops with one planted fault each, of kinds that go unnoticed.

As in `loops.py`, a loop's wrong line is marked with `# here`.
"""

import copy
from collections import deque

import torch
from loops import Language, adamw, classifier, fit, loader, step
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def two_epochs(num_batches=5):
    return loader(8 * num_batches)


# Accumulation.


def undivided_by_hand():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for number, (inputs, _) in enumerate(loader()):
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()  # here
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def undivided_sum_of_losses():
    model = classifier()
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(loader()):
        output = model(inputs)
        loss = F.cross_entropy(output, labels) + 0.01 * output.square().mean()
        loss.backward()  # here
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def divided_twice():
    model = classifier()
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(loader()):
        loss = F.cross_entropy(model(inputs), labels) / 2
        (loss / 2).backward()  # here
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def divided_and_stepped_each_time():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        (F.cross_entropy(model(inputs), labels) / 4).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def mean_divided_by_the_batch_size():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, (F.cross_entropy(model(inputs), labels) / len(inputs)))  # here: backward


def mean_over_padding():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(1, 50, (3, 12))
        mask = torch.ones(3, 11)
        mask[1:, 6:] = 0
        logits = model(tokens[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
        step(optimizer, (losses * mask).mean())  # here: backward


def mean_over_ignored_targets():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(1, 50, (3, 12))
        labels = tokens[:, 1:].clone()
        labels[1:, 6:] = -100
        logits = model(tokens[:, :-1]).transpose(1, 2)
        step(optimizer, F.cross_entropy(logits, labels, reduction="none").mean())  # here: backward


def window_over_the_end_of_an_epoch():
    model = classifier()
    optimizer = adamw(model)
    data = two_epochs()
    for _ in range(8):
        for number, (inputs, labels) in enumerate(data):
            (F.cross_entropy(model(inputs), labels) / 2).backward()  # here
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def end_of_an_epoch_lost():
    model = classifier()
    optimizer = adamw(model)
    data = two_epochs()
    for _ in range(8):
        optimizer.zero_grad()  # here
        for number, (inputs, labels) in enumerate(data):
            (F.cross_entropy(model(inputs), labels) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def sums_over_own_tokens():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        for length in (9, 17):
            tokens = torch.randint(50, (2, length))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
            (loss / tokens[:, 1:].numel() / 2).backward()  # here
        optimizer.step()
        optimizer.zero_grad()


def backward_twice():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward(retain_graph=True)
        loss.backward()  # here
        optimizer.step()


def last_loss_alone():
    model = classifier()
    optimizer = adamw(model)
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
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        loss = -F.cross_entropy(model(inputs), labels)
        loss.backward()  # here
        optimizer.step()


def not_finite():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        loss = F.nll_loss(model(inputs).softmax(1).mul(1e-30).mul(1e-30).log(), labels)
        loss.backward()  # here
        optimizer.step()


# Gradients.


def stepped_twice():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels))
        optimizer.step()  # here


def zeroed_by_hand_per_microbatch():
    model = classifier()
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(loader()):
        for one in model.parameters():
            one.grad = None
        (F.cross_entropy(model(inputs), labels) / 2).backward()  # here
        if number % 2:
            optimizer.step()


def gradients_of_the_generator():
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    judge = classifier(classes=1)
    of_generator, of_judge = adamw(generator), adamw(judge)
    ones = torch.ones(8, 1)
    for real, _ in loader():
        fake = generator(torch.randn(8, 4))
        F.binary_cross_entropy_with_logits(judge(real), ones).backward()
        F.binary_cross_entropy_with_logits(judge(fake.detach()), 0 * ones).backward()
        of_judge.step()  # here
        of_judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        of_generator.step()
        of_generator.zero_grad()


def wrong_optimizer_zeroed():
    model, other = classifier(), classifier()
    optimizer, of_other = adamw(model), adamw(other)
    for inputs, labels in loader():
        of_other.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


# Optimizers.


def two_optimizers_for_one_layer():
    model = classifier()
    optimizer, of_head = adamw(model), torch.optim.SGD(model[3].parameters(), 0.1)
    for inputs, labels in loader():
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        of_head.step()  # here
        model.zero_grad()


def made_in_each_step():
    model = classifier()
    for inputs, labels in loader():
        optimizer = torch.optim.AdamW(model.parameters())  # here
        step(optimizer, F.cross_entropy(model(inputs), labels))


def layers_in_a_list():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(8, 8) for _ in range(2)]
            self.head = nn.Linear(8, 5)

        def forward(self, inputs):
            for layer in self.layers:
                inputs = layer(inputs).relu()
            return self.head(inputs)

    fit(Model())  # here: end


def unfrozen_but_not_added():
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    for number, (inputs, labels) in enumerate(loader()):
        if number == 2:
            model[0].requires_grad_(True)
        step(optimizer, F.cross_entropy(model(inputs), labels))  # here: step


def one_parameter_twice():
    model = classifier()
    optimizer = torch.optim.SGD([*model.parameters(), *model[3].parameters()], 0.1)
    fit(model, optimizer)  # here: end


# Moves.


def updates_below_the_precision():
    model = classifier(width=32).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs.bfloat16()).float(), labels))  # here: step


def encoder_detached():
    encoder, head = nn.Linear(8, 16), nn.Linear(16, 5)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
    for inputs, labels in loader():
        hidden = encoder(inputs).detach()  # here
        step(optimizer, F.cross_entropy(head(hidden), labels))


def encoder_data():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

        def forward(self, inputs):
            hidden = self.encoder(inputs).data  # here
            return self.head(hidden)

    fit(Model())


def weights_loaded_in_each_step():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved = copy.deepcopy(model.state_dict())
    for inputs, labels in loader():
        model.load_state_dict(saved)
        step(optimizer, F.cross_entropy(model(inputs), labels))  # here: step


def frozen_by_decay():
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number, (inputs, labels) in enumerate(loader()):
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here
        optimizer.zero_grad(set_to_none=False)
        if number == 1:
            model[0].requires_grad_(False)


# Schedules, clipping, scaling.


def schedule_of_an_older_optimizer():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels))
        scheduler.step()  # here


def clipped_before_backward():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        loss = F.cross_entropy(model(inputs), labels)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unscaled_per_microbatch():
    model = classifier()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, (inputs, labels) in enumerate(loader()):
        scaler.scale(F.cross_entropy(model(inputs), labels) / 2).backward()
        if number % 2 == 0:
            scaler.unscale_(optimizer)  # here
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def one_of_two_losses_scaled():
    model = classifier()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for inputs, labels in loader():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        (0.1 * model(inputs).square().mean()).backward()  # here
        scaler.step(optimizer)
        scaler.update()


class WithInputs(nn.Sequential):
    def forward(self, inputs):
        return inputs, super().forward(inputs)


def half_without_a_scaler():
    model = WithInputs(classifier())
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            _, output = model(inputs)  # here
        F.cross_entropy(output.float(), labels).backward()
        optimizer.step()


# Losses and targets.


def relu_behind_the_last_layer():
    fit(nn.Sequential(classifier(), nn.ReLU()))  # here: sample


def each_with_each():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, _ in loader():
        step(optimizer, F.mse_loss(model(inputs), inputs.sum(1)))  # here


def softmax_over_the_batch():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.nll_loss(F.log_softmax(model(inputs), dim=0), labels))  # here


def sees_the_future():
    class Model(Language):
        def forward(self, tokens):
            hidden = self.embed(tokens)
            hidden = hidden + F.scaled_dot_product_attention(hidden, hidden, hidden)
            return self.head(hidden)

    model = Model()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(50, (2, 9))
        logits = model(tokens)[:, :-1].flatten(0, 1)
        step(optimizer, F.cross_entropy(logits, tokens[:, 1:].flatten()))  # here


def one_label():
    model = classifier()
    optimizer = adamw(model)
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    for inputs, labels in DataLoader(data, 8, shuffle=True):  # here
        step(optimizer, F.cross_entropy(model(inputs), labels))


def sorted_by_class():
    model = classifier()
    optimizer = adamw(model)
    data = TensorDataset(torch.randn(64, 8), torch.arange(64) // 16)
    for inputs, labels in DataLoader(data, 8):  # here
        step(optimizer, F.cross_entropy(model(inputs), labels))


# Mode and data.


def eval_before_training():
    model = classifier(dropout=0.2).eval()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)  # here
        loss.backward()
        optimizer.step()


def eval_after_the_first_epoch():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
    optimizer = adamw(model)
    model.train()
    for _ in range(8):
        for inputs, labels in two_epochs():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)  # here
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs, _ in two_epochs(2):
                model(inputs)


def evaluated_in_training_mode():
    model = classifier(dropout=0.2)
    optimizer = adamw(model)
    training, validation = two_epochs(), two_epochs(2)
    for _ in range(8):
        fit(model, optimizer, training)
        with torch.no_grad():
            for inputs, _ in validation:
                model(inputs)  # here


def dropout_in_evaluation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = classifier()

        def forward(self, inputs):
            return F.dropout(self.body(inputs), 0.1)  # here

    model = Model()
    optimizer = adamw(model)
    for _ in range(8):
        model.train()
        fit(model, optimizer, two_epochs())
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 8))


def seeded_in_each_step():
    model = classifier(dropout=0.2)
    optimizer = adamw(model)
    for inputs, labels in loader():
        torch.manual_seed(0)  # here
        step(optimizer, F.cross_entropy(model(inputs), labels))


def seeded_in_each_epoch():
    model = classifier()
    optimizer = adamw(model)
    data = two_epochs()
    for _ in range(8):
        torch.manual_seed(0)
        for inputs, labels in data:  # here
            step(optimizer, F.cross_entropy(model(inputs), labels))


def sampler_without_its_epoch():
    model = classifier()
    optimizer = adamw(model)
    data = TensorDataset(torch.randn(40, 8), torch.randint(5, (40,)))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    batches = DataLoader(data, 8, sampler=sampler)
    for _ in range(8):
        for inputs, labels in batches:  # here
            step(optimizer, F.cross_entropy(model(inputs), labels))


def one_sample():
    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(0)
            return torch.randn(8, generator=generator), 1

    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in DataLoader(Rows(), 8, shuffle=True):  # here
        step(optimizer, F.cross_entropy(model(inputs), labels))


def inputs_not_finite():
    model = classifier()
    data = TensorDataset(torch.randn(64, 8) / torch.zeros(8), torch.randint(5, (64,)))
    fit(model, None, DataLoader(data, 8, shuffle=True))  # here: sample


# What is kept.


def cache_of_outputs():
    model = classifier()
    optimizer = adamw(model)
    outputs = []
    for _ in range(8):
        for inputs, labels in two_epochs():
            output = model(inputs)
            step(optimizer, F.cross_entropy(output, labels))
            outputs.append(output.detach())  # here


def cache_by_step():
    model = classifier()
    optimizer = adamw(model)
    seen = {}
    number = 0
    for _ in range(8):
        for inputs, labels in two_epochs():
            step(optimizer, F.cross_entropy(model(inputs), labels))
            number += 1
            seen[number] = inputs  # here


def hook_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    for _ in range(8):
        for inputs, labels in two_epochs():
            model[0].register_forward_hook(lambda *_: None)  # here
            step(optimizer, F.cross_entropy(model(inputs), labels))


def callback_that_keeps_activations():
    class Recorder:
        def __init__(self):
            self.activations = []

        def __call__(self, module, inputs, output):
            self.activations.append(output.detach())  # here

    model = classifier()
    optimizer = adamw(model)
    model[0].register_forward_hook(Recorder())
    for _ in range(8):
        fit(model, optimizer, two_epochs())


def hidden_state_with_its_graph():
    model = nn.GRU(8, 8, batch_first=True)
    optimizer = adamw(model)
    history = deque(maxlen=100)
    for inputs, _ in loader():
        output, state = model(inputs[:, None])
        step(optimizer, output.square().mean())
        history.append(state)  # here


def total_loss_with_its_graph():
    model = classifier()
    optimizer = adamw(model)
    total = 0
    for _ in range(8):
        for inputs, labels in two_epochs():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss  # here


FAULTY = {
    "accumulation": [
        undivided_by_hand, undivided_sum_of_losses, divided_twice, divided_and_stepped_each_time,
        mean_divided_by_the_batch_size, mean_over_padding, mean_over_ignored_targets,
        window_over_the_end_of_an_epoch, sums_over_own_tokens, backward_twice, last_loss_alone,
    ],
    "sign": [gradient_ascent, not_finite],
    "zeroed": [
        end_of_an_epoch_lost, stepped_twice, zeroed_by_hand_per_microbatch,
        gradients_of_the_generator, wrong_optimizer_zeroed,
    ],
    "optimizer": [
        two_optimizers_for_one_layer, made_in_each_step, unfrozen_but_not_added,
        one_parameter_twice, layers_in_a_list,
    ],
    "moves": [
        updates_below_the_precision, encoder_detached, encoder_data, weights_loaded_in_each_step,
        frozen_by_decay,
    ],
    "schedule": [schedule_of_an_older_optimizer],
    "clipping": [clipped_before_backward],
    "scaler": [unscaled_per_microbatch, one_of_two_losses_scaled, half_without_a_scaler],
    "logits": [relu_behind_the_last_layer, each_with_each, softmax_over_the_batch],
    "targets": [sees_the_future, one_label, sorted_by_class],
    "mode": [
        eval_before_training, eval_after_the_first_epoch, evaluated_in_training_mode,
        dropout_in_evaluation,
    ],
    "data": [
        seeded_in_each_step, seeded_in_each_epoch, sampler_without_its_epoch, one_sample,
        inputs_not_finite,
    ],
    "graph": [hidden_state_with_its_graph, total_loss_with_its_graph],
    "growth": [
        cache_of_outputs, cache_by_step, hook_in_each_step, callback_that_keeps_activations,
    ],
}  # fmt: skip
