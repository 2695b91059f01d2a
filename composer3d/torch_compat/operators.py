"""Composite operators, made of other operators and of collectives; and the one that asks for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = [
    "call_operator",
    "custom_operator",
    "custom_operators",
    "device_question",
    "operator_python",
    "operator_span",
    "watch_custom_operators",
]

Span = Callable[..., AbstractContextManager[None]]

# As torch's own registry of operators, for the process; an operator is gone with its library.
_MADE: dict[str, list[Any]] = {}
_LIBRARIES: list[Any] = []
# By their numbers, since operators have a hash of Python's, and each operator of a step is looked up; they are kept.
_FUNCTIONS: dict[int, Callable[..., Any]] = {}
_NODES: dict[int, Any] = {}
# Operators take tensors, numbers and names, so what opens spans cannot be handed to them; None where nobody records.
_WATCHED: list[Span] = []


def custom_operator(
    name: str,
    schema: str,
    function: Callable[..., Any],
    *,
    kind: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Define an operator that the compiler and selective checkpoints see as one, and counters of operators see into.

    `dispatch_mode` runs the operator's own function under the mode again, so that kernels and collectives in it are
    counted, on fake tensors too.

    Args:
        name: `namespace::name`.
        schema: As torch writes it, `(Tensor x, str group) -> Tensor`.
        function: Computes the results, which share no memory with what it is given; runs collectives.
        kind: What it is to selective checkpoints: `attention`, `collective`, or `backward` of one of them.
        fake: Returns results of the same shapes, strides and dtypes without values.
        backward: As `torch.library.register_autograd` takes it, with `setup_context`.

    Returns:
        The operator, `torch.ops.namespace.name.default`.
    """
    import torch

    namespace, short = name.split("::")
    library: Any = torch.library.Library(namespace, "FRAGMENT")
    _LIBRARIES.append(library)
    # Not `torch.library.custom_op`, which imports the compiler with the first call and checks every result.
    library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(short, function, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)
    operator: Any = getattr(getattr(torch.ops, namespace), short).default
    _FUNCTIONS[id(operator)] = function
    if backward is not None and setup_context is not None:
        _NODES[id(operator)] = _node(function, backward, setup_context)
    _MADE.setdefault(kind, []).append(operator)
    return operator


def _node(function: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]) -> Any:
    """Return the autograd function of an operator that is called without torch's dispatcher."""
    import torch

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = function(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    return Operator


def call_operator(operator: Any, *args: Any) -> Any:
    """Return what an operator that `custom_operator` made returns.

    Where nothing looks at operators, its function is called, and its gradient's, without torch's dispatcher, which
    takes a third of the time of a short attention: it boxes the arguments twice, and comes back to Python twice.

    Args:
        operator: Of `custom_operator`.
        args: All of its schema.
    """
    import torch

    if _is_watched(args):
        return operator(*args)
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        node = _NODES.get(id(operator))
        return operator(*args) if node is None else node.apply(*args)
    return _FUNCTIONS[id(operator)](*args)


def _is_watched(args: tuple[Any, ...]) -> bool:
    """Return whether modes, transforms, the profiler, the compiler or a tensor's own class are to see an operator."""
    import torch

    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or torch.compiler.is_compiling()
        or any(isinstance(each, torch.Tensor) and type(each) not in (torch.Tensor, torch.nn.Parameter) for each in args)
    )


def custom_operators(*kinds: str) -> list[Any]:
    """Return the operators of some kinds that `custom_operator` made."""
    return [operator for kind in kinds for operator in _MADE.get(kind, ())]


def operator_python(operator: Any) -> Callable[..., Any] | None:
    """Return the function of an operator that `custom_operator` made; None for others."""
    return _FUNCTIONS.get(id(operator))


def device_question() -> Any:
    """Return the operator that asks a fake tensor for its device, its attribute `fake_device` (torch 2.11-2.15)."""
    import torch

    return torch.ops.prim.device.default


def operator_span(name: str, group: Any, **attributes: Any) -> AbstractContextManager[None]:
    """Return a span around what an operator's function does: a wait for a message, the block that hides it.

    Args:
        name: As of other spans: `all_gather`, `wait`, `exchange`.
        group: Process group, which gives the axis; None for what is no communication.
    """
    return _WATCHED[-1](name, group, **attributes) if _WATCHED else contextlib.nullcontext()


def watch_custom_operators(span: Span) -> Callable[[], None]:
    """Open spans with a function, given a name, the process group and attributes; return what ends that."""
    _WATCHED.append(span)

    def end() -> None:
        _WATCHED.remove(span)

    return end
