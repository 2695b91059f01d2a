"""An elementwise optimizer's step of shards is DTensor's own, bit for bit, and leaves DTensors behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composer3d.step.optimizers.shard_step import on_shards, steps_each_element
from composer3d.testing import run_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "asgd": (torch.optim.ASGD, {"t0": 1}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "sgd": (torch.optim.SGD, {}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def made(name: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter], Any]:
    """Return an optimizer of an uneven sharded, a replicated and a plain parameter, and its step without hooks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.randn(7, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    sharded = [distribute_tensor(x, mesh, [p]) for x, p in zip(values, (Shard(0), Replicate()), strict=True)]
    parameters = [*map(nn.Parameter, sharded), nn.Parameter(torch.randn(4, dtype=torch.float64))]
    cls, options = OPTIMIZERS[name]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = cls(groups, **{"lr": 1e-2, **copy.deepcopy(options)})  # type: ignore[arg-type]
    return optimizer, parameters, type(optimizer).step.__wrapped__  # type: ignore[attr-defined]


def give_gradients(parameters: list[nn.Parameter], number: int) -> None:
    """Give every parameter a gradient, but in one step the first none."""
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        is_sharded = isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements) if is_sharded else grad
    if number == 1:
        parameters[0].grad = None


def whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def stepped(name: str, *, by_shards: bool) -> tuple[list[Any], list[dict[str, tuple[str, Any]]]]:
    """Return the parameters and states after four steps; of each state its type, too."""
    optimizer, parameters, step = made(name)
    if by_shards:
        step = on_shards(step)
    for number in range(4):
        give_gradients(parameters, number)
        step(optimizer)
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    assert optimizer.param_groups[0]["params"] == parameters[:2]
    shown = [{key: (type(value).__name__, whole(value)) for key, value in state.items()} for state in states]
    return [whole(parameter.detach()) for parameter in parameters], shown


def compare_steps() -> None:
    for name in OPTIMIZERS:
        (values, states), (others, other_states) = (stepped(name, by_shards=by_shards) for by_shards in (True, False))
        for value, other in zip(values, others, strict=True):
            assert torch.equal(value, other), name
        for state, other_state in zip(states, other_states, strict=True):
            assert list(state) == list(other_state), name
            for key, (kind, value) in state.items():
                assert kind == other_state[key][0], (name, key)
                assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(other_state[key][1])), name


def test_steps_of_shards_are_those_of_dtensors_bit_for_bit() -> None:
    run_ranks(compare_steps, 2)


def step_gathered_gradient() -> None:
    optimizer, parameters, step = made("adamw")
    give_gradients(parameters, 0)
    mesh = init_device_mesh("cpu", (2,))
    parameters[0].grad = None
    gathered = distribute_tensor(torch.ones(7, 3, dtype=torch.float64), mesh, [Replicate()])
    parameters[0].grad = gathered
    before = whole(parameters[0].detach()).clone()
    on_shards(step)(optimizer)
    # AdamW's first step of a gradient of ones: lr / (1 + eps), and the weight decay.
    expected = 1e-2 / (1 + 1e-8) + before * 1e-4
    assert torch.allclose(before - whole(parameters[0].detach()), expected, rtol=1e-12, atol=1e-14)


def test_a_gradient_placed_otherwise_is_left_to_dtensor() -> None:
    run_ranks(step_gathered_gradient, 2)


def raise_in_a_step() -> None:
    optimizer, parameters, _ = made("adamw")
    give_gradients(parameters, 0)
    state = optimizer.state

    def fail(_: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        on_shards(fail)(optimizer)
    assert optimizer.state is state
    assert [group["params"] for group in optimizer.param_groups] == [parameters[:2], parameters[2:]]
    assert optimizer.param_groups[0]["foreach"] is None


def test_a_step_that_fails_leaves_groups_and_state_as_they_were() -> None:
    run_ranks(raise_in_a_step, 2)


def write_before_a_backward() -> None:
    optimizer, parameters, step = made("adamw")
    loss = (parameters[0] ** 2).sum()
    give_gradients(parameters, 0)
    on_shards(step)(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_notices_that_a_step_has_changed_what_it_needs() -> None:
    run_ranks(write_before_a_backward, 2)


def test_a_subclass_is_not_known_to_step_each_element() -> None:
    class Clipped(torch.optim.AdamW):
        pass

    assert steps_each_element(torch.optim.AdamW)
    assert not steps_each_element(Clipped)
