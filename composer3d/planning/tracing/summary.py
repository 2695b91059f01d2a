"""Summary of a recorded step: memory by purpose, operators and transfers by segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from composer3d.mesh import Role
from composer3d.planning.tracing.extending import Message, Place, Sketch, Stage
from composer3d.planning.tracing.traced import Memory, Operators, RankTrace, Segment, Transfer

if TYPE_CHECKING:
    from composer3d.context import RunContext

__all__ = ["segments_of", "sent_over", "summarise", "wire_bytes"]

# The step's own collectives, whatever the plugins: counts, losses, the norm.
_AGREEMENTS = (
    "composer3d.step.guard.",
    "composer3d.step.losses.loss_totals.",
    "composer3d.step.units.unit_record.",
    "composer3d.step.clipping.total_norm",
    "composer3d.planning.tracing.fake_composition.",
)
_NAMES = {"recv": "receive"}


def summarise(
    sketch: Sketch,
    *,
    context: RunContext,
    blocks: Sequence[Sequence[str]],
    rank: int,
    stands_for: int,
    is_extrapolated: bool,
    notes: Sequence[str] = (),
    backends: Mapping[str, str] | None = None,
) -> RankTrace:
    """Return a rank's trace.

    Args:
        sketch: Of the rank's step, with all blocks.
        context: Of the traced composition.
        blocks: Names of every stage's blocks.
        rank: Global rank.
        stands_for: As in `RankTrace`.
        is_extrapolated: As in `RankTrace`.
        notes: As in `RankTrace`.
        backends: As for `segments_of`.
    """
    several = max((stage.microbatch or 0 for stage in sketch.stretches), default=0) > 0
    return RankTrace(
        rank=rank,
        coordinates=dict(context.coordinates),
        stands_for=stands_for,
        memory=_memory(sketch, blocks, several=several),
        segments=segments_of(sketch, context, backends),
        is_extrapolated=is_extrapolated,
        notes=tuple(notes),
    )


def _memory(sketch: Sketch, blocks: Sequence[Sequence[str]], *, several: bool) -> Memory:
    stage, place, (peak, activations, gradients, number) = sketch.peak
    lasting = sketch.parameters + sketch.buffers + sketch.optimizer + sketch.averages
    return Memory(
        parameters=sketch.parameters,
        gradients=sketch.gradients,
        optimizer=sketch.optimizer,
        activations=sketch.activations,
        transient=peak - lasting - activations - gradients,
        peak=peak,
        moment=_moment(stage, len(blocks), several=several),
        module=_module(place, blocks),
        buffers=sketch.buffers,
        activations_at_peak=activations,
        gradients_at_peak=gradients,
        num_storages=number,
        host=sketch.host,
        averages=sketch.averages,
    )


def _moment(stage: Stage, num_stages: int, *, several: bool) -> str:
    where = [f"stage {stage.stage}"] if num_stages > 1 or stage.stage else []
    where += [f"micro-batch {stage.microbatch}"] if several and stage.microbatch is not None else []
    return stage.kind + (f" ({', '.join(where)})" if where else "")


def _module(place: Place, blocks: Sequence[Sequence[str]]) -> str:
    name, block, index = place
    if not block:
        return name
    names = blocks[index]
    number = {"first": 0, "before last": len(names) - 2, "last": len(names) - 1}.get(block)
    return names[int(block) if number is None else number] + name


def segments_of(sketch: Sketch, context: RunContext, backends: Mapping[str, str] | None = None) -> tuple[Segment, ...]:
    """Merge equal stretches into segments, in order of first appearance.

    Args:
        sketch: Of the rank's step.
        context: Of the traced composition.
        backends: From `stated_backends`; without them each axis has its device's own.
    """
    counted: dict[tuple[object, ...], int] = {}
    firsts: dict[tuple[object, ...], Stage] = {}
    for stage in sketch.stretches:
        if not stage.operators and not stage.messages:
            continue
        key = (stage.kind, stage.stage, frozenset(stage.operators.items()), frozenset(stage.messages.items()))
        counted[key] = counted.get(key, 0) + 1
        firsts.setdefault(key, stage)
    plugins = _Plugins(context, backends or {})
    return tuple(
        Segment(
            kind=stage.kind,
            stage=stage.stage,
            count=counted[key],
            operators=tuple(
                Operators(name=name, dtype=dtype, shapes=shapes, count=count, flops=flops, bytes_moved=moved)
                for (name, dtype, shapes, flops, moved), count in stage.operators.items()
            ),
            transfers=tuple(_transfer(message, count, plugins) for message, count in stage.messages.items()),
        )
        for key, stage in firsts.items()
    )


def wire_bytes(op: str, size: int, num_ranks: int, *, over_gloo: bool = False) -> int:
    """Return the bytes that one rank sends in a collective of a whole buffer of `size` bytes, by a ring.

    gloo's reduce-scatter is an all-reduce inside: measured with torch 2.13 on the loopback interface of 4 ranks.

    >>> wire_bytes("all_reduce", 1000, 4), wire_bytes("all_gather", 1000, 4), wire_bytes("receive", 1000, 2)
    (1500, 750, 0)
    """
    if op in ("receive", "recv", "barrier") or num_ranks == 1:
        return 0
    if op in ("send", "broadcast", "reduce"):
        return size
    is_twice = op == "all_reduce" or (over_gloo and op == "reduce_scatter")
    return math.ceil(size * (2 if is_twice else 1) * (num_ranks - 1) / num_ranks)


def sent_over(trace: RankTrace, *, gloo: bool) -> RankTrace:
    """Return a trace with the bytes that its reduce-scatters send over gloo, or by a ring as on a cluster of GPUs.

    Args:
        trace: Of a run on any device.
        gloo: Whether collectives run over gloo, but for those over axes whose backend is stated.
    """

    def sent(transfer: Transfer) -> Transfer:
        if transfer.op != "reduce_scatter":
            return transfer
        over_gloo = gloo if transfer.backend is None else transfer.backend == "gloo"
        size = wire_bytes(transfer.op, transfer.bytes, len(transfer.ranks), over_gloo=over_gloo)
        return replace(transfer, wire_bytes=transfer.count * size)

    segments = tuple(replace(segment, transfers=tuple(map(sent, segment.transfers))) for segment in trace.segments)
    return replace(trace, segments=segments)


def _transfer(message: Message, count: int, plugins: _Plugins) -> Transfer:
    op, axis, ranks, size, dtype, issuer, waits = message
    name, backend = _NAMES.get(op, op), plugins.backend_of(axis)
    over_gloo = plugins.over_gloo if backend is None else backend == "gloo"
    return Transfer(
        op=name,
        axis=axis,
        plugin=plugins.of(issuer, axis),
        ranks=ranks,
        dtype=dtype,
        count=count,
        bytes=size,
        wire_bytes=count * wire_bytes(name, size, len(ranks), over_gloo=over_gloo),
        is_overlapped=waits and plugins.may_overlap(name, axis),
        backend=backend,
    )


class _Plugins:
    """Owner of each collective: the plugin whose code issued it, else the one that owns the axis.

    Attributes:
        over_gloo: Whether collectives run over gloo, where no other backend is stated.
    """

    def __init__(self, context: RunContext, backends: Mapping[str, str]) -> None:
        self._context, self._backends = context, backends
        self.over_gloo = context.run_device.type == "cpu"
        self._modules: Mapping[str, str] = {
            type(registered.instance).__module__: registered.name for registered in context.plugins
        }

    def of(self, issuer: str, axis: str) -> str | None:
        if issuer.startswith(_AGREEMENTS):
            return None
        for module, name in self._modules.items():
            if f"{issuer}.".startswith(f"{module}."):
                return name
        names = axis.split("+") if axis != "world" else [n for n, d in self._context.degrees.items() if d > 1]
        roles = {each.name: each.role for each in self._context.layout.axes}
        # Over samples and positions as one, data-parallel plugins communicate.
        names = [name for name in names if roles.get(name) is not Role.SEQUENCE] or names
        owners = {self._context.owners[n].name for n in names if n in self._context.owners}
        return owners.pop() if len(owners) == 1 else None

    def backend_of(self, axis: str) -> str | None:
        """Return the stated backend of a dim: as for views of the mesh, its outermost axis with options has it."""
        return next(
            (self._backends[name] for name in self._context.layout.axes_of(axis) if name in self._backends), None
        )

    def may_overlap(self, op: str, axis: str) -> bool:
        """Return whether a c10d collective over an axis runs on its own stream: data parallelism's, and messages."""
        roles = {each.name: each.role for each in self._context.layout.axes}
        found = {roles.get(name) for name in axis.split("+")}
        if op in ("send", "receive") and found == {Role.SEQUENCE}:
            return True  # a ring's, posted before the block that hides them
        return found <= {Role.BATCH, Role.STAGE} or (Role.BATCH in found and found <= {Role.BATCH, Role.SEQUENCE})
