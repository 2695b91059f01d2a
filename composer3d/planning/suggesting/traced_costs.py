"""Costs of a model as functions of its depth, from the trace of its own code at two depths.

A layout without data parallelism and without a pipeline is traced on fake tensors, with three of the model's equal
blocks and with four. What one block adds to every count is its cost; what is left at no blocks is the cost of
embedding, head and loss. Nothing is read from names, so any model will do that can be traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from composer3d.planning.costs.step_time import AFTER, kernels_s, launches_s, segment_time

if TYPE_CHECKING:
    from composer3d.planning.hardware.cluster import Device, Hardware
    from composer3d.planning.tracing.extending import Depths, Sketch
from composer3d.planning.tracing.rank_tracer import Tracer

__all__ = ["ActionTime", "Moment", "TracedCosts", "traced_costs"]

_KINDS: Mapping[str, str] = {"input_backward": "backward", "weight_backward": "backward", "gradients": "optimizer"}


@dataclass(frozen=True, kw_only=True)
class ActionTime:
    """Seconds of all actions of a kind in a step of one micro-batch.

    Args:
        kernels_s: Of operators.
        launches_s: Of the host for them, however large the micro-batch.
        waiting_s: Of collectives that nothing hides.
    """

    kernels_s: float = 0.0
    launches_s: float = 0.0
    waiting_s: float = 0.0

    @classmethod
    def sum_of(cls, parts: Iterable[tuple[float, ActionTime]]) -> ActionTime:
        """Return the sum of several, each a number of times."""
        rows = list(parts)
        return cls(
            kernels_s=sum(number * time.kernels_s for number, time in rows),
            launches_s=sum(number * time.launches_s for number, time in rows),
            waiting_s=sum(number * time.waiting_s for number, time in rows),
        )

    def compute_s(self, device: Device, *, scale: float = 1.0) -> float:
        """Return the seconds of operators on a micro-batch that is `scale` times as large."""
        kernels = scale * self.kernels_s
        return max(kernels, self.launches_s) if device.is_asynchronous else kernels + self.launches_s


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of the step at which the peak may be, in bytes.

    Args:
        kind: Of the segment.
        is_inside: Whether a block runs, and not embedding, head or loss.
        activations: Made in forwards.
        gradients: Of parameters.
        transient: The rest, without parameters, buffers and optimizer state.
    """

    kind: str
    is_inside: bool
    activations: float
    gradients: float
    transient: float


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedCosts:
    """A model on one rank of its tensor- and context-parallel axes, with all of its data and all of its depth.

    Args:
        depths: The traces, of one micro-batch.
        times: By kind of segment, of the short trace and of the longer one.
        microbatch: Samples of the micro-batch.
        parameter_size: Bytes of a parameter, on average.
    """

    depths: Depths
    times: tuple[Mapping[str, ActionTime], Mapping[str, ActionTime]]
    microbatch: int
    parameter_size: float
    _moments: dict[int, list[Moment]] = field(default_factory=dict)

    def bytes_of(self, name: str, num_blocks: int) -> float:
        """Return the bytes of a number of blocks with embedding and head.

        Args:
            name: A number of `Sketch`, such as `parameters`.
            num_blocks: Of a stage; 0 leaves embedding and head.
        """
        more, first = self._weights(num_blocks)
        short: int = getattr(self.depths.short, name)
        longer: int = getattr(self.depths.longer or self.depths.short, name)
        return max(0.0, first * short + more * longer)

    def time_of(self, kind: str, num_blocks: int) -> ActionTime:
        """Return the time of all segments of a kind: `forward`, `backward`, or `optimizer` with what precedes it.

        Args:
            kind: Of segments.
            num_blocks: Of a stage; 0 leaves embedding and head.
        """
        more, first = self._weights(num_blocks)
        short, longer = (times.get(kind, ActionTime()) for times in self.times)
        return ActionTime.sum_of([(first, short), (more, longer)])

    def moments(self, num_blocks: int) -> list[Moment]:
        """Return the moments of a stage of so many blocks with embedding and head."""
        if num_blocks not in self._moments:
            self._moments[num_blocks] = list(self._moments_of(num_blocks))
        return self._moments[num_blocks]

    def _moments_of(self, num_blocks: int) -> Iterator[Moment]:
        short, longer = self.depths.short, self.depths.longer or self.depths.short
        lasting = sum(self.bytes_of(name, num_blocks) for name in ("parameters", "buffers", "optimizer"))
        more, first = self._weights(num_blocks)
        for one, other in zip(short.stretches, longer.stretches, strict=True):
            for place in one.peaks.keys() & other.peaks.keys():
                pairs = zip(one.peaks[place][:3], other.peaks[place][:3], strict=True)
                live, made, gradients = (max(0.0, first * less + more * long) for less, long in pairs)
                yield Moment(
                    kind=one.kind,
                    is_inside=bool(place[1]),
                    activations=made,
                    gradients=gradients,
                    transient=max(0.0, live - lasting - made - gradients),
                )

    @cached_property
    def saved_bytes(self) -> float:
        """Activations that one block keeps for the backward."""
        return self.bytes_of("activations", 1) - self.bytes_of("activations", 0)

    def _weights(self, num_blocks: int) -> tuple[float, float]:
        """Return by what the longer and the short trace are multiplied for a number of blocks.

        A model whose blocks differ, or that has no list of them, is traced whole: each block is as their mean.
        """
        if self.depths.longer is None:
            return 0.0, num_blocks / max(1, self.depths.num_blocks)
        more = num_blocks - self.depths.num_short
        return more, 1 - more


def traced_costs(tracer: Tracer, hardware: Hardware, *, microbatch: int, parameter_size: float) -> TracedCosts:
    """Trace a layout of one data-parallel rank and one stage.

    Args:
        tracer: Of its job.
        hardware: On which its operators and collectives are timed.
        microbatch: Samples of the micro-batch.
        parameter_size: Bytes of a parameter, on average.

    Memory: none; fake tensors. Collectives: none; a fake process group.
    """
    depths = tracer.depths()
    short = _times(tracer, depths.short, hardware)
    longer = short if depths.longer is None else _times(tracer, depths.longer, hardware)
    return TracedCosts(depths=depths, times=(short, longer), microbatch=microbatch, parameter_size=parameter_size)


def _times(tracer: Tracer, sketch: Sketch, hardware: Hardware) -> dict[str, ActionTime]:
    """Return the time of a step by kind of segment."""
    found: dict[str, list[tuple[float, ActionTime]]] = {}
    for segment in tracer.segments(sketch):
        is_model = segment.kind not in AFTER
        time = ActionTime(
            kernels_s=kernels_s(segment.operators, hardware, is_model=is_model),
            launches_s=launches_s(segment.operators, hardware, is_model=is_model),
            waiting_s=segment_time(segment, hardware).exposed_s,
        )
        found.setdefault(_KINDS.get(segment.kind, segment.kind), []).append((segment.count, time))
    return {kind: ActionTime.sum_of(times) for kind, times in found.items()}
