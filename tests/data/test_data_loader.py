from __future__ import annotations

import logging

import pytest
import torch
from support.loader_batches import RAMP, Rows, assert_same, global_batches, loader_of, ramp, ramp_position, user_source

from composer3d.composition.loop.sampling import indices
from composer3d.errors import BatchError, DataError
from composer3d.runner.data import DataTable, open_source
from composer3d.runner.data.user_data import UserSource


class Drawing(Rows):
    """Draws its rows at random, as augmentation does."""

    def __getitem__(self, number):
        return torch.randint(0, 1000, (len(self.rows[number]),))


@pytest.fixture
def docs(tmp_path):
    """Open a file of text as 29 short sequences, of which 2 are held out."""
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 122)) * 3)
    table = DataTable(use="a.txt", seq_len=9)
    return open_source(table, seed=0, folder=tmp_path, cache=tmp_path, report=[].append), table


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_every_layout_has_the_same_steps(docs, degree, order):
    source, table = docs
    table = DataTable(use=table.use, seq_len=9, order=order)

    def make(rank, degree):
        return loader_of(source, table, rank=rank, degree=degree, batch_size_of=ramp, position_of=ramp_position)

    assert_same(global_batches(make, 1, range(8)), global_batches(make, degree, range(8)))


def test_a_batch_above_the_samples_is_told_once(docs, caplog):
    source, table = docs
    for rank in (0, 1):
        loader_of(source, table, rank=rank, degree=2, batch_size_of=lambda step: 28)
    assert caplog.messages == [
        '[data] use = "a.txt" has 27 samples to train on, and 2 held out (evaluation_fraction = 0.05): a global batch '
        "of 28 holds some of them twice"
    ]
    loader_of(source, table, batch_size_of=lambda step: 27)
    assert len(caplog.messages) == 1


def test_the_samples_are_those_of_the_stream(docs):
    source, table = docs
    loader = loader_of(source, table, batch_size_of=ramp, position_of=ramp_position)
    numbers = [loader.batch(step).indices for step in range(6)]
    stream = indices(0, sum(RAMP), size=len(source), seed=3).tolist()
    assert [len(part) for part in numbers] == RAMP and sum(numbers, ()) == tuple(stream)
    batch = loader.batch(2)
    assert torch.equal(batch.tokens, torch.stack([source[index][0] for index in batch.indices]))
    assert torch.equal(batch.targets, torch.stack([source[index][1] for index in batch.indices]))
    assert batch.step == 2 and batch.tokens.shape == (8, 9)


def test_sequential_order_and_another_seed(docs):
    source, table = docs
    sequential = DataTable(use=table.use, seq_len=9, order="sequential")
    size = len(source)
    assert loader_of(source, sequential).batch(3).indices == tuple(place % size for place in range(24, 32))
    assert loader_of(source, table, seed=4).batch(0).indices != loader_of(source, table).batch(0).indices


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(docs, workers):
    source, table = docs
    ahead = DataTable(use=table.use, seq_len=9, workers=workers, prefetch=3)

    def here(rank, degree):
        return loader_of(source, table, rank=rank, degree=degree)

    def far(rank, degree):
        return loader_of(source, ahead, rank=rank, degree=degree)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    # In order, then back, then forward: a resumed run and one that looks again.
    steps = [0, 1, 2, 3, 1, 2, 7]
    assert_same(global_batches(here, 1, steps), global_batches(far, 1, steps))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_augmentation_draws_is_the_same_with_workers_and_in_every_layout():
    table = DataTable(use="m:f")
    source = user_source(Drawing([5] * 8), table)

    def make(workers):
        keys = {"workers": workers} if workers else {}
        return lambda rank, degree: loader_of(source, DataTable(use="m:f", **keys), rank=rank, degree=degree)

    whole = global_batches(make(0), 1, range(3))
    assert_same(whole, global_batches(make(2), 2, range(3)))
    # A step is an epoch here, and each epoch draws anew.
    rows = [tokens[numbers.index(3)].tolist() for tokens, _, numbers in whole]
    assert rows[0] != rows[1] != rows[2]


def test_a_run_resumes_at_its_step(docs):
    source, table = docs
    whole = loader_of(source, table)
    numbers = [whole.batch(step).indices for step in range(6)]
    stopped = loader_of(source, table)
    stopped.batch(0), stopped.batch(1)
    state = stopped.state_dict()
    assert state == {"step": 2, "seed": 3, "num_samples": len(source), "order": "shuffle", "bucket": 0}
    resumed = loader_of(source, DataTable(use=table.use, seq_len=9, workers=1))
    resumed.batch(4)  # what was read ahead of a load is forgotten
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.batch(step).indices for step in range(2, 6)] == numbers[2:]
    resumed.close()


def test_other_data_than_those_of_the_checkpoint_are_told(docs, caplog):
    source, table = docs
    state = loader_of(source, table).state_dict()
    with caplog.at_level(logging.WARNING):
        loader_of(source, table, seed=4).load_state_dict(state)
    assert caplog.messages == [
        "[data] seed was 3 when the checkpoint was saved and is 4 now: the order of the samples is another"
    ]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("batch_size", [4, 6])
def test_evaluation_counts_every_held_out_sample_once(docs, degree, batch_size):
    source, table = docs
    source.evaluation = source  # enough of them
    loaders = [loader_of(source, table, rank=rank, degree=degree) for rank in range(degree)]
    for _ in range(2):
        batches = [list(loader.evaluation_batches(batch_size=batch_size)) for loader in loaders]
        rows = [row for step in zip(*batches, strict=True) for batch in step for row in batch.indices]
        assert [row for row in rows if row >= 0] == list(range(len(source))) and len(rows) % batch_size == 0
        filled = [
            batch.targets[place].tolist()
            for part in batches
            for batch in part
            for place, row in enumerate(batch.indices)
            if row < 0
        ]
        assert filled == [[-100] * 9] * (-len(source) % batch_size)
    first = next(iter(loaders[0].evaluation_batches(1, batch_size=batch_size)))
    assert torch.equal(first.tokens[0], source[0][0]) and first.step == 0
    assert len(list(loaders[0].evaluation_batches(1, batch_size=batch_size))) == 1


def test_vocabulary_is_checked_and_the_sample_named(docs):
    source, table = docs
    source.vocab_size = None
    loader = loader_of(source, table, vocab_size=121)
    bad = [number for number in range(len(source)) if 121 in source[number][0]]
    with pytest.raises(DataError) as caught:
        for step in range(16):
            batch = loader.batch(step)
            assert int(batch.tokens.max()) < 121
    named = int(str(caught.value).split()[2])
    place = source[named][0].tolist().index(121)
    assert named in bad and str(caught.value) == (
        f"[data] sample {named} holds the token 121 at place {place}, and the model's vocab_size = 121 allows 0 to "
        "120; raise vocab_size, or mend the data"
    )


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1, -1], [1, 2]), "[data] sample 0 holds the token -1 at place 1, {allowed}"),
        (
            ([1, 2], [9, 2]),
            "[data] sample 0 holds the target 9 at place 0, {allowed} (-100 marks targets without loss)",
        ),
        (
            ([1, 2], [2, -1]),
            "[data] sample 0 holds the target -1 at place 1, {allowed} (-100 marks targets without loss)",
        ),
    ],
)
def test_targets_are_checked_too(pair, message):
    table = DataTable(use="m:f")
    source = UserSource([tuple(torch.tensor(part) for part in pair)], table, first=0, num_samples=1)
    with pytest.raises(DataError) as caught:
        loader_of(source, table, batch=1, vocab_size=9).batch(0)
    allowed = "and the model's vocab_size = 9 allows 0 to 8; raise vocab_size, or mend the data"
    assert str(caught.value) == message.format(allowed=allowed)
    ignored = UserSource([(torch.tensor([1, 2]), torch.tensor([2, -100]))], table, first=0, num_samples=1)
    assert loader_of(ignored, table, batch=1, vocab_size=9).batch(0).targets.tolist() == [[2, -100]]


def rows_loader(lengths, *, dataset=Rows, **keys):
    table = DataTable(use="m:f", order="sequential", **keys)
    return loader_of(user_source(dataset(lengths), table), table, batch=4)


class Lying(Rows):
    """States lengths that are too short."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.lengths = [2] * len(lengths)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda keys: rows_loader([3, 3, 5, 3], **keys),
            DataError,
            "[data] samples 0 and 2 meet in one batch and their tokens have the shapes (3,) and (5,); set padding = "
            '"longest", "multiple" or "seq_len", or give samples of one shape',
        ),
        (
            lambda keys: rows_loader([3, 9, 5, 3], seq_len=8, padding="longest", **keys),
            DataError,
            "[data] sample 1 has 9 tokens, more than seq_len = 8; raise seq_len, or cut the sample in the data set",
        ),
        (
            lambda keys: rows_loader([1, 1, 4, 1], dataset=Lying, padding="longest", **keys),
            DataError,
            "[data] sample 2 has 4 tokens, more than the data set's `lengths` say; mend `lengths`",
        ),
        (
            lambda keys: loader_of(
                UserSource([(torch.zeros(3), torch.zeros(3))], DataTable(use="m:f"), first=0, num_samples=1),
                DataTable(use="m:f", padding="longest", **keys),
            ),
            DataError,
            '[data] padding = "longest" is for one row of tokens and one target for each; sample 0 has tokens of shape '
            "(3,) and torch.float32 targets of shape (3,)",
        ),
        (
            lambda keys: loader_of(
                user_source(Rows([3] * 20), DataTable(use="m:f")), DataTable(use="m:f", **keys), batch=6, degree=4
            ),
            BatchError,
            "a global batch of 6 samples does not divide over 4 data-parallel ranks; use 4 or 8",
        ),
        (
            lambda keys: loader_of(user_source(Rows([3]), DataTable(use="m:f")), DataTable(use="m:f", **keys), batch=0),
            BatchError,
            "step 0 has a global batch of 0 samples; use at least 1",
        ),
    ],
)
def test_batches_that_cannot_be_are_refused_with_and_without_workers(make, error, message, workers):
    loader = make({"workers": workers} if workers else {})
    with pytest.raises(error) as caught:
        loader.batch(0)
    assert str(caught.value) == message


def test_a_tokenizer_larger_than_the_model_is_refused_at_once(docs):
    source, table = docs
    with pytest.raises(DataError) as caught:
        loader_of(source, table, vocab_size=128)
    assert str(caught.value) == (
        '[data] use = "a.txt" has tokens up to 255, and the model\'s vocab_size = 128 allows 0 to 127; set the '
        "model's vocab_size to at least 256"
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the refusal is for machines without an accelerator")
def test_pinned_memory_without_an_accelerator_is_refused(docs):
    source, _ = docs
    with pytest.raises(DataError) as caught:
        loader_of(source, DataTable(use="a.txt", seq_len=9, pin_memory=True))
    assert str(caught.value) == ("[data] pin_memory = true needs an accelerator, and this machine has none; remove it")


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory(docs, workers):
    source, table = docs
    keys = {"workers": workers} if workers else {}
    pinned = loader_of(source, DataTable(use="a.txt", seq_len=9, pin_memory=True, **keys)).batch(0)
    assert pinned.tokens.is_pinned() and pinned.targets.is_pinned()
    assert torch.equal(pinned.tokens, loader_of(source, table).batch(0).tokens)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"evaluation_fraction": 0.0},
            "[data] evaluation_fraction = 0 holds no samples out; raise it, or remove [evaluation]",
        ),
        ({}, '[data] use = "a.txt" has 1 sample, so none is held out; give more data, or remove [evaluation]'),
    ],
)
def test_evaluation_without_samples_is_refused(tmp_path, keys, message):
    (tmp_path / "a.txt").write_text("0123456789")
    table = DataTable(use="a.txt", seq_len=9, **keys)
    source = open_source(table, seed=0, folder=tmp_path, cache=tmp_path, report=[].append)
    with pytest.raises(DataError) as caught:
        next(loader_of(source, table).evaluation_batches(batch_size=2))
    assert str(caught.value) == message


def test_evaluation_leaves_out_what_fills_no_batch_and_cannot_be_marked(caplog):
    table = DataTable(use="m:f", evaluation_fraction=0.5)
    source = UserSource([(torch.zeros(3), torch.zeros(3))] * 3, table, first=0, num_samples=3)
    source.evaluation = source
    loader = loader_of(source, table, batch_size_of=lambda step: 2)
    assert [[batch.indices for batch in loader.evaluation_batches(batch_size=2)] for _ in range(2)] == [[(0, 1)]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "[data] 1 of the 3 samples held out fill no batch and are not evaluated"
    ]
    with pytest.raises(DataError) as caught:
        next(loader.evaluation_batches(batch_size=4))
    assert str(caught.value) == (
        "[data] 3 samples held out do not fill a batch of 4, and torch.float32 targets cannot be marked as without "
        "loss; hold out more (evaluation_fraction), or lower global_batch"
    )
