"""Plans of mixtures of experts: routing is assumed, and the plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.chosen_mixtures import CHOSEN
from support.mixtures import DIM
from torch import nn

import composer3d
from composer3d import StepError
from composer3d.planning.costs.collective_time import Group, collective_s, transfer_s
from composer3d.planning.hardware import load_hardware

MANIFEST = """\
composer3d = 1
[mesh]
dp_shard = 2
ep = 2
[model]
use = "{model}"
[data]
use = "synthetic"
seq_len = 6
vocab_size = 11
[train]
steps = 1
global_batch = 8
microbatch = 2
[sharding.fsdp2]
[sharding.expert_parallel]
"""


def planned(tmp_path, model, module="support.mixtures", **options):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST.format(model=f"{module}:{model}"))
    found = composer3d.plan(path, **options).plan
    (rank,) = found.ranks
    exchanged = [
        transfer
        for segment in rank.trace.segments
        for transfer in segment.transfers
        if (transfer.op, transfer.axis) == ("all_to_all", "ep")
    ]
    return found, rank, exchanged


@pytest.mark.parametrize("model", ["planned_loop", "shipped"])
def test_routing_is_assumed_to_be_balanced(tmp_path, model):
    found, _, exchanged = planned(tmp_path, model)
    assert any(note.startswith("routing is assumed to be balanced: ") for note in found.notes)
    microbatches, layers, width = 2, 2, 4
    assert sum(transfer.count for transfer in exchanged) == 5 * layers * microbatches
    rows = 4 * 2 * 6 * 2 * DIM * width  # forth and back, and their gradients: two experts of each of 2 x 6 tokens
    assert sum(transfer.count * transfer.bytes for transfer in exchanged) == layers * microbatches * (rows + 4 * 8)


@pytest.mark.parametrize(("model", "num_exchanges"), [("planned_lists", 2), ("planned_rows", 1)])
def test_blocks_are_planned_with_the_exchanges_of_a_run(tmp_path, model, num_exchanges):
    _, _, exchanged = planned(tmp_path, model, module="support.multiplied_mixtures")
    microbatches, layers = 2, 2
    assert sum(transfer.count for transfer in exchanged) == 5 * num_exchanges * layers * microbatches


def flops(rank):
    return sum(segment.count * each.count * each.flops for segment in rank.trace.segments for each in segment.operators)


@pytest.mark.parametrize(
    ("ep", "forms"),
    [(2, ("Skipping", "Counted")), (1, ("Skipping",)), (2, sorted(CHOSEN)), (1, sorted(CHOSEN))],
    ids=["exchanged", "whole", "exchanged-all", "whole-all"],
)
def test_code_that_does_what_values_say_is_planned_with_all_its_experts(tmp_path, ep, forms):
    _, loop, of_loop = planned(tmp_path, "planned_loop", overrides=[f"mesh.ep={ep}"])
    for form in forms:
        found, rank, exchanged = planned(
            tmp_path,
            "chosen_mixture",
            module="support.chosen_mixtures",
            overrides=[f"mesh.ep={ep}", f'model.args.form="{form}"'],
        )
        assert flops(rank) == flops(loop) > 0, form
        assert [(each.count, each.bytes) for each in exchanged] == [(each.count, each.bytes) for each in of_loop], form
        assert any(note.startswith("routing is assumed to be balanced: ") for note in found.notes), form


class LooksUp(nn.Module):
    """Reads which tokens there are, of which a plan knows nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens_BS):
        seen = tokens_BS.unique()
        return self.head(self.embedding(tokens_BS)) + seen.numel()


def test_what_no_choice_decides_is_named_with_its_operator_and_line(tmp_path):
    path = tmp_path / "run.toml"
    text = MANIFEST.format(model=f"{__name__}:LooksUp")
    path.write_text(text.replace("ep = 2\n", "").replace("[sharding.expert_parallel]\n", ""))
    expected = r"values decide what aten._unique2.default returns \(test_plan_routing.py:\d+\)"
    with pytest.raises(StepError, match=expected):
        composer3d.plan(path)


def test_exchanges_take_the_time_of_the_hardware_file(tmp_path):
    _, _, exchanged = planned(tmp_path, "shipped")
    (rows,) = {transfer for transfer in exchanged if transfer.bytes > 64 and transfer.ranks == (0, 1)}
    one_node = load_hardware("h100")
    two_nodes = replace(one_node, devices_per_node=1)
    within, between = (transfer_s(rows, hardware) for hardware in (one_node, two_nodes))
    assert within == collective_s("all_to_all", rows.bytes, Group(num_ranks=2, num_nodes=1), one_node)
    assert between == collective_s("all_to_all", rows.bytes, Group(num_ranks=2, num_nodes=2), two_nodes) > within > 0


def test_the_fullest_rank_needs_more_where_routing_is_skewed(tmp_path):
    _, even, _ = planned(tmp_path, "shipped")
    found, full, _ = planned(tmp_path, "shipped", routing_skew=2.0)
    assert full.trace.memory.peak > even.trace.memory.peak
    assert "a rank's experts are assumed to be sent 2 times the mean of all ranks" in found.notes


@pytest.mark.parametrize("skew", [0.5, 3.0])
def test_a_skew_that_cannot_be_is_refused(tmp_path, skew):
    with pytest.raises(composer3d.ComposerError) as caught:
        planned(tmp_path, "shipped", routing_skew=skew)
    assert (
        str(caught.value) == f"plan(routing_skew={skew}): it is at least 1 and at most the 2 ranks that share experts"
    )
