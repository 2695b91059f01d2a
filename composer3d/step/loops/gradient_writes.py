"""Writes of a loop into gradients between a backward and the optimizer's step, counted.

A gradient that one rank scales is another one than on the others, and of shards nobody else has the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from composer3d.step.gradients import local

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["GradientWrites"]


class GradientWrites:
    """Counts writes into gradients, and gradients that others are assigned for. Memory: references. Collectives: none.

    Writes through `.data` are not counted.

    Args:
        named: Returns the parameters with their FQNs.
        compares: False where no other rank is there, so that nothing is counted.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]], *, compares: bool = True) -> None:
        self._named, self._compares = named, compares
        self._parameters: Sequence[nn.Parameter] = ()
        self._gradients: list[Tensor | None] = []
        self._counts: list[Tensor] = []
        self._versions: list[int] = []
        self._found: dict[int, int] = {}  # by place among the parameters
        self._told: dict[int, int] = {}
        self._names: dict[int, int] = {}  # by the same the parameter's `id`

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients as the engine's own from here on."""
        import torch

        if not self._compares:
            return
        with torch.no_grad():  # else every DTensor would make a node of a graph
            self._parameters, self._gradients = parameters, [parameter.grad for parameter in parameters]
            found = [gradient for gradient in self._gradients if gradient is not None]
            self._counts = [each for gradient in found for each in (gradient, local(gradient))]
        self._versions = [each._version for each in self._counts]

    def end(self) -> None:
        """Count what was written since `begin`, before the engine writes again."""
        versions = [each._version for each in self._counts]
        now = [parameter.grad for parameter in self._parameters]
        if versions != self._versions or any([one is not two for one, two in zip(now, self._gradients, strict=True)]):
            self._add(now, versions)
        self._parameters, self._gradients, self._counts, self._versions = (), [], [], []

    def _add(self, now: Sequence[Tensor | None], versions: Sequence[int]) -> None:
        changes = iter([one != two for one, two in zip(versions, self._versions, strict=True)])
        for place, (gradient, before) in enumerate(zip(now, self._gradients, strict=True)):
            is_written = before is not None and any([next(changes), next(changes)])
            if is_written or gradient is not before:
                self._found[place] = self._found.get(place, 0) + 1
                self._names[place] = id(self._parameters[place])

    def stepped(self) -> None:
        """Begin the next step: what was counted is compared when it opens."""
        self.end()
        self._told, self._found = self._found, {}

    def number(self) -> int:
        """Return a number that is alike where ranks have written alike; 0 where nothing is written."""
        return hash(tuple(sorted(self._told.items()))) if self._told else 0

    def described(self) -> dict[str, int]:
        """Return the writes by parameter."""
        counts = {self._names[place]: count for place, count in self._told.items()}
        return {
            f'writes into the gradient of "{fqn}" after its last backward': counts.get(id(parameter), 0)
            for fqn, parameter in self._named()
        }
