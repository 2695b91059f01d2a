"""Expected collectives: those of real ranks compared with those of the same composition in a fake process group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from composer3d.communication import CodedCollectives
from composer3d.interfaces import DataDependent
from composer3d.mesh import Layout
from composer3d.step import to_device
from composer3d.verification.evidence.coded_exchanges import wrong_codecs
from composer3d.verification.evidence.module_outputs import Output, Outputs, watched_loss, watching
from composer3d.verification.one_device import of_dtype
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    import torch

    from composer3d import Composition
    from composer3d.observation import Collective

__all__ = ["Counted", "Row", "compare_collectives", "count_step", "silent_axes", "trace_step"]

# The step's own collectives, whatever the plugins: counts, losses, the norm.
_AGREEMENTS = (
    "composer3d.step.guard.",
    "composer3d.step.losses.loss_totals.",
    "composer3d.step.clipping.total_norm",
    "composer3d.step.units.unit_record.",
)
# How many steps are run before one is counted: pipelines learn shapes in their first, and reducers their buckets.
_WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Collectives of one step on one rank.

    Args:
        totals: (count, bytes) by (op, axis).
        of_plugins: Number over each axis, without the step's own agreements.
        data_dependent: Axes over which ranks send as many bytes as the values of the batch decide.
        outputs: Of modules and the loss in the first step.
        codecs: Codecs on the wire, by what travels.
        wrong_codecs: Faults of exchanges with them, a line each.
    """

    totals: Mapping[tuple[str, str], tuple[int, int]]
    of_plugins: Mapping[str, int]
    outputs: Outputs = field(default_factory=dict)
    data_dependent: frozenset[str] = frozenset()
    codecs: Mapping[str, str] = field(default_factory=dict)
    wrong_codecs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of collective over one axis, of the rank where real and traced runs differ most, else of rank 0.

    Where bytes depend on data, they are the sum of all ranks', which does not.

    Args:
        op: As in `Collective`.
        axis: As in `Collective`.
        count: Number on the real rank.
        bytes: Payload on the real rank.
        expected: Number in the trace.
        expected_bytes: Payload in the trace.
        rank: The rank compared.
        is_summed: Whether bytes are those of all ranks together.
    """

    op: str
    axis: str
    count: int
    bytes: int
    expected: int
    expected_bytes: int
    rank: int
    is_summed: bool = False

    @property
    def ok(self) -> bool:
        """Return whether the real run has the expected collectives."""
        return (self.count, self.bytes) == (self.expected, self.expected_bytes)


def count_step(subject: Subject, *, alone: bool = False) -> tuple[Counted, list[Any]]:
    """Count the collectives of one step of the composition, after one that is not counted.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        alone: Whether the process group is a fake one.

    Returns:
        The counts, and the Python objects that this rank received.
    """
    import torch

    from composer3d.observation import count_collectives

    messages: list[Any] = []
    outputs: dict[str, list[Output]] = {}
    watched = subject if alone else replace(subject, loss_fn=watched_loss(subject.loss_fn, outputs))
    with (
        contextlib.nullcontext() if alone else _received(messages, replay=False),
        watched.composed("float64", subject.manifest_for("float64")) as run,
        # Compiled graphs do not run where operators are observed; their collectives are the same.
        torch.compiler.set_stance("force_eager"),
    ):
        optimizer = subject.make_optimizer(run)
        with _outputs(run, alone=alone) as returned:
            for number in range(_WARM_UP):
                _step(subject, run, optimizer, number)
        outputs = {**returned, **outputs}
        coded = run.context.stash(CodedCollectives)
        coded.is_exact = False  # as a run sends it
        with count_collectives(run.mesh) as collectives:
            _step(subject, run, optimizer, _WARM_UP)
        data_dependent = frozenset(run.context.stash(DataDependent).axes)
        wrong = () if alone else wrong_codecs(coded, device=run.context.device)
    found = replace(
        _counted(collectives.rows),
        outputs=outputs,
        data_dependent=data_dependent,
        codecs={exchange.what: exchange.name or str(exchange.codec) for exchange in coded.exchanges.values()},
        wrong_codecs=wrong,
    )
    return found, messages


def trace_step(subject: Subject, *, world_size: int, rank: int, messages: Sequence[Any]) -> Counted:
    """Count the same step on one rank of a fake process group; there must be no process group yet.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        world_size: Ranks of the run.
        rank: Rank to trace.
        messages: Python objects that this rank received in the real run, in order: shapes, which a fake group does not
            send.
    """
    from composer3d.processes import fake_world, zeros_from_others

    with fake_world(world_size, rank), zeros_from_others(), _received(messages, replay=True):
        return count_step(subject, alone=True)[0]


def _outputs(run: Composition, *, alone: bool) -> contextlib.AbstractContextManager[dict[str, list[Output]]]:
    """Record module outputs, on real ranks only, where values are those of the run."""
    return contextlib.nullcontext({}) if alone else watching(run)


def _step(subject: Subject, run: Composition, optimizer: torch.optim.Optimizer, number: int) -> None:
    context = run.context
    batch = of_dtype(subject.batch(number, context.data_parallel_rank, context.data_parallel_degree), "float64")
    batch = to_device(batch, context.device)
    with run.step(number):
        run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
        run.clip_grad_norm_(math.inf)
        optimizer.step()
        optimizer.zero_grad()


def _counted(rows: Sequence[Collective]) -> Counted:
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    of_plugins: dict[str, int] = {}
    for row in rows:
        count, size = totals.get((row.op, row.axis), (0, 0))
        totals[row.op, row.axis] = (count + 1, size + row.bytes)
        if not row.issuer.startswith(_AGREEMENTS):
            for axis in row.axis.split("+"):
                of_plugins[axis] = of_plugins.get(axis, 0) + 1
    return Counted(totals=dict(sorted(totals.items())), of_plugins=of_plugins)


def compare_collectives(happened: Sequence[Counted], traced: Sequence[Counted]) -> list[Row]:
    """Return one row for each kind and axis, of the rank where the two differ most.

    Args:
        happened: Collectives of real ranks, by rank.
        traced: Those of the same ranks in a fake process group.
    """
    keys = sorted({key for counted in (*happened, *traced) for key in counted.totals})
    rows = []
    for op, axis in keys:
        candidates = [
            _row(op, axis, rank, real.totals.get((op, axis), (0, 0)), imagined.totals.get((op, axis), (0, 0)))
            for rank, (real, imagined) in enumerate(zip(happened, traced, strict=True))
        ]
        if any(axis in counted.data_dependent for counted in happened):
            total, expected = sum(row.bytes for row in candidates), sum(row.expected_bytes for row in candidates)
            candidates = [replace(row, bytes=total, expected_bytes=expected, is_summed=True) for row in candidates]
        rows.append(max(candidates, key=lambda row: (not row.ok, abs(row.count - row.expected), row.count, -row.rank)))
    return rows


def _row(op: str, axis: str, rank: int, real: tuple[int, int], imagined: tuple[int, int]) -> Row:
    return Row(
        op=op,
        axis=axis,
        count=real[0],
        bytes=real[1],
        expected=imagined[0],
        expected_bytes=imagined[1],
        rank=rank,
    )


def silent_axes(happened: Sequence[Counted], layout: Layout) -> list[str]:
    """Return the axes of degree above 1 over which no plugin communicated on any rank.

    A collective over several axes counts for each of them, and one over the whole world for all.

    Args:
        happened: Collectives of real ranks, by rank.
        layout: Axes and degrees of the run.
    """
    seen = {axis for counted in happened for axis, number in counted.of_plugins.items() if number}
    names = [axis.name for axis in layout.dense_axes if layout.degrees[axis.name] > 1]
    return [] if "world" in seen else [name for name in names if name not in seen]


@contextlib.contextmanager
def _received(messages: Sequence[Any], *, replay: bool) -> Iterator[None]:
    """Record every description of tensors that a pipeline's stages receive, or replay recorded ones instead.

    They exchange them before their first step.
    """
    from composer3d import torch_compat

    stage: Any = torch_compat.described_stage()
    receive, left = stage.receive_description, list(messages)

    def noted(self: Any, rank: int) -> Any:
        messages.append(receive(self, rank))  # type: ignore[attr-defined]
        return messages[-1]

    def replayed(self: Any, rank: int) -> Any:
        return left.pop(0)

    stage.receive_description = replayed if replay else noted
    try:
        yield
    finally:
        stage.receive_description = receive
