"""Decomposition of wrong gradients into those of micro-batches, each with a weight, as computed on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.verification.comparison import fit
from composer3d.verification.evidence.probes import loss_with, pieces_of
from composer3d.verification.reference_steps import Reference
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Weights", "bias_rank", "weighing_rank"]

_CLOSE = 1e-6
# Least number of elements per micro-batch for a fit.
_ROWS = 4
# Relative: losses of one computation in another order.
_SAME_LOSS = 1e-11


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The composed gradient as a weighted sum of the micro-batches' contributions to the right one.

    Args:
        values: One a micro-batch, rank by rank; all 1 in a right gradient.
        counts: Their valid tokens.
        residual: Residual of the fit, relative to the largest gradient.
        is_maximum: Whether it is the elementwise maximum over data-parallel ranks, times a factor.
        auxiliary: Weight of the auxiliary losses where that alone explains it; None elsewhere.
        fqns: Wrong gradients that it explains; empty for those of the whole model.
        lossy: Data-parallel rank of whose contribution some elements are missing; None where there is none.
    """

    values: list[float]
    counts: list[int]
    residual: float
    is_maximum: bool = False
    auxiliary: float | None = None
    fqns: tuple[str, ...] = ()
    lossy: int | None = None


def bias_rank(
    make_subject: Callable[[], Subject], degree: int, loss: float, candidates: Sequence[str], factor: int
) -> tuple[str, ...]:
    """Find, on one device, the biases that give a loss once multiplied by `factor`: all, or one alone."""
    from composer3d.processes import join_world

    subject = make_subject()
    join_world(subject.device)
    right = loss_with(subject, degree=degree, factors={})
    alone = {fqn: loss_with(subject, degree=degree, factors={fqn: factor}) for fqn in candidates}
    # Biases that are zero, as norms begin with, change nothing however often they are added.
    felt = tuple(fqn for fqn, found in alone.items() if abs(found - right) > _SAME_LOSS * abs(right))
    together = loss_with(subject, degree=degree, factors=dict.fromkeys(felt, factor))
    for chosen, found in ((felt, together), *(((fqn,), alone[fqn]) for fqn in felt)):
        if abs(found - loss) <= _SAME_LOSS * abs(loss):
            return chosen
    return ()


def weighing_rank(
    make_subject: Callable[[], Subject], folder: Path, degree: int, chosen: Sequence[str]
) -> Weights | None:
    """Fit the wrong gradients of the first step by the gradients of its micro-batches, on one device.

    Args:
        make_subject: As in `Session`.
        folder: As in `Session`.
        degree: Data-parallel degree.
        chosen: FQNs of the wrong ones. If they have too few elements for a fit, all gradients are fitted.
    """
    import torch

    from composer3d.processes import join_world

    subject = make_subject()
    join_world(subject.device)
    wrong = torch.load(folder / "wrong.pt")
    reference: Reference = torch.load(folder / "reference-float64.pt", weights_only=False)
    pieces = pieces_of(subject, 0, degree=degree)
    everything = sorted(set(wrong).intersection(*pieces))
    names = sorted(set(chosen).intersection(everything))
    if sum(wrong[fqn].numel() for fqn in names) < _ROWS * len(pieces):
        names = everything
    if not names:
        return None
    columns = torch.stack([torch.cat([piece[fqn].double().flatten() for fqn in names]) for piece in pieces], dim=1)
    target = torch.cat([wrong[fqn].double().flatten() for fqn in names])
    if columns.shape[0] != target.shape[0] or not bool(target.isfinite().all() and columns.isfinite().all()):
        return None
    values = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    rest = float((columns @ values - target).abs().max()) / max(float(target.abs().max()), 1e-300)
    shares = columns.view(columns.shape[0], degree, -1).sum(-1)
    largest = shares.max(dim=1).values
    found = fit(target, largest)
    return Weights(
        values=values.tolist(),
        counts=reference.steps[0].counts,
        residual=rest,
        is_maximum=degree > 1 and found is not None and found.residual <= _CLOSE,
        auxiliary=_auxiliary(subject, degree, names, columns.sum(dim=1), target) if rest > _CLOSE else None,
        fqns=tuple(names) if len(names) < len(everything) else (),
        lossy=_lossy(shares, target) if rest > _CLOSE and degree > 1 else None,
    )


def _lossy(shares: Tensor, wrong: Tensor) -> int | None:
    """Return the rank of whose contribution elements are missing, where all others' are complete."""
    off, size = wrong - shares.sum(dim=1), _CLOSE * float(shares.abs().max())
    for rank in range(shares.shape[1]):
        there, gone = off.abs() <= size, (off + shares[:, rank]).abs() <= size
        if bool((there | gone).all() and (there & ~gone).any() and (gone & ~there).any()):
            return rank
    return None


def _auxiliary(subject: Subject, degree: int, names: Sequence[str], right: Tensor, wrong: Tensor) -> float | None:
    """Return the weight of the auxiliary losses in a gradient, if nothing else is wrong with it."""
    import torch

    pieces = pieces_of(subject, 0, degree=degree, auxiliary_only=True)
    there = [torch.cat([piece[fqn].double().flatten() for fqn in names]) for piece in pieces if piece]
    found = fit(wrong - right, torch.stack(there).sum(dim=0)) if there else None
    return 1.0 + found.factor if found is not None and found.residual <= _CLOSE else None
