"""Composed run on real ranks: steps are run, gathered, and compared with the reference on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Role
from composer3d.step import local
from composer3d.verification.comparison import Limits, difference
from composer3d.verification.evidence import multiples
from composer3d.verification.evidence.derived_values import stale_values
from composer3d.verification.evidence.deviations import Deviations, Digits, deviations_of, gathered, related
from composer3d.verification.evidence.gains import Gain, gains_of
from composer3d.verification.evidence.reached_parameters import noting_reached
from composer3d.verification.evidence.replica_drift import Holding, held_buffers, held_tensors, saved_buffers
from composer3d.verification.evidence.resuming import Looped, Restored, go_on, resume
from composer3d.verification.one_device import of_dtype
from composer3d.verification.reference_steps import Reference, ReferenceStep
from composer3d.verification.subject import Arithmetic, Subject, settled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Batch, Composition
    from composer3d.verification.subject import Averages

__all__ = ["RankStep", "RankSteps", "run_composed"]

# From 65536 a scale that is halved has left float16's range by then.
MAX_OVERFLOWS = 24


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """Evidence of one step on one rank.

    Args:
        loss: Loss that the composition returned.
        grad_norm: Gradient norm that the composition returned.
        count: Valid tokens of the global batch, as agreed by all ranks; None without targets to count.
        batch: Digest of this rank's batch.
        tensors: Deviations from one device by kind and FQN: gradients as the backward leaves them, clipped as the
            optimizer sees them, parameters and moving averages after the step.
        scaled: By FQN, the factor of this rank's shard of a gradient between backward and optimizer; None where it is
            no multiple.
        held: Local shards of this rank, by kind and FQN.
        gains: Gains of gradients over those of one device; of the first step in the run's dtypes.
        overflows: Times that the loss scaler vetoed it before; what is compared is the step that was taken then.
    """

    loss: float
    grad_norm: float
    count: int | None
    batch: int
    tensors: dict[str, Deviations]
    scaled: dict[str, float | None]
    held: dict[str, dict[str, Holding]]
    gains: dict[str, Gain]
    overflows: int


@dataclass(kw_only=True)
class RankSteps:
    """All steps of one arithmetic on one rank.

    Args:
        steps: One after the other.
        initial: Deviations of the weights before the first step.
        placements: Placements of a parameter as text, by FQN.
        buffers: What this rank holds of buffers after the last step and what the loop does before it saves.
        stale: What was computed from other parameters than the last step left.
        off: How far those buffers are from one device's, where every rank sees all samples.
        restored: How a run that was saved and loaded went on; None where none was.
    """

    steps: list[RankStep] = field(default_factory=list)
    initial: Deviations = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Holding] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    off: dict[str, float] = field(default_factory=dict)
    restored: Restored | None = None


def run_composed(
    subject: Subject,
    which: Arithmetic,
    reference: Reference,
    *,
    tolerances: Limits,
    folder: Path,
    keep: Path | None,
    resumes: bool = False,
) -> RankSteps:
    """Run the reference's steps on this rank of the composition.

    Args:
        subject: What to run.
        which: Float64, or the run's own dtypes.
        reference: Of one device, in the same arithmetic.
        tolerances: By what is compared; only what is beyond is examined further.
        folder: Where it is left which parameters the forwards reach.
        keep: Where the first step's gradients are left if they are wrong; None leaves nothing.
        resumes: Save after the last step, and let a fresh run load that and go on.

    Memory: all gradients and parameters gathered, and the reference. Collectives: the run's, and those of
    `gather_full`.
    """
    result = RankSteps()
    gone = None
    with subject.composed(which, subject.manifest_for(which), draws=True) as run, noting_reached(run, folder):
        with settled(run):
            optimizer, averages = _run_steps(subject, which, run, reference, result, tolerances, keep)
        if resumes:
            loop = Looped.attached(subject, run, optimizer, averages)
            gone = go_on(subject, which, run, loop, step=len(reference.steps), folder=folder)
    if gone is not None:
        result.restored = resume(subject, which, gone)
    return result


def _run_steps(
    subject: Subject,
    which: Arithmetic,
    run: Composition,
    reference: Reference,
    result: RankSteps,
    tolerances: Limits,
    keep: Path | None,
) -> tuple[torch.optim.Optimizer, Averages | None]:
    """Run the steps, note them in `result`, and return the loop's optimizer and averages."""
    optimizer = subject.make_optimizer(run)
    result.placements = {f: h.placement for f, h in held_tensors(run, run.named_parameters()).items()}
    result.initial = deviations_of(run, _parameters(run), reference.initial, limits=tolerances, kind="parameters")
    averages = None if subject.make_averages is None else subject.make_averages(run)
    previous = None
    for number, expected in enumerate(reference.steps):
        beginning = _Beginning(start=reference.initial, previous=previous, reduce_dtype=reference.reduce_dtype)
        step = _step(subject, run, optimizer, averages, number, which, expected, tolerances, keep, beginning)
        result.steps.append(step)
        previous = expected
    result.stale = stale_values(run)
    if subject.average_buffers is not None:
        subject.average_buffers(run)
    result.buffers = held_buffers(run)
    result.off = _off(run, reference)
    return optimizer, averages


def _off(run: Composition, reference: Reference) -> dict[str, float]:
    """Compare buffers with one device's, except sharded ones and those that a plugin made."""
    layout = run.context.layout
    if layout.degree(Role.BATCH, Role.SEQUENCE, Role.INDEPENDENT) > 1:
        return {}
    pairs = ((fqn, buffer, reference.buffers.get(fqn)) for fqn, buffer in saved_buffers(run).items())
    return {
        fqn: difference(buffer, other, scale=1.0)
        for fqn, buffer, other in pairs
        if other is not None and buffer.shape == other.shape and not hasattr(buffer, "placements")
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class _Beginning:
    """State of one device at the beginning of a step.

    Args:
        start: Parameters before the first step.
        previous: The step before; None before the first.
        reduce_dtype: Dtype in which the run's ranks reduce gradients; None where unknown.
    """

    start: Mapping[str, Tensor]
    previous: ReferenceStep | None
    reduce_dtype: torch.dtype | None

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters."""
        return self.start if self.previous is None else self.previous.parameters

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Their moving averages, initially equal to the parameters."""
        return self.start if self.previous is None else self.previous.averages


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """Results of one step.

    Args:
        loss: As returned by the composition.
        grad_norm: As returned by the composition.
        count: Valid tokens of the global batch.
        gradients: Full, by FQN, as the backward leaves them.
        clipped: Full, by FQN, as the optimizer sees them.
        scaled: As in `RankStep`.
        before: Parameters before the optimizer's step.
        held: What this rank holds of gradients.
        vetoes: Names of what skipped the optimizer's step, the same on all ranks.
    """

    loss: float
    grad_norm: float
    count: int
    gradients: dict[str, Tensor]
    clipped: dict[str, Tensor]
    scaled: dict[str, float | None]
    before: dict[str, Tensor]
    held: dict[str, Holding]
    vetoes: tuple[str, ...]


def _run(
    subject: Subject,
    run: Composition,
    optimizer: torch.optim.Optimizer,
    averages: Averages | None,
    number: int,
    batch: Batch,
) -> _Ran:
    seen: list[dict[str, Tensor]] = []
    own: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:
        if not seen:  # a rank that steps more often than the others would gather alone
            seen.append(_gradients(run))
            own.append(_local_gradients(run))

    hook = optimizer.register_step_pre_hook(look)
    try:
        with run.step(number) as state:
            loss = run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
            norm = run.clip_grad_norm_(math.inf)
            gradients = _gradients(run)
            own.append(_local_gradients(run))
            held = held_tensors(run, _named_gradients(run))
            run.clip_grad_norm_(subject.grad_clip)
            before = _parameters(run)
            optimizer.step()
            if averages is not None and not state.vetoes:
                averages.update(number)
            optimizer.zero_grad()
    finally:
        hook.remove()
    return _Ran(
        loss=float(loss),
        grad_norm=float(norm),
        count=state.count,
        gradients=gradients,
        clipped=seen[0] if seen else {},
        scaled=multiples.of_shards(own[-1], own[0]),
        before=before,
        held=held,
        vetoes=state.vetoes,
    )


def _step(
    subject: Subject,
    run: Composition,
    optimizer: torch.optim.Optimizer,
    averages: Averages | None,
    number: int,
    which: Arithmetic,
    expected: ReferenceStep,
    tolerances: Limits,
    keep: Path | None,
    beginning: _Beginning,
) -> RankStep:
    from composer3d.step import Digest

    context = run.context
    batch = of_dtype(subject.batch(number, context.data_parallel_rank, context.data_parallel_degree), which)
    ran, overflows = _run(subject, run, optimizer, averages, number, batch), 0
    # A step whose gradients overflow at the loss scale is skipped, and the scale lowered: that is no fault of the run.
    while "grad_scaler" in ran.vetoes and overflows < MAX_OVERFLOWS and math.isfinite(expected.grad_norm):
        ran, overflows = _run(subject, run, optimizer, averages, number, batch), overflows + 1
    after = _parameters(run)
    averaged = {} if averages is None else averages.state_dict()["averages"]
    held = {"gradients": ran.held, "parameters": held_tensors(run, run.named_parameters())}
    held["averages"] = held_tensors(run, averaged.items())
    averaged = gathered(run, averaged) if averaged else {}
    tensors = _compared(run, ran, after, averaged, expected, beginning, tolerances, which)
    if keep is not None and number == 0 and context.rank == 0 and _wrong("gradients", tensors, tolerances):
        _keep(ran.gradients, keep)
    return RankStep(
        loss=ran.loss,
        grad_norm=ran.grad_norm,
        count=None if batch.target is None else ran.count,
        batch=Digest()((batch.args, batch.kwargs, batch.target)),
        tensors=tensors,
        scaled=ran.scaled,
        held=held,
        gains=gains_of(ran.gradients, expected.gradients) if which == "own" and number == 0 else {},
        overflows=overflows,
    )


def _compared(
    run: Composition,
    ran: _Ran,
    after: Mapping[str, Tensor],
    averaged: Mapping[str, Tensor],
    expected: ReferenceStep,
    beginning: _Beginning,
    tolerances: Limits,
    which: Arithmetic,
) -> dict[str, Deviations]:
    """Compare all tensors of a step, and relate the wrong ones to those of the step before."""
    is_narrow = beginning.reduce_dtype is not None and beginning.reduce_dtype.itemsize < 4
    # What ranks reduce in few digits has few digits.
    digits: Digits = "wrong" if which == "float64" else "none" if is_narrow else "all"
    compared = functools.partial(deviations_of, run, limits=tolerances)
    tensors = {
        "gradients": compared(ran.gradients, expected.gradients, kind="gradients", digits=digits),
        "clipped": compared(ran.clipped, expected.clipped, kind="clipped"),
        "parameters": compared(after, expected.parameters, kind="parameters"),
        "averages": compared(averaged, expected.averages, kind="averages"),
    }
    wrong = {kind: _wrong(kind, tensors, tolerances) for kind in tensors}
    earlier = {} if beginning.previous is None else beginning.previous.gradients
    relations = {
        "gradients": multiples.of_gradients(wrong["gradients"], ran.gradients, expected.gradients, earlier),
        "parameters": multiples.of_updates(
            wrong["parameters"], ran.before, after, beginning.parameters, expected.parameters
        ),
        "averages": multiples.of_averages(wrong["averages"], averaged, after, beginning.averages),
    }
    tensors |= {kind: related(tensors[kind], found) for kind, found in relations.items()}
    unmoved = {f for f, tensor in after.items() if f in ran.before and bool((tensor == ran.before[f]).all())}
    tensors["parameters"] = {f: replace(d, is_unmoved=f in unmoved) for f, d in tensors["parameters"].items()}
    return tensors


def _wrong(kind: str, tensors: Mapping[str, Deviations], tolerances: Limits) -> list[str]:
    return [fqn for fqn, deviation in tensors[kind].items() if not deviation.rel <= tolerances.of(kind, fqn)]


def _keep(gradients: Mapping[str, Tensor], keep: Path) -> None:
    import torch

    torch.save(dict(gradients), keep)


def _named_gradients(run: Composition) -> list[tuple[str, Tensor]]:
    return [(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None]


def _local_gradients(run: Composition) -> dict[str, Tensor]:
    return {fqn: local(grad.detach()).clone() for fqn, grad in _named_gradients(run)}


def _gradients(run: Composition) -> dict[str, Tensor]:
    return gathered(run, _named_gradients(run))


def _parameters(run: Composition) -> dict[str, Tensor]:
    return gathered(run, run.named_parameters())
