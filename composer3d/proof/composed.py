"""The composition on its real ranks: steps run, gathered, and compared with the reference there and then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.gradients import local
from composer3d.mesh import Role
from composer3d.proof.comparison import Limits, difference, fit, scale_of
from composer3d.proof.derived import stale_values
from composer3d.proof.reference import Reference, ReferenceStep, of_dtype
from composer3d.proof.replicas import Holding, held_buffers, held_tensors
from composer3d.proof.subject import Arithmetic, Subject
from composer3d.testing.parity import gather_full
from composer3d.torch_compat import without_torch_functions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Deviation", "RankStep", "RankSteps", "run_composed"]

_MAX_EXAMINED = 24


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one tensor of this rank's composition is from the reference, and what would explain it.

    Args:
        rel: max|d| / max|reference|; infinite where one side has it and the other has not.
        factor: The multiple of the reference that it is, None where it is none.
        missing: It has no value here, and the reference has one.
        summed: By axis, what is left if the ranks' values along it are added up.
        averaged: By axis, what is left if they are averaged.
        mixed: By axis, what is left if each element is taken as it is or added up, whichever is right.
        turned: Axes along which the ranks' pieces are right, and lie in another order.
        narrow: The dtype of fewer digits that holds every element; empty where none does.
        pieces: The ranks whose pieces alone are wrong; empty where all are, or where none holds a piece.
    """

    rel: float
    factor: float | None = None
    missing: bool = False
    summed: Mapping[str, float] = field(default_factory=dict)
    averaged: Mapping[str, float] = field(default_factory=dict)
    mixed: Mapping[str, float] = field(default_factory=dict)
    turned: tuple[str, ...] = ()
    narrow: str = ""
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step on one rank.

    Args:
        loss: As the composition returned it.
        grad_norm: As it returned it.
        gradients: By FQN.
        clipped: By FQN, as the optimizer sees them.
        parameters: By FQN, after the step.
        clip_factor: What this rank's gradients were multiplied with before the optimizer, if it is one number.
        unmoved: Parameters that the step left as they were.
        held: What this rank holds, by kind and FQN.
        batch: A digest of what this rank was given.
        leftovers: By FQN, the multiple of the gradient of the step before that a wrong one is off by, None if none.
        updates: By FQN, the multiple of the right update that a wrong one is, None where it is none.
        decays: By FQN, the multiple of the parameter that a wrong update is off by, None where it is none.
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


@dataclass(kw_only=True)
class RankSteps:
    """All steps of one arithmetic on one rank.

    Args:
        steps: One after the other.
        initial: Deviations of the weights before the first step.
        placements: By FQN, how a parameter lies, as text.
        buffers: What this rank holds of buffers after the last step and what the loop does before it saves.
        stale: What was computed from other parameters than the last step left.
    """

    steps: list[RankStep] = field(default_factory=list)
    initial: dict[str, Deviation] = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Holding] = field(default_factory=dict)
    stale: tuple[str, ...] = ()


def run_composed(
    subject: Subject, which: Arithmetic, reference: Reference, *, tolerances: Limits, keep: Path | None
) -> RankSteps:
    """Run the reference's steps on this rank of the composition.

    Args:
        subject: What to run.
        which: The arithmetic.
        reference: Of one device, in the same arithmetic.
        tolerances: By what is compared; only what is beyond is examined further.
        keep: Where the first step's gradients are left if they are wrong; None leaves nothing.

    Memory: all gradients and parameters in full, and the reference. Collectives: the run's, and those of `gather_full`.
    """
    result = RankSteps()
    with subject.composed(which, subject.manifest_for(which)) as run:
        optimizer = subject.make_optimizer(run)
        result.placements = {f: h.placement for f, h in held_tensors(run, run.named_parameters()).items()}
        result.initial = _deviations(run, _parameters(run), reference.initial, tolerances, "parameters")
        start, previous = reference.initial, None
        for number, expected in enumerate(reference.steps):
            step = _step(subject, run, optimizer, number, which, expected, tolerances, keep, start, previous)
            result.steps.append(step)
            start, previous = expected.parameters, expected
        result.stale = stale_values(run)
        if subject.average_buffers is not None:
            subject.average_buffers(run)
        result.buffers = held_buffers(run)
    return result


def _step(
    subject: Subject,
    run: Composition,
    optimizer: torch.optim.Optimizer,
    number: int,
    which: Arithmetic,
    expected: ReferenceStep,
    tolerances: Limits,
    keep: Path | None,
    start: Mapping[str, Tensor],
    previous: ReferenceStep | None,
) -> RankStep:
    from composer3d.batch import Digest

    context = run.context
    batch = of_dtype(subject.batch(number, context.data_parallel_rank, context.data_parallel_degree), which)
    seen: list[dict[str, Tensor]] = []
    own: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:
        seen.append(_gradients(run))
        own.append(_local_gradients(run))

    hook = optimizer.register_step_pre_hook(look)
    try:
        with run.step(number):
            loss = run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
            norm = run.clip_grad_norm_(math.inf)
            gradients = _gradients(run)
            own.append(_local_gradients(run))
            held = {"gradients": held_tensors(run, _named_gradients(run))}
            deviations = _deviations(run, gradients, expected.gradients, tolerances, "gradients")
            if keep is not None and number == 0 and context.rank == 0 and any(_wrong(deviations, tolerances)):
                _keep(gradients, keep)
            run.clip_grad_norm_(subject.grad_clip)
            before = _parameters(run)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        hook.remove()
    after = _parameters(run)
    held["parameters"] = held_tensors(run, run.named_parameters())
    clipped = seen[-1] if seen else {}
    parameters = _deviations(run, after, expected.parameters, tolerances, "parameters")
    off = [f for f, found in parameters.items() if not found.rel <= tolerances.of("parameters", f) and f in before]
    off = [fqn for fqn in off if fqn in after and fqn in start and fqn in expected.parameters]
    return RankStep(
        loss=float(loss),
        grad_norm=float(norm),
        gradients=deviations,
        clipped=_deviations(run, clipped, expected.clipped, tolerances, "clipped"),
        parameters=parameters,
        clip_factor=_common_factor(own[-1], own[0]),
        unmoved=tuple(f for f, tensor in after.items() if f in before and bool((tensor == before[f]).all())),
        held=held,
        batch=Digest()((batch.args, batch.kwargs, batch.target)),
        leftovers=_leftovers(gradients, expected, previous, _wrong(deviations, tolerances)),
        updates={f: _multiple(after[f] - before[f], expected.parameters[f] - start[f]) for f in off},
        decays={f: _multiple(after[f] - expected.parameters[f], before[f]) for f in off},
    )


def _leftovers(
    gradients: Mapping[str, Tensor], expected: ReferenceStep, previous: ReferenceStep | None, wrong: Sequence[str]
) -> dict[str, float | None]:
    if previous is None:
        return {}
    there = gradients.keys() & expected.gradients.keys() & previous.gradients.keys()
    return {
        fqn: _multiple(gradients[fqn] - expected.gradients[fqn], previous.gradients[fqn])
        for fqn in wrong
        if fqn in there
    }


def _wrong(deviations: Mapping[str, Deviation], tolerances: Limits) -> list[str]:
    return [fqn for fqn, deviation in deviations.items() if not deviation.rel <= tolerances.of("gradients", fqn)]


def _keep(gradients: Mapping[str, Tensor], keep: Path) -> None:
    import torch

    torch.save(dict(gradients), keep)


def _named_gradients(run: Composition) -> list[tuple[str, Tensor]]:
    return [(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None]


def _local_gradients(run: Composition) -> dict[str, Tensor]:
    return {fqn: local(grad.detach()).clone() for fqn, grad in _named_gradients(run)}


def _gathered(run: Composition, named: Any) -> dict[str, Tensor]:
    gathered = gather_full(named)
    return {fqn: run.context.in_model_order(fqn, tensor).cpu() for fqn, tensor in gathered.items()}


def _gradients(run: Composition) -> dict[str, Tensor]:
    return _gathered(run, _named_gradients(run))


def _parameters(run: Composition) -> dict[str, Tensor]:
    return _gathered(run, run.named_parameters())


def _deviations(
    run: Composition, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], limits: Limits, kind: str
) -> dict[str, Deviation]:
    """Compare every tensor; look closer, on all ranks together, at those beyond the tolerance on some rank."""
    import torch.distributed as dist

    scale = scale_of(reference.values())
    result: dict[str, Deviation] = {}
    for fqn in sorted({*actual, *reference}):
        if fqn in actual and fqn in reference:
            result[fqn] = Deviation(rel=difference(actual[fqn], reference[fqn], scale=scale))
        elif fqn in actual:
            # An unused parameter may have zeros in one layout and no gradient in the other.
            result[fqn] = Deviation(rel=math.inf if bool(actual[fqn].any()) else 0.0)
        else:
            result[fqn] = Deviation(rel=math.inf if bool(reference[fqn].any()) else 0.0, missing=True)
    wrong = [fqn for fqn, deviation in result.items() if not deviation.rel <= limits.of(kind, fqn)]
    everyone: list[Any] = [None] * run.context.world_size
    dist.all_gather_object(everyone, wrong)
    examined = sorted({fqn for names in everyone for fqn in names} & reference.keys())
    holders = _holders(run, examined[:_MAX_EXAMINED])
    for fqn in examined[:_MAX_EXAMINED]:
        found = _examine(run, actual.get(fqn), reference[fqn], result[fqn], scale)
        limit = limits.of(kind, fqn) * max(float(reference[fqn].abs().max()), scale)
        pieces = _wrong_pieces(actual.get(fqn), reference[fqn], holders.get(fqn), limit)
        result[fqn] = replace(found, pieces=pieces)
    for fqn in examined[_MAX_EXAMINED:]:
        result[fqn] = _fitted(actual.get(fqn), reference[fqn], result[fqn])
    return result


def _holders(run: Composition, fqns: Sequence[str]) -> dict[str, Tensor]:
    """Return which rank holds each element of parameters that are cut. Collectives: one gather a parameter."""
    import torch
    from torch.distributed.tensor import DTensor

    marked = {}
    for fqn, parameter in run.named_parameters():
        if fqn not in fqns or not isinstance(parameter, DTensor) or any(p.is_partial() for p in parameter.placements):
            continue
        ranks = torch.full(local(parameter).shape, float(run.context.rank), device=parameter.device)
        marked[fqn] = DTensor.from_local(
            ranks,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return _gathered(run, marked)


def _wrong_pieces(actual: Tensor | None, reference: Tensor, holders: Tensor | None, limit: float) -> tuple[int, ...]:
    if actual is None or holders is None or not actual.shape == reference.shape == holders.shape:
        return ()
    # Not "> limit": that is false for NaN.
    wrong = {int(rank) for rank in holders[~((actual.double() - reference.double()).abs() <= limit)].unique()}
    return tuple(sorted(wrong)) if len(wrong) < len(holders.unique()) else ()


def _examine(
    run: Composition, actual: Tensor | None, reference: Tensor, deviation: Deviation, scale: float
) -> Deviation:
    """Add up and average what the ranks along every axis have. Collectives: one all-reduce an axis above 1."""
    import torch
    import torch.distributed as dist

    summed, averaged, mixed = {}, {}, {}
    true = reference.double()
    usable = actual is not None and actual.shape == reference.shape
    mine = actual.double() if actual is not None and usable else torch.zeros_like(true)
    for axis in run.context.layout.dense_axes:
        degree = run.context.degrees[axis.name]
        if degree == 1 or axis.role is Role.INDEPENDENT:
            continue
        total = mine.clone().to(run.context.device)
        dist.all_reduce(total, group=run.mesh.get_group(axis.name))
        total = total.cpu()
        summed[axis.name] = difference(total, reference, scale=scale)
        averaged[axis.name] = difference(total / degree, reference, scale=scale)
        nearer = torch.where((total - true).abs() < (mine - true).abs(), total, mine)
        mixed[axis.name] = difference(nearer, reference, scale=scale)
    return replace(
        _fitted(actual, reference, deviation),
        summed=summed,
        averaged=averaged,
        mixed=mixed,
        turned=_turned(run, actual, reference),
    )


def _fitted(actual: Tensor | None, reference: Tensor, deviation: Deviation) -> Deviation:
    found = None if actual is None else fit(actual, reference)
    exact = found is not None and found.residual <= 1e-6
    factor = found.factor if found is not None and exact else None
    return replace(deviation, factor=factor, narrow="" if actual is None else _narrow(actual))


def _narrow(actual: Tensor) -> str:
    """Return the narrowest dtype that holds every element of a tensor of more digits, if there is one."""
    import torch

    if not actual.any():
        return ""
    # In float64 casts to other dtypes do nothing here; this one is to round.
    with without_torch_functions():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype.itemsize < actual.dtype.itemsize and torch.equal(actual.to(dtype).to(actual.dtype), actual):
                return str(dtype).removeprefix("torch.")
    return ""


def _multiple(actual: Tensor, reference: Tensor) -> float | None:
    """Return which multiple of another a tensor is; updates are differences, and have fewer digits than gradients."""
    found = fit(actual, reference)
    return found.factor if found is not None and found.residual <= 1e-4 else None


def _turned(run: Composition, actual: Tensor | None, reference: Tensor) -> tuple[str, ...]:
    """Return the axes whose ranks have the right pieces in another order."""
    import torch

    axes = []
    for axis in run.context.layout.dense_axes:
        degree = run.context.degrees[axis.name]
        if degree == 1 or actual is None or actual.shape != reference.shape:
            continue
        for dim in range(reference.dim()):
            pieces = [piece for piece in actual.chunk(degree, dim)]
            turns = (torch.cat(pieces[turn:] + pieces[:turn], dim) for turn in range(1, len(pieces)))
            if any(torch.equal(turned, reference) for turned in turns):
                axes.append(axis.name)
                break
    return tuple(axes)


def _common_factor(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float | None:
    """Return what all tensors were multiplied with, None where they were not multiplied with one number."""
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
