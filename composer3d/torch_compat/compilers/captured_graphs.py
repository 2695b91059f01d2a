"""Graphs of functions whose Python code no compiler can follow: what it makes torch do is recorded, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["CaptureError", "capture_graph", "capture_is_on", "is_run_eagerly", "outside_function_modes"]

_capturing: list[Any] = []


class CaptureError(Exception):
    """A function's graph would not do what the function does."""


def capture_is_on() -> bool:
    """Return whether a graph is being captured: what is made of fake tensors belongs to that graph alone."""
    return bool(_capturing)


@contextlib.contextmanager
def outside_function_modes() -> Iterator[None]:
    """Leave all modes of torch functions; their stack is private (torch 2.11-2.15)."""
    from torch import overrides

    stack: list[Any] = list(overrides._get_current_function_mode_stack())
    for _ in stack:
        overrides._pop_mode()
    try:
        yield
    finally:
        for mode in stack:
            overrides._push_mode(mode)


def is_run_eagerly() -> bool:
    """Return whether whoever calls is to see modules and operators rather than a compiled graph.

    So it is under `torch.compiler.set_stance("force_eager")`, and under modes that see operators, fake tensors' among
    them. The stance, and the number of modes, are private (torch 2.11-2.15).
    """
    import torch
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance == "force_eager" or torch._C._len_torch_dispatch_stack() > 0


def capture_graph(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Return a graph module of what a function of tensors makes torch do, above autograd and autocast.

    Sizes and other numbers are constants of it. It is torch.export's way of capturing (torch 2.11-2.15).

    Raises:
        CaptureError: The function reads values, or computes with an autograd function of Python, whose backward a graph
            above autograd does not hold, or with a tensor that needs a gradient and is none of those given.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Any] = []

    def noted(*given: Any) -> Any:
        results[:] = [function(*given)]
        return results[0]

    _capturing.append(function)
    try:
        graph = make_fx(noted, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*tensors)
    except Exception as error:  # code that reads values raises many kinds
        raise CaptureError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    finally:
        _capturing.pop()
    _refuse_python_backwards(results)
    _without_meta(graph)
    for node in graph.graph.nodes:
        held = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor) and held.requires_grad:
            raise CaptureError("it computes with a tensor of other modules that needs a gradient")
    return graph


def _refuse_python_backwards(results: Any) -> None:
    """Raise an error where a backward is Python, but for those of registered operators, which a graph holds whole."""
    import torch

    left = [leaf.grad_fn for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        name = type(node).__name__
        if isinstance(node, torch.autograd.function.BackwardCFunction) and "GeneratedBackward" not in name:
            raise CaptureError(f"it computes with an autograd function of Python ({name})")


def _without_meta(graph: Any) -> None:
    """Erase what was done on meta, where shards' whole shapes are worked out."""
    import torch

    for node in reversed(list(graph.graph.nodes)):
        value = node.meta.get("val")
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        on_meta = bool(leaves) and all(leaf.device.type == "meta" for leaf in leaves)
        if node.op in ("call_function", "get_attr") and not node.users and (on_meta or node.op == "get_attr"):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
