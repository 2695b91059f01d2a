"""The attention of sharded sequences against one device: numbers, masks, lengths, precision, dropout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.block_kernels import BlockCall, kernel_for
from composer3d_plugins.sharding.context_parallel.sequence_attention import (
    Attention,
    local_attention,
)
from composer3d_plugins.sharding.context_parallel.sequence_positions import (
    Positions,
    by_work,
    contiguous,
    zigzag,
)
from support.sequence_cases import (
    PATTERNS,
    Case,
    error,
    inputs,
    mask_of,
    one_device,
    sequence_group,
    sharded,
)

from composer3d import torch_compat
from composer3d.testing import pairwise, run_ranks

# Sums of at most 48 products in float64, in another order.
TOLERANCE = 1e-14
METHODS = {
    2: ("gather", "gather_once", "ring", "ulysses", "universal"),
    4: ("gather", "gather_once", "ring", "ulysses", "usp", "universal"),
}
OPTIONS = {
    "pattern": tuple(PATTERNS),
    "mask": ("none", "documents", "padding", "head", "tail"),
    "kv_heads": (2, 8, 4, 1),
    "balanced": (True, False),
}
SCATTERED = Positions.of([[5, 6, 0, 30], [1, 2, 3, 4, 7, 8, 9], [*range(10, 30)], [*range(31, 48)]])
# What a pattern, a mask, heads and two lengths do to shards that differ, which no model's layout makes unlikely.
PARTICULAR = [
    Case(rows=contiguous(197, 4), pattern="full"),
    Case(rows=zigzag(50, 4)),
    Case(rows=contiguous(3, 4)),
    Case(rows=contiguous(3, 4), pattern="full", mask="tail"),
    Case(rows=SCATTERED),
    Case(rows=SCATTERED, pattern="window", mask="documents"),
    Case(rows=contiguous(30, 4), columns=zigzag(49, 4), pattern="full"),
    Case(rows=contiguous(30, 4), columns=contiguous(49, 4), pattern="causal"),
    Case(rows=contiguous(49, 4), columns=contiguous(30, 4), mask="documents"),
    Case(rows=by_work([*range(20), *range(3), *range(25)], 4), mask="documents"),
    Case(mask="bias", kv_heads=4),
    Case(mask="bias of two dims", pattern="full"),
    Case(mask="least values", pattern="full"),
    Case(value_dim=12, scale=0.3),
    Case(value_dim=4, scale=1.7, kv_heads=8),
    Case(softcap=2.0, mask="padding"),
    Case(softcap=2.0, mask="bias", kv_heads=8, pattern="window"),
]


def errors_of(cases):
    group = sequence_group()
    return [error(case, group) for case in cases]


def assert_exact(cases, world_size):
    ranks = run_ranks(errors_of, world_size, cases, timeout_s=300)
    worst = {case: max(found[index] for found in ranks) for index, case in enumerate(cases)}
    assert {case: found for case, found in worst.items() if not found <= TOLERANCE} == {}


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_and_gradients_are_those_of_one_device(world_size):
    rows = pairwise({"method": METHODS[world_size], **OPTIONS})
    assert_exact([Case(**row) for row in rows], world_size)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("method", METHODS[4])
def test_every_combination_is_that_of_one_device(world_size, method):
    if method not in METHODS[world_size]:
        pytest.skip("usp needs a degree that is no prime")
    names, values = zip(*OPTIONS.items(), strict=True)
    cases = [Case(method=method, **dict(zip(names, chosen, strict=True))) for chosen in itertools.product(*values)]
    assert_exact(cases, world_size)


def test_any_lengths_masks_and_assignments_are_those_of_one_device():
    assert_exact([replace(case, method=method) for case in PARTICULAR for method in METHODS[4]], 4)


def low_precision(cases):
    group, found = sequence_group(), []
    for case in cases:
        mine, _ = sharded(case, group)
        rows, columns = case.positions(group.degree)
        reference = one_device(case, group.degree)
        alone = on_one_device(case, group.degree)
        of = (rows, rows, columns, columns)
        apart = [
            max(
                float((x.double() - y[:, :, p.index(group.rank)]).abs().max() / y.abs().max())
                for x, y, p in zip(results, reference, of, strict=True)
            )
            for results in (mine, [x[:, :, p.index(group.rank)] for x, p in zip(alone, of, strict=True)])
        ]
        found.append(tuple(apart))
    return found


def on_one_device(case, degree):
    q, k, v, grad = (x.to(case.dtype) for x in inputs(case, degree))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output.backward(grad)
    return [output.detach(), q.grad, k.grad, v.grad]


def test_low_precision_errs_as_one_device_in_it_does():
    cases = [
        Case(method=method, kv_heads=8, dtype=dtype)
        for method in METHODS[4]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    ranks = run_ranks(low_precision, 4, cases)
    for index, case in enumerate(cases):
        mine, alone = (max(found[index][which] for found in ranks) for which in (0, 1))
        # One rounding of each result more than on one device, where blocks are joined.
        assert mine <= 2 * alone + torch.finfo(case.dtype).eps, case


def bias_gradients():
    group, found = sequence_group(), {}
    for method in ("universal", "gather", "ulysses"):
        case = Case(method=method, mask="bias", kv_heads=4)
        rows, _ = case.positions(group.degree)
        bias = mask_of("bias", rows.length, rows.length).requires_grad_()
        mine, _ = sharded(case, group, mask=bias)
        dist.all_reduce(bias.grad)
        whole = mask_of("bias", rows.length, rows.length).requires_grad_()
        q, k, v, grad = inputs(case, group.degree)
        seen = PATTERNS["causal"].mask(*[torch.arange(rows.length)] * 2)
        masked = whole.masked_fill(~seen, float("-inf"))
        output = F.scaled_dot_product_attention(q, k, v, masked, enable_gqa=True)
        output.backward(grad)
        mine_is = (mine[0] - output.detach()[:, :, rows.index(group.rank)]).abs().max()
        found[method] = float((bias.grad - whole.grad).abs().max()), float(mine_is)
    return found


def test_a_bias_has_the_gradient_of_one_device():
    for found in run_ranks(bias_gradients, 4):
        assert {method: error for method, error in found.items() if max(error) > TOLERANCE} == {}


def dropped():
    group, case = sequence_group(), Case(kv_heads=8, pattern="full")
    rows, _ = case.positions(group.degree)
    torch.manual_seed(7)
    mine, _ = sharded(case, group, dropout=0.5)
    q, k, v, _ = inputs(case, group.degree)
    torch.manual_seed(7)
    expected = F.scaled_dot_product_attention(q[:, :, rows.index(group.rank)], k, v, dropout_p=0.5)
    return float((mine[0] - expected).abs().max())


def test_dropout_drops_weights_of_the_whole_row():
    assert max(run_ranks(dropped, 2)) <= TOLERANCE


def masked_of_its_own():
    """Compare masks of this rank's rows with whole ones."""
    group, found = sequence_group(), {}
    for method, mask in itertools.product(METHODS[4], ("documents", "bias")):
        case = Case(method=method, mask=mask)
        rows, _ = case.positions(group.degree)
        whole, _ = sharded(case, group)
        mine, _ = sharded(case, group, mask=mask_of(mask, 48, 48)[:, :, rows.index(group.rank)])
        found[method, mask] = all(torch.equal(x, y) for x, y in zip(whole, mine, strict=True))
    return found


def test_a_mask_may_hold_the_rows_of_the_rank_alone():
    for found in run_ranks(masked_of_its_own, 4):
        assert [case for case, is_equal in found.items() if not is_equal] == []


def cast_by_autocast():
    group, case = sequence_group(), Case(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = sharded(case, group)
    return [x.dtype for x in found]


def test_heads_are_put_side_by_side_without_a_copy():
    # What attention keeps for its backward is then what the projection after it keeps.
    q_BHSE, whole = torch.randn(2, 4, 16, 8), Positions.whole(16)
    o_BHSE = local_attention(q_BHSE, q_BHSE, q_BHSE, Attention(), rows=whole, columns=whole, rank=0)
    assert o_BHSE.transpose(1, 2).flatten(2).data_ptr() == o_BHSE.data_ptr()


def test_autocast_casts_what_attention_is_given():
    assert run_ranks(cast_by_autocast, 2)[0] == [torch.bfloat16, *[torch.float32] * 3]


@pytest.mark.parametrize(
    ("dtype", "has_bias", "softcap", "kernel"),
    [
        (torch.bfloat16, False, 0.0, "CudaFlash"),
        (torch.bfloat16, True, 0.0, "CudaEfficient"),
        (torch.float32, False, 0.0, "CudaEfficient"),
        (torch.float64, False, 0.0, "Plain"),
        (torch.bfloat16, False, 5.0, "Plain"),
    ],
)
def test_blocks_on_cuda_are_given_to_the_kernel_that_takes_them(dtype, has_bias, softcap, kernel):
    with torch_compat.fake_tensors(), torch.no_grad():
        q, k, v = (torch.empty(2, heads, 48, width, dtype=dtype, device="cuda") for heads, width in SIZES)
        bias = torch.empty(2, 1, 48, 48, dtype=dtype, device="cuda").expand(2, 8, 48, 48) if has_bias else None
        call = BlockCall(bias=bias, is_causal=False, scale=0.3, softcap=softcap)
        found = kernel_for(q, v, has_bias=has_bias, softcap=softcap)
        result = found.forward(q, k, v, call)
        gradients = found.backward(torch.empty_like(result.o_BHLF), q, k, v, result, call)
    assert type(found).__name__ == kernel
    assert (*result.o_BHLF.shape,) == (2, 8, 48, 20) and (*result.lse_BHL.shape,) == (2, 8, 48)
    found = (gradients.q_BHLE, gradients.k_BKME, gradients.v_BKMF)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


# Heads and widths of queries, keys and values: widths that no kernel takes as they are.
SIZES = ((8, 12), (2, 12), (2, 20))
