"""What pipelines refuse."""

from __future__ import annotations

import random

import pytest
import torch
from support.models import composed, padded, seeded, write_manifest

import composer3d
from composer3d import ManifestError, PluginError
from composer3d.testing import fake_world, run_ranks


def manifest(schedule="1F1B", pp=2, more=""):
    return f'[mesh]\npp = {pp}\n[scheduling.pipeline]\nschedule = "{schedule}"\n{more}'


def refusal(text, num_layers=4):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(num_layers=num_layers))
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            manifest("1F1B", more="stages_per_rank = 2"),
            '1F1B has one stage a rank, not 2; schedules of several are "Interleaved1F1B" and others',
        ),
        (manifest("DualPipeV", more="stages_per_rank = 3"), "DualPipeV has two stages a rank, not 3"),
        (
            manifest("LoopedBFS", more="stages_per_rank = 1"),
            'LoopedBFS has several stages a rank, not 1; write schedule = "1F1B"',
        ),
        (
            manifest("LoopedBFS", more="stages_per_rank = 3"),
            "pp = 2 with 3 stages a rank makes 6 stages, and the model calls blocks 4 times (layers.0 to layers.3); "
            "every stage needs one",
        ),
        (
            manifest("1F1B", more='split = ["layers.1", "layers.2"]'),
            "split names 2 blocks, and 2 stages have 1 beginnings besides the first",
        ),
        (
            manifest("1F1B", more='split = ["layers.7"]'),
            'split names "layers.7", which is no block; blocks are layers.0 to layers.3',
        ),
        (
            manifest("1F1B", more='split = ["layers.0"]'),
            'split names "layers.0" out of order, or leaves a stage without a block',
        ),
        (
            manifest("1F1B", more="[train]\nglobal_batch = 2\nmicrobatch = 2"),
            "[train] global_batch = 2 over 1 data-parallel ranks makes 1 micro-batches of 2, and 1F1B needs at least "
            "as many micro-batches as stages, 2",
        ),
        (
            manifest("DualPipeV", more="[train]\nglobal_batch = 6\nmicrobatch = 2"),
            "[train] global_batch = 6 over 1 data-parallel ranks makes 3 micro-batches of 2, and DualPipeV needs at "
            "least as many micro-batches as stages, 4 (two a rank)",
        ),
        (
            manifest("InterleavedZeroBubble", more="[train]\nglobal_batch = 5\nmicrobatch = 1"),
            "[train] global_batch = 5 over 1 data-parallel ranks makes 5 micro-batches of 1, and InterleavedZeroBubble "
            "runs them in 2 rounds of at least pp = 2, and needs a multiple of 2",
        ),
        (
            manifest("ZBVZeroBubble", more="[scheduling.compile]"),
            '"zero_bubble_pipeline" cannot be combined with "compile": ZBVZeroBubble runs the gradients of inputs and '
            "of weights apart, which torch cannot do with compiled blocks",
        ),
    ],
)
def test_refusals(text, message):
    for found in run_ranks(refusal, 2, text):
        assert found.partition("[scheduling.pipeline] ")[2] == message


@pytest.mark.parametrize(
    ("setting", "named"),
    [("reshard_after_forward = true", "reshard_after_forward = true"), ("reshard_root = true",) * 2],
)
def test_zero_bubble_refuses_resharding(setting, named):
    text = manifest("ZBVZeroBubble") + f"[sharding.fsdp2]\n{setting}\n"
    for found in run_ranks(refusal, 4, text):
        assert found == (
            f':6:11: [sharding.fsdp2] "fsdp2" cannot be combined with "zero_bubble_pipeline": {named} frees parameters '
            "between a micro-batch's forward and the end of its backward, and the schedule looks at them in between: "
            "torch would give wrong gradients, silently"
        )


def test_bucketed_ddp_is_refused():
    for found in run_ranks(refusal, 2, manifest("1F1B") + '[sharding.ddp]\nreducer = "bucketed"\n'):
        assert found == (
            ':6:11: [sharding.ddp] reducer = "bucketed" does not work with pp = 2: torch\'s DistributedDataParallel '
            'reduces in every backward of a stage, and does not know DTensors; write reducer = "unit"'
        )


def too_small(more):
    run = composed(manifest("1F1B") + more + "[train]\nmicrobatch = 12\n", seeded(num_layers=4))
    tokens, targets = padded()
    with pytest.raises(PluginError) as caught, run.step(0):
        run.forward_backward(tokens, target=targets)
    run.close()
    return str(caught.value)


@pytest.mark.parametrize("more", ["", "[sharding.fsdp2]\n"])
def test_refusals_at_the_first_batch(more):
    for message in run_ranks(too_small, 2, more):
        assert message == (
            "this batch has 1 micro-batches, and 1F1B needs at least as many micro-batches as stages, 2; "
            "hand over more sequences a call, or set [train] microbatch"
        )


class Dropping(torch.nn.Module):
    """LayerDrop, as transformers' decoders have it, by a draw of torch or of Python."""

    def __init__(self, rate, draw, size=8):
        super().__init__()
        self.embed = torch.nn.Embedding(16, size)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(size, 2, 16) for _ in range(4))
        self.rate, self.draw = rate, draw

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            dropped = torch.rand([]) if self.draw == "torch" else random.random()
            if self.training and dropped < self.rate:
                continue
            x = layer(x)
        return x


def test_blocks_that_are_left_out_at_random_are_refused_before_a_step():
    with fake_world(2):
        for draw in ("torch", "python"):
            with pytest.raises(ManifestError) as caught:
                composer3d.compose(lambda draw=draw: Dropping(0.1, draw), write_manifest(manifest()), device="cpu")
            assert (
                'Dropping leaves out "layers.0" at random, as LayerDrop does, and in a pipeline every block is called '
                "once in each forward"
            ) in str(caught.value)
            composer3d.compose(lambda draw=draw: Dropping(0.0, draw), write_manifest(manifest()), device="cpu").close()
