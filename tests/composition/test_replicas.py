"""Groups of ranks that leave and come back: the run is that of one device on every step's samples, whoever is there."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, mine, padded, seeded, sum_loss

from composer3d.processes.child import Child
from composer3d.processes.forking import limit_ranks
from composer3d.runner.launching.launcher import launch_local
from composer3d.testing import gather_full

PRESENT = [[0, 1], [0], [0, 1], [1], [0, 1]]
SGD = {"lr": 0.5, "momentum": 0.9}


def batch(step):
    return padded(num_sequences=8, seed=step)


def trained(folder, group, text):
    """Return this rank's norms by step, and the parameters at the end."""
    torch.set_default_dtype(torch.float64)
    table = f'[communication.replicas]\nuse = "third_party.replica_plugins:Replicas"\nstore = "{folder}/store"\n'
    run = composed(f"{text}{table}group = {group}\npresent = {PRESENT}\n")
    optimizer = run.optimizer(torch.optim.SGD, **SGD)
    norms = {}
    for step, present in enumerate(PRESENT):
        if group not in present:
            continue
        tokens, targets = (mine(run, tensor) for tensor in batch(step))
        with run.step(step):
            run.forward_backward(tokens, target=targets)
            norms[step] = float(run.clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: tensor.tolist() for name, tensor in gather_full(run.named_parameters()).items()}
    run.close()
    return norms, weights


def world(folder, group, text):
    output = folder / f"group-{group}"
    result = launch_local(trained, (folder, group, text), num_ranks=2, device="cpu", output=output)
    assert result.ok, result.report.render()
    return {"ranks": list(result.values.values())}


def alone():
    torch.set_default_dtype(torch.float64)
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    norms = []
    for step in range(len(PRESENT)):
        tokens, targets = batch(step)
        loss, count = sum_loss(model(tokens), targets)
        (loss / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": {name: tensor.tolist() for name, tensor in model.named_parameters()}}


DDP = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"


@pytest.mark.parametrize("text", ["[sharding.fsdp2]\n", pytest.param(DDP, marks=pytest.mark.slow)])
def test_the_run_is_that_of_one_device_whoever_is_there(text, tmp_path):
    expected = Child(alone).result()
    with limit_ranks(4):
        groups = [Child(lambda group=group: world(tmp_path, group, text)) for group in range(2)]
        found = [group.result()["ranks"] for group in groups]
    for group, ranks in enumerate(found):
        for norms, weights in ranks:
            assert norms.keys() == {str(step) for step, present in enumerate(PRESENT) if group in present}
            assert all(abs(norm - expected["norms"][int(step)]) < 1e-12 for step, norm in norms.items())
            own, others = (
                torch.cat([torch.tensor(held[name], dtype=torch.float64).flatten() for name in sorted(held)])
                for held in (weights, expected["weights"])
            )
            assert float((own - others).abs().max()) < 1e-12
