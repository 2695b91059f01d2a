from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from composer3d import torch_compat


def older_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


def older_spectral_norm(module):
    module = nn.utils.spectral_norm(module)
    module(torch.randn(2, 4))  # its first forward computes the weight
    return module


@pytest.mark.parametrize(
    "changed", [older_weight_norm, older_spectral_norm, lambda module: prune.l1_unstructured(module, "weight", 0.5)]
)
def test_copies_have_tensors_that_a_hook_computes(changed):
    torch.manual_seed(0)
    model = nn.Sequential(changed(nn.Linear(4, 4))).eval()
    with pytest.raises(RuntimeError, match="deepcopy"):  # the reason: torch refuses to copy what is no leaf
        copy.deepcopy(model)
    twin = copy.deepcopy(model, torch_compat.recomputed_tensors(model))
    for parameter in [*model.parameters(), *twin.parameters()]:
        parameter.data.add_(1.0)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x)) and twin[0].weight is not model[0].weight


def test_a_view_until_the_first_forward_is_none_that_a_loop_could_miss():
    (tensor,) = torch_compat.recomputed_tensors(model := nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))))
    assert tensor == id(model[0].weight)


def test_other_tensors_that_are_computed_are_left_to_torch():
    model = nn.Linear(4, 4)
    model.doubled = model.weight * 2
    assert torch_compat.recomputed_tensors(model) == {}


def test_what_a_graph_has_saved_is_read_where_no_hook_would_recompute_it():
    x, ran = torch.arange(3.0, requires_grad=True), []

    def product(x):
        ran.append(None)
        return x * x.exp()

    node = product(x).grad_fn
    torch.testing.assert_close(torch_compat.saved_tensor(node, "other"), x.exp())
    assert torch_compat.saved_tensor(node, "another") is None
    checkpointed = torch.utils.checkpoint.checkpoint(product, x, use_reentrant=False).grad_fn
    assert torch_compat.saved_tensor(checkpointed, "other") is None and len(ran) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_another_function_is_recomputed(use_reentrant):
    called = []

    def own(x):
        called.append("own")
        return x.sin()

    def replaced(function, given):
        assert function is own
        assert len(given) == use_reentrant

        def other(x):
            called.append("other")
            return function(x)

        return other

    x = torch.ones(2, requires_grad=True)
    with torch_compat.recomputed.replaced_recomputations(replaced):
        result = checkpoint(own, x, use_reentrant=use_reentrant)
    result.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert called == (["other", "own"] * 2 if use_reentrant else ["own", "other", "own"])
