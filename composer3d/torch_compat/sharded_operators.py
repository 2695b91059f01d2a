"""Operators on DTensors that composer3d computes itself: those of torch's table, and those that have no rule in it."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer3d.torch_compat.fakes.fake_tensors import active_fake_mode

__all__ = [
    "drawing_operators",
    "handle_operators",
    "leave_operators",
    "mixable_operators",
    "torch_handled",
    "viewing_operators",
    "writing_operators",
]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_METADATA = "_propagate_tensor_meta_non_cached"

_DRAWING = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "native_dropout", "normal",
    "normal_", "poisson", "rand_like", "randint_like", "randn_like", "random_", "uniform_",
)  # fmt: skip
_MIXABLE = ("add.Tensor", "copy_.default", "div.Tensor", "lerp_.Scalar", "mul.Tensor", "sub.Tensor")
_LISTS = (
    "add_.List", "add_.Scalar", "add_.ScalarList", "addcdiv_.Scalar", "addcdiv_.ScalarList", "addcmul_.Scalar",
    "addcmul_.ScalarList", "clamp_max_.Scalar", "clamp_min_.Scalar", "div_.List", "div_.Scalar", "div_.ScalarList",
    "lerp_.List", "lerp_.Scalar", "mul_.List", "mul_.Scalar", "mul_.ScalarList", "mul_.Tensor", "norm.Scalar",
    "sub_.List", "sub_.Scalar", "sub_.ScalarList",
)  # fmt: skip
_OF_DATA = (
    "addmm.default", "baddbmm.default", "bmm.default", "dot.default", "embedding.default", "maximum.default",
    "minimum.default", "mm.default", "mse_loss_backward.default", "mv.default", "native_layer_norm.default",
    "where.self",
)  # fmt: skip
_READING = (
    "bucketize.Tensor", "cat.default", "gather.default", "index.Tensor", "index_select.default",
    "masked_select.default", "searchsorted.Tensor", "take.default",
)  # fmt: skip
_EXTREMES = (
    "amax.default", "amin.default", "argmax.default", "argmin.default", "linalg_vector_norm.default", "max.default",
    "max.dim", "min.default", "min.dim",
)  # fmt: skip
_VIEWING = (
    "alias.default", "detach.default", "diagonal.default", "expand.default", "permute.default", "select.int",
    "slice.Tensor", "split.Tensor", "split_with_sizes.default", "squeeze.default", "squeeze.dim", "squeeze.dims",
    "t.default", "transpose.int", "unbind.int", "unfold.default", "unsqueeze.default", "view.default",
)  # fmt: skip


def drawing_operators() -> list[Any]:
    """Return the operators of aten that draw random numbers into a tensor, or of a tensor's form or parameters."""
    import torch

    packets = [getattr(torch.ops.aten, name) for name in _DRAWING]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [o for o in found if torch.Tag.nondeterministic_seeded in o.tags and "out" not in o._overloadname]


@functools.cache
def writing_operators() -> tuple[Any, ...]:
    """Return the operators of aten that write into their first argument, and leave its shape; names are private."""
    import torch

    found = []
    for name in torch._C._dispatch_get_all_op_names():
        matched = re.fullmatch(r"aten::([a-z]\w*[^_]_)(?:\.(\w+))?", name)
        if matched is not None:
            operator = getattr(getattr(torch.ops.aten, matched[1]), matched[2] or "default")
            if operator._schema.is_mutable and torch.Tag.inplace_view not in operator.tags:
                found.append(operator)
    return tuple(found)


def viewing_operators() -> tuple[Any, ...]:
    """Return the operators of aten that loops view tensors by."""
    import torch

    pairs = [name.split(".") for name in _VIEWING]
    return tuple(getattr(getattr(torch.ops.aten, name), overload) for name, overload in pairs)


@dataclass(frozen=True, kw_only=True)
class _MixableOperators:
    """Operators of aten that loops apply to tensors of several kinds; operators have no public home.

    Attributes:
        elementwise: To parameters and gradients.
        lists: To lists of them, as clipping does.
        copies: From a list of them into another.
        stack: To numbers of each.
        of_data: To a rank's data.
        reading: That read by plain indices.
        extremes: That have no value of an empty shard.
        number: Returns the number in a tensor of one.
    """

    elementwise: tuple[Any, ...]
    lists: tuple[Any, ...]
    copies: Any
    stack: Any
    of_data: tuple[Any, ...]
    reading: tuple[Any, ...]
    extremes: tuple[Any, ...]
    number: Any


def mixable_operators() -> _MixableOperators:
    """Return operators that are given plain tensors and DTensors at once."""
    import torch

    def found(names: Iterable[str], prefix: str = "") -> tuple[Any, ...]:
        pairs = [name.split(".") for name in names]
        return tuple(getattr(getattr(torch.ops.aten, prefix + name), overload) for name, overload in pairs)

    in_place = [name.replace(".Tensor", "_.Tensor") for name in _MIXABLE if name.endswith(".Tensor")]
    return _MixableOperators(
        elementwise=found([*_MIXABLE, *in_place]),
        lists=found(_LISTS, "_foreach_"),
        copies=torch.ops.aten._foreach_copy_.default,
        stack=torch.ops.aten.stack.default,
        of_data=found(_OF_DATA),
        reading=found(_READING),
        extremes=found(_EXTREMES),
        number=torch.ops.aten._local_scalar_dense.default,
    )


@functools.cache
@functools.cache
def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def handle_operators(
    handlers: Mapping[Any, Handler],
    *,
    uncovered: Handler,
    mixed: Callable[[Any], Any],
    owns: Callable[[Sequence[Any]], bool],
    settled: Mapping[Any, Callable[[Any, Any], bool]],
) -> None:
    """Let functions compute operators on some DTensors, until `leave_operators`.

    The table of operators that DTensor leaves to functions is private, and so are the two methods that raise for
    operators without a rule of sharding and for operands of which some are plain tensors (torch 2.11-2.15).

    Args:
        handlers: By operator; each is called with the operator, its arguments and keyword arguments.
        uncovered: Called alike where torch has no rule; may raise what it is to be refused with.
        mixed: Called with the operator, to raise.
        owns: Called with the arguments, returns whether any of their DTensors is one of those; torch has the others.
        settled: By operator, called with the arguments and keyword arguments first: returns whether torch has them,
            whoever owns them, as an optimizer asks hundreds of times a step.
    """
    leave_operators()
    dispatcher = _dispatcher()
    table = dispatcher._custom_op_handlers
    dispatcher.composer3d = {operator: table.get(operator) for operator in handlers}
    for operator, handler in handlers.items():
        table[operator] = functools.partial(_handled, handler, owns, settled.get(operator))
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    replicate = dispatcher._try_replicate_spec_for_scalar_tensor

    def propagated(op_call: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        try:
            return propagate(op_call, args, kwargs, *rest)
        except (RuntimeError, NotImplementedError):
            if not owns((*args, *kwargs.values())):
                raise
            return uncovered(op_call, tuple(args), dict(kwargs))

    def replicated(op_call: Any, tensor: Any, mesh: Any) -> Any:
        if tensor.numel() != 1 and not dispatcher._allow_implicit_replication and owns((mesh,)):
            mixed(op_call)
        return replicate(op_call, tensor, mesh)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagated
    dispatcher._try_replicate_spec_for_scalar_tensor = replicated
    _keep_fake_mode(dispatcher.sharding_propagator)


def leave_operators() -> None:
    """Leave all operators to torch again."""
    dispatcher = _dispatcher()
    for operator, own in vars(dispatcher).pop("composer3d", {}).items():
        _restore(operator, own)
    for name in ("_propagate_op_sharding_dispatch_slow_path", "_try_replicate_spec_for_scalar_tensor"):
        vars(dispatcher).pop(name, None)
    vars(dispatcher.sharding_propagator).pop(_METADATA, None)


def _keep_fake_mode(propagator: Any) -> None:
    """Let each thread keep the mode of fake tensors in which DTensor finds the shape of an operator's result.

    torch makes a new one, in 1 ms, for each operator and shape that it meets for the first time (torch 2.11-2.15):
    more than half of the first step of Adam. The method that makes it is private.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = threading.local()

    def found(op_schema: Any) -> Any:
        # As the class has it now: `fake_tensors` replaces it there while a plan records what is computed.
        metadata = functools.partial(getattr(type(propagator), _METADATA), propagator)
        if active_fake_mode() is not None:  # torch takes that one
            return metadata(op_schema)
        if not hasattr(kept, "mode"):
            kept.mode = FakeTensorMode()
        with kept.mode:
            return metadata(op_schema)

    setattr(propagator, _METADATA, found)


def _handled(
    handler: Handler,
    owns: Callable[[Sequence[Any]], bool],
    settled: Callable[[Any, Any], bool] | None,
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    if settled is not None and settled(args, kwargs):
        dispatcher = _dispatcher()
        table, own = dispatcher._custom_op_handlers, vars(dispatcher)["composer3d"].get(operator)
        if own is None:  # as `torch_handled` does, in less time
            ours = table.pop(operator, None)
            try:
                return operator(*args, **kwargs)
            finally:
                if ours is not None:
                    table[operator] = ours
    elif owns((*args, *kwargs.values())):
        return handler(operator, args, kwargs)
    with torch_handled(operator):
        return operator(*args, **kwargs)


def _restore(operator: Any, own: Handler | None) -> None:
    table = _dispatcher()._custom_op_handlers
    if own is None:
        table.pop(operator, None)
    else:
        table[operator] = own


class torch_handled:
    """Leave an operator to torch inside, from within its own handler.

    Thousands of times a step, and operators have a hash of Python's: so no generator, and few questions.
    """

    __slots__ = ("_handler", "_operator")

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __enter__(self) -> None:
        """Put torch's own handler, if there is one, in the place of ours."""
        operator, dispatcher = self._operator, _dispatcher()
        self._handler = dispatcher._custom_op_handlers.pop(operator, None)
        own = dispatcher.__dict__.get("composer3d")
        if own is not None and own.get(operator) is not None:
            dispatcher._custom_op_handlers[operator] = own[operator]

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        """Put ours back."""
        if self._handler is None:
            _dispatcher()._custom_op_handlers.pop(self._operator, None)
        else:
            _dispatcher()._custom_op_handlers[self._operator] = self._handler
