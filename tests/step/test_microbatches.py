from __future__ import annotations

from collections import UserDict, namedtuple

import pytest
import torch

from composer3d import Batch, BatchError
from composer3d.step.microbatches import Digest, Splitter, split_batch, tensors, to_device

Pair = namedtuple("Pair", "left right")


def rows(num=6, width=2):
    return torch.arange(num * width).reshape(num, width)


def test_micro_batches_put_together_are_the_batch():
    batch = Batch(args=(rows(), "text"), kwargs={"mask": rows() + 1}, target={"labels": rows() + 2, "weight": 0.5})
    pieces = split_batch(batch, 2)
    assert len(pieces) == 3
    assert torch.equal(torch.cat([piece.args[0] for piece in pieces]), rows())
    assert torch.equal(torch.cat([piece.kwargs["mask"] for piece in pieces]), rows() + 1)
    assert torch.equal(torch.cat([piece.target["labels"] for piece in pieces]), rows() + 2)
    assert all(piece.args[1] == "text" and piece.target["weight"] == 0.5 for piece in pieces)


def test_containers_keep_their_kind():
    batch = Batch(args=([rows(), (rows(), None)],), kwargs=UserDict(a=rows()), target=Pair(rows(), [rows()]))
    piece = split_batch(batch, 3)[1]
    assert type(piece.args[0]) is list and type(piece.args[0][1]) is tuple and piece.args[0][1][1] is None
    assert type(piece.target) is Pair and torch.equal(piece.target.right[0], rows()[3:])
    assert torch.equal(piece.kwargs["a"], rows()[3:])


def test_tensors_of_another_first_dim_go_whole_into_every_piece():
    scale, table = torch.tensor(2.0), rows(4)
    for piece in split_batch(Batch(args=(scale, rows()), kwargs={"table": table}), 3):
        assert piece.args[0] is scale and piece.kwargs["table"] is table and piece.args[1].shape == (3, 2)


def test_pieces_share_memory_with_the_batch():
    batch = Batch(args=(rows(),))
    assert split_batch(batch, 2)[1].args[0].data_ptr() == batch.args[0][2:].data_ptr()


@pytest.mark.parametrize("batch", [Batch(args=()), Batch(args=("text", 3)), Batch(args=(rows(),))])
def test_a_batch_that_is_not_to_be_cut_is_handed_through(batch):
    assert split_batch(batch, None) == [batch]
    assert split_batch(batch, 6) == [batch]


def test_the_batch_dim_is_found_in_the_target_where_the_model_takes_no_tensor():
    assert [piece.target.shape[0] for piece in split_batch(Batch(args=(), target=rows()), 2)] == [2, 2, 2]


@pytest.mark.parametrize(("num", "size"), [(6, 4), (3, 6), (0, 2)])
def test_a_batch_that_does_not_divide_is_refused(num, size):
    with pytest.raises(BatchError) as caught:
        split_batch(Batch(args=(rows(num),)), size)
    assert str(caught.value) == (
        f"a batch of {num} samples cannot be split into micro-batches of {size} ([train] microbatch); "
        f"hand over a multiple of {size} samples a call"
    )


@pytest.mark.parametrize("form", [lambda t: t, lambda t: {"labels": t, "weight": rows(6)}, lambda t: [(t, 0.5)]])
@pytest.mark.parametrize("num", [3, 12])
def test_a_target_of_another_number_of_samples_is_refused(form, num):
    batch = Batch(args=({"x": rows()},), target=form(rows(num)))
    with pytest.raises(BatchError) as caught:
        split_batch(batch, 2)
    assert str(caught.value) == (
        f"the batch has 6 samples and its target {num}, so every micro-batch of 2 ([train] microbatch) would be given "
        "the whole target; hand over a row a sample (a target of tokens as target.view(6, -1), pairs as inputs of 2 a "
        "sample), or one micro-batch a call"
    )
    assert split_batch(batch, 6) == split_batch(batch, None) == [batch]  # the loss sees all of both, and decides


@pytest.mark.parametrize("target", [torch.ones(1), torch.tensor(2.0), (rows(), torch.ones(9)), None, "text"])
def test_targets_of_no_sample_are_the_same_for_every_micro_batch(target):
    assert len(split_batch(Batch(args=(rows(),), target=target), 2)) == 3


BASE = Batch(args=(rows(),), kwargs={"a": torch.rand(3, generator=torch.Generator().manual_seed(0))}, target=rows() + 1)


@pytest.mark.parametrize(
    "other",
    [
        Batch(args=(rows().flip(0),), kwargs=BASE.kwargs, target=BASE.target),
        Batch(args=(rows().flip(1),), kwargs=BASE.kwargs, target=BASE.target),
        Batch(args=BASE.args, kwargs={"a": BASE.kwargs["a"] + 1e-6}, target=BASE.target),
        Batch(args=BASE.args, kwargs=BASE.kwargs, target=rows()),
        Batch(args=BASE.args, kwargs=BASE.kwargs),
        Batch(args=(BASE.target,), kwargs=BASE.kwargs, target=BASE.args[0]),
    ],
    ids=["rows", "columns", "one bit", "target", "no target", "swapped"],
)
def test_digests_tell_batches_apart(other):
    digest = Digest()
    again = Batch(args=(rows(),), kwargs={"a": BASE.kwargs["a"].clone()}, target=rows() + 1)
    assert digest(parts(again)) == digest(parts(BASE)) != digest(parts(other))
    assert 0 <= digest(parts(other)) < 1 << 62


def parts(batch):
    return batch.args, batch.kwargs, batch.target


def test_digests_take_any_dtype():
    values = (torch.tensor(True), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), torch.ones(2).double())
    assert Digest()(values) > 0
    assert Digest()("text") == 0


def test_digests_do_not_depend_on_what_was_seen_before_or_on_strides():
    used, value = Digest(), torch.arange(70_000).view(2, -1)
    used(torch.ones(200_000, dtype=torch.int64))
    assert used(value) == Digest()(value) == Digest()(value.t().contiguous().t())


def test_tensors_come_in_order():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors(({"a": first}, [Pair(second, 1), third], None))] == [1, 2, 3]


def test_batches_move_to_their_device():
    batch = Batch(args=(rows(), 1), kwargs={"a": [rows()]}, target=rows())
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved.args[0].is_meta and moved.kwargs["a"][0].is_meta and moved.target.is_meta and moved.args[1] == 1


@pytest.mark.parametrize(("first", "second", "said"), [(6, 4, "passed whole to"), (4, 6, "divided among")])
def test_an_argument_that_is_divided_by_chance_is_refused(first, second, said):
    split, positions = Splitter(), rows(4)
    split(Batch(args=(rows(first),), kwargs={"pos": positions, "mask": rows(1)}), 2)
    split(Batch(args=(rows(first),), kwargs={"pos": positions}), 2)
    with pytest.raises(BatchError) as caught:
        split(Batch(args=(rows(second),), kwargs={"pos": positions}), 2)
    assert f'"pos" was {said} the micro-batches of a batch of {first} samples' in str(caught.value)
    split(Batch(args=(rows(second),), kwargs={"pos": positions[None]}), 2)
