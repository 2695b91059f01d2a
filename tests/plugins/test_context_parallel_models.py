"""Attention of every kind over a sharded sequence, as other people write it: gradients equal one device's."""

from __future__ import annotations

import pytest
import torch
from support.family_models import class_loss
from support.models import write_manifest
from support.sequence_models import (
    LANGUAGES,
    Alibi,
    ByHand,
    Encoders,
    Grouped,
    Heads,
    MultiQuery,
    TrainedBias,
    TwoLengths,
    Window,
)
from support.sequence_steps import context, padded_batch, sequence_steps, two_lengths

import composer3d
from composer3d.testing import run_ranks


def assert_equal_to_one_device(degree, cases):
    """Compare every case with one device on all ranks; return the collectives over cp by case."""
    texts = [context(method, degree=degree) for _, method in cases]
    work = [
        (factory, text, two_lengths if factory is TwoLengths else padded_batch)
        for (factory, _), text in zip(cases, texts, strict=True)
    ]
    results = run_ranks(sequence_steps, degree, work, timeout_s=600)
    wrong = [
        (factory.__name__, method, *found[at][:3])
        for found in results
        for at, (factory, method) in enumerate(cases)
        if not max(found[at][:2]) <= 1e-12
    ]
    assert wrong == []
    return [each[3] for each in results[0]]


# Of these the rings and exchanged heads below are compared too.
OFTEN = (Window, ByHand, TrainedBias, Alibi, MultiQuery, TwoLengths)
ALONE = [factory for factory in LANGUAGES.values() if factory not in OFTEN]


@pytest.mark.parametrize(
    "names",
    [
        ALONE[::2],
        pytest.param(ALONE[1::2], marks=pytest.mark.slow),
        pytest.param(OFTEN, marks=pytest.mark.slow),
    ],
    ids=["gathered alone", "gathered alone, the others", "by other methods too"],
)
def test_every_kind_equals_one_device(names):
    for factory, counted in zip(
        names, assert_equal_to_one_device(2, [(factory, "gather") for factory in names]), strict=True
    ):
        assert counted["reduce_scatter"][0] >= 2, factory


RINGS = [(Window, "ring"), (TwoLengths, "ring"), (TrainedBias, "ring"), (ByHand, "ring")]
HEADS = [(Alibi, "ulysses"), (MultiQuery, "ulysses"), (TrainedBias, "universal")]
OTHERS = [(Window, "ulysses"), (TwoLengths, "ulysses"), (Alibi, "ring"), (MultiQuery, "ring")]
OTHERS += [(Heads, method) for method in ("ring", "ulysses")]


@pytest.mark.parametrize("cases", [RINGS + HEADS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_rings_and_exchanged_heads(cases):
    assert_equal_to_one_device(2, cases)


def test_four_ranks_with_fewer_key_heads():
    assert_equal_to_one_device(
        4, [(Grouped, "ring"), (MultiQuery, "ulysses"), (Grouped, "usp"), (Window, "gather"), (TwoLengths, "ring")]
    )


def test_attention_of_a_module_whose_parameters_tp_holds():
    text = context(mesh="tp = 2", more="[sharding.tensor_parallel]\n")
    for found in run_ranks(sequence_steps, 4, [(Heads, text, padded_batch)], timeout_s=600):
        assert max(found[0][:2]) <= 1e-12


def evaluations():
    """Return the loss of one device and of the ranks where gradients are off, in which torch has a fast path."""
    torch.set_default_dtype(torch.float64)
    (tokens,), _, targets = padded_batch()
    torch.manual_seed(0)
    model = Encoders()
    run = composer3d.compose(model, write_manifest(context()), loss_fn=class_loss)
    try:
        found = run.evaluate(tokens, target=targets)
        torch.manual_seed(0)
        with torch.no_grad():
            total, count = class_loss(Encoders().eval()(tokens), targets)
        return float(found.loss), float(total / count)
    finally:
        run.close()


def test_fast_path_of_encoders():
    for found, expected in run_ranks(evaluations, 2):
        assert found == pytest.approx(expected, rel=1e-14)
