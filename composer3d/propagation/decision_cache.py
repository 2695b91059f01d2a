"""Cache of decisions about functions on sharded tensors, so that a step need not decide again.

A decision follows from the function, its numbers, the sharding metadata of the sharded tensors among its arguments and
the shapes of replicated ones. Those are its key; other sizes give another key, and a new decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.shards import TENSOR_AXIS, ShardSpec, attach, spec_of

__all__ = ["Decision", "Memory"]

# So many decisions are kept of one module: sizes that change all the time would fill any memory.
MOST = 4096
NUMBERS = (bool, int, float, complex)
HASHABLE = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))

# Does on local shards what a function does on replicated tensors.
Decision = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class Memory:
    """The decisions of one propagated module.

    Args:
        axis: Of the marks.
    """

    def __init__(self, axis: str = TENSOR_AXIS) -> None:
        self._axis = axis
        self._decisions: dict[Any, Decision] = {}

    def key(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the key of a call; None if its arguments have no reliable key."""
        key: list[Any] = [func, torch.is_grad_enabled()]
        if not all(_describe(each, key, self._axis) for each in (args, tuple(options), tuple(options.values()))):
            return None
        return tuple(key)

    def get(self, key: Any) -> Decision | None:
        """Return the decision for a key, if there is one."""
        return self._decisions.get(key)

    def keep(self, key: Any, work: Decision, result: Any) -> None:
        """Remember a decision.

        Args:
            key: Of the call.
            work: Runs the function on local shards.
            result: Its marked result; later results get the same marks.
        """
        if len(self._decisions) >= MOST:
            self._decisions.clear()
        if isinstance(result, Tensor):
            self._decisions[key] = _Single(work, spec_of(result, self._axis))
            return
        with torch_compat.without_torch_functions():
            specs = [spec_of(leaf, self._axis) for leaf in torch_compat.tree_leaves(result)]
        self._decisions[key] = _Several(work, specs)

    def keep_answer(self, key: Any, answer: Any) -> None:
        """Remember an answer that is no tensor, such as a size."""
        self._decisions[key] = lambda func, args, options: answer


class _Single:
    def __init__(self, work: Decision, spec: ShardSpec | None) -> None:
        self._work, self._spec = work, spec

    def __call__(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run on local shards, and mark the result."""
        with torch_compat.without_torch_functions():
            result = self._work(func, args, options)
            if self._spec is not None:
                attach(result, self._spec)
            return result


class _Several:
    def __init__(self, work: Decision, specs: Sequence[ShardSpec | None]) -> None:
        self._work, self._specs = work, specs

    def __call__(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run on local shards, and mark the results."""
        with torch_compat.without_torch_functions():
            result = self._work(func, args, options)
            for leaf, spec in zip(torch_compat.tree_leaves(result), self._specs, strict=True):
                if spec is not None:
                    attach(leaf, spec)
            return result


def _describe(values: Sequence[Any], key: list[Any], axis: str) -> bool:
    """Append to a key what distinguishes arguments; return False if nothing does."""
    for value in values:
        if isinstance(value, Tensor):
            spec = spec_of(value, axis)
            with torch_compat.without_torch_functions():
                key += (spec, value.shape, value.dtype, value.requires_grad, value.is_meta)
        elif isinstance(value, NUMBERS):
            # 1, 1.0 and True are equal.
            key += (type(value), value)
        elif isinstance(value, HASHABLE):
            key.append(value)
        elif isinstance(value, list | tuple):
            key += (type(value), len(value))
            if not _describe(value, key, axis):
                return False
        elif isinstance(value, slice):
            key.append(slice)
            if not _describe((value.start, value.stop, value.step), key, axis):
                return False
        else:
            return False
    return True
