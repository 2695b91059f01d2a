"""The state that one rank holds of a run: copied into host memory, and filled again in the same layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.errors import CheckpointError
from composer3d.step.gradients import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.checkpoint import Staging
    from composer3d.composition.run_state.persistence import Persistence

__all__ = ["RankState", "StoredState"]


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """A copy of what a rank holds.

    Args:
        tensors: Local shards on the CPU, by key.
        state: JSON values: the optimizer's, those of plugins and of what was attached, and the tensors' full shapes.
    """

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


class RankState:
    """State of a run on this rank: parameters, buffers, the optimizer, plugins, and what was attached.

    Unlike a checkpoint it is of one rank, and of one layout: the same rank of the same world takes it back, to the bit,
    buffers of its own (batch-norm statistics) included.

    Args:
        persistence: Of the composition.
        optimizer: Of the loop.
        bypassed: Opens a context in which parameters may be written.
        changed: Called after they were.
    """

    def __init__(
        self,
        persistence: Persistence,
        optimizer: torch.optim.Optimizer | None,
        bypassed: Callable[[], AbstractContextManager[Any]],
        changed: Callable[[], None],
    ) -> None:
        self._persistence, self._optimizer = persistence, optimizer
        self._bypassed, self._changed = bypassed, changed

    def copy(self, staging: Staging) -> StoredState:
        """Return a copy in host memory, complete once the staging's `wait` has returned.

        Parameters and the optimizer's state are copied in a thread, as by a deferred save.

        Args:
            staging: Owns the memory; the copy that it gave before is overwritten.

        Memory: this rank's state once more, on the host. Collectives: those of describing the optimizer's state.
        """
        with self._persistence.readable(self._optimizer) as (tensors, state):
            shapes = {key: [list(each.shape), str(each.dtype).removeprefix("torch.")] for key, each in tensors.items()}
            own = {key: local(each).detach().contiguous() for key, each in tensors.items()}
            copies = self._persistence.copies
            taken = copies.add(staging).take(own, steady=copies.steady(own, self._optimizer))
        return StoredState(tensors=taken, state={**state, "shapes": shapes})

    def fill(self, stored: StoredState) -> None:
        """Fill the tensors and states that are there.

        Args:
            stored: From `copy` of the same rank in the same layout.

        Raises:
            CheckpointError: It is of another model, optimizer or layout.

        Collectives: those of the optimizer's state, and of plugins after a load.
        """
        import torch

        from composer3d.checkpoint import TensorInfo

        shapes: Mapping[str, Any] = stored.state["shapes"]
        known = {
            key: TensorInfo(shape=tuple(shape), dtype=getattr(torch, dtype)) for key, (shape, dtype) in shapes.items()
        }

        def read(tensors: dict[str, Tensor]) -> None:
            if tensors.keys() != stored.tensors.keys():
                other = sorted(tensors.keys() ^ stored.tensors.keys())[0]
                raise CheckpointError(f'the state that was kept in memory and this run differ by "{other}"')
            with torch.no_grad():
                for key, tensor in tensors.items():
                    kept, own = stored.tensors[key], local(tensor)
                    if (kept.shape, kept.dtype) != (own.shape, own.dtype):
                        raise CheckpointError(f'"{key}" is another shard in the state that was kept in memory')
                    own.copy_(kept)

        with self._bypassed():
            self._persistence.fill(self._optimizer, stored.state, known, read)
        self._changed()
