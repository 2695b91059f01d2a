"""`doctor --network`: every pair of ranks of every axis, and the links that are slow beside the others."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from support.models import write_manifest

from composer3d.cli import main
from composer3d.diagnostics.network import Link, ping, report_of
from composer3d.diagnostics.network.link_timing import _partners
from composer3d.diagnostics.network.probe import measure
from composer3d.testing import run_ranks

MANIFEST = """train.steps = 1
model.use = "composer3d.models:llama"
model.args = { dim = 16, num_layers = 2, num_heads = 2 }
data = { use = "synthetic", vocab_size = 16, seq_len = 8 }
run.device = "cpu"
[mesh]
dp_shard = DEGREE
[sharding.fsdp2]
[communication.process_groups.axes.dp_shard]
timeout_s = 60
"""
TRIPS = 24  # of the slow link, in the time of one


def link(one, other, *, axis="dp_shard", us=10.0, gb=1.0):
    return Link(axis=axis, ranks=(one, other), latency_s=us * 1e-6, bytes_per_s=gb * 1e9)


def judged(*links):
    return report_of(
        links,
        degrees={"dp_shard": 4, "tp": 4},
        backends={"dp_shard": "gloo", "tp": "nccl"},
        hosts={rank: f"node{rank // 2}" for rank in range(4)},
    )


def test_links_are_judged_by_the_median_of_their_axis():
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    outer = [link(*pair) for pair in pairs[:-2]] + [link(1, 3, us=31.0), link(2, 3, gb=0.24)]
    inner = [link(*pair, axis="tp", us=100.0, gb=0.1) for pair in pairs]  # slower all of them, and none beside others
    report = judged(*outer, *inner)
    assert [(axis.axis, axis.num_links, axis.bytes_per_s) for axis in report.axes] == [
        ("dp_shard", 6, 1e9),
        ("tp", 6, 1e8),
    ]
    assert [axis.latency_s for axis in report.axes] == pytest.approx([1e-5, 1e-4])
    assert [slow.ranks for slow in report.slow] == [(2, 3), (1, 3)]
    assert [round(slow["slower"], 2) for slow in report.to_json()["slow"]] == [4.17, 3.1]
    assert report.lines() == [
        "dp_shard = 4 on gloo: 10.0 us, 1.00 GB/s, the medians of 6 links",
        "tp = 4 on nccl: 100.0 us, 0.10 GB/s, the medians of 6 links",
        "slow: dp_shard, rank 2 to rank 3 on node1: 10.0 us, 0.24 GB/s, 4.2 times slower than the median",
        "slow: dp_shard, rank 1 to rank 3 on node0 and node1: 31.0 us, 1.00 GB/s, 3.1 times slower than the median",
    ]


def test_two_links_have_no_median_that_says_anything():
    report = judged(link(0, 2), link(1, 3, us=1000.0))
    assert report.slow == () and "fewer than 3 links have no median" in report.lines()[1]


@pytest.mark.parametrize("members", [[3, 5], [0, 1, 2], [4, 5, 6, 7, 8, 9], list(range(9))])
def test_every_rank_meets_every_other_once_and_its_partner_meets_it_then(members):
    rounds = {me: list(_partners(members, me)) for me in members}
    assert all(sorted(met) == sorted(set(members) - {me}) for me, met in rounds.items())
    # Who waits for the other in another order would wait for good.
    done = dict.fromkeys(members, 0)
    for _ in range(len(members) ** 2):
        for me in members:
            peer = rounds[me][done[me]] if done[me] < len(rounds[me]) else None
            if peer is not None and done[peer] < len(rounds[peer]) and rounds[peer][done[peer]] == me:
                done[me], done[peer] = done[me] + 1, done[peer] + 1
    assert all(done[me] == len(rounds[me]) for me in members)


def slowed(tensor, peer, group, is_first):
    """Go as often to and fro as makes the link between ranks 1 and 2 slow, on any machine."""
    for _ in range(TRIPS if {dist.get_rank(), peer} == {1, 2} else 1):
        ping(tensor, peer, group, is_first)


@pytest.mark.slow
def test_a_link_that_takes_longer_is_named():
    path = write_manifest(MANIFEST.replace("DEGREE", "4"))
    report, *others = run_ranks(measure, 4, str(path), slowed)
    assert others == [None] * 3
    (axis,) = report.axes
    assert (axis.axis, axis.degree, axis.backend, axis.num_links) == ("dp_shard", 4, "gloo", 6)
    assert report.slow[0].ranks == (1, 2) and report.slow[0].axis == "dp_shard"
    assert "rank 1 to rank 2" in report.lines()[1]


def test_the_command_starts_the_ranks_itself(capfd):
    path = write_manifest(MANIFEST.replace("DEGREE", "2"))
    assert main(["doctor", str(path), "--network", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (axis,) = found["axes"]
    assert (found["composer3d"], axis["axis"], axis["backend"], axis["num_links"]) == (1, "dp_shard", "gloo", 1)
    assert axis["latency_s"] > 0 and axis["bytes_per_s"] > 0 and found["slow"] == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--network", "--replay"], "--replay and --network are two questions"),
        (["--world-size", "2"], "--world-size is for --network alone"),
        (["--network", "--world-size", "3"], "but the world has 3 ranks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(more, said, capfd):
    path = write_manifest(MANIFEST.replace("DEGREE", "2"))
    assert main(["doctor", str(path), *more]) != 0
    assert said in capfd.readouterr().err


def test_one_rank_has_no_links(capfd):
    text = MANIFEST.replace("DEGREE", "1").partition("[communication")[0]
    assert main(["doctor", str(write_manifest(text)), "--network"]) != 0
    assert "a mesh of one rank has no links; --world-size N starts more" in capfd.readouterr().err
