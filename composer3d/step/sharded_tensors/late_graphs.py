"""Backwards through gathered parameters that have been resharded since: gathered again, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.torch_compat.fsdp_units.freed_copies import freed_copies, gather_again

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.torch_compat import Units

__all__ = ["LateGraphs"]

_LATE = (
    'a backward begins from a graph of "{}" as a forward had gathered it, and run.backward has freed that copy since: '
    "autograd would read freed memory, and no optimizer has the gradient; where it is a penalty add it to the loss, "
    "run.backward(loss + penalty), or compute it anew after run.backward(loss)"
)


class LateGraphs:
    """Looks at the backwards between a step's backward and the next forward.

    What was computed outside of the model from parameters that were gathered has saved these, and no hook gathers them
    again: torch reads the freed memory, which ends the process. The composition's own backward, of a penalty after the
    loss, gathers them first; those that a loop runs itself are refused. A loop that runs none of them pays nothing.

    Args:
        units: Of this rank's parts.
        is_meant: Whether the backward that begins is the composition's.
    """

    def __init__(self, units: Sequence[Units], is_meant: Callable[[], bool]) -> None:
        self._units, self._is_meant = units, is_meant
        self._backwards, self._is_open = torch_compat.LaterBackwards(self._look), False
        for each in units:
            each.gathers = self.shut

    def open(self) -> None:
        """Begin to look: a backward has ended, and the units are resharded."""
        if any(units.groups for units in self._units) and torch_compat.active_fake_mode() is None:
            self._is_open = True
            self._backwards.open()

    def shut(self) -> None:
        """Look no longer: units are gathered."""
        if self._is_open:
            self._is_open = False
            self._backwards.shut()

    def gather(self, loss: Tensor) -> None:
        """Gather what the graph of a loss reads of freed parameters, before the composition runs its backward.

        Collectives: an all-gather for each of their units.
        """
        if self._is_open:
            found, _ = _reached([loss.grad_fn], self._freed())
            for units in self._units:
                gather_again(units, found)

    def _freed(self) -> dict[int, str]:
        return {copy: fqn for units in self._units for copy, fqn in freed_copies(units).items()}

    def _look(self, nodes: Iterable[Any]) -> None:
        """Raise for a graph of gathered parameters that are freed.

        Raises:
            StepError: With the parameter.
        """
        if self._is_meant():
            return
        freed = self._freed()
        found, has_units = _reached(nodes, freed)
        if found and not has_units:
            raise StepError(_LATE.format(next(fqn for leaf, fqn in freed.items() if leaf in found)))


def _reached(nodes: Iterable[Any], freed: dict[int, str]) -> tuple[set[int], bool]:
    """Return the leaves among some that a graph ends in, by `id`, and whether units are in it.

    These gather in its backward, but after what the loop has computed from their outputs and from parameters.
    """
    found, has_units = set[int](), False
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        has_units = has_units or name.startswith("RegisterPostBackwardFunction")
        if name == "AccumulateGrad" and id(node.variable) in freed:
            found.add(id(node.variable))
        pending += [operand for operand, _ in node.next_functions]
    return found, has_units
