"""FLOPs of operators, as torch counts them."""

from __future__ import annotations

import torch

from composer3d import torch_compat


def test_num_flops_counts_products():
    counted = {}

    def handle(operator, types, args, kwargs):
        result = operator(*args, **kwargs)
        counted[operator.name()] = torch_compat.num_flops(operator, args, kwargs, result)
        return result

    with torch_compat.dispatch_mode(handle, compiles=False), torch.device("meta"):
        torch.ones(3, 4) @ torch.ones(4, 5) + 1
    assert counted["aten::mm"] == 2 * 3 * 4 * 5
    assert counted["aten::add.Tensor"] == 0


def test_operators_whose_flops_are_counted_are_told_from_others():
    aten = torch.ops.aten
    counted = [aten.mm.default, aten.convolution.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    assert all(torch_compat.has_flops(operator) for operator in (*counted, aten._grouped_mm.default))
    assert not any(torch_compat.has_flops(operator) for operator in (aten.mul.Tensor, aten.view.default))


def test_num_flops_counts_grouped_products():
    counted = []

    def handle(operator, types, args, kwargs):
        result = operator(*args, **kwargs)
        if "grouped" in operator.name():
            counted.append(torch_compat.num_flops(operator, args, kwargs, result))
        return result

    rows, weight = torch.ones(10, 32, requires_grad=True), torch.ones(4, 32, 24, requires_grad=True)
    ends = torch.tensor([2, 2, 7, 10], dtype=torch.int32)
    with torch_compat.dispatch_mode(handle, compiles=False):
        (torch.nn.functional.grouped_mm(rows, weight, offs=ends) * 1).sum().mul(2).backward()
        # A product for each of four matrices, and one whose columns are in groups.
        torch.nn.functional.grouped_mm(torch.ones(4, 8, 32), torch.ones(4, 32, 24))
        torch.nn.functional.grouped_mm(torch.ones(4, 8, 32), torch.ones(32, 12), offs=torch.tensor([4, 4, 8, 12]).int())
    # Every row is multiplied with one matrix; as much for the gradient of the rows, and of the matrices.
    assert counted == [2 * 10 * 32 * 24] * 3 + [2 * 4 * 8 * 32 * 24, 2 * 8 * 32 * 12]


def test_num_flops_counts_the_cpus_fused_attention_as_the_gpus():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    counted = {}

    def handle(operator, types, args, kwargs):
        result = operator(*args, **kwargs)
        counted[operator._overloadpacket.__name__] = torch_compat.num_flops(operator, args, kwargs, result)
        return result

    shape = (2, 3, 8, 4)
    queries, keys, values = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with torch_compat.dispatch_mode(handle, compiles=False):
        torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).sum().backward()
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert counted[name] == sdpa_flop_count(shape, shape, shape)
    assert counted[f"{name}_backward"] == sdpa_backward_flop_count(shape, shape, shape, shape)
