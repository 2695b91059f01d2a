"""Refusals of `process_groups`: options that contradict each other, or that a device or a world has no use for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.models import composed, write_manifest

from composer3d import ManifestError, PluginError, check
from composer3d.testing import run_ranks

FSDP, GROUPS = "[sharding.fsdp2]\n", "[communication.process_groups]\n"


def of_axis(axis, text):
    return f"[communication.process_groups.axes.{axis}]\n{text}\n"


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_axis("dp_shard", "min_ctas = 4"), ":5:1: [communication.process_groups.axes.dp_shard] min_ctas is an op"),
        (of_axis("dp_shard", "sharp = true"), "sharp is an option of NCCL, and dp_shard is on gloo; remove it, or run"),
        (of_axis("dp_shard", "registered_buffers = true"), "registered_buffers is an option of NCCL"),
        (of_axis("dq", "timeout_s = 4"), '"dq" is no axis; the axes are pp, dp_replicate, dp_shard, cp, tp, ep'),
        (of_axis("tp", "timeout_s = 4"), "tp = 1: nobody communicates over it, and its options would do nothing"),
        (of_axis("dp_shard", "timeout_s = -4"), "timeout_s must be greater than 0"),
        (of_axis("dp_shard", "timeout = 4"), 'unknown key "timeout"; did you mean "timeout_s"?'),
        (of_axis("dp_shard", 'backend = "glooo"'), 'backend = "glooo" has none for this device; write one of gloo'),
        (of_axis("dp_shard", 'backend = "cuda:nccl"'), 'backend = "cuda:nccl" has none for this device'),
        (of_axis("dp_shard", ""), "axes.dp_shard gives no option"),
        ('reduce_scatter = "native"\n', 'reduce_scatter = "native" is what runs without this table'),
        ('network = "efa"\n', 'network = "efa" is reached through NCCL, and every axis of this run is on gloo'),
        ('network = "myrinet"\n', "is not one of"),
        (
            'reduce_scatter = "native"\n[communication.compression]\ngradients = "int8"\n'
            + of_axis("dp_shard", "timeout_s = 4"),
            "both replace the reduce-scatter of gradients, and a run has one",
        ),
    ],
)
def test_refusals(text, said):
    assert said in run_ranks(refusal, 2, FSDP + GROUPS + text)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing is reduce-scattered in this run: nobody shards parameters"),
        ('reduce_scatter = "all_to_all"\n' + of_axis("dp_replicate", "timeout_s = 4"), "nothing is reduce-scattered"),
    ],
)
def test_replicas_alone_reduce_scatter_nothing(text, said):
    assert said in run_ranks(refusal, 2, "[sharding.ddp]\n" + GROUPS + text)[0]


@pytest.mark.parametrize(
    ("options", "axis", "said"),
    [
        ({"min_ctas": 8, "max_ctas": 4}, "tp", "min_ctas = 8 is above max_ctas = 4"),
        ({"registered_buffers": True}, "tp", "which communicate over dp_shard, not over tp; write it in axes.dp_shard"),
    ],
)
def test_options_of_nccl_that_contradict_are_refused(options, axis, said):
    from composer3d_plugins.communication.process_groups.axis_options import AxisOptions

    with pytest.raises(PluginError, match=re.escape(said)) as caught:
        AxisOptions(**options).refuse_contradictions(axis, backend="nccl", shards="dp_shard")
    assert caught.value.keys == ("axes", axis, next(iter(options)))


def test_one_rank_has_nobody_to_talk_to():
    assert "one rank communicates with nobody" in run_ranks(refusal, 1, FSDP + GROUPS)[0]


MANIFEST = """train.steps = 1
model.use = "support.models:Net"
data = { use = "synthetic", vocab_size = 11 }
[mesh]
dp_shard = 2
"""


def test_check_refuses_options_of_nccl_at_their_line():
    path = write_manifest(MANIFEST + FSDP + GROUPS + of_axis("dp_shard", "max_ctas = 4"))
    (found,) = [problem for problem in check(str(path)).problems if problem.key == "max_ctas"]
    assert found.line == 10 and found.hint == "remove it, or run on GPUs"
    assert Path(found.file).name == "run.toml"
