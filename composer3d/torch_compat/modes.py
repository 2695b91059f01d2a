"""Modes, autograd and imports."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from composer3d.torch_compat.compilers.undisabled import nothing_compiles
from composer3d.torch_compat.later_backwards import look_at
from composer3d.torch_compat.operators import device_question, operator_python

__all__ = [
    "SCALED_STEP",
    "UNSCALING",
    "backward_inside",
    "call_beside",
    "call_within",
    "dispatch_mode",
    "function_mode",
    "function_modes",
    "hidden_from",
    "hide_compiler_warnings",
    "hide_profiler_warnings",
    "import_torchao",
    "leave_mode",
    "no_torch_function",
    "on_state_dict",
    "run_backward",
    "start_autograd",
    "traceable",
    "without_torch_functions",
    "works_on_meta",
]

# Read of an optimizer by torch's GradScaler in its step, and by nothing else.
SCALED_STEP = "_step_supports_amp_scaling"
# By which it unscales gradients.
UNSCALING = "aten::_amp_foreach_non_finite_check_and_unscale_"


def dispatch_mode(
    handler: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any],
    *,
    compiles: bool = True,
    opens: bool = True,
    knows_devices: bool = False,
) -> AbstractContextManager[Any]:
    """Return a context in which every dispatched operator goes to `handler(operator, types, args, kwargs)`.

    TorchDispatchMode is how operators are seen below autograd; torch documents it under a private module only
    (torch 2.11-2.15). `handler` may return NotImplemented, so that a tensor subclass takes the operator apart first.
    `compiles=False` promises that nothing inside is compiled; else the first operator imports torch._dynamo, for 1 s.
    Of operators made by `custom_operator` the handler sees those that they consist of, unless `opens=False`.
    With `knows_devices` it is not asked for the devices of fake tensors, which is half of what is dispatched in a step.
    A number that autograd has saved as a tensor arrives as a number, which reading it again (`float(saved)`) cannot
    take: it is returned as it is.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    reading = torch.ops.aten._local_scalar_dense.default
    question = device_question() if knows_devices else None

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return compiles

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is question and (device := getattr(args[0], "fake_device", None)) is not None:
                return device
            if func is reading and not isinstance(args[0], torch.Tensor):
                return args[0]
            function = operator_python(func) if opens else None
            if function is None:
                return handler(func, types, args, kwargs or {})
            with self:  # torch took it off for this call
                return function(*args, **(kwargs or {}))

    return Mode() if compiles else _uncompiled(Mode())


@contextmanager
def _uncompiled(mode: AbstractContextManager[Any]) -> Iterator[Any]:
    with nothing_compiles(), mode as entered:
        yield entered


def function_mode(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Return a context in which every torch function goes to `handler(function, args, kwargs)`, recomputations too.

    What `torch.compile` captures inside does not: it would trace the handler.
    """
    from torch.compiler import is_compiling
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_compiling():
                return func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "backward":
                return backward_inside(self, args, kwargs or {})
            return handler(traceable(func), args, kwargs or {})

    return Mode()


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which torch functions reach no mode and no subclass; public only for use in C++."""
    import torch

    return torch._C.DisableTorchFunction()


def no_torch_function() -> Any:
    """Return the `__torch_function__` of a tensor subclass that looks at operators only; public by no name."""
    import torch

    return torch._C._disabled_torch_function_impl


def function_modes() -> list[Any]:
    """Return the modes of torch functions that are on, innermost last; the stack of modes is private (2.11-2.15)."""
    from torch import overrides

    return list(overrides._get_current_function_mode_stack())


def call_beside(kind: type, func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Call a function inside `without_torch_functions` so that all modes that are on see it but those of one class.

    What a plugin hides from its own modes others still see. Private (torch 2.11-2.15): the stack, and what turns it on.
    """
    import torch

    if not torch._C._len_torch_function_stack():
        return func(*args, **options)
    stack = function_modes()
    others = [mode for mode in stack if not isinstance(mode, kind)]
    if not others:
        return func(*args, **options)
    _replace_modes(stack, others)
    try:
        with torch._C._EnableTorchFunction():
            return func(*args, **options)
    finally:
        _replace_modes(others, stack)


class hidden_from:  # noqa: N801 (read as a function; a generator's context takes twice as long, a hundred times a step)
    """Hides what runs inside from the modes of one class that are on; modes that are entered inside see it.

    The stack of modes is private, as for `call_beside`.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._stack: list[Any] = []
        self._others: list[Any] = []

    def __enter__(self) -> None:
        import torch

        if not torch._C._len_torch_function_stack():
            return
        stack = function_modes()
        others = [mode for mode in stack if not isinstance(mode, self._kind)]
        if len(others) < len(stack):
            self._stack, self._others = stack, others
            _replace_modes(stack, others)

    def __exit__(self, *error: object) -> None:
        if self._stack:
            _replace_modes(self._others, self._stack)


def _replace_modes(before: Sequence[Any], after: Sequence[Any]) -> None:
    from torch import overrides

    for _ in before:
        overrides._pop_mode()
    for mode in after:
        overrides._push_mode(mode)


def leave_mode(mode: Any) -> None:
    """Turn a mode of torch functions off that is not innermost any more, perhaps; the stack of modes is private."""
    from torch import overrides

    stack = function_modes()
    if mode in stack:
        for _ in stack[stack.index(mode) :]:
            overrides._pop_mode()
        for inner in stack[stack.index(mode) + 1 :]:
            overrides._push_mode(inner)


def is_captured(leaf: Any) -> bool:
    """Return whether the backward that runs on this thread was asked for the gradient of a leaf, to return it.

    The engine answers, for its hooks, whether it will run a node; of a leaf that `torch.autograd.grad` was given it
    refuses to (torch 2.11-2.15), and of no other.
    """
    import torch

    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:
        return True
    return False


def run_backward(tensors: Any, gradients: Any = None, retain_graph: bool | None = None, **options: Any) -> None:
    """Do what `torch.autograd.backward` does, with the torch-function modes that are on staying on.

    torch takes a mode off while that mode handles a call, so what a backward computes again would run without it; the
    engine itself, which takes no mode off, has no public name (torch 2.11-2.15).
    """
    import torch

    several, given, targets = (
        (value,) if isinstance(value, torch.Tensor) else tuple(value or ())
        for value in (tensors, gradients, options.get("inputs"))
    )
    look_at(several)
    starts = [torch.ones_like(t) if t.requires_grad and t.numel() == 1 else None for t in several]
    starts = [start if gradient is None else gradient for start, gradient in zip(starts, given or starts, strict=True)]
    engine, again = cast(Any, torch.autograd.Variable), bool(options.get("create_graph"))
    kept = again if retain_graph is None else retain_graph
    # The last two: parameters that are not reached are no error, and gradients are accumulated in them.
    engine._execution_engine.run_backward(several, tuple(starts), kept, again, targets, True, True)


def backward_inside(mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run `backward` of a tensor, or of torch.autograd, with a mode on: what is recomputed inside is to see it.

    torch takes a mode off while that mode handles a call.
    """
    # Under either of its two names the gradient is the second argument.
    named = {"gradients" if key in ("gradient", "grad_tensors") else key: value for key, value in kwargs.items()}
    with mode:
        run_backward(*args, **named)


def start_autograd() -> None:
    """Start autograd's engine while there are no devices yet that are only made believe, so that forks can use it.

    With the first backward of a process the engine starts a thread for each device, and refuses to run in forks from
    then on. Fake tensors, which DTensor and the compiler make too, put a guard that claims to have devices in CUDA's
    place where torch was built with CUDA and the machine has none: the usual build on a machine without a GPU (torch
    2.11-2.15). An engine that started before it has no threads, and starts none later.
    """
    import torch

    if torch.version.cuda is not None and not torch.cuda.device_count():
        torch.ones((), requires_grad=True).backward()


def works_on_meta(args: tuple[Any, ...]) -> bool:
    """Return whether an operator is given tensors on meta, whose sizes a propagation compares with those of shards.

    It does so in a first forward alone, so that what is counted or kept must not include them. In a plan they are fake
    tensors, whose own device, meta, tells them from those of the rank; the class is private (torch 2.11-2.15).
    """
    fake, plain, parameter = _tensor_kinds()
    for each in args:
        kind = type(each)
        if kind is fake:  # asked for its device, it is dispatched as an operator is
            if each.fake_device.type == "meta":
                return True
        elif (kind is plain or kind is parameter) and each.is_meta:
            return True
    return False


@functools.cache
def _tensor_kinds() -> tuple[type, type, type]:
    """Return the classes of fake tensors, of plain ones, and of parameters: each operator of a trace asks for them."""
    import torch
    from torch._subclasses import FakeTensor

    return FakeTensor, torch.Tensor, torch.nn.Parameter


def traceable(func: Any) -> Any:
    """Return the function that a torch-function mode calls for `func`, so that the compiler can trace through the mode.

    `Tensor.unflatten` is Python that calls super(), which dynamo does not follow where a mode has called it (torch
    2.11-2.15); its view is the same.
    """
    import torch

    if torch.compiler.is_compiling() and getattr(func, "__name__", "") == "unflatten":
        return _unflattened
    return func


def _unflattened(tensor: Any, dim: int, sizes: Any) -> Any:
    at = dim % tensor.dim()
    return tensor.view((*tensor.shape[:at], *sizes, *tensor.shape[at + 1 :]))


def hide_compiler_warnings() -> None:
    """Hide what torch's compiler is warned of by torch: it hides it itself, but not where warnings are errors.

    Dynamo asks inputs that are no leaves for their gradients, and makes an autograd.Function; inductor imports what
    scripts methods (torch 2.11-2.15).
    """
    import warnings

    for message in ("The .grad attribute of a Tensor that is not a leaf", ".* should not be instantiated"):
        warnings.filterwarnings("ignore", message=message, module=r"torch\._")
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script_method` is deprecated", module=r"torch\.")


def hide_profiler_warnings() -> None:
    """Hide torch 2.11's warning in every process that profiles cycles: that events of earlier ones are dropped."""
    import warnings

    warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")


def import_torchao(name: str) -> Any:
    """Import a module of torchao without its noise.

    It logs that it cannot load kernels of other devices, and registers an enum as torch 2.13 warns not to (torchao
    0.17-0.18).
    """
    import importlib
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    finally:
        logging.disable(before)


def on_state_dict(module: Any, hook: Callable[[Any, Any, str, Any], Any]) -> None:
    """Let a function return what `state_dict` of a module returns; torch's public hooks only change it in place.

    Private (torch 2.11-2.15).
    """
    module._register_state_dict_hook(hook)


def call_within(module: Any, surround: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let every call of a module, its hooks' part included, run inside a context.

    A forward hook that is always called sees an exception and cannot replace it, and units gather in hooks, outside of
    `forward`. `Module.__call__` looks for `_compiled_call_impl` of the instance first, which copies leave out. Private
    (torch 2.11-2.15).
    """
    inner = module._compiled_call_impl or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        with surround():
            return inner(*args, **kwargs)

    module._compiled_call_impl = call
