"""Work of every position of a batch of packed documents, as far as its inputs show them.

Shapes: B samples, S positions, H heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, by_work

__all__ = ["balanced_positions"]

# Names of inputs that are another number in every document of a sample.
NUMBERED = re.compile(r"doc|seq_idx|sequence_id|segment_id|packing")
# Better by less than this is not worth the shorter runs of positions.
LEAST_GAIN = 0.02


def balanced_positions(inputs: Iterable[tuple[str, Tensor]], standard: Positions) -> Positions | None:
    """Return positions by which ranks have equal work in attention inside of documents; None where others are as good.

    A rank has as many positions as in the standard ones. Documents are seen in a mask of every query and key, in
    positions that begin anew, or in numbers of documents. All ranks find the same, as they have the same batch.

    Args:
        inputs: Names and values of the model's inputs that are whole.
        standard: Positions that know nothing of documents.
    """
    length, degree = standard.length, standard.degree
    if degree == 1 or not standard.is_even:
        return None
    work_S = next((work for name, x in inputs if (work := _work_of(name, x, length)) is not None), None)
    if work_S is None:
        return None
    found = by_work(work_S.tolist(), degree)
    one, other = (max(_work_by_rank(work_S, positions)) for positions in (standard, found))
    return found if other < (1 - LEAST_GAIN) * one else None


def _work_of(name: str, x: Tensor, length: int) -> Tensor | None:
    """Return of each position how many keys its queries see in all samples, int64 [S]; None if an input does not say.

    Attention without a mask that is given is taken to be causal.
    """
    if x.is_meta or x.ndim < 2 or x.shape[-1] != length:
        return None
    if x.ndim > 2 and x.shape[-2] == length:
        seen_HSS = x if x.dtype == torch.bool else x > torch.finfo(x.dtype).min / 2 if x.is_floating_point() else x != 0
        return seen_HSS.flatten(0, -3).sum((0, -1)).cpu()
    if x.ndim != 2 or x.is_floating_point():
        return None
    if name == "position_ids":
        starts_BS = torch.cat([torch.ones_like(x[:, :1]), x[:, 1:] - x[:, :-1] != 1], 1).bool()
    elif NUMBERED.search(name):
        starts_BS = torch.cat([torch.ones_like(x[:, :1]), x[:, 1:] != x[:, :-1]], 1).bool()
    else:
        return None
    at_S = torch.arange(length, device=x.device)
    return (at_S - torch.where(starts_BS, at_S, 0).cummax(1).values + 1).sum(0).cpu()


def _work_by_rank(work_S: Tensor, positions: Positions) -> list[int]:
    return [int(work_S[positions.index(rank)].sum()) for rank in range(positions.degree)]
