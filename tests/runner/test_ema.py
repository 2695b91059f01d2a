from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import seeded
from torch import nn

import composer3d
from composer3d.runner.weights.ema import EMA
from composer3d.testing import full, run_ranks

LAYOUTS = ["[sharding.fsdp2]\nzero = 1", "[sharding.fsdp2]\nzero = 3", "[sharding.ddp]", ""]


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def compose(folder, table, model):
    manifest = folder / f"run{dist.get_rank()}.toml"  # each rank its own: one would read what another is writing
    manifest.write_text(f"composer3d = 1\n{table}\n")
    return composer3d.compose(model, manifest, loss_fn=loss_fn, device="cpu")


def values(run):
    return {fqn: full(parameter.detach()).double().clone() for fqn, parameter in run.named_parameters()}


def averaged(folder, table):
    """Train three steps; return how far the averages are from ones kept naively, and whether the weights came back."""
    run = compose(folder, table, seeded())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    ema = EMA(run, decay=0.75)
    naive = values(run)
    tokens = torch.arange(20).reshape(4, 5) % 11
    for step in range(3):
        with run.step(step):
            run.forward_backward(tokens, target=tokens)
            optimizer.step()
            ema.update(step)
            optimizer.zero_grad()
        now = values(run)
        naive = {fqn: 0.75 * naive[fqn] + 0.25 * now[fqn] for fqn in now}
    with ema.applied():
        inside = values(run)
        loss = float(run.evaluate(tokens, target=tokens).loss)
    after = values(run)
    with run.step(3):
        next_loss = float(run.forward_backward(tokens, target=tokens))
    error = max(float((inside[fqn] - naive[fqn]).abs().max()) for fqn in naive)
    same = all(torch.equal(after[fqn], now[fqn]) for fqn in now)
    moved = max(float((inside[fqn] - now[fqn]).abs().max()) for fqn in now)
    return error, same, moved, loss, next_loss


@pytest.mark.parametrize("table", LAYOUTS)
def test_averages_are_those_of_a_naive_loop_and_weights_come_back(tmp_path, table):
    [(error, same, moved, loss, next_loss), *_] = run_ranks(averaged, 2 if table else 1, tmp_path, table)
    [(*_, alone, alone_next)] = run_ranks(averaged, 1, tmp_path, "")
    assert error < 1e-6 and same and moved > 1e-3
    assert loss == pytest.approx(alone, rel=1e-5) and next_loss == pytest.approx(alone_next, rel=1e-5)
    assert abs(loss - next_loss) > 1e-3


def narrow(folder):
    run = compose(folder, "", nn.Linear(2, 2, bias=False).to(torch.bfloat16))
    ema = EMA(run, decay=0.999)
    [(_, weight)] = run.named_parameters()
    with torch.no_grad():
        weight.fill_(1.0)
    start = ema.state_dict()["averages"]["weight"].clone()
    ema.update(0)
    end = ema.state_dict()["averages"]["weight"]
    return end.dtype, end.clone(), torch.lerp(start, torch.ones(2, 2), 0.001)


def test_narrow_weights_are_averaged_in_float32(tmp_path):
    [(dtype, average, expected)] = run_ranks(narrow, 1, tmp_path)
    assert dtype == torch.float32 and torch.equal(average, expected)


def every_second(folder):
    run = compose(folder, "", nn.Linear(2, 2))
    for _, parameter in run.named_parameters():
        nn.init.zeros_(parameter)
    ema = EMA(run, decay=0.5, every=2)
    found = []
    for step in range(4):
        with torch.no_grad():
            for _, parameter in run.named_parameters():
                parameter.fill_(step)
        ema.update(step)
        found.append(float(ema.state_dict()["averages"]["bias"][0]))
    return found


def test_steps_between_updates_are_left_out(tmp_path):
    [found] = run_ranks(every_second, 1, tmp_path)
    assert found == [0.0, 0.5, 0.5, 1.75]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.layer(x)


def averaged_buffers(folder, table):
    run = compose(folder, table, seeded(Counting))
    module = run.model
    for buffer in (module.statistic, module.cache):
        buffer.fill_(run.context.rank)
    module.steps.fill_(run.context.rank)
    run.sync_buffers()
    return module.statistic.tolist(), module.constant.tolist(), int(module.steps), float(module.cache)


@pytest.mark.parametrize("table", ["[sharding.fsdp2]", "mesh.dp_replicate = 3\n[sharding.ddp]"])
def test_statistics_become_the_mean_and_constants_stay_to_the_last_bit(tmp_path, table):
    tenth = float(torch.tensor(0.1))
    for rank, found in enumerate(run_ranks(averaged_buffers, 3, tmp_path, table)):
        assert found == ([1.0] * 3, [tenth] * 3, rank, float(rank))
