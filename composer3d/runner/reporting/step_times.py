"""Step times and rates of tokens or samples, reduced over ranks in the one collective at a step's end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from composer3d import units_of
from composer3d.runner.reporting.metrics import peak_flops

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.runner.data import Batch, Loader

__all__ = ["StepClock"]


class StepClock:
    """Times steps and reduces what ranks report at the end of each.

    Args:
        run: Gives layout, device and spans.
        loader: Of its batches.
        flops_per_token: Floating-point operations of forward and backward, for the MFU; those of a sample that is no
            tokens depend on its size, and there is none.
        ignored: The target that carries no loss.
    """

    def __init__(self, run: Composition, loader: Loader, *, flops_per_token: int, ignored: int = -100) -> None:
        context = run.context
        self._ignored = ignored
        self._span = context.span
        self._loader, self._flops_per_token = loader, flops_per_token
        # Ranks that share a data-parallel coordinate read the same tokens.
        self._share = context.num_readers / context.world_size
        self._world_size = context.world_size
        peak = peak_flops(context.device)
        self._peak = None if peak is None else peak * context.world_size
        self._wait_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin to count the next step."""
        self._begin = time.perf_counter()

    def read(self, step: int) -> Batch:
        """Read a batch, and note how long the step had to wait for it."""
        before = time.perf_counter()
        with self._span("data_wait", step=step):
            batch = self._loader.batch(step)
        self._wait_s = time.perf_counter() - before
        return batch

    def finish(self, row: dict[str, Any], batch: Batch, stop: bool) -> bool:
        """Add tokens, or samples where those are the unit, and times to a step's row; return whether to stop.

        Tokens are those with a target where every token has one, and all of them else.

        Collectives: one all-reduce of three numbers on the CPU.
        """
        import torch
        import torch.distributed as dist

        unit, count = units_of((batch.args, batch.kwargs))
        is_alike = isinstance(batch.inputs, torch.Tensor) and isinstance(batch.targets, torch.Tensor)
        if unit == "tokens" and is_alike and batch.targets.shape == batch.tokens.shape:
            count = int((batch.targets != self._ignored).sum())
        shared = torch.tensor([count * self._share, self._wait_s / self._world_size, float(stop)], dtype=torch.float64)
        with self._span("all_reduce", group="tokens", axis="world"):
            dist.all_reduce(shared)
        num_units = round(float(shared[0]))
        time_s = time.perf_counter() - self._begin
        row |= {unit: num_units, "step_time_s": time_s, f"{unit}_per_s": num_units / time_s}
        row["data_wait_s"] = float(shared[1])
        if self._peak is not None and unit == "tokens":
            row["mfu"] = row["tokens_per_s"] * self._flops_per_token / self._peak
        return bool(shared[2] > 0)
