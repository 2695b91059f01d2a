"""Gradients of leaves that a loop gives the model: of its samples, and all their positions, as one device has them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.late_hooks import VOCAB, Block, D
from support.models import write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
DP = "mesh.dp_shard = 2\n[sharding.fsdp2]\n"
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"
STAGES = f"mesh.pp = 2\ntrain.microbatch = 2\n{FSDP}[scheduling.pipeline]\nschedule = '1F1B'\n"
FORMS = ("engine", "given", "computed", "penalised", "twice", "hooked")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, VOCAB)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


def backward(model: nn.Module, x: Tensor, y: Tensor, form: str, run: composer3d.Composition | None) -> None:
    """Run a loop's backward; of two forms more than one, or one with a hook."""
    for last in (False, True) if form == "twice" else (True,):
        if form == "engine" and run is not None:
            run.forward_backward(x, target=y)
            continue
        loss = loss_of(model(x * 1.5 + 1 if form == "computed" else x), y)
        if form == "penalised":
            loss = loss + x.square().sum(-1).mean()
        loss.backward() if run is None else run.backward(loss, last=last)


def errors(text: str, length: int, forms: tuple[str, ...]) -> dict[str, float]:
    """Return how far gradients are from one device's, and those that a hook of the loop sees."""
    torch.set_default_dtype(torch.float64)
    generator, found = torch.Generator().manual_seed(1), {}
    given, targets = torch.randn(4, length, D, generator=generator), torch.randint(0, VOCAB, (4, length))
    for form in forms:
        x, seen = given.clone().requires_grad_(), []
        backward(seeded(), x, targets, form, None)
        wanted = x.grad / (2 if form == "twice" else 1)  # run.backward(last=False) takes the mean
        run = composer3d.compose(seeded(), write_manifest(text), loss_fn=loss_of, example=((given,), {}))
        size = 4 // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        x = given[mine].clone().requires_grad_()
        if form == "hooked":
            x.register_hook(seen.append)
        for step in range(2):
            x.grad = None
            with run.step(step):
                backward(run.model if form != "engine" else run, x, targets[mine], form, run)
            if x.grad is not None or run.context.layout.degree(composer3d.Role.STAGE) == 1:
                pairs = [(x.grad, wanted[mine]), *((each, wanted[mine]) for each in seen)]
                found[f"{form} {step}"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        copy.deepcopy(x)
        run.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "text", "length"),
    [
        pytest.param(2, DP, 8, id="samples"),
        pytest.param(2, FSDP, 8, id="positions"),
        pytest.param(2, FSDP, 7, id="padded", marks=pytest.mark.slow),
        pytest.param(2, CP, 8, id="nobody else averages", marks=pytest.mark.slow),
        pytest.param(4, f"mesh.dp_shard = 2\n{FSDP}", 8, id="samples and positions", marks=pytest.mark.slow),
        pytest.param(4, f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\n", 8, id="beside tp", marks=pytest.mark.slow),
    ],
)
def test_they_are_one_devices(world_size: int, text: str, length: int):
    for found in run_ranks(errors, world_size, text, length, FORMS):
        assert len(found) == 2 * len(FORMS)
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def test_they_are_of_several_micro_batches():
    for found in run_ranks(errors, 2, f"train.microbatch = 2\n{FSDP}", 8, ("engine",)):
        assert len(found) == 2 and max(found.values()) < TIGHT


@pytest.mark.slow
def test_they_are_on_the_first_stage_of_a_pipeline():
    ranks = [found for found in run_ranks(errors, 4, STAGES, 8, ("engine",)) if found]
    assert len(ranks) == 2 and all(error < TIGHT for found in ranks for error in found.values())


def trained(rank: int) -> list[Tensor]:
    """Return gradients of a prompt that the optimizer trains, and one device's."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    given, targets = torch.randn(4, 8, D, generator=generator), torch.randint(0, VOCAB, (4, 8), generator=generator)
    prompt = torch.ones(1, 1, D).requires_grad_()
    loss_of(seeded()(given + prompt), targets).backward()
    wanted, prompt.grad = prompt.grad, None
    run = composer3d.compose(seeded(), write_manifest(DP), loss_fn=loss_of, example=((given,), {}))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
    optimizer.add_param_group({"params": [prompt]})
    mine = slice(2 * run.context.data_parallel_rank, 2 * run.context.data_parallel_rank + 2)
    with run.step(0):
        run.backward(loss_of(run.model(given[mine] + prompt), targets[mine]))
        run.clip_grad_norm_(float("inf"))
        optimizer.step()
    run.close()
    return [prompt.grad, wanted]


def test_those_that_the_optimizer_averages_are_left_to_it():
    for found, wanted in run_ranks(trained, 2, 0):
        torch.testing.assert_close(found, wanted, rtol=TIGHT, atol=0.0)
