"""Exchanges of tokens: a right one is proven, with the bytes that routing decides; a wrong one is placed."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from support.mixtures import DIM, NUM_EXPERTS, Looped, MixtureNet, shipped, token_sum, tokens_and_targets
from support.models import write_manifest
from support.untrained_routers import UNTRAINED, InList, InStack, Routed, trained
from support.verification_cases import planted
from torch import nn

import composer3d
from composer3d import Batch
from composer3d.processes.forking import limit_ranks
from composer3d.testing import assert_parity

EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
RECOMPUTED = "[scheduling.activation_checkpoint]\n"
fault = planted("expert_faults")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("router", r"router\.weight"),
        ("twice", r"the gradients of .*experts\.w._N.* are 0\.5 times the right ones"),
        ("position", r"layers\.0\.feed_forward"),
        ("weights", r"layers\.0\.feed_forward"),
        ("side", r"layers\.0\.feed_forward"),
        ("dropped", r"layers\.0\.feed_forward"),
        ("recomputed", r"layers\.1"),
    ],
    ids=["router", "twice", "position", "weights", "side", "dropped", "recomputed"],
)
def test_an_exchange_that_is_wrong_is_found_and_named(name, said):
    tokens, targets = tokens_and_targets()
    with pytest.raises(AssertionError) as caught:
        assert_parity(
            shipped,
            write_manifest(EP + (RECOMPUTED if name == "recomputed" else "") + fault("profiling", "misrouted", name)),
            Batch(args=(tokens,), target=targets),
            loss_fn=token_sum,
            steps=1,
            own_dtype=False,
        )
    assert re.search(f"likely: .*{said}", str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("layer", "text", "routes"),
    [
        (InList, EP, UNTRAINED[::4]),
        pytest.param(InStack, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n", UNTRAINED, marks=pytest.mark.slow),
    ],
    ids=["list, ep", "stack, all"],
)
def test_a_router_that_nothing_trains_is_named(layer, text, routes):
    tokens, targets = tokens_and_targets(num_sequences=2)
    found = assert_parity(
        functools.partial(Routed, layer, (*routes, trained)),
        write_manifest(text),
        Batch(args=(tokens,), target=targets),
        loss_fn=token_sum,
        steps=2,
        own_dtype=False,
    ).verdict
    routers = [f"layers.{number}.gate.{name}" for number in range(len(routes)) for name in ("weight", "bias")]
    assert [fqn for fqn in found.evidence.reference.untrained if "gate" in fqn] == routers
    (note,) = [note for note in found.notes if note.startswith("no gradient reaches")]
    assert note.startswith("no gradient reaches layers.0.gate.weight, layers.0.gate.bias, layers.1.gate.weight, ")
    assert f" and {len(routers) - 4} more, on one device either" in note


class TiedRouter(nn.Module):
    """Two scores of a token are the same sum, in two orders."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x_BSD):
        x_BSD = x_BSD + self.down(torch.tanh(self.up(x_BSD)))
        best_BS = torch.stack([x_BSD.cumsum(-1)[..., -1], x_BSD.flip(-1).cumsum(-1)[..., -1]], -1).argmax(-1)
        chosen_BSE = nn.functional.one_hot(best_BS, 2).to(x_BSD.dtype)
        return x_BSD + sum(chosen_BSE[..., index, None] * expert(x_BSD) for index, expert in enumerate(self.experts))


def test_choices_among_equals_are_named():
    tokens, targets = tokens_and_targets()
    with pytest.raises(AssertionError) as caught:
        assert_parity(
            lambda: MixtureNet(TiedRouter),
            write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
            Batch(args=(tokens,), target=targets),
            loss_fn=token_sum,
            steps=1,
            own_dtype=False,
        )
    assert re.search(r"likely: .*layers\.0 chooses among equals on one device, in \d+ rows", str(caught.value))


MANIFEST = """\
composer3d = 1
[mesh]
dp_shard = 2
ep = 2
[model]
use = "support.mixtures:shipped"
args = { balance_loss = 0.1, z_loss = 0.01, bias_rate = 0.01 }
[data]
use = "synthetic"
seq_len = 6
vocab_size = 11
[train]
steps = 2
global_batch = 4
microbatch = 1
[sharding.fsdp2]
[sharding.expert_parallel]
"""


def test_the_shipped_mixture_is_proven_with_its_auxiliary_loss(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    with limit_ranks(2):
        found = composer3d.verify(path, steps=1)
    assert found.ok, found.to_json()
    (exchanged,) = [row for row in found.to_json()["collectives"] if (row["op"], row["axis"]) == ("all_to_all", "ep")]
    layers, microbatches, ranks = 2, 2, 2
    assert exchanged["count"] == exchanged["expected"] == 5 * layers * microbatches
    rows = 4 * 6 * 2 * 8 * 8  # two experts of each of 6 tokens, 8 wide, in float64: forth and back, and their gradients
    assert exchanged["bytes"] == exchanged["expected_bytes"] == layers * microbatches * ranks * (rows + 4 * 8)


class Choosing(Looped):
    """Experts choose their tokens, among all of a batch."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_NK, chosen_NK = self.gate(x_TD).softmax(-1).T.topk(x_TD.shape[0] * 2 // NUM_EXPERTS, -1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            rows_K = chosen_NK[number]
            out_TD = out_TD.index_add(0, rows_K, expert(x_TD[rows_K]) * weights_NK[number, :, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Full(Looped):
    """Experts take the tokens that arrive first, and drop those beyond a capacity."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_T, chosen_T = self.gate(x_TD).softmax(-1).max(-1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            (rows_R,) = torch.where(chosen_T == number)
            rows_R = rows_R[: x_TD.shape[0] // NUM_EXPERTS]
            out_TD = out_TD.index_add(0, rows_R, expert(x_TD[rows_R]) * weights_T[rows_R, None])
        return x_BSD + out_TD.view_as(x_BSD)


def depending(layer):
    tokens, targets = tokens_and_targets()
    return assert_parity(
        functools.partial(MixtureNet, layer),
        write_manifest(EP),
        Batch(args=(tokens,), target=targets),
        loss_fn=token_sum,
        microbatch=2,
        steps=1,
        own_dtype=False,
    ).verdict


def test_experts_that_choose_among_the_batch_of_a_rank_are_proven_on_it_and_named():
    (note,) = [note for note in depending(Choosing).notes if "relates the samples" in note]
    assert note.startswith("layers.0")
    assert note.endswith(
        'what the experts "layers.0.experts" are given depends on the batch of a rank, as where experts choose their '
        "tokens or have a capacity, and not tokens their experts one by one"
    )


def test_a_capacity_that_drops_tokens_by_order_of_arrival_is_refused_with_that_reason():
    with pytest.raises(AssertionError) as caught:
        depending(Full)
    assert (
        'likely: how many rows the experts "layers.0.experts" are given depends on the batch of a rank, as where a '
        "capacity drops tokens by order of arrival: every layout trains another model"
    ) in " ".join(str(caught.value).split())
