"""What the attention of sharded sequences exchanges and keeps: collectives, bytes, messages, recomputation."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.sharding.context_parallel.attention_blocks import hops
from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.attention_traffic import exchanges, saved_bytes
from composer3d_plugins.sharding.context_parallel.sequence_attention import (
    Attention,
    SequencePlan,
    attend,
    local_attention,
)
from composer3d_plugins.sharding.context_parallel.sequence_groups import SequenceGroup
from composer3d_plugins.sharding.context_parallel.sequence_positions import (
    Positions,
    contiguous,
    zigzag,
)
from support.sequence_cases import (
    PATTERNS,
    Case,
    inputs,
    mask_of,
    one_device,
    sequence_group,
    sharded,
)

from composer3d import torch_compat
from composer3d.testing import count_collectives, fake_world, run_ranks

# Sums of at most 48 products in float64, in another order.
TOLERANCE = 1e-14
METHODS = {
    2: ("gather", "gather_once", "ring", "ulysses", "universal"),
    4: ("gather", "gather_once", "ring", "ulysses", "usp", "universal"),
}


def counted(cases):
    group = sequence_group()
    found = []
    for case in cases:
        _, collectives = sharded(case, group)
        found.append(sorted((row.op, len(row.ranks), row.bytes) for row in collectives.rows if row.op != "recv"))
    received = [sum(row.op == "recv" for row in sharded(case, group)[1].rows) for case in cases]
    return found, received


def by_formula(case, degree, rank):
    layout = case.layout(degree, inner_degree=2 if case.method == "usp" else 1)
    rows = exchanges(Method(case.method), case.shape(), layout, rank=rank)
    return sorted((row.op, row.degree, row.bytes) for row in rows)


def test_collectives_and_bytes_are_those_of_the_formula():
    cases = [Case(method=method, kv_heads=kv_heads) for method in METHODS[4] for kv_heads in (8, 2)]
    cases += [Case(method=method, rows=contiguous(50, 4), kv_heads=1) for method in METHODS[4]]
    cases += [Case(method="ring", pattern="window", balanced=balanced) for balanced in (True, False)]
    cases += [Case(method="ring", dtype=torch.bfloat16), Case(method="universal", dtype=torch.bfloat16)]
    for rank, (found, received) in enumerate(run_ranks(counted, 4, cases)):
        assert found == [by_formula(case, 4, rank) for case in cases]
        assert received == [sum(op == "send" for op, _, _ in rows) for rows in found]


def test_counts_of_methods():
    ops = {
        case.method: [op for op, _, _ in by_formula(case, 4, 0)]
        for case in [Case(method=method) for method in METHODS[4]]
    }
    assert {method: {op: found.count(op) for op in sorted(set(found))} for method, found in ops.items()} == {
        "gather": {"all_gather": 2, "reduce_scatter": 1},
        "gather_once": {"all_gather": 1, "reduce_scatter": 1},
        "ring": {"send": 3 * 4 - 2},
        "ulysses": {"all_to_all": 8},
        "usp": {"all_to_all": 8, "send": 3 * 2 - 2},
        "universal": {"all_gather": 2, "reduce_scatter": 2},
    }


def test_windows_shorten_the_way_around_the_ring():
    window, length = PATTERNS["window"], 8 * 48
    ways = [
        hops(positions, positions, pattern)
        for positions in (contiguous(length, 8), zigzag(length, 8))
        for pattern in (PATTERNS["causal"], window)
    ]
    # A chunk's neighbours are on the next rank and, where the sequence is folded, on the one before.
    assert [(way.onwards, way.back) for way in ways] == [(7, 0), (1, 0), (7, 0), (1, 1)]


def actions(method):
    """Return what one forward and backward does, in order."""
    order = []

    def handle(operator, types, args, kwargs):
        name = operator.name()
        if name in ("c10d::send", "c10d::recv_"):
            order.append("post" if name == "c10d::send" else "")
        elif "flash_attention" in name:
            order.append("block")
        return operator(*args, **kwargs)

    case = Case(method=method, length=64, pattern="full", balanced=False)
    with torch_compat.dispatch_mode(handle):
        sharded(case, sequence_group())
    return [action for action in order if action]


def test_messages_are_posted_before_the_block_they_hide_behind():
    forward = ["post", "block"] * 3 + ["block"]
    backward = ["post", "block", *["post", "post", "block"] * 2, "post", "block", "post"]
    for order in run_ranks(actions, 4, "ring"):
        assert order[: len(forward)] == forward
        assert order[len(forward) :] == backward


def spans():
    """Return the spans of one forward and backward around a ring."""
    found = []

    def span(name, group, **attributes):
        found.append((name, "axis" if group is not None else "", attributes.get("what", ""), attributes["hop"]))
        return contextlib.nullcontext()

    end = torch_compat.watch_custom_operators(span)
    sharded(Case(method="ring"), sequence_group())
    end()
    return found


def test_waits_for_messages_are_spans_beside_the_blocks_that_hide_them():
    forward = [("attention_block", "", "", 0), ("wait", "axis", "keys", 1), ("attention_block", "", "", 1)]
    gradients = [("wait", "axis", "gradients", 1), ("wait", "axis", "gradients", 2)]
    assert run_ranks(spans, 2) == [[*forward, *forward, *gradients]] * 2


def whole_keys():
    group = sequence_group()
    case = Case(rows=contiguous(30, group.degree), columns=contiguous(49, group.degree), pattern="full", mask="tail")
    q, k, v, grad = inputs(case, group.degree)
    index = case.rows.index(group.rank)
    q, k, v = (x.requires_grad_() for x in (q[:, :, index], k, v))
    attention = Attention(mask=mask_of("tail", 30, 49))
    with count_collectives() as collectives:
        output = local_attention(q, k, v, attention, rows=case.rows, columns=Positions.whole(49), rank=group.rank)
        output.backward(grad[:, :, index])
    for gradient in (k.grad, v.grad):
        dist.all_reduce(gradient)
    expected = one_device(case, group.degree)
    expected[:2] = [x[:, :, index] for x in expected[:2]]
    found = (output.detach(), q.grad, k.grad, v.grad)
    return [float((x - y).abs().max()) for x, y in zip(found, expected, strict=True)], collectives.rows


def test_keys_that_every_rank_has_need_no_exchange():
    for errors, rows in run_ranks(whole_keys, 2):
        assert max(errors) <= TOLERANCE * 10
        assert rows == ()


def test_a_fake_world_counts_what_ranks_exchange():
    with fake_world(8, rank=3):
        for method in METHODS[2]:
            case = Case(method=method, length=64, mask="documents")
            with torch_compat.fake_tensors():
                group = SequenceGroup.of(dist.group.WORLD)
                _, collectives = sharded(case, group)
            found = sorted((row.op, len(row.ranks), row.bytes) for row in collectives.rows if row.op != "recv")
            assert found == by_formula(case, 8, 3)


def saved(case, degree, rank):
    """Return the bytes of the storages that one attention keeps for its backward."""
    group, plan_of = SequenceGroup.of(dist.group.WORLD), case.positions(degree)
    q, k, v, _ = inputs(case, degree)
    leaves = [
        x[:, :, positions.index(rank)].contiguous().requires_grad_()
        for x, positions in zip((q, k, v), (plan_of[0], plan_of[1], plan_of[1]), strict=True)
    ]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention = Attention(pattern=PATTERNS[case.pattern])
        output = attend(*leaves, attention, SequencePlan.of(Method(case.method), group, *plan_of))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), output


@pytest.mark.parametrize("method", METHODS[2])
def test_what_is_kept_for_the_backward_falls_with_the_degree(method):
    kept = {}
    for degree in (1, 2, 4, 8):
        case = Case(method=method, kv_heads=8, length=64)
        with fake_world(degree, rank=degree - 1):
            kept[degree], _ = saved(case, degree, degree - 1)
        assert kept[degree] == saved_bytes(Method(method), case.shape(), case.layout(degree), rank=degree - 1)
    if method not in ("gather_once", "universal"):
        assert [kept[1] // kept[degree] for degree in kept] == [1, 2, 4, 8]


def recomputed(policy):
    from torch.utils.checkpoint import checkpoint

    group, case = sequence_group(), Case()
    rows, _ = case.positions(group.degree)
    q, k, v, grad = (x[:, :, rows.index(group.rank)] for x in inputs(case, group.degree))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plan = SequencePlan.of(Method.GATHER, group, rows)

    def block(*tensors):
        doubled = (x * 2 for x in tensors)
        attention = Attention(pattern=PATTERNS["causal"])
        return attend(*doubled, attention, plan) * 3

    options = {}
    if policy:
        kept = torch_compat.custom_operators("attention")
        options = {"context_fn": lambda: torch_compat.selective_contexts(kept)}
    with count_collectives() as collectives:
        checkpoint(block, *leaves, use_reentrant=False, **options).backward(grad)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    block(*plain).backward(grad)
    return collectives.count(), [torch.equal(x.grad, y.grad) for x, y in zip(leaves, plain, strict=True)]


@pytest.mark.parametrize(("policy", "count"), [(False, 4), (True, 3)], ids=["recomputed", "saved"])
def test_recomputation_gathers_again_unless_attention_is_saved(policy, count):
    for found in run_ranks(recomputed, 2, policy):
        assert found == (count, [True] * 3)
