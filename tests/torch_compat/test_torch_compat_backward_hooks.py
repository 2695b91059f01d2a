from __future__ import annotations

import torch
from torch import nn

from composer3d import torch_compat


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_own_functions_are_known_in_graphs():
    x = torch.ones(2, requires_grad=True)
    assert torch_compat.own_function(Own.apply(x).grad_fn) is Own
    assert torch_compat.own_function((x * 2).grad_fn) is None


def test_full_backward_hooks_of_a_module_may_be_replaced():
    module, called = nn.Linear(2, 2), []
    module.register_full_backward_hook(lambda *_: called.append("after"))
    module.register_full_backward_pre_hook(lambda *_: called.append("before"))
    for table in torch_compat.module_gradient_hooks(module):
        (number,) = table
        table[number] = lambda *given, hook=table[number]: called.append("replaced") or hook(*given)
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert called == ["replaced", "before", "replaced", "after"]


def test_a_mode_below_others_is_turned_off():
    seen = []

    def mode(name):
        return torch_compat.function_mode(lambda function, args, kwargs: seen.append(name) or function(*args, **kwargs))

    outer, inner = mode("outer"), mode("inner")
    outer.__enter__()
    with inner:
        torch_compat.leave_mode(outer)
        torch.ones(2) + 1
    assert set(seen) == {"inner"}
    torch_compat.leave_mode(outer)
    assert torch_compat.function_modes() == []


def test_a_mode_that_is_entered_below_others_outlasts_them():
    seen = []

    def mode(name):
        return torch_compat.function_mode(lambda function, args, kwargs: seen.append(name) or function(*args, **kwargs))

    below = mode("below")
    with mode("around"):
        torch_compat.function_transforms.enter_mode_below(below)
        torch.ones(2) + 1
    assert seen[-2:] == ["around", "below"]
    torch.ones(2) + 1
    assert seen[-1] == "below"
    torch_compat.leave_mode(below)
    assert torch_compat.function_modes() == []
