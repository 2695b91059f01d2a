"""Observers of batches, which look and do not write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import HookError
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from composer3d.context import RunContext
    from composer3d.hooks import Bound
    from composer3d.interfaces import Batch
    from composer3d.registry import Registered

__all__ = ["observers"]


def observers(
    hooks: Sequence[Bound], named: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> tuple[Callable[..., None], ...]:
    """Return what calls every plugin's `composer3d_observe_batch`, and raises where that wrote into a batch.

    Tensors that torch made in inference mode do not count writes, and are not looked at.

    Args:
        hooks: Of the plugins.
        named: Returns a hook that is known by its plugin's name as it runs.
    """
    return tuple(_observer(registered, named(registered.name, function)) for registered, function in hooks)


def _observer(registered: Registered, function: Callable[..., Any]) -> Callable[..., None]:

    def observe(*, context: RunContext, batch: Batch) -> None:
        given = [leaf for leaf in tensors((batch.args, batch.kwargs, batch.target)) if not leaf.is_inference()]
        before = [leaf._version for leaf in given]
        function(context=context, batch=batch)
        if [leaf._version for leaf in given] != before:
            raise HookError(
                f"composer3d_observe_batch of {registered.name} wrote into the batch, which it only looks at: what "
                "trains on another one returns it from composer3d_place_batch",
                path=(registered.info.family, registered.name),
                place=registered.place,
                is_own=True,
            )

    return observe
