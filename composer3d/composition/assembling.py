"""Assembly of a preparation: process group, mesh, parts, transforms, weights, and the frozen step."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer3d import mesh, torch_compat
from composer3d.composition.agreeing import agree_on_plan
from composer3d.composition.applying import (
    agree_on_factory,
    agree_on_weights,
    apply_transforms,
    gradient_hooks,
    materialise,
)
from composer3d.composition.closing import close_all
from composer3d.composition.composed_model import span_hooks
from composer3d.composition.loop.loop_objects import GivenParameters
from composer3d.composition.observed_batches import observers
from composer3d.composition.preparing import PlanRow, Preparation, prepare
from composer3d.composition.watched_forwards import watch_functions, watch_samples
from composer3d.context import Purpose, RunContext
from composer3d.errors import ManifestError
from composer3d.hooks import Bound, Hooks, HooksInTurn
from composer3d.interfaces import Batch, Example, Microbatches, Schedule, Stateful
from composer3d.manifest import Manifest, load_manifest
from composer3d.mesh import Role
from composer3d.observation import spans
from composer3d.observation.issuers import sources_of
from composer3d.processes.arrival import await_all
from composer3d.processes.foreign_peers import refuse_foreign_peers
from composer3d.processes.process_group import default_device, join_world, own_device, own_groups
from composer3d.step import guard
from composer3d.step.accumulation import Accumulation
from composer3d.step.counted_buffers import counting_actions
from composer3d.step.engine import StepEngine
from composer3d.step.guard import Guard
from composer3d.step.loops.loop_state import compared_axes
from composer3d.step.losses.criterion import Criterion
from composer3d.step.losses.loss_totals import LossTotals
from composer3d.step.measurement import Measurement
from composer3d.step.microbatches import to_device
from composer3d.step.random_numbers.random_streams import Streams
from composer3d.step.rank_numbers import RankNumbers
from composer3d.step.sharded_tensors.whole_operators import compute_whole_operators
from composer3d.transform import Phase, StepAction, order

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.hooks.blame import Turns
    from composer3d.observation.flight_recorder import Flight

__all__ = ["Assembled", "assemble", "build_mesh", "freeze"]


@dataclass(kw_only=True, eq=False)
class Assembled:
    """The pieces of a composition."""

    context: RunContext
    hooks: Hooks
    plan: tuple[PlanRow, ...]
    engine: StepEngine
    schedule: Schedule
    has_schedule: bool
    group: Any
    control_device: torch.device
    place_batch: tuple[Callable[..., Any], ...]
    observe_batch: tuple[Callable[..., Any], ...]
    measurement: Measurement
    metric_sinks: HooksInTurn
    states: Mapping[str, Mapping[str, Stateful]]
    acting: span_hooks.Acting
    setup: str
    release: Callable[[], None]

    def placed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Batch:
        """Return a loop's arguments as this rank's batch, as plugins place it, on its device."""
        if target is None and self.engine.criterion.given is None:
            target = kwargs.get("labels")  # it is what the model counts, too
        batch = to_device(self._placed(Batch(args=args, kwargs=kwargs, target=target)), self.context.device)
        for function in self.observe_batch:
            function(context=self.context, batch=batch)
        return batch

    def placed_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of a forward that the loop runs itself, as plugins place them."""
        batch = self._placed(Batch(args=args, kwargs=kwargs, is_own_forward=True))
        return batch.args, batch.kwargs

    def _placed(self, batch: Batch) -> Batch:
        self.engine.activations.watch_inputs((batch.args, batch.kwargs))
        for function in self.place_batch:
            batch = function(context=self.context, batch=batch) or batch
        return batch

    def reported(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Pass a step's metrics to every plugin that takes them, and return them."""
        self.metric_sinks(context=self.context, step=step, metrics=metrics)
        return metrics


def assemble(
    model: nn.Module | Callable[[], nn.Module],
    manifest: str | Path | Manifest,
    *,
    criterion: Criterion,
    weights: Literal["check", "rank0"],
    tables: Mapping[str, type] | None,
    device: str | torch.device | None,
    purpose: Purpose,
    example: Example | Callable[[], Example | None] | None,
    guarded: bool,
    timeout_s: float | None,
) -> Assembled:
    """Compose a model; arguments as of `compose`."""
    import torch.distributed as dist

    where = default_device() if device is None else own_device(device)
    if not isinstance(manifest, Manifest):
        manifest = _load(manifest, tables)
    release = join_world(where, timeout_s=timeout_s)
    preparation: Preparation | None = None
    try:
        preparation = prepare(
            model,
            manifest,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            device=where,
            purpose=purpose,
            example=example,
        )
        errors = [problem for problem in preparation.problems if problem.severity == "error"]
        if errors:
            raise ManifestError(errors)
        for problem in preparation.problems if dist.get_rank() == 0 else ():
            logging.getLogger(__name__).warning("%s", problem)
        context = preparation.context
        arrived = _arrivals(context, timeout_s) if guarded else lambda place: None
        arrived("prepare the model")
        plan = agree_on_plan(preparation) if guarded else None
        if preparation.recipe is None:
            context.stash(GivenParameters).record(preparation.model)
            agree_on_weights(preparation.model, context, broadcast=weights == "rank0")
        else:
            agree_on_factory(preparation.recipe, context)
        with refuse_foreign_peers(), own_groups():
            build_mesh(preparation)
            apply_transforms(preparation)
        materialise(preparation)
        arrived("give the model its weights")
        watch_samples(criterion, context)
        return freeze(preparation, criterion, release, plan)
    except BaseException as error:
        # Plugins that were configured are closed, whatever errors they raise: the first error counts.
        if preparation is not None:
            for _, function in preparation.hooks.close():
                with contextlib.suppress(Exception):
                    function(context=preparation.context, error=error)
        release()
        raise


def _arrivals(context: RunContext, timeout_s: float | None) -> Callable[[str], None]:
    """Return what waits for all ranks at a place of this composition, where somebody said how long.

    Else a collective waits, which notices a rank that died, and cannot say who is late.
    """
    import torch.distributed as dist

    if timeout_s is None or context.world_size == 1 or dist.get_backend() == "fake":
        return lambda place: None
    store = torch_compat.default_store()
    number = store.add(f"composer3d/composed/{context.rank}", 1)  # all ranks compose in the same order
    return functools.partial(
        _arrive,
        dist.PrefixStore(f"composer3d/compose/{number}", store),  # type: ignore[attr-defined]
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _arrive(store: Any, place: str, **options: Any) -> None:
    await_all(store, place=place, **options)


def _load(source: str | Path, tables: Mapping[str, type] | None) -> Manifest:
    try:
        return load_manifest(source, tables=tables)
    except ManifestError as error:
        if tables is None and any(problem.message.startswith("unknown") for problem in error.problems):
            error.add_note("what only a run uses is allowed by compose(tables=composer3d.runner.TABLES)")
        raise


def build_mesh(preparation: Preparation) -> None:
    """Make the mesh, with the options plugins give for each axis."""
    context = preparation.context
    options = {}
    for axis in context.layout.axes:
        if axis.role is Role.REPLICA or (axis.role is Role.EXPERT and context.degrees[axis.name] == 1):
            continue  # it has no group
        answer = preparation.hooks.group_options(context, axis.name)
        if answer is not None:
            options[axis.name] = answer
    root = mesh.build(context.layout, device_type=context.device.type, options=options)
    context.set_mesh(root, mesh.MeshViews(root, context.layout, options))
    # That what is sharded twice is gathered, and its norm summed, twice is nothing that a loop could mend.
    torch_compat.silence_redistribution()


def _guard(
    preparation: Preparation, group: Any, device: torch.device, plan: int | None, make_guard: Callable[..., Guard]
) -> Guard:
    """Make the guard; `plan` is None where it only counts."""
    import torch.distributed as dist

    context = preparation.context
    return make_guard(
        layout=context.layout,
        rank=context.rank,
        group=group,
        device=device,
        plan=plan or 0,
        compares=plan is not None,
        # In a fake process group of many ranks nobody else answers.
        is_answered=context.world_size == 1 or dist.get_backend(group) != "fake",
        # A plugin that places batches shards sequences; without one, the loop passes ranks along cp their own shards.
        whole_sequences=bool(preparation.hooks.place_batch()),
        compared=compared_axes(context) if plan is not None else {},
        numbers=context.stash(RankNumbers),
    )


def _loss_totals(preparation: Preparation, group: Any, device: torch.device) -> LossTotals:
    """Make the loss_totals of losses, with the degrees over which data-parallel plugins average."""
    import torch.distributed as dist

    context = preparation.context
    # A mean that is taken twice over one axis is taken once.
    averaged = {axis for transform, _ in preparation.selected for axis in transform.averages}
    averages = math.prod(context.degrees[axis] for axis in averaged)
    # Ranks along tp compute the same loss: only the first of them counts it. Along pp only the last stage has one.
    contributes = all(context.coordinates[name] == 0 for name in context.layout.names(Role.TENSOR))
    peers = context.layout.degree(Role.TENSOR) - 1
    compares = peers and context.purpose == "run" and dist.get_backend(group) != "fake"
    spread = (1.0 if contributes else -1.0 / peers) if compares else 0.0
    return LossTotals(averages=averages, contributes=contributes, group=group, device=device, spread=spread)


def _flight(preparation: Preparation, *, guarded: bool) -> Flight | None:
    """Make the flight recorder, where there are other ranks that could answer; else None."""
    import torch.distributed as dist

    context = preparation.context
    if not guarded or context.world_size == 1 or dist.get_backend() == "fake":
        return None
    from composer3d.observation.flight_recorder import Flight  # a plan has nobody to ask
    from composer3d.observation.torch_errors import TorchErrors

    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    axes = [axis.name for axis in context.layout.dense_axes if context.degrees[axis.name] > 1]
    views = context.views.groups
    for name, group in [*views.items(), ("world", None), *((name, context.mesh.get_group(name)) for name in axes)]:
        # An axis as large as the world may have the world's own group: then it is called by the axis.
        known = torch_compat.group_name(group)
        groups[known] = (name, tuple(dist.get_process_group_ranks(group)))
    owners = {axis: registered.name for axis, registered in context.owners.items()}
    of_views = {name: owners.get(context.layout.axes_of(name)[0], "") for name in views}
    flight = Flight(
        layout=context.layout,
        rank=context.rank,
        groups=groups,
        owners={name: owner for name, owner in (of_views | owners).items() if owner},
        store=torch_compat.default_store(),
        sources=sources_of(context.plugins),
    )
    flight.errors = context.stash(TorchErrors)
    return flight


def _actions(preparation: Preparation, acting: Turns | None) -> tuple[StepAction, ...]:
    """Collect the actions of every step, in their order."""
    actions = [action for _, action in preparation.hooks.step_actions(preparation.context, acting)]
    if preparation.attachments.hooks:
        actions.append(gradient_hooks(preparation.attachments))
    modules = (module for part in preparation.context.parts for module in part.module.modules())
    return order([*actions, *counting_actions(modules, preparation.context)])


def _streams(preparation: Preparation) -> Streams:
    """Make the random streams; no mode of torch sees what compiled code draws."""
    context, train = preparation.context, preparation.context.manifest.train
    is_compiled = any(transform.phase is Phase.COMPILE for transform, _ in preparation.selected)
    is_real = context.purpose in ("run", "verify") and not is_compiled
    return Streams(
        seed=train.seed,
        layout=context.layout,
        rank=context.rank,
        device=context.device,
        parts=lambda: context.parts,
        policy=train.random_numbers if is_real else "ranks",
    )


def _microbatches(engine: StepEngine) -> Microbatches:
    return Microbatches(begin=engine.begin_microbatch, resume=engine.resume_microbatch, end=engine.end_microbatch)


def _states(
    hooks: Hooks, context: RunContext, engine: StepEngine, flight: Flight | None
) -> Mapping[str, Mapping[str, Stateful]]:
    """Ask plugins what is saved of them; a peer that is lost meanwhile is explained as in a step."""
    if flight is None:
        return hooks.states(context)
    flight.start()  # last: nothing that fails before has a thread to stop
    try:
        with engine.explaining("composer3d_state"):
            return hooks.states(context)
    except BaseException:
        flight.close()
        raise


def freeze(
    preparation: Preparation,
    criterion: Criterion,
    release: Callable[[], None],
    plan: int | None,
    *,
    make_guard: Callable[..., Guard] = Guard,
) -> Assembled:
    """Collect the functions that steps call, so that no step looks them up; `make_guard` takes `Guard`'s arguments."""
    context, hooks = preparation.context, preparation.hooks
    group, device = guard.contract_group(context.layout, context.views), guard.control_device(context.device)
    acting = span_hooks.Acting(is_watched=bool(hooks.implementing("composer3d_recorder")))
    streams = _streams(preparation)
    flight = _flight(preparation, guarded=plan is not None)
    engine = StepEngine(
        context=context,
        actions=_actions(preparation, acting.noted),
        guard=_guard(preparation, group, device, plan, make_guard),
        flight=flight,
        loss_totals=_loss_totals(preparation, group, device),
        streams=streams,
        criterion=criterion,
    )
    engine.scaling.scaler, context.loss_fn = hooks.grad_scaler(context), criterion.given
    context.freeze(
        opener=spans.Opener(hooks.recorders(context), acting=acting, turns=acting.turns),
        flight=flight,
        microbatches=_microbatches(engine),
        streams=streams,
    )
    watch_functions(engine, preparation)
    leave_operators = compute_whole_operators(context)
    span_hooks.watch_sharding(context)
    ends = (span_hooks.watch_operators(context, acting), leave_operators, *(() if flight is None else (flight.close,)))
    loss_fn, hooks.acts = streams.of_loss(engine.loss), acting.named
    scheduled = hooks.schedule(context, context.parts, loss_fn)

    def functions(bound: Sequence[Bound]) -> tuple[Callable[..., Any], ...]:
        return tuple(acting.named(registered.name, function) for registered, function in bound)

    states = _states(hooks, context, engine, flight)
    return Assembled(
        context=context,
        hooks=hooks,
        plan=preparation.plan,
        engine=engine,
        schedule=scheduled or Accumulation(context=context, loss_fn=loss_fn),
        has_schedule=scheduled is not None,
        group=group,
        control_device=device,
        place_batch=functions(hooks.place_batch()),
        observe_batch=observers(hooks.observe_batch(), acting.named),
        measurement=Measurement(context, [function for _, function in hooks.measure()], acting.noted, device=device),
        metric_sinks=HooksInTurn([function for _, function in hooks.metrics()], acting.noted, copied="metrics"),
        states=acting.states(states),
        acting=acting,
        setup=f"{plan or 0:x}",
        release=functools.partial(close_all, (*ends, engine.units.close, release)),
    )
