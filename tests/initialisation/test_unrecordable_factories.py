"""Factories that cannot be recorded: reading values, or data, is refused with its line, as are lost tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from composer3d.errors import InitialisationError
from composer3d.initialisation import (
    materialise,
    record,
)

INSTEAD = 'set [model] build = "host", or hand compose a module that is already built'


def read_item():
    return float(torch.ones(2).sum().item())


def branch():
    return 1 if torch.rand(2).sum() > 1 else 0


def to_numpy():
    return torch.rand(2).numpy()


def to_array():
    return np.asarray(torch.rand(2))


def to_list():
    return torch.arange(3).tolist()


def count():
    return torch.rand(9)[torch.rand(9) > 0.5]


def compare():
    return torch.equal(torch.rand(2), torch.rand(2))


def own_generator():
    return nn.init.normal_(torch.empty(2), generator=torch.Generator())


def own_generator_whole():
    return nn.init.trunc_normal_(torch.empty(2), generator=torch.Generator())


def fails():
    return torch.zeros(3).view(2)


READS = "the factory reads values of a tensor ({}), and there are none while it is recorded; " + INSTEAD


GENERATOR = "the factory draws from a torch.Generator of its own, which cannot be recorded; " + INSTEAD


@pytest.mark.parametrize(
    ("offence", "message"),
    [
        (read_item, READS.format("torch.Tensor.item")),
        (branch, READS.format("torch.Tensor.__bool__")),
        (to_numpy, READS.format("torch.Tensor.numpy")),
        (to_array, READS.format("torch.Tensor.__array__")),
        (to_list, READS.format("torch.Tensor.tolist")),
        (count, READS.format("torch.Tensor.__getitem__")),
        (compare, READS.format("torch.equal")),
        (own_generator, GENERATOR),
        (own_generator_whole, GENERATOR),
        (fails, "the factory raised RuntimeError: shape '[2]' is invalid for input of size 3"),
    ],
)
def test_refusals_name_the_line(offence, message):
    with pytest.raises(InitialisationError) as caught:
        record(offence)
    assert str(caught.value) == f"{__file__}:{offence.__code__.co_firstlineno + 1}: {message}"


def test_loading_data_is_refused(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")

    def factory():
        return nn.ParameterList(torch.load(tmp_path / "weights.pt").values())

    with pytest.raises(InitialisationError) as caught:
        record(factory)
    line = factory.__code__.co_firstlineno + 1
    reason = "the factory loads data, and there is no memory for it while it is recorded"
    assert str(caught.value) == f"{__file__}:{line}: {reason}; {INSTEAD}"


def test_what_cannot_be_found_again_is_refused():
    existing = nn.Linear(2, 2)
    on_meta = torch.empty(2, device="meta")

    def hidden():
        module = nn.Linear(2, 2)
        module.cache = {torch.ones(2)}
        return module

    outside = '"weight" was made outside of the factory; ' + INSTEAD
    loose = (
        '"cache[0]" is in a set of tensors, which has no order that is the same on all ranks; '
        "keep them in a list, or register them with register_buffer(name, tensor, persistent=False)"
    )
    for factory, message in [
        (lambda: existing, outside),
        (lambda: nn.ParameterList([on_meta]), '"0" was made outside of the factory; ' + INSTEAD),
        (hidden, loose),
        (
            lambda: nn.LazyLinear(2),
            '"weight" of a LazyLinear has no shape before the first forward; write a module with its sizes, such as '
            "nn.Linear(in_features, out_features)",
        ),
        (lambda: 3, "the factory returned int, not a torch.nn.Module"),
    ]:
        with pytest.raises(InitialisationError) as caught:
            record(factory)
        assert str(caught.value) == message
    assert existing.weight.device.type == "cpu"


def test_containers_and_closures_hold_values_and_the_parameters_themselves():
    def factory():
        module = nn.Linear(2, 2)
        held = torch.full((2,), 3.0)
        module.cache = {"held": [held, module.weight]}
        module.register_forward_hook(lambda module, args, output: output * held)
        return module

    module, recipe = record(factory)
    assert recipe.fqns == ("weight", "bias", "_forward_hooks[0].held")
    materialise(module, recipe, seed=0, device="cpu")
    assert module.cache["held"][1] is module.weight and module.cache["held"][0].tolist() == [3.0, 3.0]
    expected = 3.0 * nn.functional.linear(torch.ones(2), module.weight, module.bias)
    assert torch.equal(module(torch.ones(2)), expected)
