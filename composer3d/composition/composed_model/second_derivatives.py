"""Gradients of gradients, which what tensor and sequence parallelism exchange does not have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.mesh import Layout

__all__ = ["ADVICE", "exchanging_axes", "find_second_derivative", "refuse_second_derivatives"]

ADVICE = "write 1 for it, and shard parameters over dp_shard, whose gradients can be differentiated"


def exchanging_axes(layout: Layout) -> list[str]:
    """Return the axes whose ranks exchange activations inside of the model."""
    return [name for name in layout.names(Role.TENSOR, Role.SEQUENCE) if layout.degrees[name] > 1]


def find_second_derivative(model: nn.Module) -> str | None:
    """Return the sentence for a module whose own code calls `autograd.grad` with `create_graph`; None without one."""
    seen: set[type] = set()
    for fqn, module in model.named_modules():
        for base in type(module).__mro__:
            if base in seen or base.__module__.startswith("torch."):
                continue
            seen.add(base)
            for name, function in vars(base).items():
                code = function.__code__ if inspect.isfunction(function) else None
                if code is not None and any(_builds_graph(each) for each in _nested(code)):
                    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                    where = f'"{fqn}"' if fqn else "the model"
                    return f"{name} of {where} ({type(module).__name__}, {place}) differentiates with create_graph"
    return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _builds_graph(code: CodeType) -> bool:
    keywords = {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    return "grad" in code.co_names and "create_graph" in keywords


def refuse_second_derivatives(output: Any, axes: list[str]) -> None:
    """Have a backward of an output raise if it builds a graph: gradients of it would leave out the exchanges.

    Args:
        output: Of the model's forward.
        axes: Along which it exchanged activations.
    """
    import torch

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise StepError(
                f"a gradient with create_graph=True of the model's output cannot be differentiated over {axes[0]}: "
                f"what its ranks exchange in a backward is in no graph, and gradients would be wrong; in [mesh], "
                f"{ADVICE}"
            )

    for value in tensors(output):
        if value.requires_grad:
            value.register_hook(refuse)
