"""Hooks on gradients of several tensors, `torch.autograd.graph.register_multi_grad_hook`, of which some are parameters.

Gradients of parameters are final when a backward has ended, and torch's own hook, which counts what a backward brings,
would be called with a rank's, or never. So what the backward brings of the other tensors waits for these.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from composer3d.step.losses.inside_values import InsideValues
from composer3d.torch_compat.backward_hooks import SharedHook, shared_hook

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["SharedHooks"]


class SharedHooks:
    """Calls such hooks once a backward, when the last of their gradients is there.

    Memory: gradients of the other tensors, until the backward has ended.

    Args:
        context: Of the run.
        is_parameter: Returns whether a leaf is one that the run trains.
    """

    def __init__(self, context: RunContext, is_parameter: Callable[[Tensor], bool]) -> None:
        self._inside, self._is_parameter = context.stash(InsideValues), is_parameter
        self._given: dict[Any, tuple[SharedHook, dict[int, Tensor]]] = {}
        self._num_calls: dict[Any, int] = {}
        self._left: Counter[Any] = Counter()

    def begin(self) -> None:
        """Begin a backward."""
        self._given.clear()
        self._num_calls.clear()

    def expect(self, hooks: Iterable[Any]) -> None:
        """Note of hooks on parameters whether other tensors call them in this backward."""
        for shared in filter(None, map(shared_hook, hooks)):
            if shared.place is None:
                self._num_calls[shared.key] = shared.num_calls()

    def await_last(self, hooks: Iterable[Any]) -> None:
        """Note the hooks of parameters with gradients, which are called next."""
        self._left = Counter(shared.key for shared in filter(None, map(shared_hook, hooks)))

    def of_activation(self, hook: Any) -> Any:
        """Return a hook on an activation that waits, if it shares one with parameters."""
        shared = shared_hook(hook)
        if shared is None or shared.place is None or not any(map(self._is_parameter, shared.leaves)):
            return hook
        return self._taking(shared)

    def called(self, hook: Any) -> Any:
        """Return what is called with a parameter's gradient in place of a hook: itself, if no other tensor has it."""
        shared = shared_hook(hook)
        if shared is None:
            return hook
        take = self._taking(shared) if shared.place is not None else None

        def last(gradient: Tensor) -> None:
            if take is None:
                if self._num_calls.get(shared.key) == shared.num_calls():
                    self._num_calls[shared.key] = -1
                    shared.function(gradient)
                return
            take(gradient)
            self._left[shared.key] -= 1
            if not self._left[shared.key]:
                self._call(shared.key)

        return last

    def end(self) -> None:
        """Call what has waited for parameters that no backward has reached."""
        for key in list(self._given):
            self._call(key)

    def _taking(self, shared: SharedHook) -> Callable[[Tensor], None]:
        @functools.wraps(shared.function, updated=())
        def take(gradient: Tensor) -> None:
            assert shared.place is not None, "it takes all gradients"
            self._given.setdefault(shared.key, (shared, {}))[1][shared.place] = gradient

        return take

    def _call(self, key: Any) -> None:
        shared, given = self._given.pop(key)
        later = self._inside.later
        with contextlib.nullcontext() if later is None else later():
            shared.function([given.get(place) for place in range(shared.num)])
