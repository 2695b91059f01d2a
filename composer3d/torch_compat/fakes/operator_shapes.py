"""Cache of operator results on fake tensors and on meta, by the form of the operator's arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from composer3d.torch_compat.fakes.chosen_values import FROM_NUMBERS, PLACES, ChosenValues, values_of
from composer3d.torch_compat.fakes.shardings import like_other_meshes

__all__ = ["Maker", "MetaResults", "ResultMemory"]

# Makes the result of a call from its arguments and keyword arguments.
Maker = Callable[[Any, Any], Any]

# Besides those of aten: collectives, FSDP2's copies to and from their buffers, and conversions.
_OTHERS = (
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
    "prims::convert_element_type",
)
# Operators whose results depend on values, or that change the form of what they are given.
_TAGS = ("dynamic_output_shape", "data_dependent_output", "inplace_view")
_NOT_REMEMBERED = (
    "aten::lift",
    "aten::set_",
    "aten::resize",
    "aten::_local_scalar",
    "aten::item",
    "aten::record_stream",
)


class _Unknown(Exception):
    """An argument or a result that is not remembered."""


class ResultMemory:
    """Makes the results of operators in a fake mode from those of an equal call before.

    torch's own fake mode remembers too, but looks at a hundred things for each call, for 0.1 ms; composing and running
    a step asks it tens of thousands of times. A step of three blocks of Llama-3-70B on one of 64 ranks takes 2.9 s of
    CPU time with this memory, 3.9 s with torch's own alone (a third more, and as much of a plan's tracing), 6.4 s with
    neither (torch 2.13, one core). All three trace the same bytes, so that without this file plans are slower, and not
    wrong; no public way is as fast. Here a call is its operator, the forms of its tensors, and its other
    arguments; what it returned is a tensor of a known form with a new storage, a view of an argument, or an argument
    itself. Whatever is none of that goes to the mode: other types, wrappers, complex numbers and parts of them (whose
    signs are lazy), tensors that hold a value, operators whose result depends on values. Fake tensors are private
    (torch 2.11-2.15).

    One memory may serve several modes, one after the other.

    Attributes:
        mode: The fake mode that is on, in which results are made.
        chosen: Values of its tensors; what has some, or may be given some, is not remembered.
    """

    def __init__(self) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

        self.mode: Any = None
        self.chosen = ChosenValues()
        self._cls: Any = FakeTensor
        self._inside = in_kernel_invocation_manager
        self._kinds: frozenset[type] = frozenset({FakeTensor})
        # Of a model that is about to be given memory.
        self._outside: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
        self._makers: dict[Any, Maker | None] = {}
        self._remembered: dict[int, tuple[Any, bool, bool]] = {}
        self._shardings: dict[Any, Any] = {}
        # What else an argument may be; all that is equal, and of one of these types, gives an equal result.
        self._plain: frozenset[type] = frozenset(
            {type(None), int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
        )
        self._size, self._default_dtype = torch.Size, torch.get_default_dtype
        self._tags = {getattr(torch.Tag, name) for name in _TAGS}
        self._active, self._slot = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE

    def __len__(self) -> int:
        """Return how many forms of calls are known."""
        return sum(maker is not None for maker in self._makers.values())

    def run(self, operator: Any, args: Any, kwargs: Any, otherwise: Callable[[], Any]) -> Any:
        """Return what the operator returns; `otherwise` is asked the first time, and where nothing is remembered."""
        key, maker = self._find(operator, args, kwargs)
        if maker is not None:
            return maker(args, kwargs)
        result = otherwise()
        if key is not None and key not in self._makers:
            try:
                if self._is_odd((args, [*(kwargs or {}).values()], result)):
                    raise _Unknown
                self._makers[key] = self._maker(operator, args, kwargs, result)
            except _Unknown:
                self._makers[key] = None
        return result

    def recaller(self) -> Callable[[Any, Any, Any], Maker | None]:
        """Return what a dispatch mode over the fake mode may ask first: it saves the way through torch to the latter.

        It takes an operator, its arguments and keyword arguments, and returns what makes the result of these two, one
        function for every form of a call; None where the mode has to be asked: where nothing is remembered, another
        fake mode or none is on, and always where this function is called inside of further modes, which are to see the
        operator too.
        """
        import torch

        if torch._C._len_torch_dispatch_stack() != 1:
            return lambda operator, args, kwargs: None
        return self._recall

    def shardings(self) -> AbstractContextManager[None]:
        """Let DTensor find shardings of results, inside, as it has for meshes of the same form; they are kept here."""
        return like_other_meshes(self._shardings)

    def _recall(self, operator: Any, args: Any, kwargs: Any) -> Maker | None:
        if self._active(self._slot) is not self.mode:
            return None
        return self._find(operator, args, kwargs)[1]

    def _find(self, operator: Any, args: Any, kwargs: Any) -> tuple[Any, Maker | None]:
        """Return the key of a call, None where it is not remembered; and what makes its result, if that is known."""
        # By their numbers: operators have a hash of Python's. They are kept, so that no other one gets the number.
        known = self._remembered.get(id(operator))
        if known is None:
            known = self._remembered[id(operator)] = (
                operator,
                self._can_remember(operator),
                operator.name().split(".")[0] in FROM_NUMBERS,
            )
        if not known[1] or (self.chosen.are_any and known[2]):
            return None, None
        try:
            options = self._forms(kwargs.items()) if kwargs else ()
            key = (id(operator), self._default_dtype(), self._forms(args), options)
            return key, self._makers.get(key)
        except (_Unknown, TypeError, RuntimeError):  # symbolic numbers have no hash, sparse tensors have no strides
            return None, None

    def _can_remember(self, operator: Any) -> bool:
        import torch

        return (
            isinstance(operator, torch._ops.OpOverload)
            and (operator.namespace == "aten" or operator.name() in _OTHERS)
            and not operator.name().startswith(_NOT_REMEMBERED)
            and operator.name() not in PLACES
            and not self._tags & set(operator.tags)
        )

    def _forms(self, values: Any) -> tuple[Any, ...]:
        """Return what arguments have in common that give equal results."""
        kinds, plain, size = self._kinds, self._plain, self._size
        forms: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in kinds:
                forms += self._form(value)
            elif kind in plain:
                forms.append((kind, value))
            elif kind is list or kind is tuple or kind is size:
                forms.append((kind, self._forms(value)))
            elif kind in self._outside:
                forms += (kind, *_form_on_meta(value))
            else:
                raise _Unknown
        return tuple(forms)

    def _form(self, tensor: Any) -> tuple[Any, ...]:
        """Return the form of a tensor of the mode; whether its dtype is an odd one is asked as a result is learned."""
        if tensor.constant is not None or tensor.fake_mode is not self.mode or tensor.is_neg():
            raise _Unknown
        if self.chosen.are_any and values_of(tensor) is not None:
            raise _Unknown
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device

    def _is_odd(self, value: Any) -> bool:
        """Return whether tensors of a call, or of its result, are of a kind that is not remembered."""
        import torch

        if isinstance(value, list | tuple):
            return any(map(self._is_odd, value))
        return isinstance(value, torch.Tensor) and (
            value.dtype.is_complex or value.is_quantized or value.layout is not torch.strided
        )

    # ---- results -----------------------------------------------------------------------------------------------------

    def _maker(self, operator: Any, args: Any, kwargs: Any, result: Any) -> Maker:
        """Return what makes an equal result of equal arguments.

        Raises:
            _Unknown: Where that is not certain.
        """
        kind = type(result)
        if kind in (tuple, list):
            makers = [self._maker(operator, args, kwargs, each) for each in result]
            return lambda args, kwargs: kind([make(args, kwargs) for make in makers])
        if kind in (type(None), int, float, bool):
            return lambda args, kwargs: result
        if kind is not self._cls:
            raise _Unknown
        places = [place for place, arg in enumerate(args) if arg is result]
        if places:
            return lambda args, kwargs: args[places[0]]
        if any(value is result for value in kwargs.values()):
            raise _Unknown
        self._form(result)  # raises where the result is odd
        if self._outside and result.fake_device.type == "meta" and self._has_outside((*args, *kwargs.values())):
            raise _Unknown  # it may be a view of the fake tensor that stands for such an argument
        storage = result.untyped_storage()
        sharing = [
            place
            for place, arg in enumerate(args)
            if type(arg) in self._kinds and arg.untyped_storage()._cdata == storage._cdata
        ]
        if len(sharing) > 1 or (sharing and args[sharing[0]].dtype != result.dtype):
            raise _Unknown
        if sharing:
            return self._viewer(result, sharing[0])
        if operator.is_view or any(each.alias_info for each in operator._schema.returns):
            raise _Unknown
        return self._creator(result)

    def _has_outside(self, values: Any) -> bool:
        """Return whether tensors of no mode are among arguments."""
        return any(
            type(value) in self._outside or (isinstance(value, list | tuple) and self._has_outside(value))
            for value in values
        )

    def _creator(self, result: Any) -> Maker:
        import torch

        shape, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
        attributes, cls = self._attributes(result), self._cls
        empty, subclass = torch.empty_strided, torch.Tensor._make_subclass
        example = empty(shape, stride, dtype=dtype, device="meta")
        if result.storage_offset() or example.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            raise _Unknown
        no_dispatch, protect = torch._C._DisableTorchDispatch, torch._C._set_throw_on_mutable_data_ptr

        def create(args: Any, kwargs: Any) -> Any:
            with no_dispatch():
                plain = empty(shape, stride, dtype=dtype, device="meta")
            made = subclass(cls, plain, False, dispatch_device=True, device_for_backend_keys=device)
            protect(made)
            made.__dict__.update(attributes, fake_mode=self.mode)
            return made

        return create

    def _viewer(self, result: Any, place: int) -> Maker:
        import torch

        shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
        device, attributes = result.fake_device, self._attributes(result)
        cls, inside, subclass = self._cls, self._inside, torch.Tensor._make_subclass
        # Inside of a mode no torch function is seen by others; called as an operator it takes three times as long.
        as_strided, protect = torch.as_strided, torch._C._set_throw_on_mutable_data_ptr
        # In half of the time of the mode's own way, which a device without kernels in this build of torch needs.
        has_kernels = device.type in ("cpu", "meta")
        no_dispatch = torch._C._DisableTorchDispatch

        def view(args: Any, kwargs: Any) -> Any:
            viewed = args[place]
            with no_dispatch() if has_kernels else inside(self.mode):
                plain = as_strided(viewed, shape, stride, offset)
            made = subclass(cls, plain, False, dispatch_device=True, device_for_backend_keys=device)
            protect(made)
            made.__dict__.update(attributes, fake_mode=self.mode)
            return made

        return view

    def _attributes(self, result: Any) -> dict[str, Any]:
        """Return a fake tensor's own attributes but its mode: its device, and what it has not been asked yet.

        The device is one attribute in torch 2.11 and another, behind a property, in torch 2.13.
        """
        attributes = dict(vars(result))
        del attributes["fake_mode"]
        if any(value is not None for name, value in attributes.items() if name not in ("_fake_device", "fake_device")):
            raise _Unknown
        return attributes


def _form_on_meta(tensor: Any) -> tuple[Any, ...]:
    import torch

    is_odd = tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    if is_odd or not tensor.is_meta:
        raise _Unknown
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


class MetaResults(ResultMemory):
    """The same on meta, outside of a fake mode, for a dispatch mode that runs operators below autograd.

    Many of torch's kernels on meta are Python, for a tenth of a millisecond and more. A forward of Llama-3-70B on meta
    asks eighty times for each of the results of a block.
    """

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._cls = torch.Tensor
        self._kinds, self._outside = self._outside, frozenset()

    def _form(self, tensor: Any) -> tuple[Any, ...]:
        return _form_on_meta(tensor)

    def _is_odd(self, value: Any) -> bool:
        return False  # as the form says already

    def _creator(self, result: Any) -> Maker:
        import torch

        shape, stride, dtype = tuple(result.shape), result.stride(), result.dtype
        empty = torch.empty_strided
        example = empty(shape, stride, dtype=dtype, device="meta")
        if result.storage_offset() or example.untyped_storage().nbytes() != result.untyped_storage().nbytes():
            raise _Unknown
        return lambda args, kwargs: empty(shape, stride, dtype=dtype, device="meta")

    def _viewer(self, result: Any, place: int) -> Maker:
        import torch

        shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
        as_strided = torch.as_strided
        return lambda args, kwargs: as_strided(args[place], shape, stride, offset)
