"""Optimizer of any class that steps parameters of host memory on the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from composer3d_plugins.sharding.cpu_offload.pieces import split_groups
from composer3d_plugins.sharding.cpu_offload.transfers import Transfers

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["visiting"]


def visiting(cls: type[Optimizer], *, kept: Set[nn.Parameter], piece_bytes: int, transfers: Transfers) -> Any:
    """Return a subclass, of the same name, that copies parameters and gradients to the device piece by piece.

    State is made on the device and stays there.

    Args:
        cls: Any optimizer that updates each parameter independently.
        kept: Parameters in host memory.
        piece_bytes: Most bytes of parameters that are stepped at once.
        transfers: Copies between host and device.
    """
    base: Any = cls
    inner = inspect.unwrap(base.step)

    class Visiting(base):
        param_groups: list[dict[str, Any]]

        def step(self, closure: Any = None) -> None:
            """Step every piece, fetching the next one meanwhile."""
            import torch

            assert closure is None, "the composition refuses closures"
            groups = self.param_groups
            pieces = list(split_groups(groups, kept, piece_bytes))
            visits: dict[int, list[tuple[Any, Any]]] = {}
            try:
                with torch.no_grad():
                    visits |= _begin(pieces, 0, kept, transfers)
                    for index, piece in enumerate(pieces):
                        visits |= _begin(pieces, index + 1, kept, transfers)
                        transfers.wait(index)
                        self._step_piece(piece, visits.pop(index), index)
                    transfers.finish()
            finally:
                self.param_groups = groups

        def _step_piece(self, piece: list[dict[str, Any]], visits: list[tuple[Any, Any]], index: int) -> None:
            visitors = dict(visits)
            for parameter, visitor in visits:
                if parameter in self.state:
                    self.state[visitor] = self.state.pop(parameter)
            self.param_groups = [
                {**group, "params": [visitors.get(parameter, parameter) for parameter in group["params"]]}
                for group in piece
            ]
            inner(self)
            for parameter, visitor in visits:
                if visitor in self.state:
                    self.state[parameter] = self.state.pop(visitor)
            self.param_groups = piece  # visitors go when they are stored
            transfers.store(index, [(parameter.detach(), visitor.detach()) for parameter, visitor in visits])

    Visiting.__name__ = Visiting.__qualname__ = cls.__name__
    return Visiting


def _begin(
    pieces: list[list[dict[str, Any]]], index: int, kept: Set[nn.Parameter], transfers: Transfers
) -> dict[int, list[tuple[Any, Any]]]:
    """Start copying a piece's parameters and gradients to the device; return pairs of host and device ones."""
    import torch

    if index == len(pieces):
        return {}
    here = [parameter for parameter in _parameters(pieces[index]) if parameter in kept]
    moved = transfers.fetch(index, [tensor for p in here for tensor in (p.detach(), p.grad)])
    visits = []
    for position, parameter in enumerate(here):
        visitor = torch.nn.Parameter(moved[2 * position])
        visitor.grad = moved[2 * position + 1]
        visits.append((parameter, visitor))
    return {index: visits}


def _parameters(piece: list[dict[str, Any]]) -> Iterator[Any]:
    for group in piece:
        yield from group["params"]
