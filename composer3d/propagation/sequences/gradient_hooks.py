"""Hooks on gradients of a sharded sequence, whose code relates positions as on one device.

A hook on an activation, or of a module, is called with the gradient of this rank's positions, marked as the activation
is, in a propagation of its own: `g.mean(1)` and `g.shape[1]` are those of all positions. Of what every rank has whole
each has a part of the gradient: hooks are called with the sum.

Shapes as in `sequence_mode`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.padded_sequences import tokens_of, with_padding
from composer3d.propagation.sequences.rowwise_modules import EachRow, Rows
from composer3d.propagation.sequences.sequence_operands import SequenceOperands, gather_parts
from composer3d.propagation.shards import (
    SEQUENCE,
    PropagationError,
    ShardSpec,
    attach,
    copy_mark,
    interned,
    mark,
    shadow_of,
    spec_of,
    strip,
    unmark,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradientHooks", "hook_name", "passed_on"]

# Of the attribute of a tensor that a block, run by itself, takes or returns without its mark, before the axis.
PASSED = "composer3d_passed_"
# Of that of a hook that is called as on one device.
FOLLOWED = "composer3d_followed"
# In place of the mark of a tensor that every rank has whole.
WHOLE = "whole"
# In that of an output whose positions are in another order.
UNKNOWN = "unknown"
# What is known of a gradient's tensor; None where nothing is, and hooks are called as they are.
Kind = ShardSpec | Rows | str | None


class Mode(Protocol):
    """Makes the propagation in which a hook runs, of its name and of tokens by padded lengths."""

    def __call__(self, padded: Mapping[int, int], *, hook: str) -> contextlib.AbstractContextManager[Any]:
        """Return it."""


def passed_on(tensor: Tensor, spec: ShardSpec | None) -> None:
    """Remove a tensor's mark, which hooks know still, as it leaves a block; or keep that of one that enters it."""
    if spec is not None:
        unmark(tensor, spec.axis)
        setattr(tensor, PASSED + spec.axis, spec)


class GradientHooks:
    """Calls hooks on gradients of a sharded sequence as one device does.

    Attributes:
        padded: Returns numbers of tokens by padded lengths, of the batch at work: hooks see tokens alone.
        inputs: Returns the dims along which positional arguments of the whole model are sharded; None where its own
            hooks are as they are.
        is_alike: Returns whether losses are computed of whole outputs, by all ranks alike.
        are_hooked: Whether any hook has been called.
        asking: Makes the context of a backward whose gradients code asks for, of a loss of all ranks alike.

    Memory: what hooks gather. Collectives: those of what hooks relate; of tensors that every rank has whole, one
        all-reduce of the gradient.

    Args:
        degree: Ranks along the axis.
        rules: Of the plugin that shards the sequence.
        mesh: Of one dim, the axis; None in a dry run on meta.
        axis: Its name.
        mode: Makes the propagation in which a hook runs.
    """

    def __init__(
        self,
        degree: int,
        *,
        rules: SequenceRules,
        mesh: DeviceMesh | None,
        axis: str,
        mode: Mode,
    ) -> None:
        self._degree, self._rules, self._mesh, self.axis, self._mode = degree, rules, mesh, axis, mode
        self.padded: Callable[[], Mapping[int, int]] = dict
        self.inputs: Callable[[tuple[Any, ...]], Mapping[int | str, int]] | None = None
        self.is_alike: Callable[[], bool] = lambda: False
        self.are_hooked = False
        self.asking: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.at_work: Callable[[], Any] = lambda: None

    def of_tensor(
        self, tensor: Tensor, hook: Callable[[Tensor], Any], *, is_inside: bool | None = None
    ) -> Callable[[Tensor], Any]:
        """Return a hook on a tensor that is called as on one device.

        Args:
            tensor: Of which it is a hook.
            hook: As registered; those of torch's data parallelism, and of this package, are as they are.
            is_inside: Whether what has no mark is whole on every rank; None: as there is a propagation at work.
        """
        if tensor.is_leaf:
            return hook
        mode = self.at_work()
        if mode is not None and mode.pauses:
            return self._of_kind(self._kind(tensor, other=Rows(mode.pauses[0][1])), hook)
        if is_inside is None:
            is_inside = mode is not None or self.is_alike()
        return self._of_kind(self._kind(tensor, other=WHOLE if is_inside else None), hook)

    def of_output(self, output: Tensor) -> Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]:
        """Return what makes of a hook on an output of the model one that is called as on one device."""
        return functools.partial(self._of_kind, self._kind(output, other=WHOLE))

    def pass_output(self, output: Tensor, other: Tensor | None, spec: ShardSpec | None) -> None:
        """Mark for hooks alone what the whole model returns, or another tensor in its place: gathered, or tokens."""
        if other is None:
            passed_on(output, spec)
        elif spec is not None and other.shape[spec.placed.dim] <= output.shape[spec.placed.dim]:
            setattr(other, PASSED + spec.axis, spec if len(spec.placed.parts) == 1 else UNKNOWN)

    def pass_inputs(self, given: tuple[Any, ...]) -> None:
        """Mark what the whole model is given, for hooks alone."""
        for at, dim in (self.inputs(given) if self.inputs is not None else {}).items():
            if isinstance(at, int) and isinstance(x := given[at], Tensor):
                placed = Placed(dim=dim, parts=(x.shape[dim] * self._degree,))
                with torch_compat.without_torch_functions():
                    view, sources = x.view_as(x), frozenset({SEQUENCE})
                mark(view, placed=placed, degree=self._degree, sources=sources, axis=self.axis)
                setattr(x, PASSED + self.axis, spec_of(view, self.axis))

    def whole_of(self, tensor: Tensor, *, is_output: bool = False) -> Callable[[Tensor], Tensor]:
        """Return what makes of this rank's gradient of a tensor that of one device.

        Raises:
            PropagationError: It is computed in a loss of this rank's positions, and is not known as a shard.
        """
        if (mode := self.at_work()) is not None and mode.pauses and not is_output:
            raise PropagationError(
                f'retain_grad inside of "{mode.pauses[0][1]}"{beside()}, whose rows are of a rank\'s positions, '
                "in any order: its gradient is that of these rows; write it for what the module is given, or returns"
            )
        is_inside = is_output or self.at_work() is not None or self.is_alike()
        kind, padded = self._kind(tensor, other=WHOLE if is_inside else None), dict(self.padded())
        if kind is None or kind == UNKNOWN:
            raise PropagationError(
                f"retain_grad of what a loss computes of a rank's own positions{beside()}: its gradient is that of a "
                "shard; write it for the model's output, or for what a module of the model returns"
            )

        def whole(gradient: Tensor) -> Tensor:
            with torch_compat.without_torch_functions():
                if self._mesh is not None and isinstance(kind, ShardSpec):
                    return self.gathered(gradient, kind, padded)
                result: Tensor = self._given(gradient, kind, padded)
                return result

        return whole

    def of_legacy(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of a module's last function that is refused where it relates positions."""

        @functools.wraps(hook, updated=())
        def guarded(*given: Any) -> Any:
            with EachRow(f"the backward hook {hook_name(hook)}", None):
                return hook(*given)

        return guarded

    def summed(self, gradient: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of a gradient of what all of them are given whole."""
        result: Tensor = self._given(gradient, WHOLE, {})
        return result

    def _of_kind(self, kind: Kind, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        shared = torch_compat.backward_hooks.shared_hook(hook)
        own = hook if shared is None else shared.function
        module = str(getattr(own, "__module__", None) or type(getattr(own, "__self__", own)).__module__)
        is_followed = getattr(hook, FOLLOWED, False)
        if kind is None or is_followed or module.startswith(("torch.distributed", "composer3d")):
            return hook
        if kind == UNKNOWN:
            raise PropagationError(
                f"{hook_name(own)}: a hook on an output that has several sequences one after another in a dim, of "
                "which each rank has its positions; register it on what the model's last block returns"
            )
        padded = dict(self.padded())
        where = f"the hook {hook_name(own)}"
        if isinstance(kind, Rows) and shared is not None and shared.num > 1:
            raise PropagationError(
                f'{where}: a hook on gradients of several tensors inside of "{kind.module}"{beside()}, whose rows are '
                "of a rank's positions, in any order: register one on each tensor, or on what the module returns"
            )

        def propagated(gradient: Tensor) -> Any:
            self.are_hooked = True
            given = self._given(gradient, kind, padded)
            version = given._version
            with self._mode_of([kind], padded, where):
                returned = hook(given)
            is_written = returned is None and given._version != version and not _is_share(kind, padded)
            return self._returned(given if is_written else returned, gradient, kind, padded, where)

        if hasattr(own, "__name__"):
            functools.update_wrapper(propagated, own, updated=())
        propagated.__module__ = module
        setattr(propagated, FOLLOWED, True)
        return propagated

    def follow(self, model: nn.Module, rowwise: Collection[str], at_work: Callable[[], Any]) -> None:
        """Let backward hooks of a part's modules be called as on one device.

        Args:
            model: The part.
            rowwise: FQNs of modules that work on local shards, inside of which hooks are as they are.
            at_work: Returns the propagation at work, if any.
        """

        def followed(fqn: str) -> _Call | None:
            mode = at_work()
            rows = Rows(mode.pauses[0][1]) if mode is not None and mode.pauses else None
            return _Call(self, fqn, other=rows or (None if mode is None and fqn else WHOLE))

        self.at_work = at_work
        for fqn, module in model.named_modules():
            if fqn or self.inputs is not None:
                torch_compat.backward_hooks.follow_gradients(module, functools.partial(followed, fqn))

    def call(self, where: str, hook: Callable[..., Any], module: Any, groups: Sequence[tuple[Any, Any]]) -> Any:
        """Call a backward hook of a module.

        Args:
            where: For messages.
            hook: As registered.
            module: Its.
            groups: Gradients with what is known of their tensors; those that the hook returns are of the first.
        """
        self.are_hooked, padded = True, dict(self.padded())
        given = [
            tuple(self._given(each, kind, padded) for each, kind in zip(gradients, kinds, strict=True))
            for gradients, kinds in groups
        ]
        with self._mode_of([kind for _, kinds in groups for kind in kinds], padded, where):
            returned = hook(module, *given)
        gradients, kinds = groups[0]
        if not isinstance(returned, tuple | list) or len(returned) != len(kinds):
            return returned
        pairs = zip(returned, gradients, kinds, strict=True)
        return tuple(self._returned(value, each, kind, padded, where) for value, each, kind in pairs)

    def _mode_of(
        self, kinds: Sequence[Kind], padded: Mapping[int, int], where: str
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the mode in which a hook runs that is given gradients of these kinds."""
        rows = next((kind for kind in kinds if isinstance(kind, Rows)), None)
        return self._mode(padded, hook=where) if rows is None else EachRow(where, rows.module)

    def _kind(self, value: Any, *, other: Kind) -> Kind:
        """Return what is known of a tensor; of one without a mark `other`."""
        if not isinstance(value, Tensor):
            return None
        return spec_of(value, self.axis) or getattr(value, PASSED + self.axis, None) or other

    def passed(self, value: Tensor) -> ShardSpec | None:
        """Return what is known of a shard that has left the model without its mark."""
        found = getattr(value, PASSED + self.axis, None)
        return found if isinstance(found, ShardSpec) else None

    def _given(self, gradient: Any, kind: Kind, padded: Mapping[int, int]) -> Any:
        if not isinstance(gradient, Tensor) or kind is None or isinstance(kind, Rows) or self._mesh is None:
            return gradient
        if isinstance(kind, str):
            whole = gradient.clone(memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(whole, group=self._mesh.get_group())
            return whole
        if _is_share(kind, padded):
            return attach(gradient.view_as(gradient), _sized(kind, gradient))
        return self.gathered(gradient, kind, padded)

    def gathered(self, gradient: Tensor, kind: ShardSpec, padded: Mapping[int, int]) -> Tensor:
        """Return the gradient of all tokens; an output of a padded sequence has none for a rank's padding."""
        with torch_compat.without_torch_functions():
            dim = kind.placed.dim
            missing = self._rules.local_length(sum(kind.placed.parts)) - gradient.shape[dim]
            if missing > 0 and len(kind.placed.parts) == 1:
                zeros = gradient.new_zeros([*gradient.shape[:dim], missing, *gradient.shape[dim + 1 :]])
                gradient = torch.cat([gradient, zeros], dim)
            return tokens_of(gather_parts(gradient, kind.placed, self._rules), kind, padded)

    def _returned(self, value: Any, gradient: Any, kind: Kind, padded: Mapping[int, int], where: str) -> Any:
        """Return this rank's share of what a hook has returned."""
        if not isinstance(value, Tensor) or kind is None or isinstance(kind, Rows) or self._mesh is None:
            return value
        spec = spec_of(value, self.axis)
        with torch_compat.without_torch_functions():
            if isinstance(kind, ShardSpec) and spec is not None and spec.placed == kind.placed:
                if _is_share(kind, padded):
                    return strip(value)
            whole = strip(value) if spec is None else gather_parts(strip(value), spec.placed, self._rules)
            if isinstance(kind, str):
                return whole / self._degree
            shape = list(gradient.shape)
            shape[kind.placed.dim] = sum(padded.get(length, length) for length in kind.placed.parts)
            if list(whole.shape) != shape:
                raise PropagationError(
                    f"{where} returns {list(whole.shape)} in place of a gradient of {shape}; return one of its size"
                )
            whole = with_padding(whole, kind, padded)
            own = SequenceOperands(self._degree, self._mesh, self._rules)
            found: Tensor = own.indexed(whole, kind.placed.dim, kind.placed.parts)
            size = gradient.shape[kind.placed.dim]
            return found if size == found.shape[kind.placed.dim] else found.narrow(kind.placed.dim, 0, size)


class _Call:
    """One call of a module that has backward hooks.

    Args:
        hooks: Calls them.
        fqn: Of the module.
        other: What is known of tensors without a mark.
    """

    def __init__(self, hooks: GradientHooks, fqn: str, *, other: Kind) -> None:
        self._hooks, self._fqn, self._other = hooks, fqn, other
        self._inputs: tuple[Any, ...] = ()
        self._kinds: list[list[Kind]] = [[], []]

    def given(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Mark the inputs that the module is given in place of others."""
        self._mark(before, after)
        self._inputs = after
        if not self._fqn:
            self._hooks.pass_inputs(after)

    def returned(self, before: Any, after: Any) -> None:
        """Mark likewise what is returned in place of outputs, and remember the marks."""
        outputs = before if isinstance(before, tuple) else (before,)
        self._mark(outputs, after if isinstance(after, tuple) else (after,))
        for at, values in enumerate((self._inputs, outputs)):
            self._kinds[at] = [self._hooks._kind(value, other=self._other) for value in values]
        self._inputs = ()

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that is called as on one device."""

        def propagated(module: Any, *gradients: Any) -> Any:
            kinds = self._kinds[-len(gradients) :]  # a hook before the backward is given those of outputs alone
            where = f'the backward hook {hook_name(hook)} of "{self._fqn}"'
            return self._hooks.call(where, hook, module, list(zip(gradients, kinds, strict=True)))

        return propagated

    def _mark(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        for one, other in zip(before, after, strict=True):
            if isinstance(one, Tensor) and one is not other:
                copy_mark(one, other)
                passed_on(other, getattr(one, PASSED + self._hooks.axis, None))


def hook_name(hook: Any) -> str:
    """Return a hook's name, with its line where it has one."""
    name = str(getattr(hook, "__qualname__", type(hook).__name__)).rpartition("<locals>.")[2]
    code = getattr(hook, "__code__", None)
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _sized(spec: ShardSpec, gradient: Tensor) -> ShardSpec:
    """Return the mark of a gradient that an inner axis shards too, of which a hook sees this rank's shard there."""
    shape = list(gradient.shape)
    shape[spec.placed.dim] = spec.shadow.shape[spec.placed.dim]
    if shape == list(spec.shadow.shape):
        return spec
    return interned(replace(spec, shadow=shadow_of(shape, gradient.dtype)))


def _is_share(kind: Kind, padded: Mapping[int, int]) -> bool:
    """Return whether a hook is given this rank's positions, marked; of padded sequences it is given all tokens."""
    return isinstance(kind, ShardSpec) and not any(length in padded for length in kind.placed.parts)
