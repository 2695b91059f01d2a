"""The example of a forward that a run gives its plugins: taken from the data, which stay as they are."""

from __future__ import annotations

import pytest
import torch

from composer3d.errors import DataError
from composer3d.runner.data import DataTable, example_of, foreseen_batch, foreseen_example, open_source

MODULE = """
import torch

class Vectors:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(3, 5) + index, torch.tensor([index] * 3)

class Prepared(Vectors):
    ready = False

    def prepare(self):
        self.ready = True

    def __getitem__(self, index):
        assert self.ready
        return super().__getitem__(index)

class Foreseen(Prepared):
    def example(self):
        return torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)

class Wrong(Prepared):
    def example(self):
        raise ValueError("not yet")

class Stream:
    def __init__(self):
        self.next = 0

    def __iter__(self):
        while True:
            self.next += 1
            yield [self.next, self.next + 1, self.next + 2]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

class Images(Vectors):
    def __getitem__(self, index):
        return torch.rand(3, 5, 5), torch.tensor(index % 2)

def broken():
    raise ValueError("no such data")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # One for all tests: a module of a name is imported from one folder only.
    folder = tmp_path_factory.mktemp("example")
    (folder / "example_data.py").write_text(MODULE)
    return folder


def opened(table, folder):
    return open_source(table, seed=0, folder=folder, cache=folder / "cache")


def form(example):
    ((tokens,), kwargs) = example
    assert tokens.is_meta and not kwargs
    return tuple(tokens.shape), tokens.dtype


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use": "synthetic", "seq_len": 16}, ((4, 16), torch.int64)),
        ({"use": "example_data:Vectors"}, ((4, 3, 5), torch.float32)),
        ({"use": "example_data:Vectors", "padding": "multiple", "pad_multiple": 4}, ((4, 4, 5), torch.float32)),
        # Prepared by the run alone; its method says what items are like.
        ({"use": "example_data:Foreseen"}, ((4, 3, 5), torch.float32)),
        ({"use": "example_data:Stream", "order": "stream"}, ((4, 2), torch.int64)),
    ],
)
def test_it_has_the_form_of_the_first_batch(folder, options, expected):
    table = DataTable(**options)
    before = torch.get_rng_state()
    assert form(example_of(opened(table, folder), table, seed=0, num_samples=4)) == expected
    assert form(foreseen_example(table, folder, seed=0, num_samples=4)) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use": "synthetic", "seq_len": 16}, (4, 16)),
        ({"use": "example_data:Vectors"}, (4, 3)),
        ({"use": "example_data:Vectors", "padding": "multiple", "pad_multiple": 4}, (4, 4)),
        ({"use": "example_data:Foreseen"}, (4, 3)),
        ({"use": "example_data:Images"}, (4,)),
    ],
)
def test_targets_have_the_form_of_their_own(folder, options, expected):
    table = DataTable(**options)
    example, target = foreseen_batch(table, folder, seed=0, num_samples=4)
    assert (tuple(target.shape), target.dtype, target.is_meta) == (expected, torch.int64, True)
    assert form(example) == form(foreseen_example(table, folder, seed=0, num_samples=4))


def test_a_stream_that_was_looked_at_is_as_before(folder):
    table = DataTable(use="example_data:Stream", order="stream")
    looked, plain = opened(table, folder), opened(table, folder)
    example_of(looked, table, seed=0, num_samples=1)
    assert looked.state_dict() == plain.state_dict()
    assert looked.num_items == 0
    for _ in range(3):
        assert torch.equal(looked.take()[0], plain.take()[0])
        assert looked.state_dict() == plain.state_dict()
    looked.peek()
    looked.load_state_dict({"num_items": 7, "dataset": {"next": 7}})
    assert looked.take()[0].tolist() == [8, 9]
    assert looked.num_items == 8


def test_one_sample_a_microbatch_is_shown_as_two(folder):
    table = DataTable(use="example_data:Vectors")
    assert form(foreseen_example(table, folder, seed=0, num_samples=1))[0] == (2, 3, 5)


def test_what_check_cannot_foresee(folder):
    # A data set that is prepared first is opened by the run alone.
    table = DataTable(use="example_data:Prepared")
    assert foreseen_example(table, folder, seed=0, num_samples=1) is None
    assert form(example_of(opened(table, folder), table, seed=0, num_samples=1))[0] == (2, 3, 5)
    with pytest.raises(DataError, match="no such data"):
        foreseen_example(DataTable(use="example_data:broken"), folder, seed=0, num_samples=1)
    with pytest.raises(
        DataError, match=r'^\[data\] use = "example_data:Wrong": example\(\) failed: ValueError: not yet$'
    ):
        foreseen_example(DataTable(use="example_data:Wrong"), folder, seed=0, num_samples=1)
