"""Throughput: rates, percentiles of step times, utilisation, and the bandwidth of collectives."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from composer3d import (
    Batch,
    Metric,
    Recorder,
    Role,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    hookimpl,
    plugin,
    torch_compat,
    units_of,
)

__all__ = ["Throughput"]

_GIB, _TERA = 2**30, 1e12


@plugin(family="profiling")
class Throughput:
    """Report tokens/s or samples/s, step time percentiles, FLOP/s, utilisation and the bandwidth of collectives.

    FLOP/s follow two conventions, named in the metrics. `model_6n`: 6 operations per token and per parameter that is
    multiplied (2 in the forward, 4 in the backward), without attention and without recomputation; MFU is its ratio to
    the peak. `hardware_counted`: the operations of one real step by torch's formulas, attention and recomputation
    included; HFU is its ratio to the peak. Tokens are all positions of the batch, padding included, since all of them
    are computed. Models with other inputs, such as images, report `throughput_samples_per_s` and no `model_6n`: how
    often a parameter is multiplied depends on the sample's size.
    `collective_gib_per_s_AXIS` is the payload of an axis' collectives, divided by the time for which they block: for
    asynchronous ones (`ddp`'s buckets) the time spent waiting on them. It includes the wait for slower ranks.
    On a GPU `peak_device_gib` is the peak of allocated memory since the run began, maximum over ranks.

    Memory: the last `window` step times.
    Collectives: none of its own; its metrics travel with all others.
    Source: Aakanksha Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, arXiv:2204.02311, 2022.

    Args:
        window: Number of latest steps over which percentiles are computed.
        peak_tflops: Peak TFLOP/s of one device in the run's dtype; without it MFU and HFU are not reported.
        count_step: Step, counted from 1, whose operations are counted by dispatching them one by one, which slows this
            step down; 0 counts none.
    """

    window: int = Field(default=100, ge=1, le=1 << 20, examples=[1])
    peak_tflops: float | None = Field(default=None, gt=0)
    count_step: int = Field(default=2, ge=0)

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder:
        """Time steps and collectives."""
        meter = context.state[self] = _Meter(context, self)
        return meter

    @hookimpl
    def composer3d_observe_batch(self, context: RunContext, batch: Batch) -> None:
        """Count the tokens or samples of a training batch by its shape."""
        context.state[self].batch(batch)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Count the operations of one step."""
        if not self.count_step:
            return []
        return [
            StepAction(name="throughput.count", point=StepPoint.BEGIN, run=self._begin_counting),
            StepAction(
                name="throughput.counted", point=StepPoint.BEFORE_OPTIMIZER, run=self._end_counting, gradients=False
            ),
        ]

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        """Return this rank's metrics of the last step."""
        meter: _Meter = context.state[self]
        return meter.metrics()

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Stop counting if a step was interrupted while it counted."""
        if self in context.state:
            context.state[self].stop_counting()

    def _begin_counting(self, state: StepState) -> None:
        state.context.state[self].start_counting()

    def _end_counting(self, state: StepState) -> None:
        state.context.state[self].stop_counting()


class _Meter:
    """Recorder that accumulates step times, units and transfers."""

    def __init__(self, context: RunContext, options: Throughput) -> None:
        self._context, self._options = context, options
        self._times: deque[float] = deque(maxlen=options.window)
        # Ranks along tp and pp read the same batch; each counts a fraction of it, so that the sum over ranks is right.
        self._batch_fraction = context.num_readers / context.world_size
        # The wait for a pipeline's messages includes the other stage's compute, so it measures no bandwidth.
        stages = context.layout.names(Role.STAGE)
        self._axes = [axis for axis, degree in context.degrees.items() if degree > 1 and axis not in stages]
        self._flops_per_token = 6.0 * _num_multiplying(context) / context.layout.degree(Role.TENSOR)
        self._in_step = False
        self._num_steps = self._units = 0
        self._unit = "tokens"
        self._counted_per_unit: float | None = None
        self._counter: Any = None
        self._counted_flops = 0.0
        self._transfers = _Transfers(_device_event if context.device.type == "cuda" else None)

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        if name == "step":
            self._in_step, self._units = True, 0
            self._transfers.clear()
            self._num_steps += 1
            return name, attributes, time.perf_counter_ns()
        if attributes.get("axis") not in self._axes:
            return None
        return name, attributes, self._transfers.mark()

    def end(self, token: Any) -> None:
        if token is None:
            return
        name, attributes, started = token
        if name == "step":
            self._in_step = False
            self._times.append((time.perf_counter_ns() - started) / 1e9)
        else:
            # The span of a wait has no bytes: they were counted when the collective was issued.
            self._transfers.add(attributes["axis"], attributes.get("bytes", 0), started)

    def batch(self, batch: Batch) -> None:
        if self._in_step:
            self._unit, count = units_of((batch.args, batch.kwargs))
            self._units += count

    def start_counting(self) -> None:
        import torch

        if self._num_steps == self._options.count_step:
            # torch.compile raises under a dispatch mode, so the counted step runs eagerly.
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
            self._counted_flops = 0.0
            # torch's FlopCounterMode decomposes operators without a formula, which changes their results.
            self._counter = torch_compat.dispatch_mode(self._count, compiles=False)
            self._counter.__enter__()

    def stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._eager.__exit__(None, None, None)
            if self._units:
                self._counted_per_unit = self._counted_flops / self._units
            self._counter = None

    def _count(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A DTensor is global: the operators on its local tensors are counted instead.
        if any(torch_compat.is_wrapper_subclass(cls) for cls in types):
            return NotImplemented
        result = operator(*args, **kwargs)
        self._counted_flops += _num_flops(operator, args, kwargs, result)
        return result

    def metrics(self) -> list[Metric]:
        """Return the figures; their names depend on the manifest and the kind of its data."""
        if not self._times:
            return []
        last, ordered = self._times[-1], sorted(self._times)
        rate = self._units / last
        result = [
            Metric(name=f"throughput_{self._unit}_per_s", value=rate * self._batch_fraction, reduction="sum"),
            *(
                Metric(name=f"step_time_p{percent}_s", value=_percentile(ordered, percent), reduction="max")
                for percent in (50, 95, 99)
            ),
        ]
        for name, utilisation, per_unit in (
            ("model_6n", "mfu_6n", self._flops_per_token if self._unit == "tokens" else None),
            ("hardware_counted", "hfu_counted", self._counted_per_unit),
        ):
            if per_unit is not None:
                result.append(Metric(name=f"{name}_tflops_per_s", value=rate * per_unit / _TERA, reduction="sum"))
                if self._options.peak_tflops is not None:
                    share = rate * per_unit / _TERA / self._options.peak_tflops
                    result.append(Metric(name=utilisation, value=share, reduction="mean"))
        moved = self._transfers.gib_per_s()
        result += [Metric(name=f"collective_gib_per_s_{axis}", value=moved.get(axis, 0.0)) for axis in self._axes]
        if self._context.device.type == "cuda":
            import torch

            peak = torch.cuda.max_memory_allocated(self._context.device) / _GIB
            result.append(Metric(name="peak_device_gib", value=peak, reduction="max"))
        return result


class _Transfers:
    """Bytes and durations of collectives, by axis.

    On CPU a span lasts as long as its collective. NCCL returns before the transfer is done: events recorded in the
    current stream measure its time on the device, and are read without synchronising once they have completed.

    Args:
        make_event: Returns a new event of the device; None measures host time.
    """

    def __init__(self, make_event: Callable[[], Any] | None) -> None:
        self._make_event = make_event
        self._moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._pending: deque[tuple[str, int, Any, Any]] = deque()
        self._last: dict[str, float] = {}

    def clear(self) -> None:
        """Drop transfers between steps, which no metric covers."""
        self._moved.clear()

    def mark(self) -> Any:
        """Return a time stamp, or an event recorded in the current stream."""
        if self._make_event is None:
            return time.perf_counter_ns()
        event = self._make_event()
        event.record()
        return event

    def add(self, axis: str, num_bytes: int, begin: Any) -> None:
        """Record a collective that has ended, or whose events are recorded."""
        end = self.mark()
        if self._make_event is None:
            self._count(axis, num_bytes, (end - begin) / 1e9)
        else:
            self._pending.append((axis, num_bytes, begin, end))

    def gib_per_s(self) -> dict[str, float]:
        """Return bandwidths of the collectives completed since the last call; an axis without any keeps its last."""
        while self._pending and self._pending[0][3].query():
            axis, num_bytes, begin, end = self._pending.popleft()
            self._count(axis, num_bytes, begin.elapsed_time(end) / 1e3)
        self._last |= {axis: moved / _GIB / seconds for axis, (moved, seconds) in self._moved.items() if seconds}
        self._moved.clear()
        return self._last

    def _count(self, axis: str, num_bytes: int, seconds: float) -> None:
        sums = self._moved[axis]
        sums[0] += num_bytes
        sums[1] += seconds


def _num_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return an operator's FLOPs by torch's formulas, extended to the attention operators on CPU."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    name = str(operator.name())
    if name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
        if name.endswith("backward"):
            return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    return torch_compat.num_flops(operator, args, kwargs, result)


def _device_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _percentile(ordered: list[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _num_multiplying(context: RunContext) -> int:
    """Count the full parameters of this rank's parts, without embeddings that are only looked up."""
    from torch import nn

    total = 0
    for part in context.parts:
        modules = list(part.module.modules())
        looked_up = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        looked_up -= {
            id(parameter)
            for module in modules
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }
        total += sum(p.numel() for p in part.module.parameters() if id(p) not in looked_up)
    return total
