from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from composer3d.torch_compat.forward_hooks import home_of, is_users_hook, users_hooks
from composer3d.torch_compat.hook_registrations import FollowedHook, are_followed, follow_global_hooks, follow_hooks


class Follower:
    """Calls hooks, and notes of which kinds they are and which were registered."""

    def __init__(self):
        self.known, self.called = [], []

    def registered(self, module, hook):
        self.known.append(hook.kind)

    def call(self, module, hook, given):
        self.called.append((hook.kind, hook.takes_names, len(given)))
        return hook.own_hook(module, *given)


def twice(module, args, output):
    return 2 * output


def test_hooks_that_are_there_and_those_that_come_are_called_through_the_follower():
    module, follower = nn.Linear(2, 2), Follower()
    first = module.register_forward_hook(twice)
    module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    follow_hooks(module, follower)
    module.register_forward_hook(torch.mul).remove()  # a library's
    module.register_full_backward_pre_hook(lambda module, gradients: None)
    module.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)
    module.register_forward_hook(lambda module, args, kwargs, output: 3 * output, with_kwargs=True, prepend=True)
    x = torch.ones(1, 2, requires_grad=True)
    y = module(x)
    assert torch.allclose(y, 6 * nn.functional.linear(x, module.weight, module.bias))
    y.sum().backward()
    assert follower.known == ["before", "after", "gradients before", "gradients", "after"]
    assert follower.called == [
        ("before", True, 2), ("after", True, 3), ("after", False, 2), ("gradients before", False, 1),
        ("gradients", False, 2),
    ]  # fmt: skip
    first.remove()
    assert len(users_hooks_of(module._forward_hooks)) == 1


def users_hooks_of(table):
    return list(users_hooks(table))


def test_legacy_hooks_are_of_the_last_gradients_and_other_modules_are_as_they_were():
    module, follower = nn.Linear(2, 2), Follower()
    module.register_backward_hook(lambda module, of_inputs, of_outputs: None)
    follow_hooks(module, follower)
    module.register_backward_hook(lambda module, of_inputs, of_outputs: None)
    other = nn.Linear(2, 2)
    assert are_followed(nn.Sequential(module)) and not are_followed(other)
    other.register_forward_hook(twice)
    assert follower.known == ["last gradients"] * 2
    assert list(other._forward_hooks.values()) == [twice]


def test_a_followed_hook_has_the_name_and_home_of_its_own_and_copies_are_called_alike():
    followed = FollowedHook(functools.partial(twice), "after", takes_names=False)
    assert home_of(followed) == __name__
    assert is_users_hook(followed) and not is_users_hook(torch.mul)
    named = FollowedHook(twice, "after", takes_names=False)
    assert named.__name__ == "twice"
    assert copy.deepcopy(named)(nn.Linear(2, 2), (), 3) == 6


def test_hooks_of_all_modules_are_called_through_the_followers_of_those_that_have_one():
    assert not follow_global_hooks()
    module, follower = nn.Tanh(), Follower()
    follow_hooks(module, follower)
    handle = register_module_forward_hook(twice)
    assert not are_followed(module)
    try:
        follow_global_hooks()
        assert are_followed(module) and are_followed(nn.Sequential(nn.Linear(2, 2)))
        assert follow_global_hooks() and follow_global_hooks()
        assert torch.allclose(module(torch.ones(1)), 2 * torch.ones(1).tanh())
        assert torch.allclose(nn.Sigmoid()(torch.ones(1)), 2 * torch.ones(1).sigmoid())
    finally:
        handle.remove()
    assert follower.called == [("after", False, 2)]


def test_errors_of_torch_stay():
    module = nn.Linear(2, 2)
    follow_hooks(module, Follower())
    module.register_backward_hook(lambda module, of_inputs, of_outputs: None)
    with pytest.raises(RuntimeError, match="Cannot use both regular backward hooks and full backward hooks"):
        module.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)
