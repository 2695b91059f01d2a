from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from support.composition_faults import Even, Mlp
from support.models import sum_loss, write_manifest
from support.verification_cases import batch
from torch import nn

import composer3d
from composer3d import torch_compat
from composer3d.testing import assert_parity, run_ranks

MIXED = "[precision.mixed]\n"
FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
OFFLOAD = '[sharding.cpu_offload]\nmode = "gradients"\n'
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
TP = 'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise" }\n'


class Gate(Mlp):
    """A block with a parameter that has no dims."""

    def __init__(self, dim):
        super().__init__(dim)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))


class Temperate(Even):
    """Another one in the root, one more that nothing uses, and one without elements."""

    def __init__(self):
        super().__init__(block=Gate)
        self.temperature, self.unused = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens):
        return super().forward(tokens) / self.temperature + self.empty.sum()


def refusal():
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError) as caught:
        fully_shard(Gate(4))
    return str(caught.value)


def test_torch_still_shards_no_parameter_without_dims():
    """Once it does, `whole_parameters` has no reason any more."""
    [message] = run_ranks(refusal, 1)
    assert "scalar" in message


def test_whole_parameters_are_those_without_dims_or_elements():
    model = Temperate()
    expected = {model.temperature, model.unused, model.empty, *(b.gate for b in model.layers)}
    assert torch_compat.whole_parameters(model) == expected


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(FSDP + OFFLOAD, id="fsdp2, offloaded", marks=pytest.mark.slow),
        pytest.param(HYBRID + MIXED, id="hybrid, mixed", marks=pytest.mark.slow),
        pytest.param("[mesh]\ndp_replicate = 2\n[sharding.ddp]\n" + MIXED, id="ddp, mixed"),
        pytest.param(MIXED, id="mixed", marks=pytest.mark.slow),
        pytest.param(
            FSDP.replace("dp_shard", "tp = 2\ndp_shard") + "[sharding.tensor_parallel]\n" + TP,
            id="tp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_without_dims_are_trained_as_on_one_device(text):
    parity = assert_parity(Temperate, write_manifest(text), batch(), loss_fn=sum_loss, microbatch=3, steps=1)
    assert {"temperature", "layers.0.gate", "layers.1.gate", "unused"} <= parity.gradients.keys()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.on_one_rank, self.nowhere = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor(3.0))


def averaged(folder):
    path = Path(folder) / "run.toml"
    run = composer3d.compose(Parts(), path, loss_fn=sum_loss, device="cpu")
    parts, rank = run.model, run.context.rank
    parts.used.grad = torch.full_like(parts.used, 1.0 + rank)
    if rank == 1:
        parts.on_one_rank.grad = torch.tensor([4.0, 6.0])
    composer3d.average_whole(
        [parts.used, parts.on_one_rank, parts.nowhere, parts.used], axes=("dp_replicate",), context=run.context
    )
    return parts.used.grad, parts.on_one_rank.grad, parts.nowhere.grad


def test_gradients_that_some_ranks_lack_are_averaged_with_zeros():
    with tempfile.TemporaryDirectory() as folder:
        owner = '[sharding.ddp]\nreducer = "bucketed"\nfind_unused_parameters = true\n'
        (Path(folder) / "run.toml").write_text("composer3d = 1\nmesh.dp_replicate = 2\n" + owner)
        for used, on_one_rank, nowhere in run_ranks(functools.partial(averaged, folder), 2):
            assert used.dtype == torch.bfloat16 and float(used) == 1.5
            assert on_one_rank.tolist() == [2.0, 3.0] and nowhere is None
