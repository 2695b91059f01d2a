"""torch.profiler: Chrome traces of chosen steps and ranks."""

from __future__ import annotations

import gzip
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from composer3d import (
    PluginError,
    Recorder,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    hookimpl,
    plugin,
    torch_compat,
)

if TYPE_CHECKING:
    import torch

__all__ = ["TorchProfiler"]

_WAIT_FOR_RANKS_S = 10.0
_SHOWN = ("stage", "microbatch", "group", "axis")


@plugin(family="profiling")
class TorchProfiler:
    """Profile some steps of some ranks with torch.profiler, and put all ranks into one Chrome or Perfetto trace.

    Every span of composer3d is a range of the trace, named by its phase, and every block is one, named by its FQN; in
    Nsight they are NVTX ranges. Each cycle of a rank becomes `rank-R-cycle-C.json.gz`; at the end the first of the
    ranks writes `all-ranks.json.gz`, where processes are ranks.

    Memory: the events of `active` steps, in host memory: kilobytes for every operator.
    Collectives: none.

    Args:
        wait: Steps before each cycle that are not profiled.
        warmup: Steps that are profiled and thrown away.
        active: Steps that are profiled.
        repeat: Cycles; 0 goes on to the end of the run.
        ranks: That are profiled; default: the first.
        folder: Of the traces; default: `profiles` in the run's folder.
        tensorboard: Write the files so that TensorBoard's profiler finds them, in the same folder.
        shapes: Record shapes of operators' inputs.
        memory: Record allocations.
        stacks: Record Python's call stacks.
        nvtx: Emit NVTX ranges, for Nsight Systems; CUDA only.
    """

    wait: int = Field(default=1, ge=0)
    warmup: int = Field(default=1, ge=0)
    active: int = Field(default=2, ge=1)
    repeat: int = Field(default=1, ge=0)
    ranks: tuple[int, ...] = (0,)
    folder: str | None = None
    tensorboard: bool = False
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    nvtx: bool = False

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse ranks that there are not, and NVTX without CUDA."""
        for rank in self.ranks:
            if not 0 <= rank < context.world_size:
                raise PluginError(
                    f"ranks names {rank}, and the world has the ranks 0 to {context.world_size - 1}",
                    hint="take it out",
                )
        if self.nvtx and context.device.type != "cuda":
            raise PluginError(f"nvtx needs CUDA, and this run is on {context.device.type}", hint="take it out")

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Make the profiler of this rank, and ranges of spans."""
        if context.purpose != "run" or context.rank not in self.ranks:
            return None
        session = context.state[self] = _Session(self, context)
        return session

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Begin with the first step, and count steps."""
        return [
            StepAction(name="torch_profiler.begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="torch_profiler.end", point=StepPoint.END, run=self._end),
        ]

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Write what is left, and the trace of all ranks."""
        if self in context.state:
            context.state[self].close(merge=error is None)

    def _begin(self, state: StepState) -> None:
        if self in state.context.state:
            state.context.state[self].start()

    def _end(self, state: StepState) -> None:
        if self in state.context.state:
            state.context.state[self].step()


class _Session:
    """One rank's profiler, and a recorder whose spans are ranges while it is active."""

    def __init__(self, options: TorchProfiler, context: RunContext) -> None:
        from torch import profiler

        self._options, self._context = options, context
        self._folder = context.output / "profiles" if options.folder is None else Path(options.folder)
        self._cycles = 0
        self._started = False
        activities = [profiler.ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        torch_compat.hide_profiler_warnings()  # every cycle has a file of its own
        self.profiler = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(
                wait=options.wait, warmup=options.warmup, active=options.active, repeat=options.repeat
            ),
            on_trace_ready=self._write,
            record_shapes=options.shapes,
            profile_memory=options.memory,
            with_stack=options.stacks,
        )
        self._watch_blocks()

    def start(self) -> None:
        if not self._started:
            self._started = True
            self.profiler.start()

    def step(self) -> None:
        with warnings.catch_warnings():
            # Every cycle is written when it ends; that torch then forgets it is what is wanted.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self.profiler.step()

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        told = " ".join(
            f"{key}={attributes[key]}" for key in ("stage", "microbatch", "group", "axis") if key in attributes
        )
        return self._open(f"composer3d.{name} {told}".rstrip())

    def end(self, token: Any) -> None:
        import torch

        token.__exit__(None, None, None)
        if self._options.nvtx:
            torch.cuda.nvtx.range_pop()

    def _open(self, label: str) -> Any:
        import torch

        if self._options.nvtx:
            torch.cuda.nvtx.range_push(label)
        span = torch.profiler.record_function(label)
        span.__enter__()
        return span

    def _watch_blocks(self) -> None:
        context = self._context
        for part in context.parts:
            names = {name for name, _ in part.module.named_modules()}
            for fqn in context.units(None)[:-1]:
                if fqn in names:
                    self._watch(part.module.get_submodule(fqn), fqn)

    def _watch(self, module: Any, fqn: str) -> None:
        opened: list[Any] = []
        module.register_forward_pre_hook(lambda *_: opened.append(self._open(f"composer3d.block {fqn}")))
        module.register_forward_hook(lambda *_: self.end(opened.pop()) if opened else None, always_call=True)

    def _write(self, profile: torch.profiler.profile) -> None:
        from torch.profiler import tensorboard_trace_handler

        self._folder.mkdir(parents=True, exist_ok=True)
        rank = self._context.rank
        if self._options.tensorboard:
            tensorboard_trace_handler(str(self._folder), worker_name=f"rank-{rank}")(profile)
            return
        profile.export_chrome_trace(str(self._folder / f"rank-{rank}-cycle-{self._cycles}.json.gz"))
        self._cycles += 1

    def close(self, *, merge: bool) -> None:
        if self._started:
            self.profiler.stop()
        rank = self._context.rank
        if self._options.tensorboard or not self._cycles:
            return
        (self._folder / f".rank-{rank}.done").touch()
        if merge and rank == min(self._options.ranks):
            _merge(self._folder, self._options.ranks)


def _merge(folder: Path, ranks: tuple[int, ...]) -> None:
    """Write the traces of all ranks as one, once every rank has written its own."""
    deadline = time.monotonic() + _WAIT_FOR_RANKS_S
    while not all((folder / f".rank-{rank}.done").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        for path in sorted(folder.glob(f"rank-{rank}-cycle-*.json.gz")):
            with gzip.open(path, "rt") as file:
                trace = json.load(file)
            # Times are microseconds since each trace's own base.
            base_us = trace.get("baseTimeNanoseconds", 0) / 1000
            events += [_moved(event, rank, base_us) for event in trace["traceEvents"]]
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first
    with gzip.open(folder / "all-ranks.json.gz", "wt") as file:
        json.dump({"traceEvents": names + events}, file)
    for rank in ranks:
        (folder / f".rank-{rank}.done").unlink(missing_ok=True)


def _moved(event: dict[str, Any], rank: int, base_us: float) -> dict[str, Any]:
    moved = {**event, "pid": rank}
    if event.get("pid") is not None and not isinstance(event["pid"], int):
        moved["tid"] = f"{event['pid']} {event.get('tid', '')}"
    if "ts" in event:
        moved["ts"] = event["ts"] + base_us
    if isinstance(event.get("id"), int):
        moved["id"] = f"{rank}.{event['id']}"
    return moved
