"""What modules return in the first forward, as two numbers each: enough to find the first one that is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import without_torch_functions

if TYPE_CHECKING:
    from composer3d import Composition

__all__ = ["Output", "first_difference", "watching"]

_CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a module returned first.

    Args:
        shape: On this rank.
        total: Sum of its elements, in float64, each with a weight of its own.
        size: Sum of their absolute values.
    """

    shape: tuple[int, ...]
    total: float
    size: float


@contextlib.contextmanager
def watching(run: Composition) -> Iterator[dict[str, Output]]:
    """Note the first tensor that every module returns first, in the order in which they return. Collectives: none."""
    import torch

    from composer3d.gradients import local

    found: dict[str, Output] = {}

    def note(fqn: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if (
                fqn in found
                or not isinstance(tensor, torch.Tensor)
                or tensor.is_meta
                or not tensor.dtype.is_floating_point
            ):
                return
            # Modes of plugins follow what models compute; this is none of it.
            with without_torch_functions():
                values = local(tensor.detach()).double()
                # Weighted, since a norm's output adds up to nothing.
                weights = torch.linspace(1.0, 2.0, values.numel(), dtype=values.dtype, device=values.device)
                total, size = float(values.flatten() @ weights), float(values.abs().sum())
            found[fqn] = Output(shape=tuple(values.shape), total=total, size=size)

        return hook

    hooks = [
        module.register_forward_hook(note(fqn))
        for part in run.parts
        for fqn, module in part.module.named_modules()
        if fqn
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(reference: Mapping[str, Output], ranks: Sequence[Mapping[str, Output]]) -> str | None:
    """Return the first module whose output is another one on some rank that has it whole.

    Args:
        reference: Of one device, on the batch of the first data-parallel rank.
        ranks: Of the ranks that were given that batch.
    """
    for fqn, right in reference.items():
        for found in ranks:
            output = found.get(fqn)
            if output is None or output.shape != right.shape:
                continue
            if not abs(output.total - right.total) <= _CLOSE * right.size:
                return fqn
    return None
