"""Composed run on real ranks: steps are run, gathered, and compared with the reference on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Role
from composer3d.step import local
from composer3d.verification.causes.explaining import averages_of, digits_of, late_ones, leftovers_of, updates_of
from composer3d.verification.causes.gains import Gain, gains_of
from composer3d.verification.comparison import Limits, difference, fit
from composer3d.verification.derived import stale_values
from composer3d.verification.deviations import Deviation, deviations_of, gathered
from composer3d.verification.one_device import of_dtype
from composer3d.verification.reached_parameters import noting_reached
from composer3d.verification.reference_steps import Reference, ReferenceStep
from composer3d.verification.replicas import Holding, held_buffers, held_tensors, saved_buffers
from composer3d.verification.resuming import Looped, Restored, go_on, resume
from composer3d.verification.subject import Arithmetic, Subject, settled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Batch, Composition
    from composer3d.verification.subject import Averages

__all__ = ["RankStep", "RankSteps", "run_composed"]

# Relative difference.
_CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step on one rank.

    Args:
        loss: Loss that the composition returned.
        grad_norm: Gradient norm that the composition returned.
        gradients: Deviations of gradients, by FQN.
        clipped: Deviations of gradients by FQN, as the optimizer sees them.
        parameters: Deviations of parameters by FQN, after the step.
        clip_factor: Factor of this rank's gradients before the optimizer, if it is a single number.
        unmoved: Parameters that the step did not change.
        held: Local shards of this rank, by kind and FQN.
        batch: Digest of this rank's batch.
        leftovers: By FQN, the multiple of the gradient of the step before that a wrong one is off by, None if none.
        updates: By FQN, the multiple of the right update that a wrong one is, None where it is none.
        decays: By FQN, the multiple of the parameter that a wrong update is off by, None where it is none.
        late: Wrong gradients that are right ones of the step before.
        count: Valid tokens of the global batch, as agreed by all ranks; None without targets to count.
        averages: Deviations of moving averages by FQN; empty where a run has none.
        averaged_with: By FQN, the share of the weights in the last update of a wrong average, None where there is none.
        narrowed: By FQN, the dtype of fewer digits that holds a gradient, where one device's has more.
        gains: Gains of gradients over those of one device; of the first step in the run's dtypes.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Deviation]
    clipped: dict[str, Deviation]
    parameters: dict[str, Deviation]
    clip_factor: float | None
    unmoved: tuple[str, ...]
    held: dict[str, dict[str, Holding]]
    batch: int
    leftovers: dict[str, float | None]
    updates: dict[str, float | None]
    decays: dict[str, float | None]
    late: tuple[str, ...]
    count: int | None
    averages: dict[str, Deviation]
    averaged_with: dict[str, float | None]
    narrowed: dict[str, str]
    gains: dict[str, Gain]


@dataclass(kw_only=True)
class RankSteps:
    """All steps of one arithmetic on one rank.

    Args:
        steps: One after the other.
        initial: Deviations of the weights before the first step.
        placements: By FQN, how a parameter lies, as text.
        buffers: What this rank holds of buffers after the last step and what the loop does before it saves.
        stale: What was computed from other parameters than the last step left.
        off: How far those buffers are from one device's, where every rank sees all samples.
        restored: How a run that was saved and loaded went on; None where none was.
    """

    steps: list[RankStep] = field(default_factory=list)
    initial: dict[str, Deviation] = field(default_factory=dict)
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
        which: The arithmetic.
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
    result.initial = deviations_of(run, _parameters(run), reference.initial, tolerances, "parameters")
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
    if layout.degree(Role.BATCH) * layout.degree(Role.INDEPENDENT) > 1:
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
        deviations: Of the gradients, by FQN.
        clipped: Full, by FQN, as the optimizer sees them.
        clip_factor: As in `RankStep`.
        before: Parameters before the optimizer's step.
        held: What this rank holds of gradients.
    """

    loss: float
    grad_norm: float
    count: int
    gradients: dict[str, Tensor]
    deviations: dict[str, Deviation]
    clipped: dict[str, Tensor]
    clip_factor: float | None
    before: dict[str, Tensor]
    held: dict[str, Holding]


def _run(
    subject: Subject,
    run: Composition,
    optimizer: torch.optim.Optimizer,
    averages: Averages | None,
    number: int,
    batch: Batch,
    compare: Callable[[dict[str, Tensor]], dict[str, Deviation]],
) -> _Ran:
    seen: list[dict[str, Tensor]] = []
    own: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:
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
            deviations = compare(gradients)
            run.clip_grad_norm_(subject.grad_clip)
            before = _parameters(run)
            optimizer.step()
            if averages is not None:
                averages.update(number)
            optimizer.zero_grad()
    finally:
        hook.remove()
    return _Ran(
        loss=float(loss),
        grad_norm=float(norm),
        count=state.count,
        gradients=gradients,
        deviations=deviations,
        clipped=seen[-1] if seen else {},
        clip_factor=_common_factor(own[-1], own[0]),
        before=before,
        held=held,
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

    def compare(gradients: dict[str, Tensor]) -> dict[str, Deviation]:
        found = deviations_of(run, gradients, expected.gradients, tolerances, "gradients")
        if keep is not None and number == 0 and context.rank == 0 and any(_wrong(found, tolerances)):
            _keep(gradients, keep)
        return found

    ran = _run(subject, run, optimizer, averages, number, batch, compare)
    after = _parameters(run)
    averaged = {} if averages is None else averages.state_dict()["averages"]
    held = {"gradients": ran.held, "parameters": held_tensors(run, run.named_parameters())}
    held["averages"] = held_tensors(run, averaged.items())
    averaged = gathered(run, averaged) if averaged else {}
    parameters = deviations_of(run, after, expected.parameters, tolerances, "parameters")
    off = [fqn for fqn, found in parameters.items() if not found.rel <= tolerances.of("parameters", fqn)]
    wrong = _wrong(ran.deviations, tolerances)
    return RankStep(
        loss=ran.loss,
        grad_norm=ran.grad_norm,
        gradients=ran.deviations,
        clipped=deviations_of(run, ran.clipped, expected.clipped, tolerances, "clipped"),
        parameters=parameters,
        clip_factor=ran.clip_factor,
        unmoved=tuple(f for f, tensor in after.items() if f in ran.before and bool((tensor == ran.before[f]).all())),
        held=held,
        batch=Digest()((batch.args, batch.kwargs, batch.target)),
        leftovers=leftovers_of(ran.gradients, expected, beginning.previous, wrong),
        **updates_of(ran.before, after, expected.parameters, beginning.parameters, off),
        late=late_ones(ran.gradients, beginning.previous, wrong),
        count=None if batch.target is None else ran.count,
        averages=deviations_of(run, averaged, expected.averages, tolerances, "averages"),
        averaged_with=averages_of(averaged, after, beginning.averages),
        narrowed=digits_of(
            ran.gradients, expected.gradients, beginning.reduce_dtype, wrong if which == "float64" else None
        ),
        gains=gains_of(ran.gradients, expected.gradients) if which == "own" and number == 0 else {},
    )


def _wrong(deviations: Mapping[str, Deviation], tolerances: Limits) -> list[str]:
    return [fqn for fqn, deviation in deviations.items() if not deviation.rel <= tolerances.of("gradients", fqn)]


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


def _common_factor(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float | None:
    """Return the single factor between two sets of tensors; None where there is none."""
    factors = []
    for fqn in after.keys() & before.keys():
        found = fit(after[fqn], before[fqn])
        if found is not None:
            if found.residual > 1e-6 and found.factor:
                return None
            factors.append(found.factor)
    if not factors or max(factors) - min(factors) > 1e-6 * max(abs(factor) for factor in factors):
        return None
    return factors[0]
