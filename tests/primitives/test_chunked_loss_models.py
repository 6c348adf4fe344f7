"""Chunked cross-entropy on Hugging Face's and our own models, with and without values.

python -m pytest tests/primitives/test_chunked_loss_models.py
"""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.plan.shapes import pretended
from curry_train.primitives import apply_chunked_loss, chunked_loss_report, recompute_blocks
from curry_train.workloads import Case
from curry_train.workloads.models import transformer

from ..language_models import language_model
from ..toy_steps import in_bfloat16

WIDER = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 192}


MODELS = {
    "Llama": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "GPT2": {"num_hidden_layers": 3, "loss_type": "ForCausalLM"},
    # It limits its logits, `30 * tanh(logits / 30)`.
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    # It divides its logits by a number.
    "Granite": {"num_key_value_heads": 2, "logits_scaling": 8.0},
}


def labels(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


autocast = in_bfloat16(labels)


def accumulated(model, tokens):
    """The first microbatch's backward is done inside: gradients add up."""
    (labels(model, tokens[:2]) / 2).backward()
    return labels(model, tokens[2:]) / 2


@pytest.mark.parametrize(
    ("kind", "loss", "recompute"),
    [
        *itertools.product(["Llama"], [labels, autocast, accumulated], [False, True]),
        ("GPT2", labels, False),
        *itertools.product(["Gemma2", "Granite"], [labels, autocast], [False]),
    ],
)
def test_hugging_face_models_train_the_same_in_less_memory(kind, loss, recompute):
    tokens = torch.randint(640, (4, 32))
    records = []
    peaks = []
    flops = []
    for chunked_too in (False, True):
        torch.manual_seed(0)
        model = language_model(kind, **WIDER | MODELS[kind]).train()
        if recompute:
            recompute_blocks(model)
        if chunked_too:
            assert apply_chunked_loss(model, chunk_tokens=16) == ["lm_head"]
        torch.manual_seed(1)
        records.append(record_step(model, tokens, loss))
        peaks.append(measure_memory(model, tokens, loss).peak_bytes)
        flops.append(count_flops(model, tokens, loss).total)
    assert str(chunked_loss_report(model)["lm_head"]) == "losses in chunks: 1"
    found = compare(*records, tolerance=2e-2 if loss is autocast else 1e-5)
    assert found.holds, found.describe()
    # Each of the 4 samples has no target after its last token.
    assert flops[1] == flops[0] - 4 * 3 * 2 * 64 * 640
    assert peaks[1] <= peaks[0]
    if (
        loss is not accumulated and not recompute
    ):  # else the blocks, or the gradients, own the peak of models so small
        assert peaks[1] < 0.9 * peaks[0]


def test_bytes_without_values_are_those_with():
    case = Case(transformer(depth=1, dim=32, vocabulary=2048), batch_size=8)
    peaks = []
    for context in (torch.enable_grad, pretended, FakeTensorMode):
        with context():
            model, batch = case.build(), case.batch()
            apply_chunked_loss(model, chunk_tokens=32)
            peaks.append(
                measure_memory(model, batch, lambda m, b: case.workload.loss(m, b) / 512).peak_bytes
            )
    model = case.build()
    assert peaks[0] == peaks[1] == peaks[2]
    assert peaks[0] < 0.5 * measure_memory(model, case.batch(), case.workload.mean_loss).peak_bytes
