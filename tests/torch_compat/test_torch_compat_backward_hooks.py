from __future__ import annotations

import copy
import functools
import pickle

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


def test_functions_on_tensors_are_told_from_torchs_machinery():
    functions = (torch.sgn, torch.linalg.svdvals, torch.special.erf, torch.einsum, nn.functional.normalize, torch.relu)
    machinery = (torch.utils.checkpoint.checkpoint, torch.autograd.backward, torch.nn.Module)
    is_operator_module = torch_compat.backward_hooks.is_operator_module
    assert [is_operator_module(each.__module__) for each in functions + machinery] == [True] * 6 + [False] * 3


def test_full_backward_hooks_of_a_module_are_wrapped_when_it_is_called():
    module, called = nn.Linear(2, 2), []
    wrap = lambda hook: lambda *given: called.append("wrapped") or hook(*given)  # noqa: E731
    torch_compat.backward_hooks.wrap_gradient_hooks(module, wrap)
    module.register_full_backward_hook(lambda *_: called.append("after"))
    module.register_full_backward_pre_hook(lambda *_: called.append("before"))
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert called == ["wrapped", "before", "wrapped", "after"]


def test_modules_whose_hooks_are_wrapped_are_copied_and_pickled():
    module, called = nn.Linear(2, 2), []

    def wrap(hook):
        return lambda *given: called.append(hook(*given))

    torch_compat.backward_hooks.wrap_gradient_hooks(module, wrap)
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        each.register_full_backward_hook(lambda *_: None)
        each(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert called == [None]  # of the copy


def test_legacy_backward_hooks_of_a_module_may_be_replaced():
    module, called = nn.Tanh(), []
    assert not torch_compat.backward_hooks.legacy_gradient_hooks(module)
    module.register_backward_hook(lambda *_: called.append("after"))
    table = torch_compat.backward_hooks.legacy_gradient_hooks(module)
    (number,) = table
    table[number] = lambda *given, hook=table[number]: called.append("replaced") or hook(*given)
    module(torch.ones(1, 2, requires_grad=True) * 2).sum().backward()
    assert called == ["replaced", "after"]


def test_what_is_registered_on_tensors_is_seen_by_the_innermost_watch():
    seen = []

    def watch(name):
        def hooked(tensor, hook):
            seen.append((name, tuple(tensor.shape)))
            return lambda gradient: hook(gradient) * 2

        return torch_compat.backward_hooks.WatchedRegistrations(hooked, lambda x: seen.append((name, "retained")))

    outer, inner = watch("outer"), watch("inner")
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    with outer, inner:
        y.register_hook(hook=lambda gradient: gradient + 1)
        outer.__exit__()
        y.retain_grad()
    y.register_hook(lambda gradient: gradient * 10)
    y.sum().backward()
    assert seen == [("inner", (3,)), ("inner", "retained")]
    assert x.grad.tolist() == y.grad.tolist() == [40.0] * 3


def test_legacy_backward_hooks_are_counted_when_they_are_registered():
    before = torch_compat.backward_hooks.num_legacy_registrations()
    nn.Tanh().register_backward_hook(lambda *_: None)
    assert torch_compat.backward_hooks.num_legacy_registrations() == before + 1


class Call:
    """Adds 1 to gradients that a hook returns, and keeps what torch puts in place of a call's values."""

    def __init__(self) -> None:
        self.pairs = []

    def given(self, before, after):
        self.pairs += zip(before, after, strict=True)

    def returned(self, before, after):
        self.pairs.append((before, after))

    def around(self, hook):
        return lambda module, *gradients: tuple(each + 1 for each in hook(module, *gradients))


def test_calls_of_modules_with_backward_hooks_are_followed():
    module, other, calls = nn.Identity(), nn.Identity(), [Call()]
    for each in (module, other):
        each.register_full_backward_hook(lambda module, given, _: given)
    torch_compat.backward_hooks.follow_gradients(module, lambda: calls[0])
    x = torch.ones(1, 2, requires_grad=True)
    other(module(x)).sum().backward()
    assert x.grad.tolist() == [[2, 2]]
    assert [one is other for one, other in calls[0].pairs] == [False, False]
    calls[0] = None
    x.grad = None
    module(x).sum().backward()
    assert x.grad.tolist() == [[1, 1]]


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


def test_hooks_that_several_tensors_share_are_known():
    x, seen = torch.ones(2, requires_grad=True), []
    y, function = x * 2, seen.append
    torch.autograd.graph.register_multi_grad_hook([y, x], function)
    hooks = [torch_compat.gradient_hooks(each)[0] for each in (y, x)]
    found = [torch_compat.backward_hooks.shared_hook(next(iter(table.values()))) for table in hooks]
    assert all(isinstance(each, torch_compat.backward_hooks.SharedHook) for each in found)
    assert [(each.function, each.place, each.num) for each in found] == [(function, 0, 2), (function, 1, 2)]
    assert found[0].key is found[1].key
    assert [leaf is x for each in found for leaf in each.leaves] == [True, True]


def test_hooks_that_are_called_with_the_first_of_several_gradients_are_known():
    x, called = torch.ones(2, requires_grad=True), []
    torch.autograd.graph.register_multi_grad_hook([x], called.append, mode="any")
    (hook,) = torch_compat.gradient_hooks(x)[0].values()
    found = torch_compat.backward_hooks.shared_hook(hook)
    assert found.place is None
    assert found.num_calls() == 0
    x.sum().backward()
    assert found.num_calls() == len(called) == 1
    assert torch_compat.backward_hooks.shared_hook(called.append) is None
    assert torch_compat.backward_hooks.shared_hook(lambda gradient: None) is None


def test_hooks_on_nodes_are_replaced_where_they_are_registered_and_know_leaves():
    x, leaves = torch.ones(2, requires_grad=True), []
    y = Own.apply(x * 3)

    def noting(*_):
        leaves.append(torch_compat.backward_hooks.accumulated_leaf())

    def replaced(hook):
        return lambda *gradients: noting() or hook(*gradients)

    nothing = lambda *_: None  # noqa: E731
    with torch_compat.backward_hooks.WatchedRegistrations(lambda _, hook: hook, nothing, replaced):
        y.grad_fn.register_prehook(lambda given: (2 * given[0],))
        y.grad_fn.next_functions[0][0].register_hook(lambda into, _: (5 * into[0], *into[1:]))
        x.view_as(x).grad_fn.next_functions[0][0].register_prehook(nothing)
    y.grad_fn.register_prehook(lambda given: (7 * given[0],))
    y.sum().backward()
    assert x.grad.tolist() == [2 * 7 * 3 * 5] * 2
    assert [leaf is x for leaf in leaves] == [False, False, True]


def test_hooks_on_what_stands_for_a_tensor_are_registered_on_it_where_they_are_watched():
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    other = torch_compat.backward_hooks.stand_for(y * 5, y)
    assert torch_compat.backward_hooks.stand_for(y, y) is y
    assert torch_compat.backward_hooks.stood_for(other) is y
    assert torch_compat.backward_hooks.stood_for(y) is None
    with torch_compat.backward_hooks.WatchedRegistrations(lambda tensor, hook: hook, lambda tensor: None):
        other.register_hook(lambda gradient: seen.append(gradient.tolist()))
    other.register_hook(lambda gradient: seen.append(gradient.tolist()))
    (other.sum() + y.sum()).backward()
    assert seen == [[1, 1], [6, 6]]


def test_hooks_before_a_node_and_behind_it_are_known():
    y = torch.ones(2, requires_grad=True) * 2
    assert torch_compat.backward_hooks.node_hooks(y.grad_fn) == ([], [])
    first, second = (lambda gradients: None), (lambda given, gradients: None)
    y.grad_fn.register_prehook(first)
    handle = y.grad_fn.register_hook(second)
    assert torch_compat.backward_hooks.node_hooks(y.grad_fn) == ([first], [second])
    handle.remove()
    assert torch_compat.backward_hooks.node_hooks(y.grad_fn) == ([first], [])
    y.sum().backward()


def test_hooks_of_torchs_modules_are_no_users_and_its_operators_are():
    is_users = torch_compat.backward_hooks.is_users
    assert is_users(lambda gradient: None) and is_users(torch.sgn) and is_users(torch.nn.functional.normalize)
    assert not is_users(functools.partial(lambda module, gradient: None, torch.nn.Linear(2, 2)))
    assert not is_users(torch.nn.utils.clip_grad_norm_)
    x, found = torch.ones(2, requires_grad=True), []
    with torch_compat.backward_hooks.WatchedRegistrations(lambda _, hook: found.append(hook) or hook, lambda _: None):
        torch.autograd.graph.register_multi_grad_hook([x, x * 2], lambda gradients: None)
    assert len(found) == 2 and all(map(is_users, found))
