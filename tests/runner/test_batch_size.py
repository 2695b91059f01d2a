from __future__ import annotations

import pytest

from composer3d.errors import ManifestError
from composer3d.manifest import load_manifest, read_text, type_manifest
from composer3d.runner import TABLES
from composer3d.runner.objective.batch_size import BatchSize
from composer3d.runner.runner_tables import BatchRampTable, TrainTable


@pytest.mark.parametrize("ramp", [None, (2, 2, 3), (8, 1, 2), (1, 5, 1), (3, 7, 4)])
def test_the_position_is_the_sum_of_the_steps_before(ramp):
    table = None if ramp is None else BatchRampTable(start=ramp[0], step=ramp[1], every=ramp[2])
    sizes = BatchSize(TrainTable(steps=50, global_batch=12, batch_ramp=table), degree=1)
    assert [sizes.position_of(step) for step in range(60)] == [sum(map(sizes.of, range(step))) for step in range(60)]
    assert sizes.of(59) == 12 and sizes.of(0) == (12 if ramp is None else ramp[0])
    assert sorted({sizes.of(step) for step in range(60)}) == sorted(sizes.sizes())


class MegatronsCalculator:
    """Sizes as Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator has them: by the samples consumed so far."""

    def __init__(self, start, step, samples, total):
        self.start, self.step, self.samples, self.total = start, step, samples, total
        self.per_increment = samples / ((total - start) // step)

    def size_after(self, consumed):
        if consumed > self.samples:
            return self.total
        return min(self.start + int(consumed / self.per_increment) * self.step, self.total)


@pytest.mark.parametrize("ramp", [(4, 4, 1000), (4, 2, 77), (2, 1, 9), (4, 4, 1), (60, 2, 12345), (8, 8, 56)])
def test_a_ramp_by_samples_has_megatrons_size_in_every_step(ramp):
    start, step, samples = ramp
    table = BatchRampTable(start=start, step=step, samples=samples)
    sizes = BatchSize(TrainTable(steps=9, global_batch=64, batch_ramp=table), degree=1)
    theirs, consumed, seen = MegatronsCalculator(start, step, samples, 64), 0, set()
    for number in range(600):
        assert (sizes.of(number), sizes.position_of(number)) == (theirs.size_after(consumed), consumed)
        seen.add(sizes.of(number))
        consumed += sizes.of(number)
    assert sorted(seen) == sorted(sizes.sizes()) and 64 in seen


@pytest.mark.parametrize("keys", ["", ", every = 1, samples = 2"])
def test_a_ramp_grows_by_steps_or_by_samples(keys):
    text = f"composer3d = 1\n[train]\nsteps = 1\nglobal_batch = 8\nbatch_ramp = {{ start = 4, step = 2{keys} }}\n"
    with pytest.raises(ManifestError) as caught:
        type_manifest(read_text(text), tables=TABLES)
    message = "train.batch_ramp: grows every so many steps, or within so many samples; state every or samples"
    assert str(caught.value) == f"<text>:5:1: [train] {message}"


def test_without_a_global_batch_every_rank_has_a_microbatch():
    assert BatchSize(TrainTable(steps=1, microbatch=3), degree=4).of(0) == 12


@pytest.mark.parametrize("degree", [1, 4])
def test_accumulated_microbatches_are_counted_on_every_rank(degree):
    table = TrainTable(steps=1, microbatch=3, accumulate=5)
    assert BatchSize(table, degree=degree).of(0) == 15 * degree and table.num_microbatches(degree) == 5


def test_the_key_of_a_layer_replaces_the_inherited_one_of_other_units(tmp_path):
    (tmp_path / "base.toml").write_text("composer3d = 1\ntrain = { steps = 1, global_batch = 8 }\n")
    (tmp_path / "run.toml").write_text('composer3d = 1\nextends = "base.toml"\ntrain = { accumulate = 3 }\n')
    train = load_manifest(tmp_path / "run.toml", tables=TABLES).train
    assert (train.accumulate, train.global_batch) == (3, None)
    train = load_manifest(tmp_path / "run.toml", tables=TABLES, overrides=["train.global_batch=4"]).train
    assert (train.accumulate, train.global_batch) == (None, 4)


def test_two_batches_of_one_step_are_refused():
    document = read_text("composer3d = 1\n[train]\nsteps = 1\nglobal_batch = 8\naccumulate = 2\n")
    message = "accumulate and global_batch both state the batch of a step; keep one of them"
    with pytest.raises(ManifestError, match=message):
        type_manifest(document, tables=TABLES)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "global_batch = 10\nmicrobatch = 2",
            "<text>:4:1: [train] a global batch of 10 sequences does not divide into micro-batches of 2 on 2 "
            "data-parallel ranks (2 x 2 = 4); use 8 or 12",
        ),
        (
            "global_batch = 16\nmicrobatch = 2\nbatch_ramp = { start = 4, step = 2, every = 1 }",
            "<text>:6:1: [train] a global batch of 6 sequences does not divide into micro-batches of 2 on 2 "
            "data-parallel ranks (2 x 2 = 4); use 4 or 8",
        ),
        (
            "global_batch = 16\nmicrobatch = 2\nbatch_ramp = { start = 4, step = 2, samples = 500 }",
            "<text>:6:1: [train] a global batch of 6 sequences does not divide into micro-batches of 2 on 2 "
            "data-parallel ranks (2 x 2 = 4); use 4 or 8",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_at_its_line(train, message):
    manifest = type_manifest(read_text(f"composer3d = 1\n[train]\nsteps = 1\n{train}\n"), tables=TABLES)
    with pytest.raises(ManifestError) as caught:
        BatchSize(manifest.tables["train"], degree=2).check(manifest)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "batch_ramp = { start = 4, step = 2, every = 1 }",
            "4:1: [train] batch_ramp grows to global_batch, which is not stated",
        ),
        (
            "global_batch = 2\nbatch_ramp = { start = 4, step = 2, every = 1 }",
            "5:1: [train] batch_ramp starts at 4, above global_batch = 2",
        ),
    ],
)
def test_a_ramp_without_an_end_is_refused(train, message):
    with pytest.raises(ManifestError) as caught:
        type_manifest(read_text(f"composer3d = 1\n[train]\nsteps = 1\n{train}\n"), tables=TABLES)
    assert str(caught.value) == f"<text>:{message}"
