from __future__ import annotations

import copy
import re

import pytest
import torch
from support.models import composed, mine, padded, seeded

from composer3d import PatternError, StepError
from composer3d.step.optimizers.optimizer import group_parameters
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"
VETO = '[profiling.journal]\nuse = "support.plugins:Journal"\nveto_rank = 0\nveto_step = 0\n'

SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=5),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


def rates(make, vetoes):
    """Train with a scheduler over the composed optimizer and over a plain one; return both courses of rates."""
    run = composed(VETO if vetoes else "")
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = seeded()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers, courses = [make(optimizer), make(plain)], ([], [])
    tokens, targets = padded()
    for number in range(4):
        with run.step(number):
            loss = run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        plain.step()
        for scheduler, course in zip(schedulers, courses, strict=True):
            needs_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(loss)] if needs_loss else []))
            course.append(scheduler.optimizer.param_groups[0]["lr"])
    return courses


# Warnings are errors here, "lr_scheduler.step() before optimizer.step()" among them.
@pytest.mark.parametrize("vetoes", [False, True], ids=["", "first step vetoed"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_of_torch_accept_it(make, vetoes):
    composed_rates, plain_rates = run_ranks(rates, 1, make, vetoes)[0]
    assert composed_rates == plain_rates
    assert len(set(plain_rates)) > 1


def hooked():
    run = composed("")
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        with pytest.raises(StepError) as closure:
            optimizer.step(lambda: None)
        optimizer.step()
    with pytest.raises(StepError) as twice:
        run.optimizer(torch.optim.SGD, lr=0.1)
    cls = type(optimizer)
    kind = isinstance(optimizer, torch.optim.AdamW), cls.__name__, cls.__module__, len(copy.deepcopy(optimizer).state)
    return calls, str(closure.value), str(twice.value), kind


def test_it_is_an_optimizer_of_its_class_with_hooks():
    calls, closure, twice, kind = run_ranks(hooked, 1)[0]
    assert calls == ["pre", "post"]
    assert closure == (
        "AdamW.step was given a closure, whose forward and backward a composed step cannot run again, as LBFGS would: "
        "call the closure's lines, with run.backward(loss), before optimizer.step(), and pass none"
    )
    assert twice.startswith("this composition has its optimizer already, AdamW: run.optimizer(...), and run.prepare(")
    assert kind == (True, "AdamW", "torch.optim.adamw", len(list(seeded().parameters())))


def grouped(text, groups):
    run = composed(text)
    run.model.norm.weight.requires_grad_(False)
    optimizer = run.optimizer(torch.optim.AdamW, groups=groups, lr=0.5)
    names = {id(p): fqn for fqn, p in run.named_parameters()}
    found = [(group["lr"], sorted(names[id(p)] for p in group["params"])) for group in optimizer.param_groups]
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    return found


def test_groups_by_regular_expression():
    groups = [{"match": r"^layers\.0\.", "lr": 0.1}, {"match": r"bias$|^norm", "lr": 0.2}, {"match": "up", "lr": 0.3}]
    # Warnings say that the frozen parameter needs no gradient; FSDP2 keeps it all the same.
    assert run_ranks(grouped, 1, "", groups)[0] == [
        (0.1, [f"layers.0.{name}" for name in ("down.bias", "down.weight", "up.bias", "up.weight")]),
        (0.2, [*(f"layers.{i}.{name}.bias" for i in (1, 2) for name in ("down", "up")), "norm.bias", "out.bias"]),
        (0.3, ["layers.1.up.weight", "layers.2.up.weight"]),
        (0.5, ["layers.1.down.weight", "layers.2.down.weight", "out.weight", "tok.weight"]),
    ]


def grouped_on_stages(text, groups):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, groups=groups, lr=0.5)
    tokens, targets = padded()
    run.forward_backward(tokens, target=targets)
    optimizer.step()
    return [(group["lr"], len(group["params"])) for group in optimizer.param_groups]


def test_plain_and_sharded_parameters_share_a_group():
    text = '[sharding.fsdp2]\nignored = ["out.*"]\n'
    for found in run_ranks(grouped, 2, text, [{"match": "weight$", "lr": 0.1}]):
        assert [(lr, len(names)) for lr, names in found] == [(0.1, 8), (0.5, 8)]


def test_a_stage_has_the_groups_of_the_others_too():
    groups = [{"match": "^tok", "lr": 0.1}, {"match": "^out", "lr": 0.2}]
    text = "[mesh]\npp = 2\n[train]\nmicrobatch = 2\n[scheduling.pipeline]\n"
    first, last = run_ranks(grouped_on_stages, 2, text, groups)
    assert first == [(0.1, 1), (0.2, 0), (0.5, 8)]
    assert last == [(0.1, 0), (0.2, 2), (0.5, 6)]


@pytest.mark.parametrize(
    ("group", "found"),
    [
        ({"params": [], "lr": 1.0}, "group 1 has 'params', 'lr', and no text `match`; "),
        ({}, "group 1 has nothing, and no text `match`; "),
        ({"match": 3}, "group 1 has 'match', and no text `match`; "),
        ([], "group 1 is no mapping, and no text `match`; "),
        (
            {"match": "*.bias"},
            '`match` of group 1, "*.bias", is no regular expression: nothing to repeat at position 0; ',
        ),
    ],
)
def test_a_group_without_a_regular_expression_is_refused(group, found):
    named = list(seeded().named_parameters())
    with pytest.raises(StepError) as caught:
        group_parameters(named, [{"match": "bias"}, group], known=[fqn for fqn, _ in named], trained=())
    assert str(caught.value) == (
        f"run.optimizer(groups=...): {found}"
        'a group is {"match": REGULAR_EXPRESSION, ...}, searched in FQNs, with the hyperparameters of what matches'
    )


def test_a_group_that_matches_nothing_in_the_model_is_refused():
    named = list(seeded().named_parameters())
    known = [fqn for fqn, _ in named]
    message = (
        'the pattern "bais$" matches nothing in the model; the group would be empty; `match` is a regular expression'
    )
    with pytest.raises(PatternError, match=f"^{re.escape(message)}$"):
        group_parameters(named, [{"match": "bais$"}], known=known, trained=known)
    # A stage that holds none of a group's parameters is no mistake.
    out = [{"match": "^out", "lr": 1.0}]
    others = {"params": [parameter for _, parameter in named[:2]]}
    assert group_parameters(named[:2], out, known=known, trained=known) == [{"lr": 1.0, "params": []}, others]
    assert group_parameters([], out, known=known, trained=["out.bias"]) == [{"lr": 1.0, "params": []}]


class Ratio(torch.optim.Optimizer):
    """LARS: steps by the ratio of a parameter's norm to its gradient's, which `number` reads from a norm."""

    def __init__(self, params, lr=0.1, *, number=float):
        super().__init__(params, {"lr": lr})
        self.number = number

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            ratio = self.number(self.norm(parameter)) / self.number(self.norm(parameter.grad))
            parameter.sub_(parameter.grad * ratio * 0.1)

    def norm(self, tensor):
        return tensor.norm()


class LocalRatio(Ratio):
    def norm(self, tensor):
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).norm()


class Langevin(torch.optim.SGD):
    """SGD with noise, which is another one in every step of every tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.add_(torch.randn(local.shape), alpha=0.1)


OPTIMIZERS = {
    "float": (Ratio, {"number": float}),
    "item": (Ratio, {"number": lambda norm: norm.item()}),
    "local": (LocalRatio, {"number": lambda norm: norm}),
    "tensor": (Ratio, {"number": lambda norm: norm}),
    "noise": (Langevin, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
}


def made(text):
    """Return, for each optimizer, the error of making it, and that of a step where it could be made."""
    found = {}
    for name, (cls, options) in OPTIMIZERS.items():
        model = torch.nn.Linear(6, 4, bias=False)
        with composed(text, model, loss_fn=torch.nn.functional.mse_loss) as run:
            try:
                optimizer = run.optimizer(cls, **options)
                run.forward_backward(torch.ones(2, 6), target=torch.zeros(2, 4))
                optimizer.step()
            except StepError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_step_shards_otherwise_than_whole_parameters_are_refused(world_size):
    otherwise = (
        " steps a sharded parameter otherwise than a whole one: what it computes of a parameter, as "
        "p.to_local().norm(), is of this rank's shard alone. Keep it a tensor: p.norm() of a DTensor sums over ranks, "
        "as torch.where(norm > 0, ...) and p.mul_(norm) then do; or take numbers of p.full_tensor()"
    )
    in_place = (
        " writes by indices, or raises sums over shards to a power in place, which DTensor, and so a sharded or "
        "replicated parameter, does not take; use adamw"
    )
    expected = {name: name + in_place for name in ("Adafactor", "Rprop")}
    if world_size == 2:
        expected |= {"local": "LocalRatio" + otherwise}  # numbers of sharded tensors are the whole ones'
    for found in run_ranks(made, world_size, FSDP):
        assert found == expected
