from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from composer3d.errors import DataError
from composer3d.runner.data import STREAM_LOSES, DataTable, open_source
from composer3d.runner.data.user_data import seeded
from composer3d.testing import run_ranks

MODULE = '''
import random
from pathlib import Path
import numpy as np
import torch

class Items:
    """Numbered items of any kind."""

    def __init__(self, items, lengths=None):
        self.items = items
        if lengths is not None:
            self.lengths = lengths

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]

def given(items, lengths=None):
    return Items(items, lengths)

def pairs(num=10):
    return Items([(torch.full((3,), number), torch.full((3,), -number)) for number in range(num)])

def mappings():
    return Items([{"tokens": np.array([1, 2], dtype=np.int32), "targets": torch.tensor([2, 3])}])

def several():
    return Items([{"tokens": [1, 2], "more": {"mask": np.zeros(2, dtype=bool)}, "target": None}])

def images():
    return Items([(torch.zeros(3, 4, 4, dtype=torch.uint8), 7)])

def augmented():
    class Draws(Items):
        def __getitem__(self, number):
            return torch.rand(2), torch.tensor([np.random.rand(), random.random()])
    return Draws([0] * 10)

class Prepared:
    """Counts how often it was prepared, in a file."""

    def __init__(self, path):
        self.path = path

    def prepare(self):
        with open(self.path, "a") as file:
            file.write("x")

    def __len__(self):
        return Path(self.path).stat().st_size

    def __getitem__(self, number):
        return torch.tensor([1, 2, 3])

    def record(self):
        return {"path": "counted"}

def iterable():
    return iter([1])

def nothing():
    return None

def fails(path):
    raise FileNotFoundError(path)

class Stream:
    def __iter__(self):
        yield [1, 2]

class HalfStream(Stream):
    def state_dict(self):
        return {}

constant = 3
'''

RAISED = MODULE.splitlines().index("    raise FileNotFoundError(path)") + 1


@pytest.fixture
def open_user(tmp_path, monkeypatch):
    """Write a module of the test's own beside the manifest and open what it names."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"user_{random.Random(str(tmp_path)).getrandbits(60):x}"
    (tmp_path / f"{name}.py").write_text(MODULE)

    def opened(function, **keys):
        table = DataTable(use=f"{name}:{function}", **keys)
        return open_source(table, seed=0, folder=tmp_path, cache=tmp_path / "cache", report=[].append)

    opened.name = name
    return opened


def test_pairs_mappings_and_rows(open_user):
    assert open_user("pairs")[2][1].tolist() == [-2, -2, -2]
    tokens, targets = open_user("mappings", evaluation_fraction=0.0)[0]
    assert (tokens.tolist(), targets.tolist()) == ([1, 2], [2, 3]) and tokens.dtype == torch.int64
    inputs, targets = open_user("several", evaluation_fraction=0.0)[0]
    assert inputs.args[0].tolist() == [1, 2] and inputs.kwargs["more"]["mask"].dtype == torch.bool and targets is None
    inputs, targets = open_user("given", args={"items": [[[1.0], [2.0], 3]]})[0]
    assert [value.tolist() for value in inputs.args] == [[1.0], [2.0]] and targets.item() == 3
    tokens, targets = open_user("given", args={"items": [[5, 6, 7]]})[0]
    assert (tokens.tolist(), targets.tolist()) == ([5, 6], [6, 7])
    image, label = open_user("images")[0]
    assert image.dtype == torch.uint8 and label.dtype == torch.int64 and int(label) == 7


def test_the_last_items_are_held_out(open_user):
    source = open_user("pairs", evaluation_fraction=0.2, vocab_size=9)
    assert [int(source[index][0][0]) for index in range(len(source))] == list(range(8))
    assert [int(source.evaluation[index][0][0]) for index in range(2)] == [8, 9]
    assert source.record() == {
        "kind": "user",
        "use": f"{open_user.name}:pairs",
        "args": {},
        "num_samples": 8,
        "num_evaluation_samples": 2,
        "tokenizer": None,
        "vocab_size": 9,
    }
    with pytest.raises(IndexError):
        source[8]


def test_lengths_count_targets(open_user):
    rows = {"items": [[1, 2, 3], [1, 2]], "lengths": [3, 2]}
    source = open_user("given", args=rows, evaluation_fraction=0.5)
    assert source.lengths.tolist() == [2] and source.evaluation.lengths.tolist() == [1]
    assert open_user("pairs").lengths is None


def test_random_draws_are_seeded_by_the_place_and_leave_no_trace():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    def drawn(seed, position):
        with seeded(seed, position):
            return draw()

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert drawn(1, 5) == drawn(1, 5)
    assert len({drawn(1, 5), drawn(2, 5), drawn(1, 6)}) == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_prepare_runs_once_for_the_ranks_of_a_launch(open_user, tmp_path):
    path = str(tmp_path / "count")

    def rank():
        source = open_user("Prepared", args={"path": path}, evaluation_fraction=0.0)
        return len(source), source.record()["dataset"]

    assert run_ranks(rank, 4, init=False) == [(1, {"path": "counted"})] * 4
    # This process is a launch of its own, and prepares again; but only once.
    assert [rank() for _ in range(2)] == [(2, {"path": "counted"})] * 2


@pytest.mark.parametrize(
    ("function", "keys", "message"),
    [
        ("pair", {}, ': "{name}" has no "pair"; did you mean "pairs"?'),
        ("constant", {}, " is a value of type int, which cannot be called"),
        (
            "iterable",
            {},
            " gives an iterable of type list_iterator, which has no numbered samples to put in order; return a "
            'data set with __len__ and __getitem__, or set order = "stream"',
        ),
        ("nothing", {}, " gives a value of type NoneType; return a data set with __len__ and __getitem__"),
        ("given", {"args": {"items": []}}, " is empty: its length is 0"),
        (
            "given",
            {"args": {"items": [[1, 2]], "lengths": [2, 2]}},
            " has 1 items and 2 `lengths`; give one for each",
        ),
        (
            "fails",
            {"args": {"path": "a"}},
            " fails when called, at {name}.py:{line}: FileNotFoundError: a",
        ),
        (
            "pairs",
            {"order": "stream"},
            ' gives numbered samples (Items); order = "stream" is for iterables: take "shuffle" or "sequential"',
        ),
        ("nothing", {"order": "stream"}, ' gives a value of type NoneType; order = "stream" needs an iterable'),
        (
            "Stream",
            {"order": "stream"},
            " gives an iterable of type Stream without state_dict() and load_state_dict(): a resumed run would begin "
            "the stream again and train twice on the same samples; add them, or return a map-style data set with "
            "__len__ and __getitem__",
        ),
        (
            "HalfStream",
            {"order": "stream"},
            " gives an iterable of type HalfStream without load_state_dict(): a resumed run would begin "
            "the stream again and train twice on the same samples; add them, or return a map-style data set with "
            "__len__ and __getitem__",
        ),
    ],
)
def test_callables_that_give_no_data_are_refused(open_user, function, keys, message):
    with pytest.raises(DataError) as caught:
        open_user(function, **keys)
    use = f'[data] use = "{open_user.name}:{function}"'
    assert str(caught.value).replace("module ", "") == use + message.format(name=open_user.name, line=RAISED)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pth": "a"}, "missing a required argument: 'path'; it takes path"),
        ({"path": "a", "pth": "a"}, "got an unexpected keyword argument 'pth'; it takes path"),
    ],
)
def test_wrong_arguments_are_refused(open_user, args, message):
    with pytest.raises(DataError) as caught:
        open_user("fails", args=args)
    assert str(caught.value) == f'[data.args] of use = "{open_user.name}:fails": {message}'


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"labels": [1]}, "item 0 has the keys labels, and none of them is an input of the model"),
        (
            {"tokens": [1], "labels": [1], "targets": [1]},
            "item 0 has the keys labels, targets, tokens; only one of targets, labels can be its target",
        ),
        (
            {"input_ids": [1], "labels": [1]},
            'item 0 has "input_ids" and "labels", which transformers shifts by one and this does not; give "tokens" '
            'and "targets", the token that follows each one, or one row of tokens',
        ),
        (
            {"image": "cat.png", "label": 1},
            'item 0 has a value of type str as "image", which is no tensor and no number; convert it in the data set',
        ),
        (
            "text",
            "item 0 is of type str; it must be one row of tokens; (input, target), or (input, ..., target) of a model "
            'with several; or a mapping whose key "targets" (or "target", "labels", "label") is the target, and whose '
            'other keys name arguments of the model\'s forward, "tokens" the first one',
        ),
        ([1], "item 0 has 1 token; a row needs 2, the second being the target of the first"),
        ([], "item 0 has 0 tokens; a row needs 2, the second being the target of the first"),
    ],
)
def test_items_of_other_shapes_are_refused(open_user, item, message):
    source = open_user("given", args={"items": [item]})
    with pytest.raises(DataError) as caught:
        source[0]
    assert str(caught.value) == f'[data] use = "{open_user.name}:given": {message}'


def test_what_a_stream_loses_is_said():
    assert STREAM_LOSES == (
        'order = "stream" takes the data as the iterable gives it: step n cannot be computed without the steps before '
        "it, nothing is shuffled, every data-parallel rank reads the whole stream to keep its part, no samples are "
        "held out for evaluation, and resuming is as exact as the iterable's own state_dict()"
    )
