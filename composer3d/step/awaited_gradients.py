"""Retained gradients of micro-batches whose backward has not run, which a later forward of a pipeline may read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.observation.call_sites import beside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AwaitedGradients"]

# Of the attribute of a tensor that says whether its gradient may be read.
READ = "composer3d_awaited"


class AwaitedGradients:
    """Refuses that a forward takes the gradient of an earlier micro-batch, which one device has by then, for none.

    Args:
        is_in_forward: Returns whether a forward is at work.
    """

    def __init__(self, is_in_forward: Callable[[], bool]) -> None:
        self._is_in_forward, self._num_forwards = is_in_forward, 0
        self._awaited: list[weakref.ref[Any]] = []

    def count_forward(self) -> None:
        """Begin a forward of another micro-batch."""
        self._num_forwards += 1

    def add(self, tensor: Tensor) -> None:
        """Note an activation whose gradient this forward retains."""
        import torch

        if type(tensor) is not torch.Tensor:
            return
        number = self._num_forwards

        def refuse() -> None:
            if number != self._num_forwards and self._is_in_forward():
                raise StepError(
                    f"a forward reads .grad of an activation of an earlier micro-batch{beside()}, whose backward has "
                    "not run: in a pipeline forwards of later micro-batches come before it, and would find none where "
                    "one device has it; read it in the next step, or give a step one micro-batch"
                )

        setattr(tensor, READ, refuse)
        tensor.__class__ = _kind()
        self._awaited.append(weakref.ref(tensor))

    def end(self) -> None:
        """End the backwards: what has no gradient now has none on one device."""
        import torch

        awaited, self._awaited = self._awaited, []
        for reference in awaited:
            if (tensor := reference()) is not None:
                delattr(tensor, READ)
                tensor.__class__ = torch.Tensor


@functools.cache
def _kind() -> Any:
    import torch

    plain: Any = torch.Tensor.grad

    class Awaited(torch.Tensor):
        """A tensor whose retained gradient is awaited."""

        __torch_function__ = torch_compat.no_torch_function()

        @property
        def grad(self) -> Any:
            found = plain.__get__(self)
            if found is None and (refuse := vars(self).get(READ)) is not None:
                refuse()
            return found

        @grad.setter
        def grad(self, gradient: Any) -> None:
            plain.__set__(self, gradient)

        @grad.deleter
        def grad(self) -> None:
            plain.__delete__(self)

    return Awaited
