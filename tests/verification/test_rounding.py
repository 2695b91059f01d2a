from __future__ import annotations

import math

import pytest
import torch

from composer3d.verification.comparison import COMPARED, Limits, told_apart
from composer3d.verification.reference_steps import Reference
from composer3d.verification.rounding import rounding, signs
from composer3d.verification.session import limits_of


def test_a_loss_is_as_far_off_as_its_furthest_sample():
    rounded, exact = Reference(initial={}, samples=[1.0, 2.0]), Reference(initial={}, samples=[1.0, 1.6])
    assert rounding(rounded, exact, in_parts=True)["loss"][""] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("value", "other", "told"),
    [
        (2.0, 1.0, "2"),
        (0.1234567, 1.0, "0.1235"),
        (1.001, 1.0, "1.001"),
        (1.00012, 1.0, "1.00012"),
        (0.99988, 1.0, "0.99988"),
        (1.0 + 3e-9, 1.0, "1.000000003"),
        (1.0, 1.0, "1"),
        (0.30001, 0.3, "0.30001"),
        (0.3, 0.30001, "0.3"),
        (math.inf, 1.0, "inf"),
        (0.0, 0.0, "0"),
    ],
)
def test_a_number_is_told_with_the_digits_that_tell_it_from_another(value, other, told):
    assert told_apart(value, other) == told


def test_signs_take_turns():
    assert signs(torch.zeros(2, 3)).tolist() == [[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]]
    assert signs(torch.zeros(5), 1).tolist() == [1.0, 1.0, -1.0, -1.0, 1.0]


def test_a_stated_tolerance_counts_unless_an_optimizer_asks_for_more():
    limits = Limits(largest={"gradients": 1e-12, "parameters": 1e-9}, by_fqn={"parameters": {"a": 1e-9, "b": 1e-12}})
    tight, loose = limits.stated(0.0), limits.stated(1e-6)
    assert [tight["gradients"], tight.of("parameters", "a"), tight.of("parameters", "b")] == [0.0, 1e-9, 0.0]
    assert [loose["gradients"], loose.of("parameters", "a"), loose.of("parameters", "b")] == [1e-6, 1e-6, 1e-6]


@pytest.mark.parametrize(
    ("dtype", "error", "limit"),
    [
        # One device in float64 beside itself has no error, and ranks add up in another order.
        (torch.float64, 0.0, 1e-12),
        # A plugin rounds, to four units and more.
        (torch.float64, 1e-3, 4e-3),
        (torch.float32, 0.0, 16 * 2.0**-23),
    ],
)
def test_the_runs_own_float64_has_the_tolerances_of_float64(dtype, error, limit):
    none = {name: {} for name in COMPARED}
    exact = Reference(initial={}, rounding={**none, "gradients": {"a": 0.0}, "parameters": {"a": 1e-10}})
    own = Reference(
        initial={"a": torch.zeros(1, dtype=dtype)},
        rounding={**none, "gradients": {"a": error}, "parameters": {"a": error}},
    )
    limits = limits_of({"float64": exact, "own": own}, "own")
    assert limits.of("gradients", "a") == pytest.approx(limit)
    assert (limits.of("parameters", "a") == pytest.approx(4e-10)) == (limit == 1e-12)
