"""Correct compositions: the proof holds, with several steps, clipping, dropout and the run's own dtypes."""

from __future__ import annotations

import functools

import pytest
import torch
from support.composition_faults import Even
from support.models import Net, padded, sum_loss, write_manifest
from support.verification_cases import batch

import composer3d
from composer3d import Batch
from composer3d.testing import assert_parity

FSDP = "[sharding.fsdp2]\n"
AC = "[scheduling.activation_checkpoint]\n"
# Parts of what other cases hold together.
SLOW = pytest.mark.slow
PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
TP = '[mesh]\ntp = 2\n[sharding.tensor_parallel]\nplan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise" }\n'


def with_dropout():
    return Even(dropout=0.2)


def proven(text, *, factory=with_dropout, batch=batch, **options):
    path = write_manifest(text)
    found = assert_parity(
        factory, path, batch(), loss_fn=sum_loss, steps=2, grad_clip=0.5, own_dtype=True, **options
    ).verdict
    assert (found.failures, found.diagnosis) == ((), ())
    return found


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param(FSDP + "zero = 1\n[mesh]\ndp_shard = 2\n", {"microbatch": 2}, id="zero 1", marks=SLOW),
        pytest.param(FSDP + "zero = 2\n[mesh]\ndp_shard = 2\n" + AC, {"microbatch": 2}, id="zero 2, recomputed"),
        pytest.param("[mesh]\ndp_shard = 2\n[precision.mixed]\n" + FSDP, {"microbatch": 3}, id="zero 3, mixed"),
        pytest.param("[mesh]\ndp_replicate = 2\ndp_shard = 2\n" + FSDP, {"microbatch": 3}, id="hybrid", marks=SLOW),
        pytest.param(
            "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n" + AC, {"microbatch": 6}, id="ddp, recomputed", marks=SLOW
        ),
        pytest.param(TP, {}, id="tp", marks=SLOW),
        pytest.param(TP.replace("tp = 2", "tp = 2\ndp_shard = 2") + FSDP, {"microbatch": 3}, id="tp and fsdp2"),
    ],
)
def test_a_right_composition_is_proven(text, options):
    found = proven(text, **options)
    assert all(row.ok for row in found.evidence.rows) and found.notes == ()
    assert found.evidence.reference.draws.sites.keys() == {"layers.0.dropout:dropout", "layers.1.dropout:dropout"}


@pytest.mark.parametrize(
    "schedule", [pytest.param("GPipe", marks=SLOW), pytest.param("1F1B", marks=SLOW), "ZBVZeroBubble"]
)
def test_a_right_pipeline_is_proven(schedule):
    factory = functools.partial(Even, num_layers=4, dropout=0.2, tied=True)
    found = proven(PP + f'schedule = "{schedule}"\n', factory=factory, microbatch=3)
    rows = {(row.op, row.axis): (row.count, row.expected) for row in found.evidence.rows}
    assert rows["send", "pp"][0] == rows["send", "pp"][1] > 0


def test_uneven_shards_and_padding_are_no_alarm():
    def global_batch():
        tokens, targets = padded(6)
        return Batch(args=(tokens,), target=targets)

    found = proven("[mesh]\ndp_shard = 3\n" + FSDP, factory=Net, batch=global_batch, microbatch=1)
    assert found.ok


def test_what_cannot_be_traced_is_said():
    found = proven('[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n', microbatch=3)
    assert len(found.notes) == 1 and found.notes[0].startswith(
        "collectives were counted, and not compared: the composition cannot be traced (torch's DistributedDataParallel "
    )


def test_buckets_that_are_watched_are_compared():
    """Where spans are recorded, buckets are reduced through Python, which can be traced."""
    buckets = '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'
    found = proven(buckets + "[profiling.throughput]\n", microbatch=3)
    assert list(found.notes) == []


class Opposed(Even):
    """Blocks of one weight, of which half are subtracted: gradients of two stages nearly cancel."""

    def __init__(self):
        super().__init__(num_layers=4)
        linear = torch.nn.Linear(self.tok.embedding_dim, self.tok.embedding_dim)
        torch.nn.init.normal_(linear.weight, std=1e-3)
        self.layers = torch.nn.ModuleList(Signed(linear, sign) for sign in (1, 1, -1, -1))
        self.double()


class Signed(torch.nn.Module):
    def __init__(self, linear, sign):
        super().__init__()
        self.linear, self.sign = linear, sign

    def forward(self, x):
        return x + self.sign * torch.tanh(self.linear(x))


@pytest.mark.slow
def test_stages_that_share_a_weight_of_float64_are_not_taken_for_rounding():
    assert proven(PP, factory=Opposed, microbatch=2).ok


@SLOW
def test_what_a_rank_would_receive_is_the_same_in_a_recomputation_of_the_trace():
    # Keys come around a ring, and experts are chosen by what attention makes of them.
    path = write_manifest(
        "mesh = { dp_replicate = 1, cp = 2, ep = 2 }\n[sharding.ddp]\n"
        + AC
        + '[sharding.context_parallel]\nmethod = "ring"\n[sharding.expert_parallel]\ndispatch = "all_gather"\n'
        '[model]\nuse = "composer3d.models:moe"\n'
        "args = { dim = 32, num_layers = 2, num_heads = 4, num_kv_heads = 4, num_experts = 4, expert_dim = 64 }\n"
        '[data]\nuse = "synthetic"\nseq_len = 32\nvocab_size = 128\n'
        "[train]\nsteps = 2\nmicrobatch = 1\nglobal_batch = 1\n"
    )
    found = composer3d.verify(path).verdict
    assert (found.failures, found.diagnosis) == ((), ())
    assert {("send", "cp"), ("all_gather", "ep")} <= {(row.op, row.axis) for row in found.evidence.rows if row.ok}
