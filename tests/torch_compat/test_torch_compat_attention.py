"""Attention written out beside torch's own, which draws by a known call on CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composer3d.torch_compat.multihead_attention import attend_with_heads, call_of
from composer3d.torch_compat.written_attention import attend_keeping, attends_by_math


@pytest.mark.parametrize("form", ["full", "causal", "mask", "bias", "hidden rows", "shared keys"])
def test_attention_that_is_told_what_it_keeps_is_torchs_math_path(form):
    torch.manual_seed(0)
    heads = 2 if form == "shared keys" else 4
    q, k, v = (torch.randn(2, n, 5, 3, dtype=torch.float64, requires_grad=True) for n in (4, heads, heads))
    mask = {"mask": torch.rand(5, 5) > 0.4, "bias": torch.randn(5, 5, dtype=torch.float64)}.get(form)
    if form == "hidden rows":
        mask = torch.zeros(5, 5, dtype=torch.bool)
    options = {"is_causal": form == "causal", "scale": 0.3, "enable_gqa": form == "shared keys"}
    grad = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.3, **options)
    torch.manual_seed(1)
    kept = torch.empty(2, 4, 5, 5, dtype=torch.float64).bernoulli_(0.7).bool()
    found = attend_keeping(q, k, v, mask, kept, dropout_p=0.3, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    pairs = zip(*(torch.autograd.grad(y, (q, k, v), grad, retain_graph=True) for y in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    assert attends_by_math(q, (q, k, v), {"dropout_p": 0.3})


def test_16_bit_numbers_are_multiplied_in_32():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 4).bfloat16()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(q.float(), q, q, None, 0.5)
    torch.manual_seed(1)
    kept = torch.empty(1, 2, 6, 6).bernoulli_(0.5).bool()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_keeping(q.float(), q, q, None, kept, dropout_p=0.5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("form", ["plain", "mask", "padding", "one sample"])
def test_attention_with_heads_written_out_is_torchs_module(form, needs_weights):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64)
    shape = (5, 8) if form == "one sample" else (5, 3, 8)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if form == "mask" else None
    padding = torch.arange(5).expand(3, 5) > 3 if form == "padding" else None
    args = query, key, value, 8, 2, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": needs_weights}
    args += module.out_proj.weight, module.out_proj.bias
    expected = F.multi_head_attention_forward(*args, **options)
    given = call_of(args, options)
    assert given is not None and call_of((*args[:9], True, *args[10:]), options) is None
    for one, other in zip(attend_with_heads(given), expected, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
