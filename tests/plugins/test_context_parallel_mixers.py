"""Convolutions, scans and recurrent layers along a sharded sequence: neighbours exchanged, or gathered and narrowed."""

from __future__ import annotations

import functools

import pytest
from support.mixer_models import MIXERS, Staged
from support.sequence_steps import context, padded_batch, sequence_steps

from composer3d.testing import run_ranks


def assert_equal_to_one_device(degree, cases):
    """Compare every (model, manifest) with one device on all ranks; return the collectives over cp by case."""
    work = [(MIXERS.get(name, name), text, padded_batch) for name, text in cases]
    results = run_ranks(sequence_steps, degree, work, timeout_s=600)
    wrong = [(cases[at], *each[:3]) for found in results for at, each in enumerate(found) if not max(each[:2]) <= 1e-12]
    assert wrong == []
    return dict(zip([name for name, _ in cases], [each[3] for each in results[0]], strict=True))


# A scan, a recurrent layer, convolutions, a Fourier transform, a shift, pooling, and positions that the model adds.
KINDS = ("Mamba", "Recurrent", "Conformer", "Hyena", "RelativeShift", "Pooled", "Registers")


def test_every_kind_of_mixer_equals_one_device():
    found = assert_equal_to_one_device(2, [(name, context()) for name in KINDS])
    layers, attention = 2, (2, 1)
    # A convolution sends the positions that windows share; one of kernel 1 reads none, and only attention gathers.
    assert found["Conformer"]["all_to_all"][0] == 2 * 2 * layers
    assert found["Conformer"]["all_gather"][0] == attention[0] * layers
    # Of a scan in a loop each operand is gathered once, however often it is indexed.
    assert found["Mamba"]["all_to_all"][0] == 2 * layers
    assert found["Mamba"]["all_gather"][0] <= 7 * layers
    # The result of a recurrent layer is sharded again, so that attention is.
    assert found["Recurrent"]["all_gather"][0] == 1 + attention[0] * layers


@pytest.mark.slow
def test_other_mixers_equal_one_device():
    assert_equal_to_one_device(2, [(name, context()) for name in MIXERS if name not in KINDS])


SOME, OTHERS = ("Mamba", "Registers", "Grid"), ("Alone", "Conformer", "Subsampled", "InPlace")


@pytest.mark.parametrize(
    ("balanced", "contiguous"),
    [
        (("Grid",), ("Conformer",)),
        pytest.param(SOME, OTHERS, marks=pytest.mark.slow),
        pytest.param(OTHERS, SOME, marks=pytest.mark.slow),
    ],
    ids=["one of each", "some", "others"],
)
def test_four_ranks_contiguous_or_balanced(balanced, contiguous):
    cases = [(name, context("ring", degree=4)) for name in balanced]
    cases += [(name, context(degree=4, more="balanced = false\n")) for name in contiguous]
    assert_equal_to_one_device(4, cases)


def test_bytes_of_a_convolution_are_those_of_its_neighbours():
    # Of each of two layers: float64, 2 samples, 16 channels, over 4 and 4 and 2 x 2 positions, forward and backward.
    layers, position = 2, 8 * 2 * 16
    contiguous = assert_equal_to_one_device(2, [("Conformer", context(more="balanced = false\n"))])["Conformer"]
    assert contiguous["all_to_all"] == (8, layers * 2 * position * (2 + 2))
    # The first rank has both ends, so each of its chunks has one neighbour, as those of the other have two.
    balanced = assert_equal_to_one_device(2, [("Conformer", context())])["Conformer"]
    assert balanced["all_to_all"] == (8, 2 * contiguous["all_to_all"][1])


TENSOR = context(mesh="tp = 2", more="[sharding.tensor_parallel]\nsequence_parallel = true\n")
STAGES = context(mesh="pp = 2", more='[scheduling.pipeline]\nschedule = "GPipe"\n')
RECOMPUTED = context(mesh="dp_shard = 2", more="[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n")
LAYOUTS = {"stages": STAGES, "recomputed": RECOMPUTED, "tensor": TENSOR}
FAST = {("Conformer", "recomputed"), ("Rwkv", "stages"), ("Conformer", "tensor")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in FAST else [pytest.mark.slow])
        for name in ("Mamba", "Rwkv", "Conformer")
        for layout in LAYOUTS
    ],
)
def test_mixers_beside_other_axes(name, layout):
    assert_equal_to_one_device(4, [(functools.partial(Staged, MIXERS[name]), LAYOUTS[layout])])
