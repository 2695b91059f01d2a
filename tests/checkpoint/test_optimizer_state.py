from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer3d.checkpoint import (
    contents,
    initialise_optimizer_state,
    load,
    load_optimizer_json,
    match_optimizer_state,
    optimizer_tensors,
    read_state,
    read_tensors,
    save,
)
from composer3d.checkpoint.state_file import encode_state
from composer3d.errors import CheckpointError
from composer3d.testing import full, run_ranks

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, fused=True),
    "adamw_tensor_lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False),
    "adamw_amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).double()
    module[1].bias.requires_grad_(False)
    return module


def train(module, optimizer, first, last, skip=()):
    """Step with gradients that are a function of step and name alone; names in `skip` get none."""
    for step in range(first, last):
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if parameter.requires_grad and name not in skip:
                parameter.grad = torch.zeros_like(parameter).add_(0.1 * (index + 1) * (step - 1.5))
        optimizer.step()
        optimizer.zero_grad()


def save_all(path, module, optimizer):
    parameters = dict(module.named_parameters())
    tensors, data = optimizer_tensors(optimizer, parameters)
    save(path, tensors={**parameters, **tensors}, state={"optimizer": data})


def load_all(path, module, optimizer):
    parameters = dict(module.named_parameters())
    data = read_state(path)["optimizer"]
    match_optimizer_state(optimizer, parameters, data)
    tensors, _ = optimizer_tensors(optimizer, parameters)
    load(path, tensors={**parameters, **tensors})
    load_optimizer_json(optimizer, parameters, data)


def values(module) -> dict[str, torch.Tensor]:
    return {name: full(parameter).detach().clone() for name, parameter in module.named_parameters()}


def equal(one, two) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_resumed_run_is_bit_equal(tmp_path, name, fresh):
    module = model()
    optimizer = OPTIMIZERS[name](module.parameters())
    skip = ("2.weight",)
    train(module, optimizer, 0, 3, skip)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    save_all(tmp_path / "step-3", module, optimizer)
    held = [name for name, parameter in module.named_parameters() if optimizer.state.get(parameter)]
    train(module, optimizer, 3, 4, skip)
    train(module, optimizer, 4, 6)

    resumed = model()
    other = OPTIMIZERS[name](resumed.parameters())
    if not fresh:
        train(resumed, other, 0, 5)
    load_all(tmp_path / "step-3", resumed, other)
    assert other.param_groups[0]["weight_decay"] == 0.25
    assert [name for name, parameter in resumed.named_parameters() if other.state.get(parameter)] == held
    assert ("2.weight" in held) == (name == "adagrad")  # which makes its state when it is built
    train(resumed, other, 3, 4, skip)
    train(resumed, other, 4, 6)
    assert equal(values(module), values(resumed))
    for mine, yours in zip(module.parameters(), resumed.parameters(), strict=True):
        assert str(optimizer.state.get(mine)) == str(other.state.get(yours))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_initialising_changes_nothing_but_state(name):
    module = model()
    with torch.no_grad():
        module[0].weight[0] = torch.tensor([-0.0, torch.inf, 1e-320])
    optimizer = OPTIMIZERS[name](module.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append(arguments))
    module[0].bias.grad = torch.full((5,), 3.0, dtype=torch.float64)
    before, gradient = values(module), module[0].bias.grad
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    rate = optimizer.param_groups[0]["lr"]
    initialise_optimizer_state(optimizer)
    assert not calls
    assert all(torch.equal(before[key].view(torch.int64), now.view(torch.int64)) for key, now in values(module).items())
    assert module[0].bias.grad is gradient and gradient.eq(3).all()
    assert all(parameter.grad is None for parameter in module.parameters() if parameter is not module[0].bias)
    assert optimizer.param_groups[0]["lr"] is rate
    assert groups == [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    stateful = [name for name, parameter in module.named_parameters() if optimizer.state.get(parameter)]
    expected = {"sgd": [], "adagrad": list(before)}
    assert stateful == expected.get(name, ["0.weight", "0.bias", "1.weight", "2.weight"])


def test_initialising_keeps_state_that_is_there():
    module = model()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    train(module, optimizer, 0, 2, skip=("0.weight", "0.bias"))
    before = copy.deepcopy(optimizer.state[module[2].weight])
    initialise_optimizer_state(optimizer, [module[0].weight, module[1].bias, module[2].weight])
    assert equal(optimizer.state[module[2].weight], before)
    assert not optimizer.state[module[0].weight]["exp_avg"].any()
    assert optimizer.state[module[1].bias] and not optimizer.state.get(module[0].bias)


def test_an_optimizer_that_needs_a_closure_is_refused():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    with pytest.raises(CheckpointError) as caught:
        initialise_optimizer_state(optimizer)
    assert str(caught.value).startswith("LBFGS cannot make its state by a step on zero gradients: ")
    assert optimizer.param_groups[0]["lr"] == 1 and optimizer.param_groups[0]["params"][0].tolist() == [1, 1]


def test_tensors_and_json_are_named():
    module = model()
    optimizer = torch.optim.AdamW(
        [{"params": module[0].parameters(), "lr": 0.5}, {"params": list(module[1:].parameters()), "tag": "rest"}]
    )
    train(module, optimizer, 0, 1, skip=("0.weight",))
    tensors, data = optimizer_tensors(optimizer, dict(module.named_parameters()))
    names = ["step", "exp_avg", "exp_avg_sq"]
    stateful = ["0.bias", "1.weight", "2.weight"]
    assert list(tensors) == [f"optimizer/{fqn}/{name}" for fqn in stateful for name in names]
    assert tensors["optimizer/2.weight/exp_avg"] is optimizer.state[module[2].weight]["exp_avg"]
    common = {"betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
    common["decoupled_weight_decay"] = True
    assert data == {
        "class": "AdamW",
        "groups": [
            {"hyperparameters": {"lr": 0.5, **common}, "parameters": ["0.weight", "0.bias"]},
            {
                "hyperparameters": {"tag": "rest", "lr": 1e-3, **common},
                "parameters": ["1.weight", "1.bias", "2.weight"],
            },
        ],
        "values": {},
        "tensors": {fqn: names for fqn in stateful},
    }


class Counting(torch.optim.Optimizer):
    """Keeps a count that is no tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "range": (0.5, torch.tensor(0.25))})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_values_that_are_no_tensors_are_restored_in_their_types(tmp_path):
    module = model()
    optimizer = Counting(module.parameters(), torch.tensor(0.5))
    train(module, optimizer, 0, 3, skip=("0.bias",))
    optimizer.param_groups[0]["lr"].fill_(0.1)
    save_all(tmp_path / "step-1", module, optimizer)
    other = Counting(module.parameters(), torch.tensor(0.5))
    rate = other.param_groups[0]["lr"]
    load_all(tmp_path / "step-1", module, other)
    assert other.param_groups[0]["lr"] is rate and rate.item() == torch.tensor(0.1).item()
    assert other.param_groups[0]["range"] == (0.5, torch.tensor(0.25))
    assert other.state[module[0].weight] == {"count": 3} and not other.state.get(module[0].bias)


def groups_of(module, *splits):
    parameters = dict(module.named_parameters())
    return [{"params": [parameters[name] for name in names], "lr": lr} for lr, *names in splits]


DATA = [(0.1, "0.weight", "0.bias"), (0.2, "1.weight", "1.bias", "2.weight")]


@pytest.mark.parametrize(
    ("splits", "cls", "text"),
    [
        (DATA, torch.optim.SGD, "the checkpoint's optimizer is AdamW, this run's is SGD"),
        (
            [(0.1, "0.weight", "0.bias", "1.weight"), (0.2, "1.bias", "2.weight")],
            torch.optim.AdamW,
            "0.weight and 1.weight share a parameter group in this run, in the checkpoint they differ: "
            "lr is 0.1 and 0.2",
        ),
        (
            [(0.1, "0.weight", "0.bias"), (0.2, "1.weight", "2.weight")],
            torch.optim.AdamW,
            "the checkpoint's optimizer holds 1.bias, this run's does not; is it frozen now?",
        ),
    ],
)
def test_another_optimizer_is_refused(splits, cls, text):
    module = model()
    parameters = dict(module.named_parameters())
    _, data = optimizer_tensors(torch.optim.AdamW(groups_of(module, *DATA)), parameters)
    optimizer = cls(groups_of(module, *splits))
    for load_part in (match_optimizer_state, load_optimizer_json):
        with pytest.raises(CheckpointError) as caught:
            load_part(optimizer, parameters, data)
        assert str(caught.value).removeprefix("optimizer state: ") == text
    assert not optimizer.state


def test_a_parameter_that_the_checkpoint_lacks_is_refused():
    module = model()
    parameters = dict(module.named_parameters())
    _, data = optimizer_tensors(torch.optim.AdamW(groups_of(module, DATA[0])), parameters)
    with pytest.raises(CheckpointError) as caught:
        match_optimizer_state(torch.optim.AdamW(groups_of(module, *DATA)), parameters, data)
    text = "optimizer state: the checkpoint's optimizer does not hold 1.weight; was it frozen or absent then?"
    assert str(caught.value) == text


def test_finer_groups_get_what_their_parameters_had():
    module = model()
    parameters = dict(module.named_parameters())
    _, data = optimizer_tensors(torch.optim.AdamW(groups_of(module, *DATA)), parameters)
    optimizer = torch.optim.AdamW(groups_of(module, (9, "2.weight", "1.bias"), (9, "1.weight"), (9, *DATA[0][1:])))
    load_optimizer_json(optimizer, parameters, data)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.1]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_parameters_without_a_name_are_refused():
    module = model()
    with pytest.raises(CheckpointError) as caught:
        optimizer_tensors(torch.optim.SGD(module.parameters()), {"0.weight": module[0].weight})
    assert str(caught.value) == "optimizer state: the optimizer holds a parameter of shape [5] of no known name"


def test_hyperparameters_that_json_cannot_carry_are_refused():
    module = model()
    optimizer = torch.optim.SGD([{"params": module.parameters(), "rule": print}])
    with pytest.raises(CheckpointError) as caught:
        optimizer_tensors(optimizer, dict(module.named_parameters()))
    assert str(caught.value).startswith(
        "optimizer state: optimizer.hyperparameters.rule is a builtin_function_or_method, which JSON cannot carry"
    )


# On several ranks


def sharded(shape):
    module = model()
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module, torch.optim.AdamW(groups_of(module, *DATA), fused=True)


def save_sharded(path, shape):
    module, optimizer = sharded(shape)
    train(module, optimizer, 0, 3, skip=("1.weight",))
    save_all(path, module, optimizer)
    train(module, optimizer, 3, 5)
    return values(module)


def load_sharded(path, shape):
    module, optimizer = sharded(shape)
    load_all(path, module, optimizer)
    tensors, data = optimizer_tensors(optimizer, dict(module.named_parameters()))
    loaded = values(module) | {key: full(tensor).clone() for key, tensor in tensors.items()}
    train(module, optimizer, 3, 5)
    return loaded, values(module), data if dist.get_rank() == 0 else None


@pytest.mark.parametrize("saved", [(2,), (4,), (2, 2)])
def test_sharded_states_load_in_every_layout(tmp_path, saved):
    path = tmp_path / "step-1"
    expected = run_ranks(save_sharded, torch.Size(saved).numel(), path, saved)[0]
    reference = dict(read_tensors(path, list(contents(path))))
    assert len([key for key in reference if key.startswith("optimizer/")]) == 9
    for shape in [None, (2,), (4,), (2, 2)]:
        results = run_ranks(load_sharded, torch.Size(shape or (1,)).numel(), path, shape)
        for loaded, after, _ in results:
            assert equal(loaded, reference)
            if shape == saved:
                assert equal(after, expected)
            # In another layout the vector units cut the shards elsewhere: the last bit of a step may differ.
            torch.testing.assert_close(after, expected, rtol=1e-14, atol=0)
        assert encode_state(results[0][2]) == encode_state(read_state(path)["optimizer"])


def stage(num_stages):
    """Return this rank's parts of the model under the whole model's FQNs, and one optimizer over them."""
    module, rank = model(), dist.get_rank()
    # The last stage holds no parameter of the first group.
    mine = {2: [("0",), ("1", "2")], 1: [("0", "1", "2")]}[num_stages][rank]
    parameters = {name: parameter for name, parameter in module.named_parameters() if name.partition(".")[0] in mine}
    groups = [{"params": [parameters[name] for name in names if name in parameters], "lr": lr} for lr, *names in DATA]
    return module, parameters, torch.optim.AdamW([group for group in groups if group["params"]])


def save_stage(path):
    module, parameters, optimizer = stage(2)
    train(module, optimizer, 0, 3)
    tensors, data = optimizer_tensors(optimizer, parameters)
    save(path, tensors={**parameters, **tensors}, state={"optimizer": data})
    train(module, optimizer, 3, 5)
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def load_stage(path, num_stages):
    module, parameters, optimizer = stage(num_stages)
    data = read_state(path)["optimizer"]
    match_optimizer_state(optimizer, parameters, data)
    tensors, _ = optimizer_tensors(optimizer, parameters)
    load(path, tensors={**parameters, **tensors})
    load_optimizer_json(optimizer, parameters, data)
    train(module, optimizer, 3, 5)
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def test_pipeline_stages_are_one_checkpoint(tmp_path):
    path = tmp_path / "step-1"
    first, second = run_ranks(save_stage, 2, path)
    groups = read_state(path)["optimizer"]["groups"]
    assert [(group["hyperparameters"]["lr"], group["parameters"]) for group in groups] == [
        (0.1, ["0.weight", "0.bias"]),
        (0.2, ["1.weight", "1.bias", "2.weight"]),
    ]
    assert equal(run_ranks(load_stage, 1, path, 1)[0], first | second)
    again = run_ranks(load_stage, 2, path, 2)
    assert equal(again[0] | again[1], first | second)


def disagree():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (dist.get_rank() + 1))
    with pytest.raises(CheckpointError) as caught:
        optimizer_tensors(optimizer, dict(module.named_parameters()))
    return str(caught.value)


def test_ranks_with_different_hyperparameters_are_refused():
    text = "optimizer state: rank 0: 0.weight: ranks differ: lr is 0.1 and 0.2"
    assert run_ranks(disagree, 2) == [text, text]


def one_stage_differs(path):
    module, parameters, optimizer = stage(2)
    data = copy.deepcopy(read_state(path)["optimizer"])
    if dist.get_rank() == 1:
        optimizer = torch.optim.AdamW([parameters["1.weight"], parameters["2.weight"]])
    with pytest.raises(CheckpointError) as caught:
        match_optimizer_state(optimizer, parameters, data)
    return str(caught.value)


def test_a_difference_on_one_rank_is_raised_on_all(tmp_path):
    run_ranks(save_stage, 2, tmp_path / "step-1")
    reason = "the checkpoint's optimizer holds 1.bias, this run's does not; is it frozen now?"
    assert run_ranks(one_stage_differs, 2, tmp_path / "step-1") == [f"optimizer state: rank 1: {reason}"] * 2
