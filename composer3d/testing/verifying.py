"""`composer3d verify` as a call, for the tests of a plugin or of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.composition import local_slice
from composer3d.errors import BatchError, InitialisationError, RankError
from composer3d.interfaces import Batch
from composer3d.manifest import load_manifest
from composer3d.mesh import Role
from composer3d.step import split_batch, tensors
from composer3d.testing.ranks import run_ranks

if TYPE_CHECKING:
    from torch import nn

    from composer3d import Manifest
    from composer3d.interfaces import Example, LossFunction
    from composer3d.verification import Subject, Verdict

__all__ = ["Parity", "assert_parity"]


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Distance of a composition from one device.

    Args:
        loss: |composed - reference| / |reference|, of the rank and step where it is largest.
        grad_norm: The same of the norm of the full gradient.
        gradients: By FQN the measure of `assert_gradients_equal`, of the rank and step where it is largest.
        collectives: (count, bytes) by (op, axis) as rank 0 issued them in one step.
        verdict: Everything else that was looked at.
    """

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    collectives: Mapping[tuple[str, str], tuple[int, int]]
    verdict: Verdict


def assert_parity(
    model_factory: Callable[[], nn.Module],
    manifest: str | Path,
    batch: Batch,
    *,
    world_size: int | None = None,
    loss_fn: LossFunction | None = None,
    tolerance: float = 1e-12,
    microbatch: int | None = None,
    steps: int = 2,
    grad_clip: float = math.inf,
    own_dtype: bool = True,
    optimizer: Callable[[Any], Any] | None = None,
    count_fn: Callable[[Any], int] | None = None,
    tables: Mapping[str, type] | None = None,
) -> Parity:
    """Assert that a manifest's composition computes what one device computes; what `composer3d verify` asserts.

    Compared are loss, gradient norm, gradients and updated parameters, in float64 and in the default dtype; copies, to
    the last bit; random numbers with what the axes promise; collectives with a trace. The reference is the factory
    without plugins, its batch divided into the same micro-batches; both start from the weights of a composed factory.

    Args:
        model_factory: Makes the model. Random numbers that it draws in its forward are switched off for the comparison.
        manifest: A path, with the tables that embedding uses, and `tables`.
        batch: The global batch of every step, on the CPU; each data-parallel rank takes its slice of dim 0.
        world_size: Ranks, 1 to 8; default: what the manifest's degrees multiply to.
        loss_fn: As for `compose`, and so `count_fn`.
        tolerance: Of every measure in float64, inclusive; more only where an optimizer makes more of a rounding.
        microbatch: Instead of the manifest's.
        steps: Optimizer steps; what goes stale, or is lost between steps, shows in the second.
        grad_clip: Gradients are scaled down to this norm.
        own_dtype: Compare in the default dtype too, with the precision plugins, by a bound derived from the reference.
        optimizer: Called with the composition; default: AdamW with a learning rate of 1e-3.
        tables: As for `compose`: `composer3d.runner.TABLES` lets the manifest of a run pass.

    Raises:
        AssertionError: With all that differs, the five worst gradients, and what is likely the cause.
        InitialisationError: The factory is none.
        BatchError: The batch is no `Batch`, or does not divide over the ranks and into micro-batches.
        RankError: A rank failed; its text has that rank's traceback, and there is no other.

    Memory: full gradients and the reference on every rank. Collectives: those of the steps, and of `gather_full`.
    """
    __tracebackhide__ = True
    overrides = [] if microbatch is None else [f"train.microbatch={microbatch}"]
    typed = load_manifest(manifest, overrides=overrides, tables=tables)
    _refuse_mistakes(model_factory, batch)
    verdict = _prove(
        functools.partial(_subject, model_factory, typed, batch, loss_fn, grad_clip, optimizer, count_fn),
        typed,
        batch,
        world_size=world_size,
        num_steps=steps,
        grad_clip=grad_clip,
        passes=("float64", "own") if own_dtype else ("float64",),
        tolerance=tolerance,
    )
    return _parity(verdict, tolerance)


def _prove(
    make_subject: Callable[[], Subject], typed: Manifest, batch: Batch, *, world_size: int | None, **options: Any
) -> Verdict:
    """Verify on forked ranks, once the batch is known to divide by them."""
    __tracebackhide__ = True
    # Here, because the proof is written on this package's own parts.
    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks
    from composer3d.verification import prove

    layout, size = layout_of(typed, Hooks(typed.plugins), world_size=world_size), typed.train.microbatch
    degree = layout.degree(Role.BATCH)
    number = len(local_slice(range(_length(batch)), 0, degree))
    split_batch(split_batch(batch, number)[0], size)
    microbatches = _microbatches(_length(batch), degree, size)
    try:
        return prove(make_subject, layout=layout, launch=_launch, microbatches=microbatches, **options)
    except RankError as error:
        # What went on in this process is no concern of the test: the text has where the rank failed.
        raise error.with_traceback(None) from None


def _refuse_mistakes(model_factory: Any, batch: Any) -> None:
    """Refuse, before ranks are started, what is of another kind than asked for."""
    __tracebackhide__ = True
    from torch import nn

    if isinstance(model_factory, nn.Module) or not callable(model_factory):
        raise InitialisationError(
            f"assert_parity is given a {type(model_factory).__name__}, and takes a factory: the model is made once for "
            "each composition, in float64 too; pass its class, or lambda: Model(...)"
        )
    if not isinstance(batch, Batch):
        raise BatchError(
            f"assert_parity is given a {type(batch).__name__} as its batch; pass composer3d.Batch(args=(inputs,), "
            "target=targets), the whole batch of a step on the CPU"
        )
    if not any(tensor.dim() for tensor in tensors((batch.args, batch.kwargs, batch.target))):
        raise BatchError("assert_parity is given a batch without samples: none of its tensors has a dim 0 to cut")


def _microbatches(length: int, degree: int, size: int | None) -> int:
    of_rank = max(length // degree, 1)
    return max(length // degree // (size or of_rank), 1)


def _launch(function: Callable[..., Any], args: Sequence[Any], num_ranks: int) -> list[Any]:
    return run_ranks(function, num_ranks, *args)


def _subject(
    model_factory: Callable[[], nn.Module],
    manifest: Any,
    batch: Batch,
    loss_fn: LossFunction | None,
    grad_clip: float,
    optimizer: Callable[[Any], Any] | None,
    count_fn: Callable[[Any], int] | None,
) -> Subject:
    import torch

    from composer3d.verification import Subject

    return Subject(
        manifest=manifest,
        build=lambda: model_factory,
        loss_fn=loss_fn,
        make_optimizer=optimizer or (lambda run: run.optimizer(torch.optim.AdamW, lr=1e-3)),
        batch=lambda step, rank, degree: split_batch(batch, len(local_slice(range(_length(batch)), rank, degree)))[
            rank
        ],
        grad_clip=grad_clip,
        average_buffers=lambda run: run.sync_buffers(),  # as `run.save` does
        device=torch.device("cpu"),
        count_fn=count_fn,
        example=_example(batch, manifest.train.microbatch or 1),
    )


def _example(batch: Batch, size: int) -> Example:
    """Return the model's arguments of one micro-batch: plugins that follow a forward see what the run will see."""
    first = split_batch(batch, size)[0]
    return tuple(first.args), dict(first.kwargs)


def _length(batch: Batch) -> int:
    return next(tensor.shape[0] for tensor in tensors((batch.args, batch.kwargs, batch.target)) if tensor.dim())


def _parity(verdict: Verdict, tolerance: float) -> Parity:
    __tracebackhide__ = True
    if not verdict.ok:
        raise AssertionError(_text(verdict, tolerance))
    evidence = verdict.evidence
    assert evidence is not None and evidence.ranks[0].happened is not None, "the ranks got to the end"
    return Parity(
        loss=evidence.number("loss", "float64").rel,
        grad_norm=evidence.number("grad_norm", "float64").rel,
        gradients={row.fqn: row.gradient for row in sorted(verdict.table(), key=lambda row: row.fqn)},
        collectives=evidence.ranks[0].happened.totals,
        verdict=verdict,
    )


def _text(verdict: Verdict, tolerance: float) -> str:
    worst = [f"  {row.fqn}: {row.gradient:.3g}" for row in verdict.table()[:5] if not row.gradient <= tolerance]
    lines = [*verdict.failures, *(["worst gradients:", *worst] if worst else [])]
    return "\n".join([*lines, *(f"likely: {line}" for line in verdict.diagnosis)])
