"""Optimizers that keep their state elsewhere, or in fewer bits, beside experts over ep."""

from __future__ import annotations

import functools

import pytest
import torch
from support.mixtures import Looped, MixtureNet, Stacked, mine, seeded, shipped, token_sum, tokens_and_targets
from support.models import write_manifest
from support.offloading import assert_same, trained

import composer3d
from composer3d import torch_compat
from composer3d.testing import full, run_ranks

# Before ranks are forked: each of them would import it anew.
torch_compat.import_torchao("torchao.optim")

EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
DATA = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
LOW_BIT = "[precision.low_bit_optimizer]\n"


@pytest.mark.parametrize("layer", [Looped, pytest.param(Stacked, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "table",
    [
        '[sharding.cpu_offload]\nmode = "optimizer"\npiece_mib = 0.0001\n',
        pytest.param('[sharding.cpu_offload]\nmode = "gradients"\n', marks=pytest.mark.slow),
        '[sharding.cpu_offload]\nmode = "parameters"\n',
        pytest.param('[sharding.cpu_offload]\nmode = "all"\n', marks=pytest.mark.slow),
        "nvme",
    ],
    ids=["optimizer", "gradients", "parameters", "all", "nvme"],
)
def test_offloaded_experts_have_the_bits_of_the_run_without_it(layer, table, tmp_path):
    if table == "nvme":
        table = f"[sharding.nvme_offload]\nchunk_mib = 0.02\nfolder = {str(tmp_path)!r}\n"
    options = (torch.optim.AdamW, {}, 2, functools.partial(MixtureNet, layer))
    plain = run_ranks(trained, 2, EP, *options)
    for found, wanted in zip(run_ranks(trained, 2, EP + table, *options), plain, strict=True):
        assert_same(found, wanted)


def low_bit(text):
    """Return the weights after four steps, and the classes of the optimizer's state."""
    torch.set_default_dtype(torch.float64)
    factory = functools.partial(shipped, dim=64, expert_dim=32, vocab_size=64)
    run = composer3d.compose(seeded(factory), write_manifest(text), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
    for number in range(4):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    kinds = {type(value).__name__ for state in optimizer.state.values() for value in state.values()}
    found = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    run.close()
    return found, kinds


def distance(one, other):
    return max(float((one[fqn] - other[fqn]).abs().max()) for fqn in one)


def test_moments_of_experts_in_few_bits_are_those_of_data_parallelism():
    # Whose ranks have the same blocks of all weights.
    (plain, _), (wanted, kinds) = (run_ranks(low_bit, 2, DATA + table)[0] for table in ("", LOW_BIT))
    ranks = run_ranks(low_bit, 2, EP + LOW_BIT)
    rounding = distance(wanted, plain)
    assert rounding > 1e-6 and all(of_rank == kinds for _, of_rank in ranks)
    assert all(distance(found, wanted) < 1e-3 * rounding for found, _ in ranks)
