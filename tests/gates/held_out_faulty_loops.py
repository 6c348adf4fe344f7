"""Faulty loops of kinds that no test had, written before the rules that find them.

As in `loops.py`, a loop's wrong line is marked with `# here`.
"""

import torch
from loops import Language, adamw, classifier, loader
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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
        optimizer.zero_grad()
        F.cross_entropy(model(inputs) * temperature, labels).backward()
        optimizer.step()  # here


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
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


def hook_that_zeroes():
    model = classifier()
    model[0].weight.register_hook(torch.zeros_like)
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


def rounded_outputs():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.mse_loss(model(inputs).round().squeeze(1), labels.float()).backward()
        optimizer.step()  # here


def ratio_of_the_same_policy():
    model = classifier()
    optimizer = adamw(model)
    for states, actions in loader():
        new = model(states).log_softmax(1).gather(1, actions[:, None])
        old = new
        optimizer.zero_grad()
        (-(new - old).exp() * torch.randn(len(states), 1)).mean().backward()
        optimizer.step()  # here


def same_weights_everywhere():
    model = classifier()
    for layer in (model[0], model[3]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


def maximized():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


def schedule_made_in_each_step():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()  # here


def rate_set_over_the_schedule():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for inputs, labels in loader():
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()  # here


def rate_of_zero_after_three_steps():
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
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
        optimizer.zero_grad()
        F.mse_loss(model(inputs), 5 * inputs.sum(1, keepdim=True)).backward()  # here
        optimizer.step()


def labels_of_minus_one():
    model = classifier(classes=1)
    optimizer = adamw(model)
    for inputs, labels in loader():
        signs = (labels > 2).float() * 2 - 1
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), signs).backward()  # here
        optimizer.step()


def several_labels_as_classes():
    model = classifier()
    optimizer = adamw(model)
    for inputs, _ in loader():
        tags = (inputs[:, :5] > 0).float()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), tags).backward()  # here
        optimizer.step()


def labels_smoothed_away():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels, label_smoothing=1.0).backward()  # here
        optimizer.step()


def padding_alone_counts():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(1, 50, (3, 12))
        mask = torch.ones_like(tokens)
        mask[:, 7:] = 0
        tokens = tokens * mask
        labels = tokens.masked_fill(mask.bool(), -100)[:, 1:]
        optimizer.zero_grad()
        logits = model(tokens, attention_mask=mask)[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()  # here
        optimizer.step()


def viewed_instead_of_transposed():
    model = Language()
    optimizer = adamw(model)
    for _ in range(4):
        tokens = torch.randint(50, (3, 12))
        logits = model(tokens[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.reshape(3, 50, 11), tokens[:, 1:]).backward()  # here
        optimizer.step()


def all_dropped():
    model = classifier(dropout=1.0)
    optimizer = adamw(model)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # here


def inputs_divided_to_zero():
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        pixels = (inputs * 100).abs().clamp(0, 254).to(torch.uint8)
        optimizer.zero_grad()
        F.cross_entropy(model((pixels // 255).float()), labels).backward()  # here
        optimizer.step()


def dropout_recomputed_anew():
    first, second = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), nn.Linear(16, 5)
    optimizer = adamw(nn.ModuleList([first, second]))
    for inputs, labels in loader():
        hidden = checkpoint(first, inputs, use_reentrant=False, preserve_rng_state=False)  # here
        optimizer.zero_grad()
        F.cross_entropy(second(hidden), labels).backward()
        optimizer.step()


def arrays_of_outputs():
    model = classifier()
    optimizer = adamw(model)
    outputs = []
    for inputs, labels in loader():
        optimizer.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        outputs.append(logits.detach().numpy().repeat(9000, axis=0))  # here


FAULTY = {
    "accumulation": [running_total],
    "zeroed": [attack_left_in_the_gradients, extra_parameter_never_zeroed],
    "optimizer": [extra_parameter_in_no_optimizer, state_cleared_in_each_step],
    "moves": [
        one_group_without_a_rate, hook_that_zeroes, rounded_outputs, ratio_of_the_same_policy,
        same_weights_everywhere, all_dropped, second_loss_forgotten,
    ],
    "sign": [maximized],
    "schedule": [
        schedule_made_in_each_step, rate_set_over_the_schedule, rate_of_zero_after_three_steps,
    ],
    "clipping": [clipped_to_nothing],
    "targets": [
        targets_out_of_reach, labels_of_minus_one, several_labels_as_classes, labels_smoothed_away,
        padding_alone_counts,
    ],
    "logits": [viewed_instead_of_transposed],
    "data": [inputs_divided_to_zero],
    "mode": [dropout_recomputed_anew],
    "growth": [arrays_of_outputs],
}  # fmt: skip
