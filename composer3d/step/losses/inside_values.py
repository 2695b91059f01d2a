"""Values of a model's inside in losses, where a rank holds the shard of its own positions.

Modules keep losses and activations in attributes and lists, for the code that adds them up after the forward. Where a
plugin shards sequences, what a loop's own forward returns is whole on all ranks that share a sequence; what the loop
reads beside it is made whole where it is used, so that these ranks compute one loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from composer3d import torch_compat
from composer3d.mesh import Role

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.mesh import Layout

__all__ = ["InsideValues"]


class _ShardHooks(Protocol):
    """Calls hooks on gradients of shards as one device does."""

    def of_tensor(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a hook on an activation that is called with all positions."""

    def of_output(self, output: Tensor) -> Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]:
        """Return what makes of a hook on an output of a forward one that is called with all positions."""

    def whole_of(self, tensor: Tensor, *, is_output: bool) -> Callable[[Tensor], Tensor]:
        """Return what makes of a gradient of this rank's shard that of all positions."""

    def of_legacy(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of `register_backward_hook`, which may relate no positions."""

    def summed(self, gradient: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of a gradient."""


class InsideValues:
    """Follows shards of a model's inside into code after its forward.

    Attributes:
        axes: Along which ranks get whole outputs of a forward that the loop runs itself, and compute one loss.
        mode: Makes the mode of torch functions in which that code runs; None where nothing is sharded.
        later: Makes that of code after a batch, for which all that it reads is gathered; None likewise.
        are_kept: Returns whether the model may have kept anything for such code.
        are_hooked: Returns whether hooks of the loop's or the model's own may have.
        hooks: Calls hooks on gradients of shards; None where nothing is sharded.
        asking: Makes the context of a backward whose gradients code asks for, by `torch.autograd.grad`.
        closing: Ends the run for what code has kept of it.

    Memory: what the code gathers. Collectives: those of its gathers.
    """

    def __init__(self) -> None:
        self.axes: tuple[str, ...] = ()
        self.mode: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
        self.later: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
        self.are_kept: Callable[[], bool] = lambda: False
        self.are_hooked: Callable[[], bool] = lambda: False
        self.hooks: _ShardHooks | None = None
        self.asking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.closing: Callable[[], None] = lambda: None
        self._entered: Any = None

    def others(self, layout: Layout) -> list[str]:
        """Return the axes of samples and positions along which ranks compute losses of their own."""
        return [axis for axis in layout.names(Role.BATCH, Role.SEQUENCE) if axis not in self.axes]

    def begin(self) -> None:
        """Follow what a loop computes, until `end`: modes that it enters meanwhile are left before this one."""
        if self.mode is not None:
            self.are_hooked()  # hooks of this forward may be gone when its backward has ended
            self._enter(self.mode())

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Follow nothing of a batch inside; then what the loop reads of what hooks, or the model, have kept of it."""
        self.end()
        yield
        if self.later is not None and (self.are_kept() or self.are_hooked()):
            self._enter(self.later())

    def _enter(self, mode: Any) -> None:
        self._entered = mode
        torch_compat.function_transforms.enter_mode_below(mode)

    def end(self) -> None:
        """Follow nothing until the next forward."""
        entered, self._entered = self._entered, None
        if entered is not None:
            torch_compat.leave_mode(entered)

    def close(self) -> None:
        """Follow nothing any more: what code has kept is as it is from now on, or refused."""
        self.end()
        self.closing()

    @contextlib.contextmanager
    def over_loss(self) -> Iterator[None]:
        """Follow what a loss function computes."""
        self.end()
        with contextlib.nullcontext() if self.mode is None else self.mode():
            yield
