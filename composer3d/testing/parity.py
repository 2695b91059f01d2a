"""Full tensors out of sharded ones, the one measure by which gradients are compared, and whole steps compared by it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.batch import cut, map_tensors, tensors
from composer3d.composition import compose
from composer3d.manifest import load_manifest
from composer3d.protocol import Batch, LossFunction
from composer3d.sampling import local_slice
from composer3d.testing.collectives import count_collectives
from composer3d.testing.ranks import run_ranks

__all__ = ["Parity", "assert_gradients_equal", "assert_parity", "full", "gather_full"]


def full(tensor: Tensor) -> Tensor:
    """Return the full value of a tensor, detached: a DTensor's shards gathered and its partial sums summed.

    Memory: the full tensor. Collectives: one or more for each sharded or partial axis of a DTensor, so every rank of
    its mesh calls this; none for a plain tensor.
    """
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def gather_full(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the full value of every named tensor of the model, on every rank, sorted by name.

    Ranks may hold different names, as the stages of a pipeline do: what a rank lacks comes from the lowest rank that
    has it. Every rank of the world calls this.

    Args:
        named_tensors: FQN and tensor, for example `model.named_parameters()`.

    Memory: copies of all full tensors. Collectives: those of `full`, one gather of names, and one broadcast for each
    name that not every rank has.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    own = {fqn: full(tensor).clone() for fqn, tensor in items}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(sorted(own.items()))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {fqn: (tensor.shape, tensor.dtype, tensor.device) for fqn, tensor in own.items()})
    for fqn in sorted({fqn for names in held for fqn in names}):
        owners = [rank for rank, names in enumerate(held) if fqn in names]
        if len(owners) == len(held):
            continue
        shape, dtype, device = held[owners[0]][fqn]
        tensor = own[fqn] if fqn in own else torch.empty(shape, dtype=dtype, device=torch.device(device.type))
        # A rank that has the tensor keeps its own: a difference between owners stays visible.
        received = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, src=owners[0])
        own.setdefault(fqn, received)
    return dict(sorted(own.items()))


def assert_gradients_equal(
    actual: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None], *, tolerance: float
) -> None:
    """Assert that the gradients of one model are those of another, parameter by parameter.

    The measure is max|actual - reference| / max|reference| of each parameter, computed in float64; a reference of
    zeros asks for zeros. In float64 correct layouts stay below 1e-12; float32 (2e-7 to 8e-7) cannot tell small errors.

    Args:
        actual: FQN to gradient; DTensors are gathered, so that every rank of their mesh calls this.
        reference: FQN to gradient of one device.
        tolerance: The largest measure allowed, inclusive.

    Raises:
        AssertionError: Names the FQNs that only one side has, or the five worst with their measures.
    """
    text = _worst(_measures(actual, reference), tolerance)
    if text:
        raise AssertionError(text)


def _measures(actual: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> dict[str, float]:
    missing, unexpected = sorted(reference.keys() - actual.keys()), sorted(actual.keys() - reference.keys())
    if missing or unexpected:
        raise AssertionError(f"FQNs differ: missing {missing}, unexpected {unexpected}")
    return {fqn: _difference(fqn, actual[fqn], reference[fqn]) for fqn in sorted(reference)}


def _worst(measures: Mapping[str, float], tolerance: float) -> str:
    """Return the text on what is out of tolerance, empty if nothing is."""
    # Not "measure > tolerance": that is false for NaN.
    bad = {fqn: measure for fqn, measure in measures.items() if not measure <= tolerance}
    if not bad:
        return ""
    worst = sorted(bad.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])[:5]
    lines = "".join(f"\n  {fqn}: {measure:.3g}" for fqn, measure in worst)
    return f"{len(bad)} of {len(measures)} gradients differ by more than {tolerance:g} of their largest value:{lines}"


def _difference(fqn: str, actual: Tensor | None, reference: Tensor | None) -> float:
    if actual is None or reference is None:
        if actual is not reference:
            side = "actual" if actual is None else "reference"
            raise AssertionError(f"{fqn}: the {side} gradient is None and the other is not")
        return 0.0
    one, other = full(actual).to("cpu", torch.float64), full(reference).to("cpu", torch.float64)
    if one.shape != other.shape:
        raise AssertionError(f"{fqn}: shape {tuple(one.shape)} is not the reference's {tuple(other.shape)}")
    if one.numel() == 0:
        return 0.0
    difference, scale = (one - other).abs().max().item(), other.abs().max().item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far one composed step is from the same step on one device.

    Args:
        loss: |composed - reference| / |reference|, of the rank where it is largest.
        grad_norm: The same of the norm of the full gradient.
        gradients: By FQN the measure of `assert_gradients_equal`, of the rank where it is largest.
        collectives: (count, bytes) by (op, axis) as rank 0 issued them, from the forward to the gradient norm.
    """

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    collectives: Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class _Step:
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    collectives: dict[tuple[str, str], tuple[int, int]]


def assert_parity(
    model_factory: Callable[[], nn.Module],
    manifest: str | Path,
    batch: Batch,
    *,
    world_size: int,
    loss_fn: LossFunction,
    tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    microbatch: int | None = None,
) -> Parity:
    """Assert that a manifest's layout computes what one device computes: loss, gradient norm and every gradient.

    The reference is the same factory composed with an empty manifest on one rank, the whole batch in one forward. Both
    start from the same weights, because composed factories do in every layout. The comparison is blind to a plugin that
    does nothing: assert `collectives` as well. The model must not draw random numbers in its forward (dropout differs
    between data-parallel ranks), and its loss must be a sum, or a mean, over tokens.

    Args:
        model_factory: Makes the model; `dtype` is the default dtype while it runs.
        manifest: A path, with the tables that embedding uses.
        batch: The global batch on the CPU; each data-parallel rank takes its cut of dim 0. What is floating-point is
            converted to `dtype`.
        world_size: Ranks, 1 to 8.
        loss_fn: As for `compose`.
        tolerance: Of each measure in `Parity`, inclusive.
        dtype: Of parameters and computation; float32 (2e-7 to 8e-7 for correct layouts) cannot tell small errors.
        microbatch: Instead of the manifest's.

    Raises:
        AssertionError: With everything out of tolerance, and the five worst gradients.
        RankError: A rank failed.

    Memory: the model and its full gradients on every rank. Collectives: those of the step, and of `gather_full`.
    """
    __tracebackhide__ = True
    overrides = [] if microbatch is None else [f"train.microbatch={microbatch}"]

    def one_device() -> _Step:
        seed = load_manifest(manifest, overrides=overrides).train.seed
        with tempfile.TemporaryDirectory(prefix="composer3d-parity-") as folder:
            empty = Path(folder) / "one_device.toml"
            empty.write_text(f"composer3d = 1\n[train]\nseed = {seed}\n")
            return _step(model_factory, empty, [], batch, loss_fn, dtype)

    (reference,) = run_ranks(one_device, 1)

    def composed() -> Parity | str:
        step = _step(model_factory, manifest, overrides, batch, loss_fn, dtype)
        try:
            return _compare(step, reference)
        except AssertionError as error:
            return str(error)

    return _judge(run_ranks(composed, world_size), tolerance)


def _step(
    model_factory: Callable[[], nn.Module],
    manifest: str | Path,
    overrides: list[str],
    batch: Batch,
    loss_fn: LossFunction,
    dtype: torch.dtype,
) -> _Step:
    """Run one step on this rank, which is a process of its own."""
    torch.set_default_dtype(dtype)
    with compose(model_factory, load_manifest(manifest, overrides=overrides), loss_fn=loss_fn, device="cpu") as run:
        if run.has_grad_scaler:
            run.optimizer(torch.optim.SGD, lr=0.0)  # it unscales an optimizer's gradients
        context = run.context
        mine = _cut(batch, context.data_parallel_rank, context.data_parallel_degree, dtype)
        with count_collectives(run.mesh) as collectives, run.step(0):
            loss = run.forward_backward(*mine.args, target=mine.target, **mine.kwargs)
            norm = run.clip_grad_norm_(math.inf)
            summary = collectives.summary()
            gradients = gather_full({fqn: p.grad for fqn, p in run.named_parameters() if p.grad is not None})
        return _Step(loss=float(loss), grad_norm=float(norm), gradients=gradients, collectives=summary)


def _cut(batch: Batch, rank: int, degree: int, dtype: torch.dtype) -> Batch:
    def convert(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)

    whole = Batch(args=convert(batch.args), kwargs=convert(batch.kwargs), target=convert(batch.target))
    length = next(tensor.shape[0] for tensor in tensors((whole.args, whole.kwargs, whole.target)) if tensor.dim())
    return cut(whole, len(local_slice(range(length), rank, degree)))[rank]


def _compare(step: _Step, reference: _Step) -> Parity:
    return Parity(
        loss=_relative(step.loss, reference.loss),
        grad_norm=_relative(step.grad_norm, reference.grad_norm),
        gradients=_measures(step.gradients, reference.gradients),
        collectives=step.collectives,
    )


def _relative(actual: float, reference: float) -> float:
    if actual == reference:
        return 0.0
    return abs(actual - reference) / abs(reference) if reference else math.inf


def _judge(ranks: list[Parity | str], tolerance: float) -> Parity:
    """Put the ranks' results together; raise if anything is out of tolerance."""
    __tracebackhide__ = True
    parities: list[Parity] = []
    for rank, result in enumerate(ranks):
        if isinstance(result, str):
            raise AssertionError(f"rank {rank}: {result}")
        parities.append(result)
    whole = Parity(
        loss=_largest(parity.loss for parity in parities),
        grad_norm=_largest(parity.grad_norm for parity in parities),
        gradients={fqn: _largest(parity.gradients[fqn] for parity in parities) for fqn in parities[0].gradients},
        collectives=parities[0].collectives,
    )
    lines = [
        f"the {name} differs by {measure:.3g} of its value, more than {tolerance:g}"
        for name, measure in (("loss", whole.loss), ("gradient norm", whole.grad_norm))
        if not measure <= tolerance
    ]
    text = "\n".join([*lines, _worst(whole.gradients, tolerance)]).strip()
    if text:
        raise AssertionError(text)
    return whole


def _largest(measures: Iterable[float]) -> float:
    """Return the largest; NaN is larger than any number."""
    return max(measures, key=lambda measure: math.inf if math.isnan(measure) else measure)
