"""torch.compile on modules that plugins have sharded, checkpointed or quantised."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat.hook_registrations import are_followed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compile_graph", "compile_module", "is_compiled", "leave_uncompiled", "trace_quantisers", "uncompiled"]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile of what calls it runs as it is: it is called, and not traced.

    For hooks around the model's forward: tracing what they do to Python objects breaks graphs in their middle, and
    resumes with another object's locals (torch 2.13).
    """
    import torch

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # True for what traces this call, and never while it runs
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    code: Any = call
    code.__code__ = code.__code__.replace()  # dynamo compiles a code object a few times, whichever function it is of
    return call


def compile_module(
    module: Any,
    *,
    mode: str | None = None,
    keep_roundings: bool = False,
    most_forms: int = 8,
    told: Callable[[], None] = lambda: None,
    hooked: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Compile a module in place, as its `compile` does; what is recomputed inside may write to Python objects.

    Torch compiles one code, of all modules of a class, in eight forms, and then raises an error where `fullgraph` is
    asked for. Here it is `most_forms`, and a call of one more runs as it is, after `told`. Torch leaves out hooks that
    are registered later on modules inside; here they are a part of the form (torch 2.11-2.15).

    With `keep_roundings`, inductor rounds between the operators that it fuses as these do one after the other. Its
    settings and its modes cannot be given together, so a mode is given as its settings, whose list is torch's alone.

    Code that keeps a tensor or swaps one in its forward stops dynamo inside a checkpoint, unless a setting that is
    torch's alone (torch 2.11-2.15) says that the recomputation need not write again: once a forward, as without a
    checkpoint. It is read while the module is traced, so it holds during calls of this module and nowhere else.
    """
    import torch
    import torch._dynamo

    _order_saved_states()
    _multiply_any_number_of_sizes()
    options |= _rounding_options(mode, keep_roundings=keep_roundings)
    module.compile(**options)
    setting: Any = torch._dynamo.config
    allowing = setting.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        skip_nnmodule_hook_guards=False,
        recompile_limit=most_forms,
        accumulated_recompile_limit=max(most_forms, setting.accumulated_recompile_limit),
    )
    compiled = allowing(module._compiled_call_impl)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if are_followed(module):
            hooked()
            return module._call_impl(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # before any of the code has run
            told()
            return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = call


def is_compiled(value: Any) -> bool:
    """Return whether something is a function that torch.compile returned, or a module that is compiled in place.

    There is no public name for either (torch 2.11-2.15).
    """
    from torch import nn

    if isinstance(value, nn.Module):
        return value._compiled_call_impl is not None
    return isinstance(value, FunctionType | MethodType) and hasattr(value, "_torchdynamo_orig_callable")


def leave_uncompiled(module: nn.Module) -> bool:
    """Let a module that is compiled in place, and those inside, run as they are; return whether there is one."""
    compiled = [each for each in module.modules() if is_compiled(each)]
    for each in compiled:
        each._compiled_call_impl = None
    return bool(compiled)


def compile_graph(graph: Any, *, backend: str, mode: str | None = None, keep_roundings: bool = False) -> Any:
    """Return what runs a captured graph compiled, with options as of `compile_module`; its sizes are constants."""
    import torch

    _multiply_any_number_of_sizes()
    options = _rounding_options(mode, keep_roundings=keep_roundings)
    return torch.compile(graph, backend=backend, fullgraph=True, dynamic=False, **options)


def _rounding_options(mode: str | None, *, keep_roundings: bool) -> dict[str, Any]:
    if not keep_roundings:
        return {"mode": mode}
    from torch._inductor import list_mode_options

    settings = {} if mode is None else list_mode_options(mode)
    return {"options": {**settings, "emulate_precision_casts": True}}


def trace_quantisers() -> None:
    """Let the compiler follow torchao's quantisers of tokens.

    They ask a function of torch for the shape of scales, and dynamo follows nothing of that module in torch 2.11.
    """
    import torch

    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        import torch._dynamo
        from torch.ao.quantization.fx import _decomposed

        module: Any = _decomposed
        name = "_per_token_quant_qparam_dim_check"
        if not hasattr(getattr(module, name), "__wrapped__"):
            setattr(module, name, torch._dynamo.dont_skip_tracing(getattr(module, name)))


def _order_saved_states() -> None:
    """Let a compiled checkpoint draw, or attend, beside DTensors.

    What a compiled forward leaves for its backward are tensors, then meshes of DTensors, then numbers. States of random
    streams, which recomputation asks for and which are tensors, are put behind the meshes, and are then taken for them
    (torch 2.13). The function that adds them is replaced by one that puts meshes last; where they are, it does nothing.
    """
    import torch._functorch.partitioners

    partitioners: Any = torch._functorch.partitioners
    adding = partitioners.functionalize_rng_ops
    if hasattr(adding, "__wrapped__"):
        return

    @functools.wraps(adding)
    def ordered(joint: Any, forward: Any, backward: Any, num_numbers: int, *args: Any, **kwargs: Any) -> Any:
        before = {node.name for node in _placeholders(backward)}
        forward, backward = adding(joint, forward, backward, num_numbers, *args, **kwargs)
        inputs = _placeholders(backward)
        states = [node for node in inputs if node.name not in before]
        meshes = [node for node in inputs if _is_mesh(node) and not node.name.startswith("tangents")]
        if states and meshes and inputs.index(meshes[-1]) < inputs.index(states[0]):
            for node in reversed(meshes):
                states[-1].append(node)
            backward.recompile()
            _meshes_last(forward, len(meshes), len(states), num_numbers)
        return forward, backward

    partitioners.functionalize_rng_ops = ordered


def _multiply_any_number_of_sizes() -> None:
    """Let a symbolic size be a product of more than two.

    Products of sizes that a graph passes on, those of DTensors, are built from their sympy expressions. It
    writes a product of any number of factors as one, which torch gives to `operator.mul`, which takes two (torch
    2.11-2.13; sums have a function that takes any number since 2.12).
    """
    import torch.fx.experimental.proxy_tensor

    tracing: Any = torch.fx.experimental.proxy_tensor
    handlers = tracing._sympy_handlers()
    handlers.update({kind: _product for kind, operation in handlers.items() if operation is operator.mul})


def _product(*factors: Any) -> Any:
    return functools.reduce(operator.mul, factors)


def _meshes_last(forward: Any, num_meshes: int, num_states: int, num_numbers: int) -> None:
    """Exchange the meshes among a forward's outputs with the states that follow them."""
    (output,) = forward.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    end = len(outputs) - num_numbers
    start = end - num_states
    meshes, states = outputs[start - num_meshes : start], outputs[start:end]
    output.args = ((*outputs[: start - num_meshes], *states, *meshes, *outputs[end:]),)
    forward.recompile()


def _placeholders(graph_module: Any) -> list[Any]:
    return list(graph_module.graph.find_nodes(op="placeholder"))


def _is_mesh(node: Any) -> bool:
    from torch._library.fake_class_registry import FakeScriptObject

    return isinstance(node.meta.get("val"), FakeScriptObject)
