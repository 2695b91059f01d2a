"""Refusal of backwards through gathered parameters that have been resharded since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError

if TYPE_CHECKING:
    from composer3d.torch_compat import Units

__all__ = ["LateGraphs"]

_LATE = (
    'a backward begins from a graph of "{}" as a forward had gathered it, and run.backward has freed that copy since: '
    "autograd would read freed memory, and no optimizer has the gradient; where it is a penalty add it to the loss, "
    "run.backward(loss + penalty), or compute it anew after run.backward(loss)"
)


class LateGraphs:
    """Looks at the backwards that a loop runs itself between a step's backward and the next forward.

    What was computed outside of the model from parameters that were gathered has saved these, and nothing gathers them
    again: torch reads the freed memory, which ends the process. A loop that runs no such backward pays nothing.

    Args:
        units: Of this rank's parts.
        is_meant: Whether the backward that begins is the composition's.
    """

    def __init__(self, units: Sequence[Units], is_meant: Callable[[], bool]) -> None:
        self._units, self._is_meant = units, is_meant
        self._backwards = torch_compat.LaterBackwards(self._look)
        self.shut = self._backwards.shut
        for each in units:
            each.gathers = self.shut

    def open(self) -> None:
        """Begin to look: a backward has ended, and the units are resharded."""
        if any(units.groups for units in self._units) and torch_compat.active_fake_mode() is None:
            self._backwards.open()

    def _look(self, nodes: Iterable[Any]) -> None:
        """Raise for a graph of gathered parameters that are freed.

        Raises:
            StepError: With the parameter.
        """
        if self._is_meant():
            return
        freed = {id(leaf): fqn for units in self._units for fqn, leaf in units.freed()}
        if (fqn := _reached(nodes, freed)) is not None:
            raise StepError(_LATE.format(fqn))


def _reached(nodes: Iterable[Any], freed: dict[int, str]) -> str | None:
    """Return the name of a leaf that a graph ends in; None where units are in it, which gather in its backward."""
    found: str | None = None
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name.startswith("RegisterPostBackwardFunction"):
            return None
        if name == "AccumulateGrad":
            found = freed.get(id(node.variable), found)
        pending += [operand for operand, _ in node.next_functions]
    return found
