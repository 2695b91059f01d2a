"""Compiled modules in a trace: results of products and attention are saved, the rest is recomputed.

A compiler's partitioner keeps for the backward what is costly to compute, and fuses the rest into the kernels that need
it. Its kernels do not run on fake tensors; a selective checkpoint of the same choice keeps the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.transform import Phase

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.composition import Preparation

__all__ = ["keep_as_compiled"]

_COLLECTIVES = ("c10d", "_c10d_functional")


def keep_as_compiled(run: Composition, preparation: Preparation) -> None:
    """Let the compiled modules of a composition keep what a compiler does; those that are recomputed stay as they are.

    Args:
        run: On fake tensors, of a copy of the model.
        preparation: With the modules that transforms select.
    """
    recomputed = _selected(preparation, Phase.RECOMPUTE)
    for part in run.parts:
        for fqn in _selected(preparation, Phase.COMPILE):
            related = any(fqn == other or _is_inside(fqn, other) or _is_inside(other, fqn) for other in recomputed)
            try:
                module: Any = part.module.get_submodule(fqn)
            except AttributeError:  # another stage's
                continue
            if not related and any(True for _ in module.parameters()):
                module.forward = _keeping(module.forward)


def _selected(preparation: Preparation, phase: Phase) -> list[str]:
    return [fqn for transform, fqns in preparation.selected if transform.phase is phase for fqn in fqns]


def _is_inside(fqn: str, other: str) -> bool:
    return fqn.startswith(f"{other}.")


def _keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    contexts = functools.partial(torch_compat.selective_contexts, _policy)

    @functools.wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        return checkpoint(forward, *args, **options, **kwargs)

    return kept


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what has floating-point operations to count, attention of other packages, and what was communicated."""
    from torch.utils.checkpoint import CheckpointPolicy

    is_costly = (
        torch_compat.has_flops(operator)
        or getattr(operator, "namespace", "") in _COLLECTIVES
        or operator in _custom_operators()
    )
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _custom_operators() -> frozenset[Any]:
    return frozenset(torch_compat.custom_operators("attention", "collective"))
