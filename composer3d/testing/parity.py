"""Comparison of two models' gradients by one measure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from composer3d.step import full

__all__ = ["assert_gradients_equal"]


def assert_gradients_equal(
    actual: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None], *, tolerance: float
) -> None:
    """Assert that the gradients of one model are those of another, parameter by parameter.

    The measure is max|actual - reference| / max|reference| of each parameter, computed in float64; a reference of
    zeros asks for zeros. In float64 correct layouts stay below 1e-12; float32 (2e-7 to 8e-7) cannot show small errors.

    Args:
        actual: FQN to gradient; DTensors are gathered, so that every rank of their mesh calls this.
        reference: FQN to gradient of one device.
        tolerance: The largest measure allowed, inclusive.

    Raises:
        AssertionError: Names the FQNs that only one side has, or the five worst with their measures.
    """
    text = _worst(_measures(actual, reference), tolerance)
    if text:
        raise AssertionError(text)


def _measures(actual: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> dict[str, float]:
    missing, unexpected = sorted(reference.keys() - actual.keys()), sorted(actual.keys() - reference.keys())
    if missing or unexpected:
        raise AssertionError(f"FQNs differ: missing {missing}, unexpected {unexpected}")
    return {fqn: _difference(fqn, actual[fqn], reference[fqn]) for fqn in sorted(reference)}


def _worst(measures: Mapping[str, float], tolerance: float) -> str:
    """Return the text on what is out of tolerance, empty if nothing is."""
    # Not "measure > tolerance": that is false for NaN.
    bad = {fqn: measure for fqn, measure in measures.items() if not measure <= tolerance}
    if not bad:
        return ""
    worst = sorted(bad.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])[:5]
    lines = "".join(f"\n  {fqn}: {measure:.3g}" for fqn, measure in worst)
    return f"{len(bad)} of {len(measures)} gradients differ by more than {tolerance:g} of their largest value:{lines}"


def _difference(fqn: str, actual: Tensor | None, reference: Tensor | None) -> float:
    if actual is None or reference is None:
        if actual is not reference:
            side = "actual" if actual is None else "reference"
            raise AssertionError(f"{fqn}: the {side} gradient is None and the other is not")
        return 0.0
    one, other = full(actual).to("cpu", torch.float64), full(reference).to("cpu", torch.float64)
    if one.shape != other.shape:
        raise AssertionError(f"{fqn}: shape {tuple(one.shape)} is not the reference's {tuple(other.shape)}")
    if one.numel() == 0:
        return 0.0
    difference, scale = (one - other).abs().max().item(), other.abs().max().item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf
