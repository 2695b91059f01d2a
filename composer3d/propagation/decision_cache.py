"""Cache of decisions about functions on sharded tensors, so that a step need not decide again.

A decision follows from the function, its numbers, the sharding metadata of the sharded tensors among its arguments and
the shapes of replicated ones. Those are its key; other sizes give another key, and a new decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.whole_operands import Meeting
from composer3d.propagation.shards import PREFIX, TENSOR_AXIS, ShardSpec, attach, spec_of

__all__ = ["UNSHARDED", "Decision", "Memory", "Work", "as_it_is"]

# So many decisions are kept of one module: sizes that change all the time would fill any memory.
MOST = 4096
AUTOCAST = ("cpu", "cuda")
NUMBERS = (bool, int, float, complex)
NUMBER_KINDS = frozenset(NUMBERS)
HASHABLE = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))

count_function_modes = torch_compat.function_transforms.function_mode_counter()
is_any_autocast_on = torch_compat.function_transforms.autocast_question()
# In place of the key of a call on replicated tensors alone.
UNSHARDED = ()

# Does on local shards what a function does on replicated tensors; called without torch functions.
Work = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
# The same, of a forward's operands.
Decision = Callable[[Meeting, Any, Sequence[Any], dict[str, Any]], Any]
# Of arguments that are whole, by place: the dims of which a rank takes its shard, with their parts.
Narrowings = Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]


def as_it_is(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run a function on local shards; modes of others see it, as those do that compute in float64."""
    return torch_compat.call_beside(torch_compat.ModuleFunctions, func, args, options)


class Memory:
    """The decisions of one propagated module.

    Args:
        axis: Of the marks.
    """

    def __init__(self, axis: str = TENSOR_AXIS) -> None:
        self._axis, self._attribute = axis, PREFIX + axis
        self._decisions: dict[Any, Decision] = {}

    def key(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the key of a call; None if its arguments have no reliable key, `UNSHARDED` if none is sharded.

        Asked without torch functions, before every function of the model.
        """
        key: list[Any] = [func, torch.is_grad_enabled(), *_autocast()]
        found = _describe(args, key, self._attribute)
        if options and found is not None:
            key += options
            others = _describe(tuple(options.values()), key, self._attribute)
            found = None if others is None else found or others
        return tuple(key) if found else None if found is None else UNSHARDED

    def get(self, key: Any) -> Decision | None:
        """Return the decision for a key, if there is one."""
        return self._decisions.get(key)

    def keep(self, key: Any, work: Work, result: Any, narrowings: Narrowings) -> None:
        """Remember a decision.

        Args:
            key: Of the call.
            work: Runs the function on local shards.
            result: Its marked result; later results get the same marks.
            narrowings: Of its arguments.
        """
        if len(self._decisions) >= MOST:
            self._decisions.clear()
        if isinstance(result, Tensor):
            self._decisions[key] = _Single(work, narrowings, spec_of(result, self._axis))
            return
        with torch_compat.without_torch_functions():
            specs = [spec_of(leaf, self._axis) for leaf in torch_compat.tree_leaves(result)]
        self._decisions[key] = _Several(work, narrowings, specs)

    def keep_answer(self, key: Any, answer: Any) -> None:
        """Remember an answer that is no tensor, such as a size."""
        self._decisions[key] = lambda meeting, func, args, options: answer


class _Kept:
    def __init__(self, work: Work, narrowings: Narrowings) -> None:
        self._work, self._narrowings = work, narrowings

    def _narrowed(self, meeting: Meeting, args: Sequence[Any]) -> Sequence[Any]:
        """Return arguments with this rank's shards of what is whole."""
        given = list(args)
        for at, dims in self._narrowings.items():
            given[at] = meeting.narrow(given[at], dims)
        return given


class _Single(_Kept):
    def __init__(self, work: Work, narrowings: Narrowings, spec: ShardSpec | None) -> None:
        super().__init__(work, narrowings)
        self._spec, self._attribute = spec, "" if spec is None else PREFIX + spec.axis
        self._is_direct = work is as_it_is

    def __call__(self, meeting: Meeting, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the result, marked."""
        if self._narrowings:
            args = self._narrowed(meeting, args)
        if self._is_direct and not count_function_modes():
            result = func(*args, **options) if options else func(*args)
        else:
            result = self._work(func, args, options)
        if (spec := self._spec) is not None:
            setattr(result, self._attribute, spec)
        return result


class _Several(_Kept):
    def __init__(self, work: Work, narrowings: Narrowings, specs: Sequence[ShardSpec | None]) -> None:
        super().__init__(work, narrowings)
        self._specs = specs

    def __call__(self, meeting: Meeting, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the results, marked."""
        result = self._work(func, self._narrowed(meeting, args) if self._narrowings else args, options)
        for leaf, spec in zip(torch_compat.tree_leaves(result), self._specs, strict=True):
            if spec is not None:
                attach(leaf, spec)
        return result


def _autocast() -> tuple[bool, ...]:
    return tuple(map(torch.is_autocast_enabled, AUTOCAST)) if is_any_autocast_on() else ()


def _describe(values: Sequence[Any], key: list[Any], attribute: str) -> bool | None:
    """Append to a key what distinguishes arguments; return whether any is sharded, None if nothing tells them apart.

    Kinds by how often they come: it runs before every function of the model.
    """
    found = False
    for value in values:
        if isinstance(value, Tensor):
            spec, layout = getattr(value, attribute, None), value.layout
            if spec is not None:
                found = True
            strides = value.stride() if layout is torch.strided else layout
            key += (spec, value.shape, value.dtype, value.requires_grad, value.is_meta, strides)
        elif (kind := type(value)) in NUMBER_KINDS:
            # 1, 1.0 and True are equal.
            key += (kind, value)
        elif isinstance(value, HASHABLE):
            key.append(value)
        elif isinstance(value, list | tuple | slice):
            inner = (value.start, value.stop, value.step) if isinstance(value, slice) else value
            key += (kind, len(inner))
            one = _describe(inner, key, attribute)
            if one is None:
                return None
            found = found or one
        elif isinstance(value, NUMBERS):
            key += (kind, value)
        else:
            return None
    return found
