"""Faulty loops of kinds that no test had, written before the rules that find them.

As in `loops.py`, a loop's wrong line is marked with `# here`.
"""

import copy

import torch
from held_out_healthy_loops import Attention, Layers, climb, padded_tokens, sequences
from loops import Language, accumulate, adamw, classifier, fit, loader, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset


def running_total():
    model = classifier()
    optimizer = adamw(model)
    total = 0
    for number, (inputs, labels) in enumerate(loader()):
        total = total + F.cross_entropy(model(inputs), labels) / 4
        total.backward(retain_graph=True)  # here
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            total = 0


def attack_left_in_the_gradients():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        inputs.requires_grad_()
        F.cross_entropy(model(inputs), labels).backward()  # here
        attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
        F.cross_entropy(model(attacked), labels).backward()
        optimizer.step()


def second_loss_forgotten():
    body, first, second = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 1)
    optimizer = adamw(nn.ModuleList([body, first, second]))
    for inputs, labels in loader():
        hidden = body(inputs).relu()
        loss = F.cross_entropy(first(hidden), labels)
        side = F.mse_loss(second(hidden).squeeze(1), inputs.sum(1))  # here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(float(loss + side))


def extra_parameter_never_zeroed():
    model = classifier()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.01)
    for inputs, labels in loader():
        model.zero_grad()
        F.cross_entropy(model(inputs) * temperature, labels).backward()
        optimizer.step()  # here


def extra_parameter_in_no_optimizer():
    model = classifier()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs) * temperature, labels))  # here: step


def state_cleared_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.state.clear()
        optimizer.step()  # here


def one_group_without_a_rate():
    model = classifier()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters()}]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    fit(model, optimizer)  # here: end


def hook_that_zeroes():
    model = classifier()
    model[0].weight.register_hook(torch.zeros_like)
    fit(model)  # here: end


def rounded_outputs():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.mse_loss(model(inputs).round().squeeze(1), labels.float()))  # here: step


def ratio_of_the_same_policy():
    model = classifier()
    optimizer = adamw(model)
    for states, actions in loader():
        new = model(states).log_softmax(1).gather(1, actions[:, None])
        old = new
        step(optimizer, (-(new - old).exp() * torch.randn(len(states), 1)).mean())  # here: step


def same_weights_everywhere():
    model = classifier()
    for layer in (model[0], model[3]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    fit(model)  # here: end


def maximized():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    fit(model, optimizer)  # here: end


def schedule_made_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        step(optimizer, F.cross_entropy(model(inputs), labels))
        scheduler.step()  # here


def rate_set_over_the_schedule():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for inputs, labels in loader():
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        step(optimizer, F.cross_entropy(model(inputs), labels))
        scheduler.step()  # here


def rate_of_zero_after_three_steps():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels))
        scheduler.step()  # here


def clipped_to_nothing():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.0)  # here
        optimizer.step()


def targets_out_of_reach():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    optimizer = adamw(model)
    for inputs, _ in loader():
        step(optimizer, F.mse_loss(model(inputs), 5 * inputs.sum(1, keepdim=True)))  # here


def labels_of_minus_one():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        signs = (labels > 2).float() * 2 - 1
        step(optimizer, F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), signs))  # here


def several_labels_as_classes():
    model = classifier()
    optimizer = adamw(model)
    for inputs, _ in loader():
        tags = (inputs[:, :5] > 0).float()
        step(optimizer, F.cross_entropy(model(inputs), tags))  # here


def labels_smoothed_away():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels, label_smoothing=1.0))  # here


def padding_alone_counts():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(1, 50, (3, 12))
        mask = torch.ones_like(tokens)
        mask[:, 7:] = 0
        tokens = tokens * mask
        labels = tokens.masked_fill(mask.bool(), -100)[:, 1:]
        logits = model(tokens, attention_mask=mask)[:, :-1]
        step(optimizer, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))  # here


def viewed_instead_of_transposed():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(50, (3, 12))
        logits = model(tokens[:, :-1])
        step(optimizer, F.cross_entropy(logits.reshape(3, 50, 11), tokens[:, 1:]))  # here


def all_dropped():
    fit(classifier(dropout=1.0))  # here: end


def inputs_divided_to_zero():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        pixels = (inputs * 100).abs().clamp(0, 254).to(torch.uint8)
        step(optimizer, F.cross_entropy(model((pixels // 255).float()), labels))  # here


def dropout_recomputed_anew():
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), nn.Linear(16, 5)
    optimizer = adamw(nn.ModuleList([first, second]))
    for inputs, labels in loader():
        hidden = checkpoint(first, inputs, use_reentrant=False, preserve_rng_state=False)  # here
        step(optimizer, F.cross_entropy(second(hidden), labels))


def arrays_of_outputs():
    model = classifier()
    optimizer = adamw(model)
    outputs = []
    for inputs, labels in loader():
        logits = model(inputs)
        step(optimizer, F.cross_entropy(logits, labels))
        outputs.append(logits.detach().numpy().repeat(9000, axis=0))  # here


def same_batch_in_a_window():
    model = classifier(dropout=0.1)
    optimizer = adamw(model)
    criterion = nn.CrossEntropyLoss()
    for inputs, labels in loader():
        for _ in range(2):
            loss = criterion(model(inputs), labels) / 2  # here
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def part_of_the_loss_as_a_number():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels) + 0.1 * logits.square().mean().item()  # here
        step(optimizer, loss)


def penalty_without_a_graph():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)  # here
        step(optimizer, loss + slope.square().sum())


def penalty_in_each_microbatch():
    model = classifier()
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(loader()):
        logits = model(inputs)
        (F.cross_entropy(logits, labels) / 2 + 0.03 * logits.square().mean()).backward()  # here
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def masked_values_over_all():
    model = Language()
    optimizer = adamw(model)
    for length in range(4, 14):
        tokens = torch.randint(50, (4, 14))
        logits = model(tokens[:, :-1]).log_softmax(-1)
        values = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        mask = torch.arange(13) < length
        step(optimizer, (-(values * mask).sum() / values.numel()))  # here: backward


def trial_gradients_added():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        changes = climb(model)
        F.cross_entropy(model(inputs), labels).backward()  # here
        climb(model, [-one for one in changes])
        optimizer.step()


def trial_weights_stay():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step_to = F.cross_entropy(model(inputs), labels)
        step_to.backward()
        climb(model)
        step(optimizer, F.cross_entropy(model(inputs), labels))  # here: step
        optimizer.zero_grad()


def frozen_after_the_first_step():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs.requires_grad_()), labels))  # here: step
        model.requires_grad_(False)


def group_without_a_rate_after_the_first_step():
    model = classifier()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "scale": 0}]
    optimizer = torch.optim.AdamW(groups)
    for inputs, labels in loader():
        step(optimizer, F.cross_entropy(model(inputs), labels))  # here: step
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group.get("scale", 1)


def gate_detached():
    model = nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])
    optimizer = adamw(model)
    for inputs, labels in loader():
        logits = model[0](inputs) * model[1](inputs).sigmoid().detach()  # here
        step(optimizer, F.cross_entropy(logits, labels))


def targets_with_a_gradient():
    model = classifier()
    optimizer = adamw(model)
    for inputs, actions in loader():
        values = model(inputs).gather(1, actions[:, None]).squeeze(1)
        wanted = torch.randn(8) + 0.9 * model(torch.randn(8, 8)).max(1).values
        loss = F.smooth_l1_loss(values, wanted)  # here
        step(optimizer, loss)


def mask_inverted():
    model = Attention()
    optimizer = adamw(model)
    for _ in range(10):
        tokens = padded_tokens()
        logits = model(tokens, tokens == 0)[:, 0]  # here
        step(optimizer, F.cross_entropy(logits, torch.randint(5, (6,))))


def padding_counts_without_a_mask():
    model = Language()
    optimizer = adamw(model)
    criterion = nn.CrossEntropyLoss()
    for _ in range(10):
        tokens = padded_tokens()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = criterion(logits, tokens[:, 1:].flatten())  # here
        step(optimizer, loss)


def probabilities_for_ctc():
    model = nn.Linear(8, 5)
    optimizer = adamw(model)
    for _ in range(10):
        lengths = torch.full((4,), 12), torch.full((4,), 3)
        values = model(torch.randn(12, 4, 8)).softmax(-1)
        loss = F.ctc_loss(values, torch.randint(1, 5, (4, 3)), *lengths)  # here
        step(optimizer, loss)


def teacher_in_training_mode():
    teacher, model = classifier(dropout=0.1), classifier()
    optimizer = adamw(model)
    for inputs, _ in loader():
        with torch.no_grad():
            wanted = teacher(inputs)  # here
        step(optimizer, F.mse_loss(model(inputs), wanted))


class Dropping(nn.Linear):
    def forward(self, given):
        return super().forward(F.dropout(given, 0.5, self.training))


def function_left_in_eval_mode():
    model = Dropping(8, 5).eval()
    optimizer = adamw(model)
    for inputs, labels in loader():
        logits = model(inputs)  # here
        step(optimizer, F.cross_entropy(logits, labels))


def same_noise_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(loader()):
        torch.manual_seed(0)  # here
        if number % 5 == 0:
            torch.randn(3)  # an evaluation
        noisy = inputs + torch.randn_like(inputs)
        step(optimizer, F.cross_entropy(model(noisy), labels))


def clipped_before_its_backward():
    model, other = classifier(), classifier()
    first, second = adamw(model), adamw(other)
    for inputs, labels in loader():
        step(first, F.cross_entropy(model(inputs), labels))
        second.zero_grad()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # here
        F.mse_loss(other(inputs), inputs[:, :5]).backward()
        second.step()


def scalars_with_a_graph():
    model = classifier()
    optimizer = adamw(model)
    penalties = []
    for inputs, labels in loader():
        hidden = model[0](inputs)
        penalties.append(hidden.square().mean())  # here
        step(optimizer, F.cross_entropy(model[1:](hidden), labels))


def sum_of_losses():
    model = classifier()
    optimizer = adamw(model)
    total = 0
    for inputs, labels in loader():
        loss = F.cross_entropy(model(inputs), labels)
        step(optimizer, loss)
        total += loss  # here


def targets_of_the_batch_before():
    model = classifier()
    optimizer = adamw(model)
    before = None
    for inputs, labels in loader():
        if before is not None:
            loss = F.cross_entropy(model(inputs), before)  # here
            step(optimizer, loss)
        before = labels


def recurrent_over_the_batch():
    fit(Layers(nn.LSTM(16, 16)), None, sequences())  # here: sample


def attention_over_the_batch():
    fit(Layers(nn.TransformerEncoderLayer(16, 2, 32)), None, sequences())  # here: sample


def first_loss_zeroed():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        logits = model(inputs)
        F.cross_entropy(logits, labels).backward(retain_graph=True)  # here
        step(optimizer, 0.1 * logits.square().mean())


def schedule_of_epochs():
    model = classifier()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    fit(model, optimizer, schedule=schedule)  # here: schedule


class Remade(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = classifier(), nn.Parameter(torch.ones(5))

    def forward(self, inputs):
        self.scale = nn.Parameter(self.scale.clamp(0, 2))
        return self.body(inputs) * self.scale


def parameters_made_in_forward():
    fit(Remade())  # here: end


def gradients_divided_too():
    accumulate(divisor=2)  # here: half


def compared_with_itself():
    fit(loss=lambda logits, _: F.softplus(logits.detach() - logits).mean())  # here: sample


def label_among_the_inputs():
    batches = ((torch.cat([one, labels[:, None]], 1), labels) for one, labels in loader())
    fit(nn.Linear(9, 5), None, batches)  # here: sample


def scale_updated_per_optimizer():
    body, head = nn.Linear(8, 8), nn.Linear(8, 5)
    optimizers = [adamw(body), adamw(head)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for inputs, labels in loader():
        scaler.scale(F.cross_entropy(head(body(inputs)), labels)).backward()
        for one in optimizers:
            scaler.step(one)
            scaler.update()  # here
            one.zero_grad()


def state_loaded_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    saved = None
    for inputs, labels in loader():
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved))
        step(optimizer, F.cross_entropy(model(inputs), labels))  # here: step
        saved = saved or copy.deepcopy(optimizer.state_dict())


def loss_of_no_weight():
    fit(loss=lambda logits, labels: 0 * F.cross_entropy(logits, labels))  # here: end


def each_batch_twice_in_an_epoch():
    rows = TensorDataset(torch.randn(32, 8), torch.randint(5, (32,)))
    fit(batches=DataLoader(ConcatDataset([rows, rows]), 8))  # here: fetch


FAULTY = {
    "accumulation": [
        running_total, same_batch_in_a_window, part_of_the_loss_as_a_number,
        penalty_without_a_graph, penalty_in_each_microbatch, masked_values_over_all,
        gradients_divided_too,
    ],
    "zeroed": [
        attack_left_in_the_gradients, extra_parameter_never_zeroed, trial_gradients_added,
        trial_weights_stay, first_loss_zeroed,
    ],
    "optimizer": [
        extra_parameter_in_no_optimizer, state_cleared_in_each_step, state_loaded_in_each_step,
        parameters_made_in_forward,
    ],
    "moves": [
        one_group_without_a_rate, hook_that_zeroes, rounded_outputs, ratio_of_the_same_policy,
        same_weights_everywhere, all_dropped, second_loss_forgotten, frozen_after_the_first_step,
        group_without_a_rate_after_the_first_step, gate_detached, compared_with_itself,
        loss_of_no_weight,
    ],
    "sign": [maximized],
    "schedule": [
        schedule_made_in_each_step, rate_set_over_the_schedule, rate_of_zero_after_three_steps,
        schedule_of_epochs,
    ],
    "scaler": [scale_updated_per_optimizer],
    "clipping": [clipped_to_nothing, clipped_before_its_backward],
    "targets": [
        targets_out_of_reach, labels_of_minus_one, several_labels_as_classes, labels_smoothed_away,
        padding_alone_counts, targets_with_a_gradient, mask_inverted,
        padding_counts_without_a_mask, recurrent_over_the_batch, attention_over_the_batch,
        label_among_the_inputs,
    ],
    "logits": [viewed_instead_of_transposed, probabilities_for_ctc],
    "data": [
        inputs_divided_to_zero, same_noise_in_each_step, targets_of_the_batch_before,
        each_batch_twice_in_an_epoch,
    ],
    "mode": [
        dropout_recomputed_anew, teacher_in_training_mode, function_left_in_eval_mode,
    ],
    "graph": [sum_of_losses],
    "growth": [arrays_of_outputs, scalars_with_a_graph],
}  # fmt: skip
