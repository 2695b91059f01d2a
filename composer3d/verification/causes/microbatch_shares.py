"""Diagnosis of wrong gradients by the weights of their micro-batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.verification.causes.microbatch_weights import Weights
    from composer3d.verification.verdict import Evidence

__all__ = ["explain_shares"]

_CLOSE = 1e-6
_NAMED = 4


def explain_shares(evidence: Evidence) -> Iterator[str]:
    """Yield sentences on the micro-batches' weights, where they explain the wrong gradients; all 1 in a right one."""
    weights = evidence.weights
    if weights is not None and weights.residual <= _CLOSE:
        line = _of_weights(evidence, weights)
        if line:
            yield line
            return
    if weights is not None and weights.auxiliary is not None:
        yield (
            f"the auxiliary loss weighs {weights.auxiliary:.6g} times what it should, and all else is right"
            f"{_meaning(evidence, weights.auxiliary)}"
        )
        return
    if weights is not None and weights.is_maximum:
        axes = [name for name in evidence.layout.names(Role.BATCH) if evidence.layout.degrees[name] > 1]
        yield (
            f"every element of the gradients is the largest that a data-parallel rank has: a reduction over "
            f"{' and '.join(axes)} takes the maximum, and not the sum"
        )
        return
    if weights is not None and weights.lossy is not None:
        yield (
            f"of what data-parallel rank {weights.lossy} adds to {_whose(weights)} some elements are not there, and "
            "all else is right: they are dropped before the reduction on that rank, as by a compression that keeps the "
            "largest and carries nothing over"
        )
        return
    factors = _common_factors(evidence)
    if len(factors) == 1:
        ((factor, fqns),) = factors.items()
        everything = {fqn for _, _, fqn, _ in evidence.deviations("gradients")}
        whose = f"{len(fqns)} parameters" if len(fqns) > _NAMED or len(fqns) == len(everything) else ", ".join(fqns)
        yield f"the gradients of {whose} are {factor:.6g} times the right ones{_meaning(evidence, factor)}"


def _of_weights(evidence: Evidence, weights: Weights) -> str:
    values = weights.values
    if _equal(values):
        factor = sum(values) / len(values)
        if math.isclose(factor, 1.0, rel_tol=_CLOSE):
            return ""
        return f"{_whose(weights)} are {factor:.6g} times the right ones{_meaning(evidence, factor)}"
    per_rank = evidence.microbatches
    if _equal([value * count for value, count in zip(values, weights.counts, strict=True)]):
        return _MEAN_OF_MEANS.format(whose=_whose(weights), what="micro-batch")
    ranks = [values[start : start + per_rank] for start in range(0, len(values), per_rank)]
    counts = [sum(weights.counts[start : start + per_rank]) for start in range(0, len(values), per_rank)]
    inside = [sum(rank) / len(rank) for rank in ranks]
    if all(map(_equal, ranks)) and _equal([mean * count for mean, count in zip(inside, counts, strict=True)]):
        return _MEAN_OF_MEANS.format(whose=_whose(weights), what="rank")
    alive = [index for index, rank in enumerate(ranks) if any(abs(value) > _CLOSE for value in rank)]
    if len(alive) < len(ranks):
        return _of_some_ranks(evidence, _whose(weights), alive, len(ranks))
    late = [2.0, *[1.0] * (per_rank - 2), 0.0]
    if per_rank > 1 and all(_equal([1.0 + a - b for a, b in zip(rank, late, strict=True)]) for rank in ranks):
        return (
            f"in {_whose(weights)} every micro-batch but the first adds what the one before it gave: a stale gradient"
        )
    dead = [index for index in range(per_rank) if all(abs(rank[index]) <= _CLOSE for rank in ranks)]
    if dead:
        shown = ", ".join(map(str, dead))
        return (
            f"the micro-batches {shown} of every rank do not count in {_whose(weights)}: they are overwritten instead "
            "of accumulated, or never run"
        )
    overlap = _overlap(values, per_rank)
    if overlap:
        return overlap
    shown = ", ".join(f"{value:.4g}" for value in values)
    twice = [
        index for index in range(per_rank) if all(math.isclose(rank[index], 2.0, rel_tol=_CLOSE) for rank in ranks)
    ]
    if twice and all(math.isclose(v, 1.0, rel_tol=_CLOSE) or math.isclose(v, 2.0, rel_tol=_CLOSE) for v in values):
        return f"the micro-batches {', '.join(map(str, twice))} of every rank are counted twice in {_whose(weights)}"
    alike = all(map(_equal, ranks))
    who = "; each rank's are scaled by a number of its own before they are reduced" if alike and per_rank > 1 else ""
    if not alike and all(value > 0 for value in values):
        who = "; each is scaled by itself before all are accumulated, as by clipping, or a scale, in between"
    return f"the micro-batches weigh {shown} in {_whose(weights)}, where each should weigh 1{who}"


def _whose(weights: Weights) -> str:
    """Return a phrase for the gradients concerned."""
    if not weights.fqns:
        return "all gradients"
    return "the gradients of " + (
        f"{len(weights.fqns)} parameters, as {weights.fqns[0]},"
        if len(weights.fqns) > _NAMED
        else ", ".join(weights.fqns)
    )


def _overlap(values: Sequence[float], per_rank: int) -> str:
    """Return a sentence where some micro-batches count twice, and others instead not at all."""
    usual = statistics.median(values)
    gone = [index for index, value in enumerate(values) if abs(value) <= _CLOSE]
    twice = [index for index, value in enumerate(values) if math.isclose(value, 2 * usual, rel_tol=1e-4)]
    rest = [value for index, value in enumerate(values) if index not in (*gone, *twice)]
    if not gone or not twice or not all(math.isclose(value, usual, rel_tol=1e-4) for value in rest):
        return ""

    def say(indices: Sequence[int]) -> str:
        return ", ".join(f"{index % per_rank} of data-parallel rank {index // per_rank}" for index in indices[:_NAMED])

    return (
        f"the samples of micro-batch {say(twice)} are there twice, and those of micro-batch {say(gone)} are not: the "
        "parts of the batch that ranks take overlap"
    )


_MEAN_OF_MEANS = (
    "{whose} are a mean of means: every {what} weighs the same, whatever its number of valid tokens; the loss "
    "has to be summed and divided by the global count"
)


def _of_some_ranks(evidence: Evidence, whose: str, alive: Sequence[int], num_ranks: int) -> str:
    shown = " and ".join(map(str, alive))
    if any(drift.what == "gradients" for drift in evidence.drifts):
        over = " and ".join(_missing_axes(evidence, set(alive)))
        return (
            f"{whose} on rank 0 hold the samples of data-parallel rank {shown} alone, of {num_ranks}: a "
            f"reduction over {over} is missing"
        )
    why = "all ranks saw the same batch" if whose == "all gradients" else "nothing of the others gets there"
    if not evidence.is_loss_wrong():
        why = "each rank computed its own samples, and then those gradients are handed to all, as by a broadcast"
    return (
        f"{whose} hold the samples of data-parallel rank {shown} alone, of {num_ranks}, and are equal on all ranks: "
        f"{why}"
    )


def _missing_axes(evidence: Evidence, alive: set[int]) -> list[str]:
    """Return the batch axes along which samples are missing: those of all ranks along the others are there."""
    layout = evidence.layout
    axes = [name for name in layout.names(Role.BATCH) if layout.degrees[name] > 1]
    ranks = [rank for rank in range(layout.world_size) if layout.index(rank, Role.BATCH) in alive]
    seen = {name: {layout.coordinates(rank)[name] for rank in ranks} for name in axes}
    return [name for name in axes if len(seen[name]) < layout.degrees[name]] or axes


def _equal(values: Sequence[float]) -> bool:
    largest = max(abs(value) for value in values)
    return max(values) - min(values) <= _CLOSE * largest if largest else True


def _common_factors(evidence: Evidence) -> dict[float, list[str]]:
    """Return the parameters whose gradients are a multiple of the right ones, by the multiple."""
    step = evidence.first_wrong_step()
    found: dict[float, list[str]] = {}
    if step is None:
        return found
    for fqn, deviations in sorted(evidence.wrong("gradients", step=step).items()):
        factors = {float(f"{d.factor:.5g}") for d in deviations if d.factor is not None}
        if len(factors) == 1 and all(d.factor is not None for d in deviations):
            found.setdefault(factors.pop(), []).append(fqn)
    found.pop(0.0, None)
    found.pop(1.0, None)  # off by less than is told apart here
    return found


def _meaning(evidence: Evidence, factor: float) -> str:
    """Return the degree, or number of micro-batches, that a factor equals."""
    layout = evidence.layout
    meanings = []
    sizes = {name: degree for name, degree in layout.degrees.items() if degree > 1}
    if layout.degree(Role.BATCH) not in sizes.values():
        sizes["the data-parallel degree"] = layout.degree(Role.BATCH)
    for name, degree in sizes.items():
        is_tensor = name in layout.names(Role.TENSOR)
        if math.isclose(factor, degree, rel_tol=1e-4):
            how = "added up once too often" if is_tensor else "reduced once too often, or not averaged"
            if name in layout.names(Role.STAGE):
                how = "the copies of a parameter that several stages share are added up twice"
            meanings.append(f"{name} = {degree}: {how}")
        if math.isclose(factor, 1 / degree, rel_tol=1e-4):
            how = "averaged where it is to be added up" if is_tensor else "averaged once too often"
            meanings.append(f"1 / {name} = 1 / {degree}: {how}")
        for power, what in ((0.5, "the root of"), (-0.5, "1 / the root of")):
            if math.isclose(factor, degree**power, rel_tol=1e-4):
                meanings.append(f"{what} {name} = {degree}: scaled by the root of the degree")
        for other in (degree - 1, degree + 1):
            one_off = (f"{other} / {degree}", other / degree), (f"{degree} / {other}", degree / max(other, 1))
            if other > 1:
                meanings += [
                    f"{shown}, with {name} = {degree}: a rank too many or too few is divided by"
                    for shown, value in one_off
                    if math.isclose(factor, value, rel_tol=1e-4)
                ]
    norm = evidence.told.grad_norms["float64"][0] if "float64" in evidence.told.grad_norms else 0.0
    if evidence.grad_clip < norm and math.isclose(factor, evidence.grad_clip / (norm + 1e-6), rel_tol=1e-4):
        meanings.append(f"grad_clip / the norm = {evidence.grad_clip:g} / {norm:.4g}: clipped before the core clips")
    number = evidence.microbatches
    if number > 1 and math.isclose(factor, number, rel_tol=1e-4):
        meanings.append(f"the {number} micro-batches of a rank: the loss is not divided by their number")
    if number > 1 and math.isclose(factor, 1 / number, rel_tol=1e-4):
        meanings.append(f"1 / the {number} micro-batches of a rank: the loss is divided by their number twice")
    return "; that is " + ", or ".join(meanings) if meanings else ""
