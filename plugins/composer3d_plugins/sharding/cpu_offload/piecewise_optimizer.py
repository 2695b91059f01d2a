"""Optimizer of any class whose state is fetched to the device piece by piece."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from composer3d_plugins.sharding.cpu_offload.pieces import split_groups
from composer3d_plugins.sharding.cpu_offload.transfers import Transfers

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["offloaded"]


def offloaded(cls: type[Optimizer], *, kept: Set[nn.Parameter], piece_bytes: int, transfers: Transfers) -> Any:
    """Return a subclass, of the same name, that steps pieces of its parameters one after the other.

    Args:
        cls: Any optimizer that updates each parameter independently.
        kept: Parameters whose state is in host memory between steps.
        piece_bytes: Most bytes of parameters that are stepped at once.
        transfers: Copies between host and device.
    """
    base: Any = cls
    # The bare step: hooks on the optimizer run once a step, not once a piece.
    inner = inspect.unwrap(base.step)
    hosts: dict[Any, Tensor] = {}

    class Offloaded(base):
        param_groups: list[dict[str, Any]]

        def step(self, closure: Any = None) -> None:
            """Step every piece, fetching the next one meanwhile."""
            import torch

            assert closure is None, "the composition refuses closures"
            groups = self.param_groups
            pieces = list(split_groups(groups, kept, piece_bytes))
            try:
                with torch.no_grad():
                    self._fetch(pieces, 0)
                    for index, piece in enumerate(pieces):
                        self._fetch(pieces, index + 1)
                        transfers.wait(index)
                        self.param_groups = piece
                        inner(self)
                        self._store(piece, index)
                    transfers.finish()
            finally:
                self.param_groups = groups

        def _fetch(self, pieces: list[list[dict[str, Any]]], index: int) -> None:
            if index < len(pieces):
                places = _moments(self.state, pieces[index], kept)
                moved = transfers.fetch(index, [state[name] for _, state, name in places])
                for (_, state, name), tensor in zip(places, moved, strict=True):
                    state[name] = tensor

        def _store(self, piece: list[dict[str, Any]], index: int) -> None:
            pairs = []
            for parameter, state, name in _moments(self.state, piece, kept):
                key = (parameter, name)
                if key not in hosts:
                    hosts[key] = transfers.allocate(state[name])
                pairs.append((hosts[key], state[name]))
                state[name] = hosts[key]
            transfers.store(index, pairs)

    Offloaded.__name__ = Offloaded.__qualname__ = cls.__name__
    return Offloaded


def _moments(
    states: Any, piece: list[dict[str, Any]], kept: Set[nn.Parameter]
) -> list[tuple[Any, dict[str, Any], str]]:
    """Return the state tensors of a piece's kept parameters that have their shape; counters stay on the device."""
    return [
        (parameter, states[parameter], name)
        for group in piece
        for parameter in group["params"]
        if parameter in kept
        for name, value in states.get(parameter, {}).items()
        if getattr(value, "shape", None) == parameter.shape and parameter.shape
    ]
