"""`plan` as a call: the cost of a manifest on every kind of rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import pieces_of
from composer3d.checking import (
    Inspection,
    above_zero,
    as_set,
    collected_rarely,
    device_of,
    inspect,
    verb,
    whole_number,
)
from composer3d.errors import ArgumentError, ComposerError, ManifestError
from composer3d.processes import single_threaded

if TYPE_CHECKING:
    from composer3d import ModelFindings
    from composer3d.manifest import Document, InspectedManifest
    from composer3d.planning.costs.whole_run import Failures
    from composer3d.planning.plan import Plan
    from composer3d.planning.traced_manifest import TracedManifest
    from composer3d.planning.tracing.fake_composition import Job
    from composer3d.planning.tracing.rank_roles import RankChoice

__all__ = ["PlanResult", "inspected_job", "plan", "traced_manifest"]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Answer of `plan`.

    Args:
        plan: Memory, collectives, pipeline and time of every kind of rank.
    """

    plan: Plan

    @property
    def ok(self) -> bool:
        """Whether it fits, or no memory was named."""
        return self.plan.verdict != "does not fit"

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d plan --json` prints."""
        from composer3d.planning.reports.plan_json import plan_to_json

        return plan_to_json(self.plan)

    def __str__(self) -> str:
        from composer3d.planning.reports.plan_text import show_plan

        return show_plan(self.plan)


def _rank(value: Any) -> RankChoice:
    if isinstance(value, str) and value in ("worst", "all"):
        return value  # type: ignore[return-value]
    try:
        return int(whole_number(0)(value))
    except ValueError as error:
        raise ValueError(f'"worst", "all" or {error}') from None


def _factors(value: Any) -> dict[str, float]:
    try:
        return {str(part): above_zero(factor) for part, factor in value.items()}
    except (AttributeError, ValueError):
        raise ValueError('numbers above 0 by part of a cluster, such as {"network": 0.5}') from None


def _expected_failures(value: Any) -> Failures:
    from composer3d.planning.costs.whole_run import Failures

    try:
        if isinstance(value, Failures):
            above_zero(value.hours), above_zero(value.storage)
            above_zero(value.restart_s or 1)  # 0 of a run that loses no time in it
            return value
    except ValueError:
        pass
    raise ValueError("a composer3d.planning.Failures, of numbers above 0")


@verb(rank=_rank, what_if=_factors, failures=_expected_failures)
@collected_rarely()
def plan(
    manifest: str | Path,
    *,
    world_size: int | None = None,
    rank: RankChoice = "worst",
    memory_bytes: int | None = None,
    hardware: str | None = None,
    tokens: float | None = None,
    samples: float | None = None,
    price: float | None = None,
    currency: str = "$",
    failures: Failures | None = None,
    what_if: Mapping[str, float] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    full: bool = False,
    routing_skew: float = 1.0,
) -> PlanResult:
    """Plan what a manifest costs: memory, collectives, bubble and time, per rank, without the ranks.

    What the caller has set up for its own tensors, as a default dtype or device, autocast or `torch.no_grad()`, plays
    no part, and is left as it was; so are the states of random numbers.

    Args:
        manifest: Path, or the name of a shipped manifest.
        world_size: Ranks of the run; default: what the degrees multiply to, of several stated world sizes the largest.
        rank: `worst`, one of each distinct role; `all`, one of every pipeline position; or a number.
        memory_bytes: Of a device; None takes what the hardware's has, if there is one.
        hardware: A shipped cluster's name, or its file; None leaves time out.
        tokens: Of a whole run; needs `hardware`.
        samples: The same, of a model that is given no tokens.
        price: Of one device for an hour; needs `tokens` or `samples`.
        currency: Of the price, as it is written before a number.
        failures: To be expected, for goodput; needs `hardware`.
        what_if: Factors by which parts of the hardware are faster, or wait longer, such as `{"network": 0.5}`.
        overrides: `table.key=value`, as given to `--set`, or values by key.
        full: Trace every block, where two depths of equal blocks would do.
        routing_skew: Rows that the ranks planned are sent over the mean of all ranks, where experts are sharded.

    Raises:
        ManifestError: The manifest has problems, all of which it has.
        ComposerError: It cannot be composed, or an argument is none that it takes, or says nothing without another.
    """
    from composer3d.planning.costs.whole_run import Questions
    from composer3d.planning.hardware.hardware_file import load_hardware
    from composer3d.planning.hardware.scaled_hardware import scaled
    from composer3d.planning.plan import plan_of

    _refuse_idle(tokens or samples, price, hardware, what_if, failures)
    cluster = None if hardware is None else load_hardware(hardware)
    if cluster is not None:
        try:
            scaled(cluster, what_if or {})  # what cannot be is refused before anything is traced
        except ComposerError as error:
            raise ArgumentError("what_if", str(error)) from None
    asked = Questions(price=price, currency=currency, failures=failures, what_if=what_if or {})
    device = None if cluster is None else cluster.device.kind
    trace = partial(traced_manifest, world_size=world_size, choice=rank, device=device)
    traced = trace(manifest, as_set(overrides), extrapolate=not full, routing_skew=routing_skew)
    asked = replace(asked, num_units=_amount_of(traced.unit, tokens=tokens, samples=samples))
    return PlanResult(plan=plan_of(traced, hardware=cluster, memory_bytes=memory_bytes, asked=asked))


def traced_manifest(
    source: str | Path,
    overrides: Sequence[str],
    *,
    world_size: int | None,
    choice: RankChoice = "worst",
    extrapolate: bool = True,
    routing_skew: float = 1.0,
    device: str | None = None,
    findings: ModelFindings | None = None,
) -> TracedManifest:
    """Return the trace of a manifest without errors, made or from disk.

    Args:
        source: As for `plan`.
        overrides: As for `plan`.
        world_size: As for `plan`.
        choice: The ranks to trace, as for `plan`.
        extrapolate: Trace repeated blocks at two depths, where the rest follows from them.
        routing_skew: As for `plan`.
        device: Kind of device where the manifest states none; None takes this machine's.
        findings: Of other layouts of the manifest.

    Raises:
        ManifestError: The manifest has problems, all of which it has.
        ComposerError: The form of its batches is not known beforehand, or it cannot be composed.
    """
    from composer3d.manifest import read
    from composer3d.planning.kept_manifest import kept_manifest

    document = read(source, overrides)

    def trace() -> tuple[TracedManifest, frozenset[str]]:
        inspected, found = _inspected(document, world_size, device, routing_skew=routing_skew, findings=findings)
        return _traced(inspected, found, choice=choice, extrapolate=extrapolate)

    asked = {"world_size": world_size, "rank": choice, "extrapolate": extrapolate, "routing_skew": routing_skew}
    stated = document.get(("run", "device")) not in (None, "auto")
    return kept_manifest(document, {**asked, "device": None if stated else device}, trace)


def _inspected(
    document: Document,
    world_size: int | None,
    device: str | None,
    *,
    routing_skew: float,
    findings: ModelFindings | None,
) -> tuple[InspectedManifest, Inspection]:
    """Return a manifest without errors, inspected for its run's device, which this machine need not have."""
    from composer3d.manifest import inspect_manifest
    from composer3d.runner import TABLES, world_sizes

    inspected = inspect_manifest(document, tables=TABLES)
    world_size = world_size or max(world_sizes(inspected.manifest), default=None)
    where = device_of(inspected.manifest, else_of=device)
    found = inspect(inspected, world_size=world_size, rank=0, device=where, findings=findings)
    if not found.ok(strict=False) or found.layout is None or found.preparation is None:
        raise ManifestError(found.ordered())
    _skew(found, routing_skew)
    return inspected, found


@single_threaded()
def _traced(
    inspected: InspectedManifest, found: Inspection, *, choice: RankChoice, extrapolate: bool
) -> tuple[TracedManifest, frozenset[str]]:
    """Trace a manifest that was inspected, and without errors; return the modules of what runs, too."""
    from composer3d.planning.manifest_notes import manifest_notes
    from composer3d.planning.manifest_tracer import trace_manifest
    from composer3d.planning.tracing.model_errors import tracing_model

    assert found.layout is not None and found.preparation is not None, "inspected without errors"
    job = inspected_job(inspected, found)
    with tracing_model(job.manifest, found, in_full=not extrapolate):
        traced = trace_manifest(
            job,
            found.layout,
            orders_of=found.preparation.actions,
            schedule=_schedule_name(found),
            choice=choice,
            extrapolate=extrapolate,
        )
    callables = [job.loss_fn, job.count_fn, *(type(plugin.instance) for plugin in job.manifest.plugins)]
    classes = {type(module) for module in job.model.modules()}
    modules = frozenset(getattr(each, "__module__", None) or "" for each in (*classes, *callables)) - {""}
    return replace(traced, notes=tuple(manifest_notes(inspected.manifest, traced))), modules


def inspected_job(inspected: InspectedManifest, found: Inspection) -> Job:
    """Return what is traced of a manifest that was inspected without errors, with the form of its batches.

    The global batch is that of the largest step.

    Args:
        inspected: From `open_manifest`.
        found: From `inspect`.

    Raises:
        ComposerError: The form of its batches is not known beforehand.
    """
    import torch

    from composer3d.checking import find_factory
    from composer3d.planning.tracing.fake_composition import Job
    from composer3d.runner import EMA, BatchSize, make_optimizer, with_tokenizer
    from composer3d.runner.data import foreseen_batch

    assert found.layout is not None and found.preparation is not None, "inspected without errors"
    manifest = with_tokenizer(inspected.manifest)
    factory, problems = find_factory(manifest)
    assert factory is not None and not problems, "the inspection has found it"
    train, data = manifest.tables["train"], manifest.tables["data"]
    microbatch, pieces = train.microbatch or 1, pieces_of(found.preparation.context)
    degree = pieces.total * found.layout.num_groups
    batch = foreseen_batch(data, manifest.document.folder, seed=train.seed, num_samples=microbatch)
    if batch is None:
        file = manifest.document.file
        raise ComposerError(f"{file}: the form of a batch of [data] is not known without preparing the data")
    example, target = batch
    factory.learn(found.preparation.model)
    return Job(
        manifest=manifest,
        model=found.preparation.model.to(torch.device("meta")),
        loss_fn=factory.loss_fn,
        make_optimizer=lambda run: make_optimizer(run, manifest),
        make_averages=None if (decay := manifest.tables["ema"].decay) is None else partial(EMA, decay=decay),
        example=example,
        inputs=factory.inputs,
        count_fn=factory.loss.count,
        grad_clip=train.grad_clip,
        world_size=found.layout.world_size,
        num_microbatches=max(1, pieces.most * BatchSize(train, degree=degree).largest // (microbatch * degree)),
        microbatch=microbatch,
        preparation=found.preparation,
        target=target,
        has_targets=target is not None,
    )


def _skew(found: Inspection, routing_skew: float) -> None:
    """Assume that experts of a rank are sent more rows than those of others."""
    from composer3d.interfaces import DataDependent
    from composer3d.mesh import Role

    assert found.layout is not None and found.preparation is not None, "inspected without errors"
    degree = found.layout.degree(Role.EXPERT)
    if routing_skew != 1.0 and not 1.0 <= routing_skew <= degree:
        allowed = (
            f"it is at least 1 and at most the {degree} ranks that share experts"
            if degree > 1
            else ("no ranks of this manifest share experts; set ep in [mesh]")
        )
        raise ArgumentError("routing_skew", allowed, value=routing_skew)
    found.preparation.context.stash(DataDependent).routing_skew = routing_skew


def _refuse_idle(
    amount: float | None,
    price: float | None,
    hardware: str | None,
    what_if: Mapping[str, float] | None,
    failures: Failures | None,
) -> None:
    """Refuse what would say nothing, before anything is composed."""
    if (amount or price) and hardware is None:
        raise ArgumentError("hardware", "{tokens}, {samples} and {price} need it: without it there is no time")
    if price and not amount:
        raise ArgumentError("price", "it needs {tokens}, or {samples}: how much there is to pay for")
    if what_if and hardware is None:
        raise ArgumentError("what_if", "it needs {hardware}: there is nothing to change without it")
    if failures is not None and hardware is None:
        raise ArgumentError("failures", "it needs {hardware}: without it there is no time")


def _amount_of(unit: str, **amounts: float | None) -> float | None:
    """Return how much a whole run sees, in the unit of its model's inputs."""
    other = "samples" if unit == "tokens" else "tokens"
    if amounts[other] is not None:
        said = f"the model is given {unit}, and a run is as long as these; write {{{unit}}}"
        raise ArgumentError(other, said)
    return amounts[unit]


def _schedule_name(found: Inspection) -> str | None:
    """Return what the plugin that owns the stages calls its schedule."""
    assert found.preparation is not None
    from composer3d.mesh import Role

    context = found.preparation.context
    owners = [context.owners[name] for name in context.layout.names(Role.STAGE) if name in context.owners]
    names = [getattr(owner.instance, "schedule", None) for owner in owners if context.layout.degree(Role.STAGE) > 1]
    return next((name for name in names if isinstance(name, str)), None)
