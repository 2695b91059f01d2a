"""What lies between expanding and contracting projections: tensors of which each rank along tp holds other features.

Projections that read one tensor share its way in: one gather (or nothing) in the forward, and one reduction of their
gradients in the backward, where torch's styles would do both once a projection.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from composer3d import RunContext, TransformError
from composer3d_plugins.sharding.tensor_parallel.following import Following, cut_of, mark, strip
from composer3d_plugins.sharding.tensor_parallel.shapes import Placed

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Region", "site_of"]


def site_of(fqn: str) -> int:
    """Return a number for a place in the model, the same on every rank and in every stage."""
    return zlib.crc32(fqn.encode()) << 8


class Region:
    """The cut activations inside one module; reentered in every forward, and when it is recomputed.

    Args:
        fqn: The module's name.
        share: Makes a whole (or sequence-cut) tensor what expanding projections take.
        context: For the random stream; None where nothing in the module draws numbers.
        degree: Of tp, if the module's code computes with sizes of the whole model; else None.
        cut: The dim along which the module's first argument is cut, if it is.
    """

    def __init__(
        self,
        fqn: str,
        share: Callable[[Tensor], Tensor],
        *,
        context: RunContext | None,
        degree: int | None,
        cut: int | None,
    ) -> None:
        self._fqn, self._share, self._context, self._degree, self._cut = fqn, share, context, degree, cut
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._random = contextlib.ExitStack()
        self._entries = 0

    @property
    def is_open(self) -> bool:
        """Whether the forward is between expanding and contracting projections."""
        return bool(self._shared)

    def wrap(self, module: nn.Module) -> None:
        """Replace the module's forward by one that leaves the region whatever happens, keeping its name."""
        forward = self._followed(module.forward)

        @functools.wraps(forward)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._entries = 0
            try:
                return forward(*args, **kwargs)
            finally:
                # Also after errors, and when a recomputation stops early.
                self.leave()

        module.forward = bounded

    def _followed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        degree, cut = self._degree, self._cut
        if degree is None:
            return forward

        @functools.wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            with Following(degree, self._fqn):
                if cut is not None:
                    args, kwargs = _mark_first(args, kwargs, cut, degree)
                return forward(*args, **kwargs)

        return followed

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """Return what the projections that read `x` share."""
        for seen, shared in self._shared:
            if seen is x:
                return shared
        if not self._shared and training and self._context is not None:
            self._random.enter_context(self._context.sharded_random(site_of(self._fqn) + self._entries))
            self._entries += 1
        shared = self._share(strip(x))
        self._shared.append((x, shared))
        return shared

    def leave(self) -> None:
        """End it: the next tensor enters anew."""
        self._shared.clear()
        self._random.close()

    def refuse_unplanned(self, fqn: str) -> Callable[..., None]:
        """Return a hook for a module with parameters of its own that the plan says nothing about."""

        def check(*_: Any) -> None:
            if self.is_open:
                where = self._fqn or "the root"
                raise TransformError(
                    f'"{fqn}" has parameters and runs between the projections that cut "{where}"; write "local" for it '
                    'in plan if it works on their cut results, "replicate" if it works on whole ones'
                )

        return check


def _mark_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, degree: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Say of the first activation among a module's arguments that it is cut along the sequence."""
    everything: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in everything:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > dim:
            if cut_of(value) is None:
                size = value.shape[dim] * degree
                value = mark(value.view_as(value), placed=Placed(dim=dim, parts=(size,)), degree=degree)
            if isinstance(key, int):
                return (*args[:key], value, *args[key + 1 :]), kwargs
            return args, {**kwargs, key: value}
    return args, kwargs
