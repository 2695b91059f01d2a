"""Operators on DTensors that composer3d computes itself: those of torch's table, and those that have no rule in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["drawing_operators", "handle_operators", "mixable_operators", "torch_handled"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_DRAWING = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "native_dropout", "normal",
    "normal_", "poisson", "rand_like", "randint_like", "randn_like", "random_", "uniform_",
)  # fmt: skip
_MIXABLE = ("add.Tensor", "copy_.default", "div.Tensor", "lerp_.Scalar", "mul.Tensor", "sub.Tensor")
_LISTS = ("norm.Scalar", "mul_.Tensor", "mul_.Scalar", "clamp_min_.Scalar", "clamp_max_.Scalar")
_OF_DATA = (
    "addmm.default", "baddbmm.default", "bmm.default", "dot.default", "embedding.default", "maximum.default",
    "minimum.default", "mm.default", "mse_loss_backward.default", "mv.default", "native_layer_norm.default",
    "where.self",
)  # fmt: skip


def drawing_operators() -> list[Any]:
    """Return the operators of aten that draw random numbers into a tensor, or of a tensor's form or parameters."""
    import torch

    packets = [getattr(torch.ops.aten, name) for name in _DRAWING]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [o for o in found if torch.Tag.nondeterministic_seeded in o.tags and "out" not in o._overloadname]


@dataclass(frozen=True, kw_only=True)
class _MixableOperators:
    """Operators of aten that loops apply to tensors of several kinds; operators have no public home.

    Attributes:
        elementwise: To parameters and gradients.
        lists: To lists of them, as clipping does.
        stack: To numbers of each.
        of_data: To a rank's data.
    """

    elementwise: tuple[Any, ...]
    lists: tuple[Any, ...]
    stack: Any
    of_data: tuple[Any, ...]


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
        stack=torch.ops.aten.stack.default,
        of_data=found(_OF_DATA),
    )


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def handle_operators(handlers: Mapping[Any, Handler], *, uncovered: Handler, mixed: Callable[[Any], Any]) -> None:
    """Let functions compute operators on DTensors, in this process from now on.

    The table of operators that DTensor leaves to functions is private, and so are the two methods that raise for
    operators without a rule of sharding and for operands of which some are plain tensors (torch 2.11-2.15).

    Args:
        handlers: By operator; each is called with the operator, its arguments and keyword arguments.
        uncovered: Called alike where torch has no rule; may raise what it is to be refused with.
        mixed: Called with the operator, to raise.
    """
    dispatcher = _dispatcher()
    dispatcher._custom_op_handlers.update(handlers)
    is_extended = hasattr(dispatcher, "composer3d")
    dispatcher.composer3d = uncovered, mixed
    if is_extended:
        return
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    replicate = dispatcher._try_replicate_spec_for_scalar_tensor

    def propagated(op_call: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        try:
            return propagate(op_call, args, kwargs, *rest)
        except (RuntimeError, NotImplementedError):
            return dispatcher.composer3d[0](op_call, tuple(args), dict(kwargs))

    def replicated(op_call: Any, tensor: Any, mesh: Any) -> Any:
        if tensor.numel() != 1 and not dispatcher._allow_implicit_replication:
            dispatcher.composer3d[1](op_call)
        return replicate(op_call, tensor, mesh)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagated
    dispatcher._try_replicate_spec_for_scalar_tensor = replicated


@contextlib.contextmanager
def torch_handled(operator: Any) -> Iterator[None]:
    """Leave an operator to torch inside, from within its own handler."""
    handlers = _dispatcher()._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        yield
    finally:
        if handler is not None:
            handlers[operator] = handler
