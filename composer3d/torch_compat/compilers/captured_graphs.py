"""Graphs of functions whose Python code no compiler can follow: what it makes torch do is recorded, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "CaptureError",
    "capture_graph",
    "capture_is_on",
    "is_run_eagerly",
    "outside_capture",
    "outside_function_modes",
    "traced_function_modes",
]

_capturing: list[Any] = []


class CaptureError(Exception):
    """A function's graph would not do what the function does."""


def capture_is_on() -> bool:
    """Return whether a graph is being captured: what is made of fake tensors belongs to that graph alone."""
    return bool(_capturing)


@contextlib.contextmanager
def outside_function_modes(*, but: Sequence[Any] = ()) -> Iterator[None]:
    """Leave all modes of torch functions but some; their stack is private (torch 2.11-2.15)."""
    from torch import overrides

    stack: list[Any] = list(overrides._get_current_function_mode_stack())
    for _ in stack:
        overrides._pop_mode()
    for mode in but:
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in but:
            overrides._pop_mode()
        for mode in stack:
            overrides._push_mode(mode)


def traced_function_modes() -> list[Any]:
    """Return the modes of torch functions that are on and say that compiled code goes through them, innermost last."""
    from torch import overrides

    return [mode for mode in overrides._get_current_function_mode_stack() if getattr(mode, "is_traced", False)]


def is_run_eagerly() -> bool:
    """Return whether whoever calls is to see modules and operators rather than a compiled graph.

    So it is under `torch.compiler.set_stance("force_eager")`, and under modes that see operators, fake tensors' among
    them. The stance, and the number of modes, are private (torch 2.11-2.15).
    """
    import torch
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance == "force_eager" or torch._C._len_torch_dispatch_stack() > 0


def capture_graph(
    function: Callable[..., Sequence[Any]],
    compiled: Callable[[Any, Sequence[Any]], Callable[..., Any]],
    *,
    recomputes: bool = True,
) -> Callable[..., Any]:
    """Return what runs graphs of what a function of tensors makes torch do, of its forward and of its backward.

    They are captured in the first call, of fake tensors, below autograd: autograd functions of Python, and what
    DTensors among the arguments exchange, are a part of them. Sizes and other numbers are constants. It is AOTAutograd,
    as it stands behind `torch.compile`, without the part of it that reads Python code.

    Args:
        function: Of tensors, DTensors among them; returns a list of plain tensors. It is called more than once.
        compiled: Returns what runs a graph module of plain tensors that are like those given.
        recomputes: Whether the backward computes again what is cheap to, as compilers do; else all that it needs is
            kept.

    Raises:
        CaptureError: From the first call: the function reads values, or computes with a tensor that needs a gradient
            and is none of those given.
    """
    from functorch import compile as aot  # type: ignore[import-untyped]

    began: list[bool] = []

    def kept(graph: Any, given: Sequence[Any]) -> Callable[..., Any]:
        _refuse_constants(graph)
        run = compiled(graph, given)

        def called(tensors: list[Any]) -> Any:
            began[:] = [True]
            inside = [*tensors]
            tensors.clear()  # or this list would keep them through the call
            with outside_function_modes():
                # Whoever looks at operators sees those of the graph.
                return (graph.forward if is_run_eagerly() else run)(*inside)

        called._boxed_call = True  # type: ignore[attr-defined]
        return called

    partition = aot.min_cut_rematerialization_partition if recomputes else aot.default_partition
    whole = aot.aot_function(function, kept, kept, partition_fn=partition)

    def run(*tensors: Any) -> Any:
        if began:
            return whole(*tensors)
        with _capture(function):
            try:
                return whole(*tensors)
            except Exception as error:  # code that reads values raises many kinds
                if began or isinstance(error, CaptureError):
                    raise
                raise CaptureError(_reason_of(error)) from error

    return run


@contextlib.contextmanager
def _capture(function: Any) -> Iterator[None]:
    """Capture inside, and run what is captured once.

    Beside fake tensors there are some at hand, as positions are: constants. Operators are not looked at for results
    that share memory with what they were given, which whatever compiles the graphs does (torch 2.11-2.15).
    """
    import torch._functorch.config
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode

    settings: Any = torch._functorch.config
    unchecked = {"check_custom_op_aliasing": False} if hasattr(settings, "check_custom_op_aliasing") else {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _capturing.append(function)
    try:
        with settings.patch(unchecked), tracing(TracingContext(mode)):
            yield
    finally:
        _capturing.pop()


def _reason_of(error: Exception) -> str:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    is_by_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return f"what it does is data-dependent ({text})" if is_by_value else text


def _refuse_constants(graph: Any) -> None:
    """Raise an error where a graph computes with a tensor that is to be given a gradient, and would be none."""
    import torch

    for node in graph.graph.nodes:
        held = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor) and held.requires_grad:
            raise CaptureError("it computes with a tensor of other modules that needs a gradient")


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """Let what is done inside be no part of a graph that is being captured; its results are constants there."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes() if capture_is_on() else contextlib.nullcontext():
        yield
