"""Positions of a sequence on ranks, and the choice between methods of attention with its figures."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.sharding.context_parallel.attention_methods import Method, head_repeats, inner_degrees, unfit
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.attention_traffic import AttentionShape, Layout
from composer3d_plugins.sharding.context_parallel.method_choice import Link, choose
from composer3d_plugins.sharding.context_parallel.opaque_kernels import opaque_kernels
from composer3d_plugins.sharding.context_parallel.packed_documents import balanced_positions
from composer3d_plugins.sharding.context_parallel.sequence_groups import divided_group
from composer3d_plugins.sharding.context_parallel.sequence_positions import (
    Positions,
    by_work,
    contiguous,
    padded_length,
    zigzag,
)
from torch.distributed.device_mesh import init_device_mesh

from composer3d import torch_compat
from composer3d.testing import fake_world


@pytest.mark.parametrize("length", [0, 1, 3, 16, 50, 197])
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("assigned", [contiguous, zigzag])
def test_every_position_is_on_one_rank(assigned, degree, length):
    positions = assigned(length, degree)
    assert sorted(positions.order().tolist()) == list(range(length))
    assert positions.degree == degree
    assert sum(positions.local_lengths) == length
    assert max(positions.local_lengths) - min(positions.local_lengths) <= 2
    assert [positions.order()[at].item() for at in positions.inverse()] == list(range(length))
    assert Positions.decoded(positions.encoded) == positions


def test_zigzag_pairs_chunks_from_both_ends():
    assert zigzag(16, 4).runs == (((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 10),))


def work(positions, documents):
    """Return by rank the pairs of query and key that are visible under a causal mask inside of documents."""
    starts = torch.cat([torch.full((length,), sum(documents[:n])) for n, length in enumerate(documents)])
    return [int((index - starts[index] + 1).sum()) for index in map(positions.index, range(positions.degree))]


@pytest.mark.parametrize("documents", [[4096], [64] * 64, [1000, 3, 2000, 77, 1016]])
def test_documents_are_balanced_wherever_they_end(documents):
    starts = torch.cat([torch.full((length,), sum(documents[:n])) for n, length in enumerate(documents)])
    found = by_work((torch.arange(4096) - starts + 1).tolist(), 4)
    assert set(found.local_lengths) == {1024}
    loads = work(found, documents)
    assert max(loads) / (sum(loads) / 4) < 1.02


def test_a_zigzag_over_all_documents_is_not_balanced():
    loads = work(zigzag(4096, 4), [1000, 3, 2000, 77, 1016])
    assert max(loads) / (sum(loads) / 4) > 1.15


NUMBERS = torch.repeat_interleave(torch.arange(5), torch.tensor([1000, 3, 2000, 77, 1016]))[None]
IDS = torch.cat([torch.arange(n) for n in (1000, 3, 2000, 77, 1016)])[None]
SEEN = (NUMBERS[:, :, None] == NUMBERS[:, None]) & torch.ones(4096, 4096, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": IDS},
        {"document_ids": NUMBERS},
        {"attention_mask": SEEN[:, None]},
        {"attention_mask": torch.zeros(1, 1, 4096, 4096).masked_fill(~SEEN, torch.finfo(torch.float32).min)},
    ],
    ids=["positions", "numbers", "mask", "additive mask"],
)
def test_inputs_show_documents(inputs):
    found = balanced_positions(inputs.items(), zigzag(4096, 4))
    loads = work(found, [1000, 3, 2000, 77, 1016])
    assert max(loads) / (sum(loads) / 4) < 1.02


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "attention_mask"])
def test_other_inputs_leave_positions_as_they_are(name):
    assert balanced_positions([(name, torch.arange(4096)[None])], zigzag(4096, 4)) is None


def test_contiguous_documents_are_not_balanced():
    found = work(contiguous(4096, 4), [4096])
    assert max(found) / (sum(found) / 4) > 1.7


def test_positions_that_two_ranks_have_are_refused():
    with pytest.raises(ValueError, match="positions from 3 on are held by no rank, or by two"):
        Positions.of([[0, 1, 2], [2, 3]])


def test_groups_have_their_positions_in_order():
    positions = zigzag(16, 4)
    assert positions.grouped(2).runs == (((0, 4), (12, 16)), ((4, 12),))
    assert positions.within(0, 2).runs == (((0, 2), (6, 8)), ((2, 4), (4, 6)))


@pytest.mark.parametrize(("length", "balanced", "padded"), [(16, True, 16), (17, True, 24), (17, False, 20)])
def test_padded_lengths_are_the_next_that_all_ranks_share(length, balanced, padded):
    assert padded_length(length, 4, is_balanced=balanced) == padded


def test_key_heads_are_repeated_as_often_as_a_degree_needs():
    assert [head_repeats(8, kv, degree) for kv, degree in [(8, 4), (2, 4), (1, 8), (4, 2)]] == [1, 2, 8, 1]
    assert head_repeats(24, 6, 4) == 2


def shape(num_heads=32, num_kv_heads=8):
    return AttentionShape(
        batch=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, value_dim=128, element_bytes=2
    )


def layout(degree, length=32768, pattern=None, inner_degree=1):
    positions = zigzag(length, degree)
    pattern = Pattern.causal() if pattern is None else pattern
    return Layout(rows=positions, columns=positions, pattern=pattern, inner_degree=inner_degree)


@pytest.mark.parametrize(
    ("shape", "layout", "method"),
    [
        (shape(num_kv_heads=2), layout(2), Method.GATHER),
        (shape(num_kv_heads=32), layout(8), Method.ULYSSES),
        (shape(num_heads=9, num_kv_heads=9), layout(16), Method.RING),
        (shape(num_heads=12, num_kv_heads=12), layout(8), Method.USP),
        (shape(num_heads=9, num_kv_heads=9), layout(8, pattern=Pattern.causal(1024)), Method.RING),
    ],
    ids=["few key heads", "many heads", "heads that no degree divides", "heads that a part divides", "window"],
)
def test_the_method_that_moves_fewest_bytes_is_chosen(shape, layout, method):
    chosen = choose(shape, layout)
    assert chosen.method is method
    possible = {each: found for each, found in chosen.figures.items() if found.unfit is None}
    assert f"{possible[method].moved_bytes:,} bytes sent an attention" in chosen.reason
    assert all(
        f"{each} {possible[each].moved_bytes:,}" in chosen.reason
        for each in possible
        if each not in (method, Method.UNIVERSAL)
    )


def test_links_decide_by_what_no_block_hides():
    slow = choose(shape(num_kv_heads=2), layout(2), link=Link(bytes_per_s=1e9, latency_s=1e-5, flops_per_s=1e12))
    assert slow.method is Method.RING  # minutes of blocks hide it
    fast = choose(shape(num_kv_heads=2), layout(2, length=64), link=Link(bytes_per_s=1e12, latency_s=1e-5))
    assert fast.method is Method.GATHER  # latency decides
    assert fast.figures[Method.GATHER].exposed_s < fast.figures[Method.RING].exposed_s


def test_what_needs_autograd_is_left_to_torch():
    assert choose(shape(num_kv_heads=1), layout(2), needs_autograd="dropout").method is Method.UNIVERSAL


def test_groups_of_usp_divide_an_axis_wherever_it_lies():
    found = {}
    for rank in range(16):
        with fake_world(16, rank=rank):
            mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
            group = divided_group(mesh, axis="cp", inner_degree=2)
            names = (group.name, group.inner, group.outer)
            found[rank] = [dist.get_process_group_ranks(torch_compat.process_group(name)) for name in names]
            assert (group.rank, group.degree, group.inner_degree) == (rank // 2 % 4, 4, 2)
    assert found[0] == [[0, 2, 4, 6], [0, 2], [0, 4]]
    assert found[15] == [[9, 11, 13, 15], [13, 15], [11, 15]]


def test_only_the_methods_that_there_are_are_chosen_among():
    few = (Method.RING, Method.UNIVERSAL)
    assert choose(shape(num_kv_heads=2), layout(2), methods=few).method is Method.RING
    assert choose(shape(num_kv_heads=2), layout(2), methods=few, needs_autograd="dropout").method is Method.UNIVERSAL


def test_methods_that_do_not_fit_say_what_does():
    assert unfit(Method.ULYSSES, num_heads=12, degree=8) == (
        'method = "ulysses" gives each of 8 ranks the same number of heads, and there are 12; '
        'write method = "usp" with inner_degree = 4'
    )
    assert unfit(Method.ULYSSES, num_heads=3, degree=2) == (
        'method = "ulysses" gives each of 2 ranks the same number of heads, and there are 3; '
        'write method = "gather" or "ring"'
    )
    assert unfit(Method.USP, num_heads=9, degree=8) == (
        'method = "usp" needs a divisor of cp = 8, other than 1 and 8, that divides the 9 heads, and there is none; '
        'write method = "gather" or "ring"'
    )
    assert unfit(Method.USP, num_heads=12, degree=8, inner_degree=3) == (
        "inner_degree = 3 is not one of 4, 2, which divide cp and heads"
    )
    assert unfit(Method.RING, num_heads=4, degree=2, needs_autograd="a bias with a gradient") == (
        'method = "ring" computes blocks with kernels that take no bias with a gradient; '
        'write method = "universal", or "ulysses" where the degree divides the heads'
    )
    assert unfit(Method.GATHER, num_heads=3, degree=8) is None
    assert inner_degrees(12, 8) == [4, 2]


def flash_attn_func(q, k, v):
    """Stand for a binding of CUDA code."""
    raise AssertionError("nothing is called")


flash_attn_func.__module__ = "flash_attn.flash_attn_interface"


class Bound(torch.nn.Module):
    def forward(self, x):
        return flash_attn_func(x, x, x)


xops = ModuleType("xformers.ops")
xops.memory_efficient_attention = xops.fused_norm = flash_attn_func


class BoundByModule(torch.nn.Module):
    def forward(self, x):
        return xops.memory_efficient_attention(x, x, xops.fused_norm(x))


class Normed(torch.nn.Module):
    def forward(self, x):
        return xops.fused_norm(x)


class Configured(torch.nn.Module):
    def __init__(self, implementation):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=implementation)
        self.plain = torch.nn.MultiheadAttention(4, 2)


def test_kernels_that_cannot_be_seen_into_are_named():
    assert opaque_kernels(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([Bound(), Bound()]))) == [
        ("1.0", "flash_attn.flash_attn_interface.flash_attn_func", "torch.nn.functional.scaled_dot_product_attention")
    ]
    assert opaque_kernels(Configured("flash_attention_2")) == [
        ("", "flash_attention_2", 'attn_implementation = "sdpa"')
    ]
    assert [kernel.name for kernel in opaque_kernels(BoundByModule())] == ["xformers.ops.memory_efficient_attention"]
    assert opaque_kernels(Normed()) == opaque_kernels(Configured("sdpa")) == []
