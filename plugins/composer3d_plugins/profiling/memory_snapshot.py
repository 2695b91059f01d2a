"""Memory snapshots: a rank's allocations, on request and when it is out of memory."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from composer3d import PluginError, RunContext, StepAction, StepPoint, StepState, hookimpl, plugin

__all__ = ["MemorySnapshot"]


@plugin(family="profiling", provides={"memory_snapshots": {}})
class MemorySnapshot:
    """Write down what a rank's memory holds: after chosen steps, on SIGUSR2, and when a step ran out of memory.

    A snapshot is a JSON file: the bytes of parameters, gradients, optimizer state, buffers and other tensors alive,
    each storage once, the largest of the others, and the process' resident memory; on CUDA also the allocator's
    figures. With `history` CUDA's allocator is recorded too, and its pickle written beside it, for
    https://pytorch.org/memory_viz.

    Memory: none but while one is written; `history` takes host memory for every allocation.
    Collectives: none.

    Args:
        steps: After which one is written.
        on_signal: Write one at the end of the step in which SIGUSR2 arrives.
        history: Record CUDA's allocator, so many of the last allocations and frees; 0 records none.
        folder: Of the snapshots; default: `memory` in the run's folder.
    """

    steps: tuple[int, ...] = ()
    on_signal: bool = True
    history: int = 0
    folder: str | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse to record an allocator that there is not."""
        if self.history and context.device.type != "cuda":
            raise PluginError(
                f"history records CUDA's allocator, and this run is on {context.device.type}", hint="take it out"
            )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Begin with the first step, and look at the end of each whether one is due."""
        return [
            StepAction(name="memory_snapshot.begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="memory_snapshot.end", point=StepPoint.END, run=self._end),
        ]

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Write one if memory ran out; give the signal back."""
        watch: _Watch | None = context.state.get(self)
        if watch is None:
            return
        if error is not None and _is_out_of_memory(error):
            watch.write(f"step-{watch.step}-out-of-memory", told=f"{type(error).__name__}: {error}")
        watch.close()

    def _begin(self, state: StepState) -> None:
        context = state.context
        if context.purpose == "run" and self not in context.state:
            context.state[self] = _Watch(self, context)
        if self in context.state:
            context.state[self].step, context.state[self].optimizer = state.step, state.optimizer

    def _end(self, state: StepState) -> None:
        watch: _Watch | None = state.context.state.get(self)
        if watch is not None and (state.step in self.steps or watch.is_asked):
            watch.is_asked = False
            watch.write(f"step-{state.step}")


class _Watch:
    """One rank's snapshots."""

    def __init__(self, options: MemorySnapshot, context: RunContext) -> None:
        from composer3d import torch_compat

        self._context, self._options = context, options
        self._folder = context.output / "memory" if options.folder is None else Path(options.folder)
        self.step = 0
        self.optimizer: Any = None
        self.is_asked = False
        self._before: Any = None
        # Only the main thread may take signals.
        if options.on_signal and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._ask)
        if options.history:
            torch_compat.record_memory_history(options.history)

    def _ask(self, *_: Any) -> None:
        self.is_asked = True

    def write(self, name: str, told: str | None = None) -> None:
        from composer3d import torch_compat

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._context.rank}-{name}.json"
        content = {"step": self.step, "rank": self._context.rank, "error": told, **self._content()}
        path.write_text(json.dumps(content, indent=1) + "\n")
        if self._options.history:
            torch_compat.dump_memory_history(str(path.with_suffix(".pickle")))
        logging.getLogger(__name__).info("memory snapshot: %s", path)

    def _content(self) -> dict[str, Any]:
        import torch

        kinds = self._known()
        sums: Counter[str] = Counter()
        others: list[tuple[int, str]] = []
        seen: set[int] = set()
        for kind, tensor in [*kinds, *(("other", thing) for thing in _tensors_alive())]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            sums[kind] += storage.nbytes()
            if kind == "other":
                others.append((storage.nbytes(), f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        result: dict[str, Any] = {
            "bytes": dict(sums),
            "largest_others": [{"bytes": size, "tensor": told} for size, told in sorted(others, reverse=True)[:20]],
            "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }
        if self._context.device.type == "cuda":
            result["allocator"] = torch.cuda.memory_stats(self._context.device)
        return result

    def _known(self) -> list[tuple[str, Any]]:
        """Return local tensors whose use is known."""
        import torch

        from composer3d import torch_compat

        found: list[tuple[str, Any]] = []
        for part in self._context.parts:
            parameters = list(part.module.parameters())
            found += [("parameters", torch_compat.local_of(p.detach())) for p in parameters]
            found += [("gradients", torch_compat.local_of(p.grad)) for p in parameters if p.grad is not None]
            found += [("buffers", torch_compat.local_of(buffer)) for buffer in part.module.buffers()]
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            found += [
                ("optimizer", torch_compat.local_of(value))
                for value in values.values()
                if isinstance(value, torch.Tensor)
            ]
        return found

    def close(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)


def _tensors_alive() -> list[Any]:
    import torch

    # `type`, because isinstance asks lazy modules among the objects for their class and makes them import things.
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [thing for thing in gc.get_objects() if type(thing) in kinds and _is_real(thing)]


def _is_real(tensor: Any) -> bool:
    return tensor.device.type != "meta" and str(tensor.layout) == "torch.strided"


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CPU's allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
