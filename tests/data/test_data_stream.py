from __future__ import annotations

import json

import pytest
import torch

from composer3d.errors import DataError
from composer3d.runner.data import DataTable, Loader
from composer3d.runner.data.stream import StreamSource


class Counting:
    """A stream of rows, item i being [i, i + 1, ...]; knows its place."""

    def __init__(self, num=10, lengths=(3,)):
        self.num, self.lengths, self.place = num, lengths, 0

    def __iter__(self):
        while self.place < self.num:
            length = self.lengths[self.place % len(self.lengths)]
            self.place += 1
            yield list(range(self.place - 1, self.place + length))
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def loader_of(stream, *, rank=0, degree=1, batch=4, **keys):
    table = DataTable(use="m:f", order="stream", **keys)
    source = StreamSource(stream, table)
    return Loader(
        source,
        table,
        seed=0,
        rank=rank,
        degree=degree,
        batch_size_of=lambda step: batch,
        position_of=lambda step: step * batch,
    )


def firsts(batch):
    return batch.tokens[:, 0].tolist()


def test_items_come_in_their_order_pass_after_pass():
    loader = loader_of(Counting())
    assert [firsts(loader.batch(step)) for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert loader.batch(4).indices == (16, 17, 18, 19)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("padding", ["none", "longest"])
def test_every_layout_has_the_same_steps(degree, padding):
    lengths = (3,) if padding == "none" else (3, 1, 5)
    whole = loader_of(Counting(lengths=lengths), padding=padding)
    ranks = [loader_of(Counting(lengths=lengths), rank=rank, degree=degree, padding=padding) for rank in range(degree)]
    for step in range(5):
        batch, parts = whole.batch(step), [loader.batch(step) for loader in ranks]
        assert torch.equal(batch.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(batch.targets, torch.cat([part.targets for part in parts]))
        assert batch.indices == sum((part.indices for part in parts), ())


@pytest.mark.parametrize("stop", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("num", [8, 10])
def test_a_state_goes_on_exactly_in_any_layout(stop, num):
    whole = loader_of(Counting(num))
    batches = [whole.batch(step) for step in range(9)]
    stopped = loader_of(Counting(num), rank=1, degree=2)
    for step in range(stop):
        stopped.batch(step)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = loader_of(Counting(num))
    resumed.load_state_dict(state)
    for step in range(stop, 9):
        batch = resumed.batch(step)
        assert torch.equal(batch.tokens, batches[step].tokens) and batch.indices == batches[step].indices


def test_a_saved_state_does_not_change_while_the_stream_goes_on():
    class Live(Counting):
        def __init__(self):
            super().__init__()
            self.state = {"place": 0}

        def state_dict(self):
            self.state["place"] = self.place
            return self.state

    loader = loader_of(Live())
    state = loader.state_dict()
    loader.batch(0)
    loader.state_dict()
    assert state["stream"] == {"num_items": 0, "dataset": {"place": 0}}


def test_steps_out_of_order_are_refused():
    loader = loader_of(Counting())
    loader.batch(0)
    for step in (0, 2):
        with pytest.raises(DataError) as caught:
            loader.batch(step)
        assert str(caught.value) == (
            f'[data] order = "stream" gives the steps in order: step 1 is next, and step {step} was asked for; load '
            "the state that was saved with the checkpoint"
        )


def test_a_stream_without_items_is_refused():
    with pytest.raises(DataError) as caught:
        loader_of(Counting(0)).batch(0)
    assert str(caught.value) == '[data] use = "m:f" is empty: a pass over it gives no item'


def test_a_stream_holds_nothing_out():
    with pytest.raises(DataError) as caught:
        next(loader_of(Counting()).evaluation_batches(batch_size=2))
    assert str(caught.value) == (
        '[data] order = "stream" holds no samples out, so there is nothing to evaluate on; remove [evaluation]'
    )


def test_the_state_of_a_stream_is_not_that_of_a_numbered_data_set():
    loader = loader_of(Counting())
    with pytest.raises(DataError) as caught:
        loader.load_state_dict({"step": 3, "seed": 0, "num_samples": 5, "order": "shuffle", "bucket": 0})
    assert str(caught.value) == (
        "[data] the checkpoint was trained on a numbered data set, and this run reads a stream; start a new run"
    )


def test_the_record_of_a_stream():
    assert StreamSource(Counting(), DataTable(use="m:f", order="stream")).record() == {
        "kind": "stream",
        "use": "m:f",
        "args": {},
        "num_samples": None,
        "num_evaluation_samples": 0,
        "tokenizer": None,
        "vocab_size": None,
    }
