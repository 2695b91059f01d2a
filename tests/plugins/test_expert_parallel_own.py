"""Loops that treat one expert of a list otherwise than the others: ranks hold other experts, and decide alike."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import Looped, MixtureNet, mine, seeded, token_sum, tokens_and_targets
from support.models import write_manifest

import composer3d
from composer3d.errors import StepError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "ep": (2, "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"),
    "ep, replicas of experts": (4, "[mesh]\ndp_shard = 4\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"),
}
HALF = "layers.1.experts.2.0.weight"


def make_model(frozen=""):
    model = seeded(lambda: MixtureNet(Looped))
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and fqn.startswith(frozen)))
    return model


def trained(model, named, optimizer, compute, habit):
    """Train three steps by a loop with a habit of its own."""
    for _ in range(3):
        compute()
        for fqn, parameter in named():
            if habit == "halves" and fqn == HALF:
                parameter.grad *= 0.5
        optimizer.step()
        for fqn, parameter in named():
            if habit == "clamps" and fqn == HALF:
                with torch.no_grad():
                    parameter.clamp_(-0.1, 0.1)
        optimizer.zero_grad()
        for fqn, module in model.named_modules():
            if habit == "evaluates" and fqn.startswith("layers.0.experts.3"):
                module.eval()


def beside_one_device(text, habit, frozen):
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    single = make_model(frozen)

    def compute():
        loss = token_sum(single(tokens), targets)
        (loss.sum / loss.count).backward()

    plain = [parameter for parameter in single.parameters() if parameter.requires_grad]
    trained(single, single.named_parameters, torch.optim.SGD(plain, lr=0.1), compute, habit)
    expected = dict(single.named_parameters())
    run = composer3d.compose(make_model(frozen), write_manifest(text), loss_fn=token_sum)
    ours = mine(run, tokens), mine(run, targets)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    trained(run.model, run.named_parameters, optimizer, lambda: run.forward_backward(ours[0], target=ours[1]), habit)
    found = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    run.close()
    return {fqn: float((value - expected[fqn].detach()).abs().max()) for fqn, value in found.items()}


@pytest.mark.parametrize("layout", ["ep", pytest.param("ep, replicas of experts", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("habit", "frozen"),
    [
        ("none", "layers.0.experts.1."),
        ("none", "layers.1.experts.2.0."),
        ("halves", ""),
        ("clamps", ""),
        ("evaluates", ""),
    ],
)
def test_a_loop_may_treat_one_expert_of_a_list_otherwise(layout, habit, frozen):
    num_ranks, text = LAYOUTS[layout]
    ranks = run_ranks(beside_one_device, num_ranks, text, habit, frozen)
    assert len({fqn for found in ranks for fqn in found}) == 39
    for found in ranks:
        assert max(found.values()) < TIGHT, found


def of_one_rank(text, habit):
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    run = composer3d.compose(make_model(), write_manifest(text), loss_fn=token_sum)
    ours = mine(run, tokens), mine(run, targets)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    parameters = dict(run.named_parameters())
    is_odd = run.context.rank == 1
    with pytest.raises(StepError) as caught:
        for _ in range(3):
            if is_odd and habit == "freezes":
                parameters["layers.0.gate.weight"].requires_grad_(False)
            run.forward_backward(ours[0], target=ours[1])
            if is_odd and habit == "halves":
                parameters["layers.0.gate.weight"].grad *= 0.5
            optimizer.step()
            optimizer.zero_grad()
    return str(caught.value)


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("freezes", '"layers.0.gate.weight".requires_grad: False, not True'),
        ("halves", 'writes into the gradient of "layers.0.gate.weight" after its last backward: 1, not 0'),
    ],
)
def test_what_one_rank_decides_about_what_all_have_is_named_beside_experts(habit, said):
    for message in run_ranks(of_one_rank, 2, LAYOUTS["ep"][1], habit):
        assert (
            said in message
            or said.replace("False, not True", "True, not False").replace("1, not 0", "0, not 1") in message
        )
