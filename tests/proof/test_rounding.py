from __future__ import annotations

import pytest
import torch

from composer3d.proof.reference import Reference
from composer3d.proof.rounding import rounding, signs


def test_a_loss_is_as_far_off_as_its_furthest_sample():
    rounded, exact = Reference(initial={}, samples=[1.0, 2.0]), Reference(initial={}, samples=[1.0, 1.6])
    assert rounding(rounded, exact, in_parts=True)["loss"][""] == pytest.approx(0.25)


def test_signs_take_turns():
    assert signs(torch.zeros(2, 3)).tolist() == [[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]]
    assert signs(torch.zeros(5), 1).tolist() == [1.0, 1.0, -1.0, -1.0, 1.0]
