"""Training loops with a planted fault each, and a right one that looks like it.

As in `tests/gates/loops.py`, a loop's wrong line is marked with `# here`.
"""

import copy

import torch
from loops import adamw, classifier, fit, loader, step
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def distilled(divergence):
    teacher = classifier(width=32).eval()
    model = classifier()
    optimizer = adamw(model)
    for inputs, _ in loader():
        with torch.no_grad():
            wanted = teacher(inputs).softmax(1)
        step(optimizer, divergence(model(inputs).log_softmax(1), wanted))


def mean_over_classes():
    distilled(lambda shares, wanted: F.kl_div(shares, wanted))  # here


def mean_over_samples():
    distilled(nn.KLDivLoss(reduction="batchmean"))


def kept_small(weights):
    model = classifier()
    optimizer = adamw(model)
    for inputs, labels in loader():
        size = sum(one.square().sum() for one in weights(model))
        step(optimizer, F.cross_entropy(model(inputs), labels) + 1e-3 * size)


def penalty_of_data():
    kept_small(lambda model: [one.data for one in model.parameters()])  # here


def penalty_of_weights():
    kept_small(nn.Module.parameters)


def by_index(difference):
    inputs, wanted = torch.randn(64, 8), torch.randn(64)
    model = classifier(classes=1)
    optimizer = adamw(model)
    for rows in torch.randperm(64).split(8):
        step(optimizer, difference(model(inputs[rows]), wanted[rows]).square().mean())


def each_with_each_by_index():
    by_index(lambda values, wanted: values - wanted)  # here


def each_with_its_own_by_index():
    by_index(lambda values, wanted: values - wanted[:, None])


def drawn_by(weights):
    data = TensorDataset(torch.randn(64, 8), torch.randint(5, (64,)))
    fit(batches=DataLoader(data, 8, sampler=WeightedRandomSampler(weights(data.tensors[1]), 64)))


def weights_of_classes():
    drawn_by(lambda labels: 1 / labels.bincount())  # here: fetch


def weights_of_samples():
    drawn_by(lambda labels: 1 / labels.bincount()[labels])


def bootstrapped(copied, ask):
    policy = classifier()
    target_net = copied(policy)
    optimizer = adamw(policy)
    for inputs, labels in loader():
        with torch.no_grad():
            best = policy(inputs).argmax(1, keepdim=True)
            wanted = labels + 0.9 * ask(target_net, inputs).gather(1, best)[:, 0]
        step(optimizer, F.smooth_l1_loss(policy(inputs)[:, 0], wanted))


def target_is_the_policy():
    bootstrapped(lambda policy: policy, lambda target_net, inputs: target_net(inputs))  # here


def target_is_a_copy():
    bootstrapped(copy.deepcopy, lambda target_net, inputs: target_net(inputs))


class Scaled(nn.Module):
    def __init__(self, chosen):
        super().__init__()
        self.body = classifier()
        self.scale = nn.Linear(5, 5)
        self.chosen = chosen

    def forward(self, inputs):
        return self.scale(self.chosen(self.body(inputs)))


def largest_alone():
    fit(Scaled(lambda values: F.one_hot(values.argmax(1), 5).float()))  # here: sample


def all_values():
    fit(Scaled(lambda values: values))


def stepped(batches, times):
    model = classifier()
    optimizer = adamw(model)
    schedule = StepLR(optimizer, 1, 0.5)
    for _ in range(times):
        fit(model, optimizer, batches, schedule=schedule if times == 1 else None)
        schedule.step()


def schedule_of_epochs_for_batches():
    stepped(loader(), 1)  # here: schedule


def schedule_of_epochs():
    stepped(loader(32), 6)


FAULTY = {
    "accumulation": [penalty_of_data],
    "logits": [each_with_each_by_index],
    "targets": [mean_over_classes],
    "moves": [target_is_the_policy, largest_alone],
    "schedule": [schedule_of_epochs_for_batches],
    "data": [weights_of_classes],
}
HEALTHY = [
    mean_over_samples, penalty_of_weights, each_with_its_own_by_index, weights_of_samples,
    target_is_a_copy, all_values, schedule_of_epochs,
]  # fmt: skip
