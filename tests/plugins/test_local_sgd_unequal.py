"""Islands that are given different numbers of samples: the papers' formulas with weights, and data parallelism."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from plugins.test_local_sgd import refusal, simulated
from support.islands import LR, PLAIN, STEPS, distance, equal, table, trained
from support.models import composed, seeded, sum_loss, unpadded

import composer3d
from composer3d import StepError
from composer3d.composition.loop.sampling import local_slice
from composer3d.testing import run_ranks

UNEQUAL = "samples = [2, 1]\n"
SHARDED = "[mesh]\nisland = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
QUICK = 'composer3d = 1\nextends = "quickstart"\n'


def twelve(num_sequences, seed):
    return unpadded(num_sequences=12, seed=seed)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (table("diloco", every=2), {"every": 2, "lr": 0.7, "momentum": 0.9}),
        (
            table("streaming_diloco", every=4, fragments=2, overlap=1, quantise='"int8"'),
            {"every": 4, "lr": 0.7, "momentum": 0.9, "fragments": 2, "overlap": 1, "mix": 0.5, "quantise": "int8"},
        ),
    ],
    ids=["diloco", "streaming"],
)
def test_an_island_of_double_size_is_the_simulation(text, setting):
    """Eight samples and four, to the bit; weights are those of tokens."""
    expected = simulated(**setting, weigh=True, make=twelve, samples=(2, 1))
    found = run_ranks(partial(trained, make=twelve), 2, PLAIN + text + UNEQUAL)[0]
    assert all(equal(one, other) for one, other in zip(expected, found, strict=True))
    equally = simulated(**setting, weigh=False, make=twelve, samples=(2, 1))
    assert distance(equally[-1], found[-1]) > 1e-6


def one_device(steps):
    """Return the parameters of one device that trains on the whole batch, after each step."""
    torch.set_default_dtype(torch.float64)
    model, found = seeded(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        tokens, targets = twelve(None, step)
        loss, count = sum_loss(model(tokens), targets)
        model.zero_grad()
        (loss / count).backward()
        optimizer.step()
        found.append({fqn: p.detach().clone() for fqn, p in model.named_parameters()})
    torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize(
    ("layout", "world_size"), [(PLAIN, 2), (SHARDED, 4)], ids=["one rank each", "two ranks of shards each"]
)
def test_islands_of_unequal_size_that_meet_in_every_step_are_data_parallelism(layout, world_size):
    """Plain SGD: the mean of parameters, weighted, is a step with the gradient of the whole batch."""
    text = layout + table("average", every=1) + UNEQUAL
    found = run_ranks(partial(trained, make=twelve), world_size, text)[0]
    assert max(distance(one, other) for one, other in zip(one_device(STEPS), found, strict=True)) < 1e-13


@pytest.mark.parametrize("samples", [[2, 1], [4, 2], [1, 3]])
def test_a_global_batch_is_divided_without_a_rest(samples):
    manifest = SHARDED + table("average", every=1) + f"samples = {samples}\n"
    parts = run_ranks(divided, 4, manifest, samples)
    assert sorted(index for indices, *_ in parts for index in indices) == list(range(24))
    share = [24 * samples[rank // 2] // sum(samples) // 2 for rank in range(4)]
    assert [len(indices) for indices, *_ in parts] == share
    assert [size for _, size, _ in parts] == share
    ratio = ":".join(str(each // min(samples)) for each in samples)
    assert all(f"ranks along island are given {ratio} of a batch" in said for *_, said in parts)


def divided(text, samples):
    """Return what this rank reads of a batch by a sampler, how much by a loader, and what a loop of its own is told."""
    run = composed(text + "[train]\nglobal_batch = 24\n")
    indices = run.sampler(24).local_indices(0)
    data = torch.utils.data.TensorDataset(torch.arange(24))
    (batch,) = run.loader(torch.utils.data.DataLoader(data, batch_size=24))
    with pytest.raises(StepError) as caught:
        _ = run.context.reader
    run.close()
    return indices, len(batch[0]), str(caught.value)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([1, 1], "samples = [1, 1] gives all islands as many, as without it"),
        ([2, 1, 1], "samples = [2, 1, 1] is for 3 islands, and there are 2"),
        ([0, 1], "samples[0] must be at least 1, not 0"),
    ],
)
def test_refusals(samples, said):
    assert said in run_ranks(refusal, 2, PLAIN + table("average", every=1) + f"samples = {samples}\n")[0]


def test_slices_of_pieces_are_the_batch():
    cuts = [local_slice(range(12), first, 6, num=num) for first, num in ((0, 3), (3, 1), (4, 2))]
    assert [list(cut) for cut in cuts] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]


def manifest(tmp_path, more, steps=1):
    path = tmp_path / "run.toml"
    path.write_text(
        QUICK + f"{more}[train]\nsteps = {steps}\nmicrobatch = 1\nglobal_batch = 6\ngrad_clip = inf\n[optimizer]\n"
        f'use = "sgd"\nlr = 0.1\n[evaluation]\nevery = {steps}\nbatches = 2\n'
    )
    return path


ISLANDS_OF_A_RUN = "[mesh]\nisland = 2\ndp_shard = 1\n" + table("average", every=1) + UNEQUAL


def test_a_run_of_unequal_islands_is_that_of_one_rank(tmp_path):
    """In float32, by the loss of an evaluation of all samples after a step; micro-batches are four and two."""
    found = {}
    for name, more, ranks in (("islands", ISLANDS_OF_A_RUN, 2), ("one", "[mesh]\ndp_shard = 1\n", 1)):
        folder = tmp_path / name
        folder.mkdir()
        result = composer3d.run(manifest(folder, more), overrides=[f"run.output={folder}/out"], nproc_per_node=ranks)
        assert result.ok, result
        rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        found[name] = [row["evaluation_loss"] for row in rows if "evaluation_loss" in row]
    assert found["one"] and found["islands"] == pytest.approx(found["one"], rel=1e-5)


def test_check_says_that_a_batch_does_not_divide(tmp_path):
    path = manifest(tmp_path, ISLANDS_OF_A_RUN)
    path.write_text(path.read_text().replace("global_batch = 6", "global_batch = 8"))
    found = composer3d.check(path)
    assert not found.ok
    assert (
        "a global batch of 8 sequences does not divide into micro-batches of 1 on 3 equal parts, of which ranks have "
        "different numbers (1 x 3 = 3); use 6 or 9" in str(found)
    )


def test_a_plan_is_of_the_largest_island(tmp_path):
    found = composer3d.plan(manifest(tmp_path, ISLANDS_OF_A_RUN))
    assert found.plan.num_microbatches == 4
