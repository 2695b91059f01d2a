"""Backwards through gathered parameters that have been resharded since: gathered again, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from composer3d import torch_compat
from composer3d.errors import StepError

if TYPE_CHECKING:
    from composer3d.torch_compat import Units

__all__ = ["LateGraphs"]

_LATE = (
    'a backward begins from a graph of "{}" as a forward had gathered it, and that copy has been freed since: '
    "autograd would read freed memory, and no optimizer has the gradient; where it is a penalty add it to the loss, "
    "run.backward(loss + penalty), or compute it anew after run.backward(loss)"
)
_WRITTEN = (
    'a backward begins from a graph of "{}" as a forward had gathered it, and the parameter has been written since, by '
    "an optimizer's step perhaps: its old values are gone, and one device refuses a graph that reads them; compute it "
    "anew from the values of now"
)


class LateGraphs:
    """Looks at the backwards that begin after a forward of the model, until the next one.

    What was computed from parameters that were gathered has saved these. A unit gathers them again where a gradient
    arrives at its outputs; for what was computed outside of it after its forward, inside of it and handed out past its
    outputs, or from a graph that an earlier backward has kept, nothing does: torch reads freed memory, which ends the
    process. So the graph is followed from where the backward begins to the outputs of units, which of a usual loss
    are a few nodes away. What it finds is gathered for the composition's backwards, and refused for others.

    Args:
        units: Of this rank's parts.
        is_meant: Whether the backward that begins is the composition's.

    Collectives: of the units that are gathered again, see `Units.gather_again`.
    """

    def __init__(self, units: Sequence[Units], is_meant: Callable[[], bool]) -> None:
        self._units, self._is_meant = units, is_meant
        self._backwards = torch_compat.LaterBackwards(self._look)
        self.shut = self._backwards.shut
        for each in units:
            each.entered, each.ended, each.outdated = self.shut, self._open, _refuse

    def _open(self) -> None:
        """Begin to look: a forward has ended."""
        if any(units.groups for units in self._units) and torch_compat.active_fake_mode() is None:
            self._backwards.open()

    def _look(self, nodes: Iterable[Any]) -> None:
        """Gather what a graph needs.

        Raises:
            StepError: The backward is the loop's own, or a parameter was written since; it names the parameter.
        """
        for units in self._units:
            freed = units.freed(nodes)
            if freed and not self._is_meant():
                raise StepError(_LATE.format(freed[0].fqn))
            for each in freed:
                if not each.is_current:
                    _refuse(each.fqn)
            if freed:
                units.gather_again(freed)


def _refuse(fqn: str) -> NoReturn:
    raise StepError(_WRITTEN.format(fqn))
