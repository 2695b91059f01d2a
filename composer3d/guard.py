"""The one all-reduce at the start of a step: valid tokens are counted, and ranks prove that they run the same step.

A rank that skips a step trains on in plain torch, each of its collectives paired with another step's, and nobody is
told. Here every rank writes its step into its own slot of the vector that carries the token count, so the first
forward of the wrong step names the ranks that differ.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Layout, Role

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Guard", "Totals", "contract_group", "control_device"]

_MISSING_WAIT_S = 5.0
# In the place of the batch's number: an evaluation is never taken for a step of the same number.
_EVALUATION = 0xFFFF


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all ranks together are about to compute.

    Args:
        count: Valid tokens of the global batch.
        num_microbatches: Micro-batches of the global batch.
        equal: Whether every micro-batch has the same count.
    """

    count: int
    num_microbatches: int
    equal: bool


def control_device(device: torch.device) -> torch.device:
    """Return the device for small control tensors: the CPU where the default group can, so no step waits for a GPU."""
    import torch
    import torch.distributed as dist

    config = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in config or config in ("gloo", "fake") else device


def contract_group(layout: Layout, mesh: DeviceMesh) -> Any:
    """Return the process group that shares one global batch: the world, but for independent axes."""
    if layout.degree(Role.INDEPENDENT) == 1:
        return None
    names = tuple(axis.name for axis in layout.dense_axes if axis.role is not Role.INDEPENDENT)
    return torch_compat.flatten(mesh[names], "contract").get_group()


class Guard:
    """Agreement on counts and steps. Collectives: one all-reduce of 3 + 2 x ranks integers a call."""

    def __init__(self, *, layout: Layout, rank: int, group: Any, device: torch.device) -> None:
        import torch.distributed as dist

        self._ranks = dist.get_process_group_ranks(group) if group is not None else range(layout.world_size)
        self._group, self._device = group, device
        self._slot = list(self._ranks).index(rank)
        self._rank = rank
        coordinates = layout.coordinates(rank)
        others = layout.names(Role.TENSOR, Role.STAGE)
        # Ranks along tp and pp hold the same samples: only the first of them counts.
        self._counts = all(coordinates[name] == 0 for name in others)
        self._batch_index = [layout.index(other, Role.BATCH, Role.SEQUENCE) for other in self._ranks]
        self.compares_batches = layout.degree(Role.TENSOR, Role.STAGE) > 1

    def agree(self, *, step: int, call: int | None, counts: Sequence[int], digest: int) -> Totals:
        """Add up counts over all ranks and check that they are at the same place.

        Args:
            step: The number the loop gave this step, or that of the evaluation.
            call: The how-manieth batch of this step it is; None for an evaluation.
            counts: Valid tokens of each of this rank's micro-batches.
            digest: Of the batch; compared between ranks that must hold the same one.

        Raises:
            StepError: Ranks differ, or some did not arrive; names them.
        """
        import torch
        import torch.distributed as dist

        size = len(self._ranks)
        vector = [0] * (3 + 2 * size)
        if self._counts:
            vector[:3] = [sum(counts), len(counts), sum(count * count for count in counts)]
        # Slots start at 1, so that a rank which took no part in the sum cannot look like step 0.
        slot = (step << 16) + (_EVALUATION if call is None else call + 1)
        vector[3 + self._slot] = slot
        vector[3 + size + self._slot] = digest
        tensor = torch.tensor(vector, dtype=torch.int64, device=self._device)
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise StepError(self._missing(slot, error)) from error
        total: list[int] = tensor.tolist()
        self._same_step(total[3 : 3 + size])
        self._same_batch(total[3 + size :], slot)
        count, microbatches, squares = total[:3]
        return Totals(count=count, num_microbatches=microbatches, equal=microbatches * squares == count * count)

    def any(self, votes: Sequence[bool]) -> list[bool]:
        """Return, for each vote, whether any rank cast it. Collectives: one all-reduce."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(votes, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(vote) for vote in tensor.tolist()]

    def _same_step(self, slots: list[int]) -> None:
        if len(set(slots)) == 1:
            return
        usual = Counter(slots).most_common(1)[0][0]
        odd = [(rank, slot) for rank, slot in zip(self._ranks, slots, strict=True) if slot != usual]
        shown = ", ".join(f"rank {rank} is at {_place(slot)}" for rank, slot in odd[:4])
        raise StepError(
            f"ranks do not run the same step: {shown}, while {len(slots) - len(odd)} of {len(slots)} ranks are at "
            f"{_place(usual)}; a rank skipped or repeated a batch"
        )

    def _same_batch(self, digests: list[int], slot: int) -> None:
        if not self.compares_batches:
            return
        first: dict[int, int] = {}
        for position, index in enumerate(self._batch_index):
            other = first.setdefault(index, position)
            if digests[other] != digests[position]:
                raise StepError(
                    f"ranks {self._ranks[other]} and {self._ranks[position]} were given different batches at "
                    f"{_place(slot)}; ranks that differ only in tp or pp must read the same samples"
                )

    def _missing(self, slot: int, error: RuntimeError) -> str:
        """Find out through the store who did not arrive; only after a failure, so steps pay nothing for it."""
        missing = []
        deadline = time.monotonic() + _MISSING_WAIT_S
        try:
            store = torch_compat.default_store()
            store.set(f"composer3d/step/{slot}/{self._rank}", "here")
            for rank in self._ranks:
                try:
                    # One deadline for all: with many missing, those who are there would be waited for in vain.
                    left_s = max(deadline - time.monotonic(), _MISSING_WAIT_S / 100)
                    store.wait([f"composer3d/step/{slot}/{rank}"], timedelta(seconds=left_s))
                except RuntimeError:
                    missing.append(rank)
        except RuntimeError:
            return f"rank {self._rank} lost the other ranks at the start of {_place(slot)}: {error}"
        if not missing:
            return f"the collective at the start of {_place(slot)} failed on rank {self._rank}: {error}"
        names = " and ".join(f"rank {rank}" for rank in missing[:8])
        return f"{names} did not reach {_place(slot)}, which rank {self._rank} waited for: stalled, ended, or elsewhere"


def _place(slot: int) -> str:
    if slot & 0xFFFF == _EVALUATION:
        return f"evaluation {slot >> 16}"
    call = (slot & 0xFFFF) - 1
    return f"step {slot >> 16}" + (f", batch {call + 1}" if call else "")
