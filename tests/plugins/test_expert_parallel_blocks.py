"""Experts that a block multiplies, nests, or calls with results: gradients equal one device's, exchange by exchange."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import Looped, MixtureNet, mixture_steps, token_sum, tokens_and_targets
from support.models import mine, seeded, write_manifest
from support.multiplied_mixtures import CHAINED, MULTIPLIED, NESTED, ChoosingStacks, Lists
from torch import nn

import composer3d
from composer3d import PluginError
from composer3d.testing import fake_world, run_ranks

EP = "[mesh]\nep = 2\n{}\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
KNOWN = MULTIPLIED | NESTED | CHAINED
NUM_EXCHANGES = dict.fromkeys(MULTIPLIED, 2) | dict.fromkeys(NESTED, 1) | {"Twice": 2, "ByGroup": 2, "Chained": 4}
LAYERS = 2


def assert_equal_to_one_device(names, text, world_size=2):
    results = run_ranks(mixture_steps, world_size, [(KNOWN[name], text) for name in names], timeout_s=900)
    for name, *ranks in zip(names, *results, strict=True):
        for loss, norm, error, _ in ranks:
            assert max(loss, norm, error) <= 1e-12, (name, loss, norm, error)
    return dict(zip(names, [found[3] for found in results[0]], strict=True))


@pytest.mark.parametrize(
    "names",
    [("Lists", "Unsaid", "Beside", "Broadcast", "Gathered", "Groups", "Twice"), sorted(KNOWN)],
    ids=["forms", "all"],
)
def test_blocks_that_use_experts_in_their_own_code_equal_one_device(names):
    for name, counted in assert_equal_to_one_device(names, EP.format("dp_shard = 2")).items():
        count, most = counted["all_to_all", "ep"][0], 5 * NUM_EXCHANGES[name] * LAYERS
        # An expert without tokens in a chain waits for nobody.
        assert count == most if name != "Chained" else 5 * LAYERS < count <= most, name


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp_shard = 4", ""),
        ("dp_shard = 4", "zero = 1\n"),
        ("dp_shard = 2\ndp_replicate = 2", ""),
        ("dp_shard = 2\ntp = 2", "[sharding.tensor_parallel]\n"),
        ("dp_shard = 2\npp = 2", "[scheduling.pipeline]\n[train]\nmicrobatch = 2\n"),
        ("dp_shard = 4", "[scheduling.activation_checkpoint]\n"),
    ],
    ids=["efsdp", "zero1", "hsdp", "tensor_parallel", "pipeline", "recomputed"],
)
def test_layouts(mesh, more):
    text = EP.format(mesh).replace("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + (more if "zero" in more else ""))
    assert_equal_to_one_device(sorted(KNOWN), text + ("" if "zero" in more else more), world_size=4)


def test_ranks_that_share_a_sequence():
    # Blocks that do the same with every position alone are no use of context_parallel, and it says so.
    names = ["Lists", "Beside", "ChoosingStacks", "Groups", "Twice", "ByGroup", "RowByRow"]
    more = "[sharding.context_parallel]\nbalanced = false\n[train]\nmicrobatch = 1\n"
    assert_equal_to_one_device(names, EP.format("cp = 2") + more)


class Normalised(Lists):
    """Reads a norm of a matrix, beside products with it."""

    def forward(self, x_BSD):
        return super().forward(x_BSD) / self.up[0].norm()


class Merged(ChoosingStacks):
    """Adds up the experts' matrices, by weights of each sequence."""

    def forward(self, x_BSD):
        weights_BN = self.gate(x_BSD.mean(1)).softmax(-1)
        up_BDF = torch.einsum("bn,ndf->bdf", weights_BN, self.up_NDF)
        return x_BSD + torch.bmm(x_BSD, up_BDF).sum(-1, keepdim=True)


class Outside(MixtureNet):
    """Calls experts of a layer itself."""

    def forward(self, tokens_BS):
        x_BSD, experts = self.tok(tokens_BS), self.layers[0].experts
        return super().forward(tokens_BS) + (experts[0](x_BSD) + experts[-1](x_BSD)).sum()


class Unequal(Lists):
    """Of an expert's matrices one list lacks the last."""

    def __init__(self):
        super().__init__()
        self.up = nn.ParameterList([*self.up][:3])


def said_of(model):
    run = composer3d.compose(seeded(model), write_manifest(EP.format("dp_shard = 2")), loss_fn=token_sum)
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
    with pytest.raises(PluginError) as caught, run.step(0):
        run.forward_backward(tokens, target=targets)
    return str(caught.value)


def said():
    return (
        said_of(lambda: MixtureNet(Normalised)),
        said_of(lambda: Outside(Looped)),
        said_of(lambda: MixtureNet(Merged)),
    )


def test_uses_of_weights_and_experts_that_another_rank_has_are_refused():
    for of_weights, of_call, of_sums in run_ranks(said, 2):
        assert of_weights == (
            'expert_parallel: the experts of "layers.0.up" use their weights in `norm`, which is no product of rows '
            "with a matrix of each expert; it computes F.grouped_mm, F.linear, torch.matmul, torch.bmm, and "
            "torch.einsum that sums over one dim of rows and matrices; write these, and weigh or add up what experts "
            "return in place of their weights, or leave these out of [sharding.expert_parallel] experts = [...], which "
            "names what is sharded"
        )
        assert 'use their weights in `einsum("bn,ndf->bdf")`, which is no product of rows' in of_sums
        assert of_call == (
            'expert_parallel: an expert of "layers.0.experts" is called from outside of the forward of "layers.0", '
            "around which rows are exchanged, and another rank holds it; call it there, or leave it out of "
            "[sharding.expert_parallel] experts; where its forward has torch.utils.checkpoint recompute experts, let "
            "[scheduling.activation_checkpoint] recompute the block instead"
        )


def test_lists_that_ranks_cannot_share_evenly_are_named():
    with fake_world(2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(
            seeded(lambda: MixtureNet(Unequal)),
            write_manifest(EP.format("dp_shard = 2") + 'experts = ["layers.*.up"]\n'),
            loss_fn=token_sum,
        )
    assert '"layers.0.up" has 3 experts, which do not divide by ep = 2; ep may be 3' in str(caught.value)
