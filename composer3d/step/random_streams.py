"""Random streams: dropout draws depend only on seed, step, micro-batch and the rank's coordinates.

Two streams a rank. Ranks along tp hold the same activations between their sharded regions, so dropout there must draw
the same numbers: the *replicated* stream does not depend on tp. Inside sharded regions each rank holds other values:
the *sharded* stream does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer3d.initialisation import seed_of
from composer3d.mesh import Layout, Role

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Streams"]


class Streams:
    """The random streams of one rank; outside micro-batches the loop's own random state is left as it is."""

    def __init__(self, *, seed: int, layout: Layout, rank: int, device: torch.device) -> None:
        coordinates = layout.coordinates(rank)
        shared = layout.names(Role.STAGE, Role.BATCH, Role.SEQUENCE, Role.EXPERT, Role.INDEPENDENT)
        own = layout.names(Role.TENSOR)
        self._seed = seed
        self._device = device
        self._replicated = "/".join(f"{name}={coordinates[name]}" for name in shared)
        self._sharded = "/".join([self._replicated, *(f"{name}={coordinates[name]}" for name in own)])
        self._place = (0, 0, 0)
        self._outside: list[Tensor] | None = None

    def enter(self, step: int, microbatch: int, stage: int = 0) -> None:
        """Start the replicated stream of a micro-batch in torch's default generators."""
        if self._outside is None:
            self._outside = self._states()
        self._place = (step, microbatch, stage)
        self._set(self._replicated, 0)

    def leave(self) -> None:
        """Restore the random state from before the first `enter`; nothing if there was none."""
        if self._outside is not None:
            self._restore(self._outside)
            self._outside = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Run the backward of a forward that has left the stream; the random state is restored afterwards.

        A recomputation inside sets the state of its forward; regions that draw from the sharded stream then go on in
        the replicated one, as they did there.
        """
        self._outside = self._states()
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def sharded(self, site: int) -> Iterator[None]:
        """Draw from the sharded stream inside.

        Inside a micro-batch the replicated stream continues with another seed afterwards, and the sharded one depends
        on the seed before: two draws at one site differ, and a recomputation, for which torch restores the generators,
        repeats its draws.

        Args:
            site: Identifies the place of the draw within a micro-batch.
        """
        import torch

        before, states = torch.default_generator.initial_seed(), self._states() if self._outside is None else None
        self._set(self._sharded, site + 1, before)
        try:
            yield
        finally:
            if states is None:
                self._set(self._replicated, 1, before)
            else:
                self._restore(states)

    def _states(self) -> list[Tensor]:
        import torch

        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _restore(self, states: list[Tensor]) -> None:
        import torch

        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    def _set(self, name: str, site: int, *before: int) -> None:
        import torch

        seed = seed_of(self._seed, *self._place, name, site, *before)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)
