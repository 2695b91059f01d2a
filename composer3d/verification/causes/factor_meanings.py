"""Meanings of a factor: the degree, number of micro-batches, or clipping that it equals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.verification.verdict import Evidence

__all__ = ["meaning_of"]

_CLOSE = 1e-4  # relative


def meaning_of(evidence: Evidence, factor: float) -> str:
    """Return a clause on what a factor of gradients equals in this layout; empty where it equals nothing."""
    known = [*_of_degrees(evidence), *_of_clipping(evidence), *_of_microbatches(evidence.microbatches)]
    meanings = [text for value, text in known if math.isclose(factor, value, rel_tol=_CLOSE)]
    return "; that is " + ", or ".join(meanings) if meanings else ""


def _of_degrees(evidence: Evidence) -> Iterator[tuple[float, str]]:
    layout = evidence.layout
    sizes = {name: degree for name, degree in layout.degrees.items() if degree > 1}
    if layout.degree(Role.BATCH) not in (1, *sizes.values()):
        sizes["the data-parallel degree"] = layout.degree(Role.BATCH)
    for name, degree in sizes.items():
        more, less = "reduced once too often, or not averaged", "averaged once too often"
        if name in layout.names(Role.TENSOR):
            more, less = "added up once too often", "averaged where it is to be added up"
        if name in layout.names(Role.STAGE):
            more = "the copies of a parameter that several stages share are added up twice"
        yield degree, f"{name} = {degree}: {more}"
        yield 1 / degree, f"1 / {name} = 1 / {degree}: {less}"
        for power, what in ((0.5, "the root of"), (-0.5, "1 / the root of")):
            yield degree**power, f"{what} {name} = {degree}: scaled by the root of the degree"
        for other in (degree - 1, degree + 1):
            if other > 1:
                why = f"with {name} = {degree}: a rank too many or too few is divided by"
                yield other / degree, f"{other} / {degree}, {why}"
                yield degree / other, f"{degree} / {other}, {why}"


def _of_clipping(evidence: Evidence) -> Iterator[tuple[float, str]]:
    norm = evidence.reference.grad_norms["float64"][0] if "float64" in evidence.reference.grad_norms else 0.0
    if evidence.grad_clip < norm:
        shown = f"{evidence.grad_clip:g} / {norm:.4g}"
        yield evidence.grad_clip / (norm + 1e-6), f"grad_clip / the norm = {shown}: clipped before the core clips"


def _of_microbatches(number: int) -> Iterator[tuple[float, str]]:
    if number > 1:
        yield number, f"the {number} micro-batches of a rank: the loss is not divided by their number"
        yield 1 / number, f"1 / the {number} micro-batches of a rank: the loss is divided by their number twice"
