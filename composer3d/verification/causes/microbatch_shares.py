"""Rules for wrong gradients by the weights of their micro-batches: all 1 in a right gradient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from composer3d.mesh import Role
from composer3d.verification.causes.factor_meanings import meaning_of
from composer3d.verification.comparison import told_apart

if TYPE_CHECKING:
    from composer3d.verification.evidence.microbatch_weights import Weights
    from composer3d.verification.verdict import Evidence

__all__ = ["explain_shares"]

_CLOSE = 1e-6
_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """Weights that explain all wrong gradients.

    Args:
        evidence: Observations of all passes.
        whose: Phrase for the gradients concerned.
        ranks: Weights of the micro-batches of each data-parallel rank.
        counts: Their valid tokens.
    """

    evidence: Evidence
    whose: str
    ranks: list[list[float]]
    counts: list[list[int]]

    @property
    def values(self) -> list[float]:
        """Weights of all micro-batches, rank by rank."""
        return [*chain.from_iterable(self.ranks)]

    def everywhere(self, value: float) -> list[int]:
        """Return the micro-batches that have this weight on every rank."""
        columns = zip(*self.ranks, strict=True)
        return [index for index, column in enumerate(columns) if all(_is(weight, value) for weight in column)]


def explain_shares(evidence: Evidence) -> Iterator[str]:
    """Yield the first sentence on the micro-batches' weights that explains the wrong gradients."""
    weights = evidence.weights
    lines: Iterator[str] = iter(())
    if weights is not None:
        is_fit = weights.residual <= _CLOSE
        lines = chain(_of_fit(evidence, weights) if is_fit else (), (rule(evidence, weights) for rule in _BESIDES))
    yield from [line for line in chain(lines, _common_factor(evidence)) if line][:1]


def _of_fit(evidence: Evidence, weights: Weights) -> Iterator[str]:
    size = evidence.microbatches
    starts = range(0, len(weights.values), size)
    shares = _Shares(
        evidence=evidence,
        whose=_whose(weights),
        ranks=[weights.values[start : start + size] for start in starts],
        counts=[weights.counts[start : start + size] for start in starts],
    )
    if not (_equal(shares.values) and _is(statistics.fmean(shares.values), 1.0)):
        yield from (rule(shares) for rule in _OF_SHARES)


# ---- weights that explain everything ---------------------------------------------------------------------------------


def _scaled(shares: _Shares) -> str:
    if not _equal(shares.values):
        return ""
    factor = statistics.fmean(shares.values)
    return (
        f"{shares.whose} are {told_apart(factor, digits=6)} times the right ones{meaning_of(shares.evidence, factor)}"
    )


def _mean_of_means(shares: _Shares) -> str:
    weighed = [weight * count for weight, count in _pairs(shares.values, [*chain.from_iterable(shares.counts)])]
    of_ranks = [statistics.fmean(w) * sum(n) for w, n in zip(shares.ranks, shares.counts, strict=True)]
    what = "micro-batch" if _equal(weighed) else "rank" if all(map(_equal, shares.ranks)) and _equal(of_ranks) else ""
    if not what:
        return ""
    return (
        f"{shares.whose} are a mean of means: every {what} weighs the same, whatever its number of valid tokens; the "
        "loss has to be summed and divided by the global count"
    )


def _of_some_ranks(shares: _Shares) -> str:
    alive = [index for index, rank in enumerate(shares.ranks) if any(not _is(weight, 0.0) for weight in rank)]
    if len(alive) == len(shares.ranks):
        return ""
    evidence, shown, num_ranks = shares.evidence, " and ".join(map(str, alive)), len(shares.ranks)
    if any(drift.what == "gradients" for drift in evidence.drifts):
        over = " and ".join(_missing_axes(evidence, set(alive)))
        return (
            f"{shares.whose} on rank 0 hold the samples of data-parallel rank {shown} alone, of {num_ranks}: a "
            f"reduction over {over} is missing"
        )
    why = "all ranks saw the same batch" if shares.whose == _ALL else "nothing of the others gets there"
    if not evidence.is_loss_wrong():
        why = "each rank computed its own samples, and then those gradients are handed to all, as by a broadcast"
    return (
        f"{shares.whose} hold the samples of data-parallel rank {shown} alone, of {num_ranks}, and are equal on all "
        f"ranks: {why}"
    )


def _missing_axes(evidence: Evidence, alive: set[int]) -> list[str]:
    """Return the batch axes along which samples are missing: those of all ranks along the others are there."""
    layout = evidence.layout
    axes = [name for name in layout.names(Role.BATCH) if layout.degrees[name] > 1]
    ranks = [rank for rank in range(layout.world_size) if layout.index(rank, Role.BATCH) in alive]
    seen = {name: {layout.coordinates(rank)[name] for rank in ranks} for name in axes}
    return [name for name in axes if len(seen[name]) < layout.degrees[name]] or axes


def _late(shares: _Shares) -> str:
    size = shares.evidence.microbatches
    late = [2.0, *[1.0] * (size - 2), 0.0]
    if size < 2 or not all(_is(weight, due) for rank in shares.ranks for weight, due in _pairs(rank, late)):
        return ""
    return f"in {shares.whose} every micro-batch but the first adds what the one before it gave: a stale gradient"


def _not_counted(shares: _Shares) -> str:
    dead = shares.everywhere(0.0)
    if not dead:
        return ""
    return (
        f"the micro-batches {', '.join(map(str, dead))} of every rank do not count in {shares.whose}: they are "
        "overwritten instead of accumulated, or never run"
    )


def _overlap(shares: _Shares) -> str:
    """Some micro-batches count twice, and others instead not at all."""
    usual = statistics.median(shares.values)
    gone = [index for index, value in enumerate(shares.values) if _is(value, 0.0)]
    twice = [index for index, value in enumerate(shares.values) if math.isclose(value, 2 * usual, rel_tol=1e-4)]
    rest = [value for index, value in enumerate(shares.values) if index not in (*gone, *twice)]
    if not gone or not twice or not all(math.isclose(value, usual, rel_tol=1e-4) for value in rest):
        return ""
    size = shares.evidence.microbatches

    def shown(indices: Sequence[int]) -> str:
        return ", ".join(f"{index % size} of data-parallel rank {index // size}" for index in indices[:_NAMED])

    return (
        f"the samples of micro-batch {shown(twice)} are there twice, and those of micro-batch {shown(gone)} are not: "
        "the parts of the batch that ranks take overlap"
    )


def _twice(shares: _Shares) -> str:
    twice = shares.everywhere(2.0)
    if not twice or not all(_is(value, 1.0) or _is(value, 2.0) for value in shares.values):
        return ""
    return f"the micro-batches {', '.join(map(str, twice))} of every rank are counted twice in {shares.whose}"


def _weighed(shares: _Shares) -> str:
    alike = all(map(_equal, shares.ranks))
    why = ""
    if alike and shares.evidence.microbatches > 1:
        why = "; each rank's are scaled by a number of its own before they are reduced"
    elif not alike and all(value > 0 for value in shares.values):
        why = "; each is scaled by itself before all are accumulated, as by clipping, or a scale, in between"
    shown = ", ".join("1" if _is(value, 1.0) else told_apart(value) for value in shares.values)
    return f"the micro-batches weigh {shown} in {shares.whose}, where each should weigh 1{why}"


_OF_SHARES: tuple[Callable[[_Shares], str], ...] = (
    _scaled,
    _mean_of_means,
    _of_some_ranks,
    _late,
    _not_counted,
    _overlap,
    _twice,
    _weighed,
)


# ---- what weights alone do not explain -------------------------------------------------------------------------------


def _auxiliary(evidence: Evidence, weights: Weights) -> str:
    factor = weights.auxiliary
    if factor is None:
        return ""
    meaning = meaning_of(evidence, factor)
    return (
        f"the auxiliary loss weighs {told_apart(factor, digits=6)} times what it should, and all else is right{meaning}"
    )


def _maximum(evidence: Evidence, weights: Weights) -> str:
    if not weights.is_maximum:
        return ""
    axes = [name for name in evidence.layout.names(Role.BATCH) if evidence.layout.degrees[name] > 1]
    return (
        f"every element of the gradients is the largest that a data-parallel rank has: a reduction over "
        f"{' and '.join(axes)} takes the maximum, and not the sum"
    )


def _lossy(evidence: Evidence, weights: Weights) -> str:
    if weights.lossy is None:
        return ""
    return (
        f"of what data-parallel rank {weights.lossy} adds to {_whose(weights)} some elements are not there, and all "
        "else is right: they are dropped before the reduction on that rank, as by a compression that keeps the largest "
        "and carries nothing over"
    )


_BESIDES: tuple[Callable[[Evidence, Weights], str], ...] = (_auxiliary, _maximum, _lossy)


def _common_factor(evidence: Evidence) -> Iterator[str]:
    """Gradients of some parameters that are one multiple of the right ones, where there is no other."""
    step = evidence.first_wrong_step("gradients")
    wrong = {} if step is None else evidence.wrong("gradients", step=step)
    factors: dict[float, list[str]] = {}
    for fqn, found in sorted(wrong.items()):
        known = {None if d.factor is None else float(f"{d.factor:.5g}") for d in found}
        factor = known.pop() if len(known) == 1 else None
        # What is off by less than five digits show is 1.
        if factor is not None and factor not in (0.0, 1.0):
            factors.setdefault(factor, []).append(fqn)
    if len(factors) == 1:
        ((factor, fqns),) = factors.items()
        everything = {fqn for _, _, fqn, _ in evidence.deviations("gradients")}
        whose = f"{len(fqns)} parameters" if len(fqns) > _NAMED or len(fqns) == len(everything) else ", ".join(fqns)
        shown, meaning = told_apart(factor, digits=6), meaning_of(evidence, factor)
        yield f"the gradients of {whose} are {shown} times the right ones{meaning}"


_ALL = "all gradients"


def _whose(weights: Weights) -> str:
    """Return a phrase for the gradients concerned."""
    if not weights.fqns:
        return _ALL
    many = f"{len(weights.fqns)} parameters, as {weights.fqns[0]},"
    return f"the gradients of {many if len(weights.fqns) > _NAMED else ', '.join(weights.fqns)}"


def _pairs(one: Sequence[float], other: Sequence[float]) -> Iterator[tuple[float, float]]:
    return zip(one, other, strict=True)


def _is(weight: float, value: float) -> bool:
    return abs(weight - value) <= _CLOSE * max(1.0, abs(value))


def _equal(values: Sequence[float]) -> bool:
    largest = max(abs(value) for value in values)
    return max(values) - min(values) <= _CLOSE * largest if largest else True
