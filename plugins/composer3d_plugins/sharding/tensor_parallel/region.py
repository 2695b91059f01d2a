"""Regions between expanding (colwise) and contracting (rowwise) projections: activations sharded over tp by feature.

Projections that read one tensor share its entry: one all-gather (or nothing) in the forward, and one reduction of their
gradients in the backward, where torch's styles would issue both once per projection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.propagation import activation_of, exchanged, replaced, spec_of, strip

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import Shard

__all__ = ["Region"]


class Region:
    """The sharded activations inside one module; reentered in every forward, and when it is recomputed.

    Args:
        share: Returns the input x_BSD of expanding projections, from a tensor and its placement, None if it is
            replicated.
        is_known: Whether every sharded tensor carries a mark, so that an unmarked one is replicated.
    """

    def __init__(self, share: Callable[[Tensor, Shard | None], Tensor], *, is_known: bool = False) -> None:
        self._share, self._is_known = share, is_known
        self._shared: list[tuple[Tensor, Tensor]] = []

    def wrap(self, module: nn.Module) -> None:
        """Replace the module's forward by one that leaves the region whatever happens, keeping its name."""
        forward = module.forward

        @functools.wraps(forward)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                # Also after errors, and when a recomputation stops early.
                self.leave()

        module.forward = bounded

    def gather(self, module: nn.Module, placement: Shard) -> None:
        """Give a module in it the full sequence, which the projections that read it share.

        Args:
            module: Its forward is replaced, keeping its name.
            placement: Placement of the activation that the module takes.
        """
        forward = module.forward

        def whole(x: Tensor) -> Tensor:
            shared: Any = None

            def gathered(x: Tensor) -> Tensor:
                nonlocal shared
                shared = self._share(x, placement)
                result: Tensor = torch_compat.unviewed(shared.to_local())
                return result

            result = exchanged(x, gathered)
            self.put(result, shared)
            return result

        @functools.wraps(forward)
        def gathering(*args: Any, **kwargs: Any) -> Any:
            key = activation_of(args, kwargs)
            if key is not None:
                args, kwargs = replaced(args, kwargs, key, whole)
            return forward(*args, **kwargs)

        module.forward = gathering

    def enter(self, x: Tensor, placement: Shard | None) -> Tensor:
        """Return what the projections that read `x` share.

        Args:
            x: Local, x_BSD or x_B(S/T)D.
            placement: Its placement, if it carries no mark; None if it is replicated.
        """
        for seen, shared in self._shared:
            if seen is x:
                return shared
        shared = self._share(strip(x), None if self._is_known and spec_of(x) is None else placement)
        self.put(x, shared)
        return shared

    def needs_gather(self, x: Tensor) -> bool:
        """Return whether `x` is sharded along the sequence where that is stated, and nobody has gathered it yet."""
        return not any(seen is x for seen, _ in self._shared) and not (self._is_known and spec_of(x) is None)

    def put(self, x: Tensor, shared: Tensor) -> None:
        """Take what the projections that read `x` share."""
        self._shared.append((x, torch_compat.backward_hooks.stand_for(shared, x)))

    def leave(self) -> None:
        """End the region: the next tensor enters again."""
        self._shared.clear()
