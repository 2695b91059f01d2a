"""Writes of a loop into optimizer state between steps, counted: shards differ between ranks, writes into them do not.

A moment that one rank scales differs from the others', and of a shard no other rank has the value. Every tensor
counts what is written into it; what is assigned in its place is counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.step.gradients import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OptimizerWrites"]


@dataclass(slots=True)
class _State:
    """One tensor of an optimizer's state, with what counts its writes: of a DTensor those through it, and its shard's.

    Args:
        fqn: Of its parameter.
        key: Of its parameter's states.
        states: Which these are.
        tensor: As the optimizer left it.
        counts: The tensor, and its shard.
    """

    fqn: str
    key: str
    states: dict[str, Any]
    tensor: Tensor
    counts: tuple[Tensor, ...]

    def version(self) -> int:
        return sum([each._version for each in self.counts])


class OptimizerWrites:
    """Counts the writes into an optimizer's state since its last step. Memory: references. Collectives: none.

    Args:
        named: Returns the parameters that the optimizer has, between steps, with their FQNs.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._named = named
        self._states: list[_State] = []
        self._versions: list[int] = []
        self._num_parameters = 0

    def stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Take the state as the optimizer's own, at the end of its step."""
        state = getattr(optimizer, "state", {})
        is_as_before = len(state) == self._num_parameters
        if not is_as_before or any([each.states.get(each.key) is not each.tensor for each in self._states]):
            names = {id(parameter): fqn for fqn, parameter in self._named()}
            self._states, self._num_parameters = list(_tensors(state, names)), len(state)
        self._versions = [each.version() for each in self._states]

    def forget(self) -> None:
        """Take what is written before the next step as not the loop's: a checkpoint that is loaded."""
        self._states, self._versions, self._num_parameters = [], [], 0

    def number(self) -> int:
        """Return a number that is alike where ranks have written alike; 0 where nothing is written."""
        return sum(self._counts())

    def described(self) -> dict[str, int]:
        """Return the writes by state."""
        return {
            f'writes between steps into the optimizer\'s "{each.key}" of "{each.fqn}"': count
            for each, count in zip(self._states, self._counts(), strict=True)
        }

    def _counts(self) -> list[int]:
        return [
            each.version() - version if each.states.get(each.key) is each.tensor else 1
            for each, version in zip(self._states, self._versions, strict=True)
        ]


def _tensors(state: Any, names: dict[int, str]) -> Iterator[_State]:
    import torch

    for parameter, states in state.items():
        for key, value in states.items() if isinstance(states, dict) else ():
            if key != "step" and isinstance(value, torch.Tensor) and not value.is_inference():
                plain = local(value)
                counts = (value,) if plain is value else (value, plain)
                fqn = names.get(id(parameter), "?")
                yield _State(fqn=fqn, key=key, states=states, tensor=value, counts=counts)
