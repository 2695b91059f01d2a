"""One plugin that implements every hook, does something observable in each, and writes down all that it was given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from composer3d import (
    Action,
    Dtypes,
    GroupOptions,
    LayoutTraits,
    Metric,
    ParameterMesh,
    Part,
    Phase,
    Split,
    StepAction,
    StepError,
    StepPoint,
    Transform,
    hookimpl,
    plugin,
)

SCALE = 1024.0
VETO_STEP, OVERFLOW_STEP = 1, 2
LAYOUTS = []  # degrees that composer3d_layout was given: it has no context to keep them in


@dataclass
class Log:
    """What the plugin saw on this rank; calls are (hook, what it was given), in order."""

    calls: list = field(default_factory=list)
    spans: list = field(default_factory=list)
    points: list = field(default_factory=list)
    scaler: list = field(default_factory=list)
    metrics: list = field(default_factory=list)


def log_of(context):
    """Return the log of the only plugin that keeps one."""
    (log,) = [value for value in context.state.values() if isinstance(value, Log)]
    return log


class Converted(nn.LayerNorm):
    """What `norm` is swapped for."""


class ReplacedSGD(torch.optim.SGD):
    """What the optimizer is replaced by."""


class BackToFront:
    """A schedule that runs the micro-batches in reverse."""

    def __init__(self, context, loss_fn):
        self.context, self.loss_fn = context, loss_fn

    def train(self, microbatches):
        for index in reversed(range(len(microbatches))):
            batch = microbatches[index]
            self.context.microbatches.begin(index, index == 0, 0)
            with self.context.span("back_to_front"):
                self.loss_fn(self.context.parts[0].module(*batch.args, **batch.kwargs), batch.target).backward()
            self.context.microbatches.end()

    def evaluate(self, microbatches):
        for batch in microbatches:
            self.loss_fn(self.context.parts[0].module(*batch.args, **batch.kwargs), batch.target)


class Scaler:
    """A constant scale that tells the core what overflowed on this rank."""

    def __init__(self, log):
        self.log = log

    def scale(self, loss):
        return loss * SCALE

    def unscale_(self, optimizer):
        grads = [p.grad.to_local() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.log.scaler.append(("unscale", max(float(grad.abs().max()) for grad in grads if grad.numel())))
        for grad in grads:
            grad /= SCALE
        return not all(bool(grad.isfinite().all()) for grad in grads)

    def update(self, skipped):
        self.log.scaler.append(("update", skipped))


class Spans:
    """A recorder; a token says how deep its span is."""

    def __init__(self, log):
        self.log, self.depth = log, 0

    def begin(self, name, attributes):
        self.depth += 1
        self.log.spans.append(("begin", self.depth, name, dict(attributes)))
        return (self.depth, name)

    def end(self, token):
        assert token[0] == self.depth
        self.depth -= 1
        self.log.spans.append(("end", *token))


class Counter:
    """State of both kinds: a number and a tensor."""

    def __init__(self):
        self.count, self.tensor = 0, torch.zeros(3)

    def state_dict(self):
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.count, self.tensor = state["count"], state["tensor"]


@plugin(family="profiling")
class Every:
    """Everything at once.

    Args:
        takes_over: Also answer the queries that replace what the core would do: split, schedule, optimizer, scaler.
    """

    takes_over: bool = True

    def _saw(self, hook, context, **given):
        log = context.state.setdefault(self, Log())
        log.calls.append((hook, given))
        return log

    def _has_mesh(self, context):
        try:
            return context.mesh is not None
        except StepError:
            return False

    # ---- life cycle --------------------------------------------------------------------------------------------------

    @hookimpl
    def composer3d_configure(self, context):
        degree, coordinate = context.degrees["dp_shard"], context.coordinates["dp_shard"]
        self._saw("configure", context, mesh=self._has_mesh(context), place=(context.purpose, degree, coordinate))

    @hookimpl
    def composer3d_close(self, context, error):
        self._saw("close", context, error=repr(error))

    @hookimpl
    def composer3d_state(self, context):
        self._saw("state", context)
        context.state[self, "counter"] = Counter()
        return {"counter": context.state[self, "counter"]}

    # ---- transforms --------------------------------------------------------------------------------------------------

    def _transform(self, hook, context, phase, fqns, change=None):
        self._saw(hook, context, mesh=self._has_mesh(context))

        def select(model, context):
            on_meta = all(parameter.is_meta for parameter in model.parameters())
            self._saw("select", context, phase=phase.name, on_meta=on_meta)
            return fqns

        def apply(model, fqns, context):
            self._saw("apply", context, phase=phase.name, fqns=list(fqns), on_meta=next(model.parameters()).is_meta)
            if change is not None:
                change(model, context)
            return fqns

        return Transform(name=f"every.{phase.name.lower()}", phase=phase, select=select, apply=apply)

    @hookimpl
    def composer3d_convert(self, context):
        def change(model, context):
            converted = Converted(model.norm.normalized_shape, device="meta")
            converted.load_state_dict(model.norm.state_dict(), assign=True)
            model.norm = converted

        return self._transform("convert", context, Phase.CONVERT, ["norm"], change)

    @hookimpl
    def composer3d_shard(self, context):
        def ask(model, context):
            answer = context.parameter_mesh("layers.0.up.weight")
            found = (
                answer.mesh is context.mesh["dp_shard"] or answer.mesh == context.mesh["dp_shard"],
                answer.shard_dim,
            )
            self._saw("asked", context, parameter_mesh=found, other=context.parameter_mesh("tok.weight"))

        return [
            self._transform("shard", context, Phase.MATERIALISE, ["out"]),
            self._transform("shard", context, Phase.TENSOR, ["out.weight"], ask),
        ]

    @hookimpl
    def composer3d_reschedule(self, context):
        return self._transform("reschedule", context, Phase.RECOMPUTE, ["layers.0"])

    @hookimpl
    def composer3d_collectives(self, context):
        return self._transform("collectives", context, Phase.COMMUNICATE, [""])

    # ---- queries while composing -------------------------------------------------------------------------------------

    @hookimpl
    def composer3d_replicas(self, context):
        self._saw("replicas", context)
        return None  # there is one group

    @hookimpl
    def composer3d_group_options(self, context, axis):
        self._saw("group_options", context, axis=axis, mesh=self._has_mesh(context))
        return GroupOptions(backend="gloo", timeout_s=11.0) if axis == "dp_shard" else None

    @hookimpl
    def composer3d_split(self, context, model):
        whole, on_meta = hasattr(model, "tok"), next(model.parameters()).is_meta
        self._saw("split", context, whole=whole, on_meta=on_meta, mesh=self._has_mesh(context))
        return Split(parts=(Part(module=model),), keep_unsharded=True) if self.takes_over else None

    @hookimpl
    def composer3d_actions(self, context, num_microbatches):
        self._saw("actions", context, num_microbatches=num_microbatches)
        return [[Action(0, kind, index) for index in range(num_microbatches) for kind in "FB"]]

    @hookimpl
    def composer3d_layout(self, degrees):
        LAYOUTS.append(dict(degrees))
        return LayoutTraits(is_compiled=degrees["dp_shard"] > 1)

    @hookimpl
    def composer3d_parameter_mesh(self, context, fqn):
        self._saw("parameter_mesh", context, fqn=fqn)
        if fqn.startswith("layers.0."):
            return ParameterMesh(mesh=context.mesh["dp_shard"])
        return None

    @hookimpl
    def composer3d_offload_policy(self, context, fqn):
        from torch.distributed.fsdp import OffloadPolicy

        self._saw("offload_policy", context, fqn=fqn)
        return OffloadPolicy()

    @hookimpl
    def composer3d_dtypes(self, context, fqn):
        self._saw("dtypes", context, fqn=fqn)
        return Dtypes(output=torch.float64 if fqn == "" else None)

    @hookimpl
    def composer3d_load_parameter(self, context, fqn, tensor):
        self._saw("load_parameter", context, fqn=fqn, shape=tuple(tensor.shape), device=tensor.device.type)
        return tensor + 1.0 if fqn == "out.bias" else None

    # ---- queries once it stands --------------------------------------------------------------------------------------

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn):
        self._saw("schedule", context, parts=parts == context.parts, on_meta=next(parts[0].module.parameters()).is_meta)
        return BackToFront(context, loss_fn) if self.takes_over else None

    @hookimpl
    def composer3d_grad_scaler(self, context):
        log = self._saw("grad_scaler", context)
        return Scaler(log) if self.takes_over else None

    @hookimpl
    def composer3d_recorder(self, context):
        return Spans(self._saw("recorder", context))

    @hookimpl
    def composer3d_optimizer(self, context, cls, groups):
        self._saw("optimizer", context, cls=cls.__name__, groups=[sorted(set(group) - {"params"}) for group in groups])
        return ReplacedSGD([dict(group) for group in groups]) if self.takes_over else None

    # ---- steps -------------------------------------------------------------------------------------------------------

    @hookimpl
    def composer3d_observe_batch(self, context, batch):
        self._saw("observe_batch", context, shape=tuple(batch.args[0].shape))

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        self._saw("place_batch", context, shape=tuple(batch.args[0].shape))
        return replace(batch, args=(batch.args[0][:, :4],), target=batch.target[:, :4])

    @hookimpl
    def composer3d_step_actions(self, context):
        log = self._saw("step_actions", context)

        def note(point):
            def run(state):
                index = state.index if "MICROBATCH" in point.name else None
                log.points.append((state.step, point.name, index))
                if point is StepPoint.BEFORE_MICROBATCH:
                    log.points[-1] += (state.is_last,)
                if point is StepPoint.GRADIENTS_REDUCED and state.step == OVERFLOW_STEP and context.rank == 1:
                    next(state.parts[0].module.parameters()).grad.to_local().fill_(math.inf)
                if point is StepPoint.END:
                    state.metrics["noted"] = 1.0

            return run

        def veto(state):
            return "this rank does not like it" if state.step == VETO_STEP and context.rank == 1 else None

        return [
            *(StepAction(name=f"every.{point.name}", point=point, run=note(point)) for point in StepPoint),
            StepAction(name="every.veto", point=StepPoint.DECIDE, run=veto, after=("every.DECIDE",)),
        ]

    @hookimpl
    def composer3d_measure(self, context, step):
        self._saw("measure", context, step=step)
        value = context.rank + 1.0 + step
        return [Metric(name=kind, value=value, reduction=kind) for kind in ("sum", "max", "mean", "rank0")]

    @hookimpl
    def composer3d_metrics(self, context, step, metrics):
        self._saw("metrics", context, step=step).metrics.append(dict(metrics))
