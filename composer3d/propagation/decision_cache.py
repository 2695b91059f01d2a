"""Cache of decisions about functions on sharded tensors, so that a step need not decide again.

A decision follows from the function, its numbers, the sharding metadata of the sharded tensors among its arguments and
the shapes of replicated ones. Those are its key; other sizes give another key, and a new decision. What a key has of a
sharded tensor is one object, its `LocalForm`, which is kept on the tensor: results have theirs from the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.whole_operands import Meeting
from composer3d.propagation.shards import PREFIX, TENSOR_AXIS, ShardSpec, spec_of

__all__ = ["UNSHARDED", "Decision", "Memory", "Work", "as_it_is"]

# So many decisions are kept of one module: sizes that change all the time would fill any memory.
MOST = 4096
AUTOCAST = ("cpu", "cuda")
NUMBERS = (bool, int, float, complex)
NUMBER_KINDS = frozenset(NUMBERS)
HASHABLE = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))

count_function_modes = torch_compat.function_transforms.function_mode_counter()
is_any_autocast_on = torch_compat.function_transforms.autocast_question()
is_grad_enabled = torch.is_grad_enabled
# In place of the key of a call on replicated tensors alone.
UNSHARDED = ()
# Of the attribute of a sharded tensor that has its form, before the axis.
FORM = "composer3d_form_"

# Does on local shards what a function does on replicated tensors; called without torch functions.
Work = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
# The same, of a forward's operands.
Decision = Callable[[Meeting, Any, Sequence[Any], dict[str, Any]], Any]
# Of arguments that are whole, by place: the dims of which a rank takes its shard, with their parts.
Narrowings = Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]


def as_it_is(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run a function on local shards; modes of others see it, as those do that compute in float64."""
    return torch_compat.call_beside(torch_compat.ModuleFunctions, func, args, options)


class LocalForm:
    """Key of a sharded tensor in decisions, beside whether it requires gradients; one object for equal tensors.

    It is kept on the tensor, and holds as long as the tensor has the same mark and nothing changes its sizes in place.

    Args:
        spec: The tensor's mark.
    """

    __slots__ = ("spec",)

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec


class Memory:
    """The decisions of one propagated module.

    Args:
        axis: Of the marks.
    """

    def __init__(self, axis: str = TENSOR_AXIS) -> None:
        self._axis, self._attribute, self._form = axis, PREFIX + axis, FORM + axis
        self._decisions: dict[Any, Decision] = {}
        self._forms: dict[Any, LocalForm] = {}

    def key(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the key of a call; None if its arguments have no reliable key, `UNSHARDED` if none is sharded.

        Asked without torch functions, before every function of the model.
        """
        key: list[Any] = [func, is_grad_enabled()]
        if is_any_autocast_on():
            key += map(torch.is_autocast_enabled, AUTOCAST)
        found = self._describe(args, key)
        if options and found is not None:
            key += options
            others = self._describe(tuple(options.values()), key)
            found = None if others is None else found or others
        return tuple(key) if found else None if found is None else UNSHARDED

    def _describe(self, values: Sequence[Any], key: list[Any]) -> bool | None:
        """Append to a key what distinguishes arguments; return whether any is sharded, None if nothing tells them.

        Kinds by how often they come: it runs before every function of the model.
        """
        found = False
        for value in values:
            if isinstance(value, Tensor):
                if (spec := getattr(value, self._attribute, None)) is None:
                    key += (None, value.requires_grad, *_sizes_of(value))
                    continue
                found, form = True, getattr(value, self._form, None)
                if form is None or form.spec is not spec:
                    form = self._formed(value, spec)
                key += (form, value.requires_grad)
            elif (kind := type(value)) in NUMBER_KINDS:
                # 1, 1.0 and True are equal.
                key += (kind, value)
            elif isinstance(value, HASHABLE):
                key.append(value)
            elif isinstance(value, list | tuple | slice):
                inner = (value.start, value.stop, value.step) if isinstance(value, slice) else value
                key += (kind, len(inner))
                one = self._describe(inner, key)
                if one is None:
                    return None
                found = found or one
            elif isinstance(value, NUMBERS):
                key += (kind, value)
            else:
                return None
        return found

    def _formed(self, tensor: Tensor, spec: ShardSpec) -> LocalForm:
        """Return the form of a sharded tensor, which is kept on it."""
        key = (spec, *_sizes_of(tensor))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = LocalForm(spec)
        setattr(tensor, self._form, form)
        return form

    def changed(self, *values: Any) -> None:
        """Forget the forms of tensors that a function may have given other sizes, as those do that work in place."""
        for leaf in torch_compat.tree_leaves(list(values)):
            if getattr(leaf, self._form, None) is not None:
                delattr(leaf, self._form)

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
            self._forms.clear()
        if isinstance(result, Tensor):
            with torch_compat.without_torch_functions():
                spec = spec_of(result, self._axis)
                form = None if spec is None else self._formed(result, spec)
            self._decisions[key] = _Single(work, narrowings, form)
            return
        with torch_compat.without_torch_functions():
            leaves = torch_compat.tree_leaves(result)
            forms = [
                None if (spec := spec_of(leaf, self._axis)) is None else self._formed(leaf, spec) for leaf in leaves
            ]
            is_flat = type(result) in (tuple, list) and len(leaves) == len(result)
        self._decisions[key] = _Several(work, narrowings, forms, is_flat=is_flat)

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
    def __init__(self, work: Work, narrowings: Narrowings, form: LocalForm | None) -> None:
        super().__init__(work, narrowings)
        self._form, self._spec = form, None if form is None else form.spec
        axis = "" if form is None else form.spec.axis
        self._attributes = PREFIX + axis, FORM + axis
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
            mark, form = self._attributes
            setattr(result, mark, spec)
            setattr(result, form, self._form)
        return result


class _Several(_Kept):
    def __init__(self, work: Work, narrowings: Narrowings, forms: Sequence[LocalForm | None], *, is_flat: bool) -> None:
        super().__init__(work, narrowings)
        self._forms, self._is_flat = forms, is_flat

    def __call__(self, meeting: Meeting, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the results, marked."""
        result = self._work(func, self._narrowed(meeting, args) if self._narrowings else args, options)
        leaves = result if self._is_flat else torch_compat.tree_leaves(result)
        for leaf, form in zip(leaves, self._forms, strict=True):
            if form is not None:
                setattr(leaf, PREFIX + form.spec.axis, form.spec)
                setattr(leaf, FORM + form.spec.axis, form)
        return result


def _sizes_of(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.layout
    return tensor.shape, tensor.dtype, tensor.is_meta, tensor.stride() if layout is torch.strided else layout
