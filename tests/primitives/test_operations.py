"""Families of operations: named as users name them, and sorted by torch's own schemas.

python -m pytest tests/primitives/test_operations.py
"""

import pytest
import torch

from curry_train.primitives import sac

aten = torch.ops.aten


def test_operations_are_named_by_text_packet_and_overload():
    expected = {aten.mm.default, aten.mm.dtype} & {
        getattr(aten.mm, name) for name in aten.mm.overloads()
    }
    assert sac.find_operations(["aten.mm"]) == expected
    assert sac.find_operations([aten.mm]) == expected
    assert sac.find_operations(["torch.ops.aten.mm.default"]) == {aten.mm.default}
    assert sac.find_operations([aten.mm.default, "aten.addmm.default"]) == {
        aten.mm.default,
        aten.addmm.default,
    }


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("mm", "named as torch.ops.aten.mm"),
        ("aten.mm.fast", "no operation 'aten.mm.fast'"),
    ],
)
def test_a_name_that_is_not_an_operation_is_refused(named, message):
    with pytest.raises(ValueError, match=message):
        sac.find_operations([named])


def test_attention_draws_only_with_dropout():
    flash = aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1)
    assert not sac.draws(flash, (query, query, query), {})
    assert not sac.draws(flash, (query, query, query, 0.0), {})
    assert sac.draws(flash, (query, query, query, 0.1), {})
    assert sac.draws(flash, (query, query, query), {"dropout_p": 0.1})
    assert sac.draws(aten.bernoulli_.float, (query,), {})
    assert not sac.draws(aten.mm.default, (query, query), {})
