"""Batches that all data-parallel ranks are given alike, in the first steps of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from composer3d.mesh import Layout, Role

__all__ = ["SameBatches"]

log = logging.getLogger(__name__)

_NUM_STEPS = 3


class SameBatches:
    """Comparison of the batches of data-parallel ranks, until two of them differ.

    One step alike says little, as of a warm-up, and a loop that fits one batch on purpose is right to go on, so that
    several in a row are a warning, once.

    Args:
        layout: Axes and degrees.
        ranks: Those that share one global batch.

    Attributes:
        is_looking: Whether the next step's batches are compared.
    """

    def __init__(self, layout: Layout, ranks: Sequence[int]) -> None:
        others = layout.names(Role.TENSOR, Role.STAGE, Role.SEQUENCE)
        self._positions = [
            position
            for position, rank in enumerate(ranks)
            if not any(layout.coordinates(rank)[name] for name in others)
        ]
        self._num_alike = 0
        self.is_looking = len(self._positions) > 1

    def compare(self, digests: Sequence[int], *, is_this_first: bool) -> None:
        """Compare the digests of a step's batches, by position; log a warning where the first steps' are all alike.

        Args:
            digests: 0 where a rank has seen no batch.
            is_this_first: Whether this rank logs.
        """
        found = {digests[position] for position in self._positions}
        self._num_alike += 1
        self.is_looking = len(found) == 1 and found != {0} and self._num_alike < _NUM_STEPS
        if len(found) == 1 and found != {0} and self._num_alike == _NUM_STEPS and is_this_first:
            log.warning(
                "the %d data-parallel ranks were given the same batch in each of the first %d steps, so that every "
                "sample counts %d times and the global batch is no larger than one rank's; where that is not meant, "
                "iterate over run.loader(DataLoader(...)), which reads every rank's own part of each batch, or slice "
                "with run.context.data_parallel_rank",
                len(self._positions),
                _NUM_STEPS,
                len(self._positions),
            )
