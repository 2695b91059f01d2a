"""Collectives of islands: what a plan states, and what ranks issue."""

from __future__ import annotations

import pytest
import torch
from support.islands import ALONE, PLAIN, table
from support.models import composed, seeded, sum_loss, unpadded

import composer3d
from composer3d import Batch, Decisions, block_codec
from composer3d.testing import assert_parity, count_collectives, run_ranks


def counted(text):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    found = []
    for step in range(4):
        tokens, targets = (each.chunk(2)[run.context.reader] for each in unpadded(num_sequences=8, seed=step))
        with count_collectives(run.mesh) as collectives, run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        totals = collectives.summary()
        found.append(totals.get(("all_reduce", "island")) or totals.get(("all_gather", "island")))
    notes = run.context.stash(Decisions).notes
    run.close()
    return [*found, notes]


def planned(how, total, every, what="parameters", parts=""):
    return [
        f"over island, outside of the trace, which is of a step between exchanges: in every {every} steps a rank {how} "
        f"{total:,} bytes of {what}{parts}; that is {total / every:,.0f} bytes a step"
    ]


def test_collectives_are_those_that_a_plan_states():
    num_bytes = 4 * sum(p.numel() for p in seeded().parameters())
    for *found, notes in run_ranks(counted, 2, PLAIN + table("diloco", every=2)):
        assert found == [None, (1, num_bytes), None, (1, num_bytes)]
        assert notes == planned("all-reduces", num_bytes, 2)
    for *found, notes in run_ranks(counted, 2, PLAIN + table("streaming_diloco", every=2, fragments=2)):
        assert [each[0] for each in found if each] == [1] * 3
        first, second = found[1][1], found[2][1]
        assert first + second == num_bytes
        parts = f", in 2 of these steps one fragment each: {first:,}, {second:,}"
        assert notes == planned("all-reduces", num_bytes, 2, parts=parts)
    codec, length = block_codec("int4"), num_bytes // 4
    coded = table("diloco", every=2, quantise='"int4"', weigh='"tokens"')
    for *found, notes in run_ranks(counted, 2, PLAIN + coded):
        total = 2 * (codec.num_bytes(length) + 8)
        assert found == [None, (1, total)] * 2
        assert notes == planned("all-gathers", total, 2, what="outer gradients in int4")
    ((*_, notes),) = run_ranks(counted, 1, ALONE + table("diloco", every=2))
    assert notes == ["island = 1: there is one island, and nobody to exchange with; [mesh] island = 2 makes two"]
    for first, *_ in run_ranks(counted, 2, PLAIN + table("diloco", every=2, warmup_steps=1)):
        assert first == (1, num_bytes + 4)


SMALL = """
composer3d = 1
[mesh]
island = 2
[model]
use = "composer3d.models:llama"
args = { dim = 16, num_heads = 2, num_layers = 2 }
[data]
use = "synthetic"
seq_len = 16
[train]
steps = 8
"""


def test_check_names_the_step_points_at_which_islands_meet(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALL + table("diloco", every=2, warmup_steps=2))
    rows = {row["name"]: row["point"] for row in composer3d.check(path, world_size=2).to_json()["step"]}
    assert rows["local_sgd"] == "PARAMETERS_SYNCHRONISED" and rows["local_sgd.warmup"] == "UNSCALED"


@pytest.mark.slow
def test_verify_proves_an_island_and_says_what_it_leaves_out(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALL + table("diloco", every=2))
    found = composer3d.verify(path, world_size=2)
    assert found.ok
    note = "along island ranks train models of their own: each was compared with one device on the same samples"
    assert any(each.startswith(note) for each in found.to_json()["notes"])
    counted = {(row["op"], row["axis"]): row for row in found.to_json()["collectives"]}
    assert counted["all_reduce", "island"]["count"] == counted["all_reduce", "island"]["expected"] == 1


def test_verify_proves_islands_that_send_outer_gradients_in_a_codec(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"composer3d = 1\n{PLAIN}[train]\nmicrobatch = 2\n" + table("diloco", quantise='"int8"'))
    tokens, targets = unpadded(num_sequences=4, seed=0)
    found = assert_parity(seeded, path, Batch(args=(tokens,), target=targets), loss_fn=sum_loss, own_dtype=False)
    assert [op for op, axis in found.collectives if axis == "island"] == ["all_gather"]
    assert any("as int8 in blocks of 256, of outer gradients" in note for note in found.verdict.notes)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 9])
def test_a_plan_counts_blocks_that_it_does_not_trace(num_layers, tmp_path):
    path, more = tmp_path / "run.toml", table("streaming_diloco", every=4, fragments=4)
    mesh = "[mesh]\nisland = 2\ndp_shard = 2\n[train]\nglobal_batch = 32\n"
    head = f'composer3d = 1\nextends = "quickstart"\n{mesh}[model.args]\n'
    path.write_text(f"{head}num_layers = {num_layers}\n{more}")
    found = composer3d.plan(path, world_size=4).to_json()
    (note,) = [note for note in found["notes"] if note.startswith("over island")]
    assert f"all-reduces {found['ranks'][0]['memory']['gradients']:,} bytes of parameters" in note
