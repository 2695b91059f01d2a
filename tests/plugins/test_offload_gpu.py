"""Offloading on a device: the bits of the run without it, and memory that stays bounded though the host runs ahead."""

from __future__ import annotations

import pytest
import torch
from support.models import composed
from torch import nn

from composer3d.testing import run_ranks

pytestmark = pytest.mark.gpu

DIM, NUM_LAYERS, MIB = 1024, 12, 2**20
MATRIX_BYTES = 4 * DIM * DIM
FSDP = "[sharding.fsdp2]\n"
OPTIMIZER = "[sharding.cpu_offload]\npiece_mib = 4.1\n"
ACTIVATIONS = "[scheduling.activation_offload]\nmin_mib = 0.1\n"
TABLES = [
    OPTIMIZER,
    *(f'[sharding.cpu_offload]\nmode = "{mode}"\npiece_mib = 4.1\n' for mode in ("gradients", "parameters")),
    "[sharding.nvme_offload]\nchunk_mib = 4.0\nfolder = {!r}\n",
    ACTIVATIONS,
    ACTIVATIONS + "prefetch = 0\n",
    ACTIVATIONS + "[scheduling.activation_checkpoint]\n",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.product(x))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * 1.0


BACKEND = "cpu:gloo,cuda:nccl"  # as `compose` makes it


def trained(text, num_tokens=2048, num_steps=3):
    """Train; return weights on the host, and the peaks of device memory of backwards and of optimizer steps, bytes."""
    torch.manual_seed(0)
    run = composed(text, Deep(), loss_fn=lambda y, target: ((y - target).square().sum(), target.numel()), device="cuda")
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    x, target = (torch.randn(num_tokens, DIM, device="cuda") for _ in range(2))
    peaks = []
    for number in range(num_steps):
        with run.step(number):
            torch.cuda.reset_peak_memory_stats()
            run.forward_backward(x, target=target)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            optimizer.zero_grad()
    weights = {name: p.full_tensor().cpu() for name, p in run.named_parameters()}
    run.close()
    return weights, peaks[-2:]


@pytest.mark.parametrize("table", TABLES)
def test_every_bit_is_that_of_the_run_without_it(tmp_path, table):
    found, plain = (
        run_ranks(trained, 1, FSDP + text.format(str(tmp_path)), backend=BACKEND)[0][0] for text in (table, "")
    )
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_state_on_the_device_is_that_of_three_pieces():
    (_, (_, found)), (_, (_, plain)) = (
        run_ranks(trained, 1, FSDP + text, backend=BACKEND)[0] for text in (OPTIMIZER, "")
    )
    # AdamW has two moments of every matrix; what it computes with is there in both.
    assert plain - found >= 2 * MATRIX_BYTES * (NUM_LAYERS - 3) - MIB


def test_activations_on_the_device_are_those_of_a_few_units():
    (_, (found, _)), (_, (plain, _)) = (
        run_ranks(trained, 1, FSDP + text, 8192, backend=BACKEND)[0] for text in (ACTIVATIONS, "")
    )
    # A unit saves its input and what tanh gave; of four units they may be there: one at work, one on its way each way,
    # and what is being freed.
    unit_bytes = 2 * 4 * 8192 * DIM
    assert plain - found >= unit_bytes * (NUM_LAYERS - 4) - MIB
