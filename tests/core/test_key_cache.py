"""Hugging Face models, which fill a key cache in training, under every technique.

python -m pytest tests/core/test_key_cache.py
"""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

from curry_train.core.generators import seeded
from curry_train.core.measure import measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.primitives import apply_sac, recompute, recompute_blocks
from curry_train.workloads import Case, load_workload
from curry_train.workloads.workload import call, without_cache

from ..language_models import language_model

TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def gpt2():
    return language_model("GPT2", num_hidden_layers=3, num_attention_heads=2, n_positions=16)


def llama():
    return language_model("Llama", num_hidden_layers=3)


def t5():
    sizes = dict(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def loss(model, tokens):
    """Return the loss as a user's own loop does, without any setting for caches."""
    return model(input_ids=tokens, labels=tokens).loss


def without(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def built(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def step(model, loss=loss):
    with seeded(3):
        return record_step(model, TOKENS, loss)


@pytest.mark.parametrize("change", [recompute_blocks, apply_sac])
@pytest.mark.parametrize("name", MODELS)
def test_the_step_is_bit_equal_and_holds_as_much_as_without_a_cache(name, change):
    plain = built(name)
    changed = built(name)
    uncached = built(name)
    assert plain.config.use_cache
    change(changed)
    change(uncached)
    assert compare(step(plain), step(changed)).bit_equal
    held = [
        measure_memory(model, TOKENS, how).held_bytes
        for model, how in ((changed, loss), (uncached, without))
    ]
    assert held[0] == held[1]


def test_the_warning_about_a_cache_is_logged_once(caplog):
    recompute._warn_once.cache_clear()
    model = built("llama")
    recompute_blocks(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loss(model, TOKENS).backward()
    (message,) = [record.message for record in caplog.records if "fills a cache" in record.message]
    assert message.endswith(
        "call the model with use_cache=False, or set model.config.use_cache = False"
    )


def test_a_filled_cache_is_refused():
    """Refuse a filled cache, as in prefix tuning, since its content matters."""
    model = built("llama")
    with torch.no_grad():
        prefix = model(TOKENS, past_key_values=DynamicCache()).past_key_values
    recompute_blocks(model)
    with pytest.raises(
        ValueError,
        match=r"that holds keys already, and a block that .*: train without past_key_values",
    ):
        model(input_ids=TOKENS, labels=TOKENS, past_key_values=prefix)


def cache_of(*layers):
    cache = DynamicCache()
    cache.layers = layers
    return cache


EMPTY = SimpleNamespace(keys=None)
FILLED = SimpleNamespace(keys=TOKENS)
CROSSED = EncoderDecoderCache(cache_of(), cache_of())
CROSSED.cross_attention_cache.layers = [FILLED]


@pytest.mark.parametrize(
    ("cache", "is_filled"),
    [
        (cache_of(EMPTY, FILLED), False),
        (cache_of(FILLED), True),
        (cache_of(SimpleNamespace(has_previous_state=True)), True),
        (cache_of(SimpleNamespace(has_previous_state={0: False, 1: True})), True),
        (cache_of(SimpleNamespace(has_previous_state={0: False})), False),
        (CROSSED, True),
    ],
)
def test_a_cache_is_left_out_unless_the_layer_of_the_block_is_filled(cache, is_filled):
    block = nn.Linear(1, 1)
    if is_filled:
        with pytest.raises(ValueError, match="that holds keys already"):
            recompute.leave_out_caches(block, ((cache,), {}))
    else:
        assert recompute.leave_out_caches(block, ((cache,), {})) == ((None,), {})


def test_a_cache_that_is_read_is_not_left_out_silently():
    """Read the cache in a second call, which continues from the first."""
    model = built("llama")
    recompute_blocks(model)
    first = model(TOKENS[:, :8])
    with pytest.raises(ValueError, match="gets a cache that it has been given before"):
        model(TOKENS[:, 8:], past_key_values=first.past_key_values)


def test_a_block_that_only_reads_a_cache_gets_it():
    class Reader(nn.Module):
        _can_checkpoint_with_cache = True

        def forward(self, x, cache):
            return x * (cache is not None)

    model = nn.Sequential(Reader())
    recompute_blocks(model, blocks=["0"])
    assert model[0](torch.ones(1, requires_grad=True), DynamicCache()) == 1


def test_blocks_that_share_keys_find_them():
    torch.manual_seed(0)
    plain = language_model(
        "Gemma3nText",
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ).train()
    changed = copy.deepcopy(plain)
    recompute_blocks(changed)
    assert compare(step(plain), step(changed)).bit_equal


def test_recomputing_one_block_alone_is_bit_equal():
    """Recompute a block whose predecessors have already filled their caches."""
    plain, changed = built("llama"), built("llama")
    recompute_blocks(changed, blocks=["model.layers.2"])
    assert compare(step(plain), step(changed)).bit_equal


def test_generation_still_uses_its_cache():
    plain, changed = built("llama").eval(), built("llama").eval()
    recompute_blocks(changed)
    how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    assert torch.equal(plain.generate(TOKENS, **how), changed.generate(TOKENS, **how))
    with torch.no_grad():
        assert changed(TOKENS).past_key_values.get_seq_length() == TOKENS.shape[1]


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS,), {"input_ids": TOKENS}])
def test_our_calls_fill_no_cache_unless_the_batch_asks_for_one(batch):
    model = without_cache(built("llama"))
    assert call(model, batch).past_key_values is None
    assert call(model, {"input_ids": TOKENS, "use_cache": True}).past_key_values is not None
    assert call(torch.nn.Linear(2, 2), torch.ones(1, 2)).shape == (1, 2)


def pair():
    return gpt2(), {"input_ids": TOKENS, "labels": TOKENS}


def test_a_factorys_model_is_measured_without_a_cache():
    assert Case(load_workload(f"{__file__}:pair")).build().config.use_cache is False
