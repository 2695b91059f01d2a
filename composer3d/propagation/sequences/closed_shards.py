"""Activations of a sharded sequence that code still has when its run is closed, and no rank can gather any more."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.function_dims import OBJECT, name_of
from composer3d.propagation.sequences.gradient_hooks import PASSED
from composer3d.propagation.shards import ShardSpec, spec_of

__all__ = ["ClosedShard", "closing_shards"]


class ClosedShard(Tensor):
    """A tensor whose values, and sizes, are of a rank's positions: reading these is refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function that asks the object itself.

        Raises:
            StepError: It reads values or sizes.
        """
        if (name := name_of(func)) in OBJECT:
            return super().__torch_function__(func, types, args, kwargs)
        raise StepError(
            f"{name} of an activation{beside()} that was kept of a run that is closed: a rank has its own positions of "
            "the sequence, and nobody gathers them any more; read it before run.close(), where it is gathered"
        )


@functools.cache
def _open() -> weakref.WeakSet[Any]:
    """Return the runs of this process that are open: their shards are not told from those of others."""
    return weakref.WeakSet()


def closing_shards(run: Any, *, axis: str) -> Callable[[], None]:
    """Return what ends a run that begins now: of those of the process the last refuses that shards are read.

    Args:
        run: An object that lives as long.
        axis: Along which its sequences are sharded.

    Memory: none. Collectives: none. It takes one look at the objects of the process.
    """
    _open().add(run)
    reference = weakref.ref(run)

    def close() -> None:
        _open().discard(reference())
        if _open():
            return
        with torch_compat.without_torch_functions():
            for value in gc.get_objects():
                if type(value) is Tensor and not value.is_meta and _is_shard(value, axis):
                    value.__class__ = ClosedShard

    return close


def _is_shard(value: Tensor, axis: str) -> bool:
    return spec_of(value, axis) is not None or isinstance(getattr(value, PASSED + axis, None), ShardSpec)
