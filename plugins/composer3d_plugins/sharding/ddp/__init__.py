"""Data parallelism with a replica of the model on every rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    ReplicaReduction,
    ReplicaReductions,
    Role,
    RunContext,
    StepAction,
    StepError,
    StepPoint,
    StepState,
    TorchErrors,
    Transform,
    average_whole,
    averaging_action,
    divide_by_dtype,
    hookimpl,
    make_unit,
    map_tensors,
    own_meshes,
    plugin,
    torch_compat,
    whole_in_own_meshes,
)
from composer3d_plugins.sharding.ddp.bucket_loop import loop_of, second_gradient

if TYPE_CHECKING:
    import torch
    from torch import nn

BUCKET_OPTIONS = tuple(
    "static_graph gradient_as_bucket_view find_unused_parameters bucket_mib broadcast_buffers".split()
)

REPLICAS = "dp_replicate"


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Replicate where nothing is sharded."""
    return None if wanted.zero else {}


@plugin(family="sharding", owns=(REPLICAS,), offer=LayoutOffer(table=_table, choices={"zero": (0,)}))
class DDP:
    """Replicate the model over the ranks of dp_replicate, and of axes that shard sequences, and average gradients.

    reducer = "unit": torch's replicate over FSDP2's machinery: DTensor parameters and the same hooks as FSDP2.
        Modules of another dtype than most of their unit are units, too.
        Collectives: one all-reduce a unit (the root is one), after the last micro-batch; one for all parameters
        without dims or elements, which FSDP2 does not handle, and those of another dtype than their module.
    reducer = "bucketed": torch's DistributedDataParallel, kept outside the module tree, so FQNs stay.
        Collectives: one all-reduce a bucket, after the last micro-batch; at the first forward one broadcast of
        parameters; with broadcast_buffers one broadcast a buffer and forward. In a loop of one's own a backward that
        does not follow a forward of its own, as of two losses of one graph, is reduced by an all-reduce an axis; so are
        parameters that were frozen in the first forward, and, where unused ones are not found, all gradients of a
        forward without some that were trained then.
    Memory: parameters, gradients and optimizer state in full; "bucketed" holds gradients a second time in its buckets,
        unless gradient_as_bucket_view.

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv:2006.15704.

    Args:
        reducer: Which of torch's two reducers.
        units: Patterns of the modules whose gradients are reduced together; default: the model's blocks. Only "unit".
        static_graph: The graph is the same in every step. Only "bucketed", as all that follow.
        gradient_as_bucket_view: Gradients are views of the buckets.
        find_unused_parameters: Some parameters get no gradient in some steps.
        bucket_mib: Size of a bucket, MiB.
        broadcast_buffers: Take rank 0's buffers before every forward.
    """

    reducer: Literal["unit", "bucketed"] = "unit"
    units: tuple[str, ...] | None = None
    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    find_unused_parameters: bool | None = None
    bucket_mib: float | None = Field(default=None, gt=0, le=1 << 20, examples=[])
    broadcast_buffers: bool | None = None

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(zero=0)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options of the other reducer: they would do nothing."""
        import torch

        foreign = BUCKET_OPTIONS if self.reducer == "unit" else ("units",)
        for name in foreign:
            if getattr(self, name) is not None:
                raise PluginError(
                    f'{name} has no effect with reducer = "{self.reducer}"',
                    hint='write reducer = "bucketed"' if self.reducer == "unit" else 'write reducer = "unit"',
                )
        roles = (Role.STAGE, Role.TENSOR, Role.EXPERT)
        divided = [name for name in context.layout.names(*roles) if context.degrees[name] > 1]
        if self.reducer == "bucketed" and divided:
            raise PluginError(
                f'reducer = "bucketed" does not work with {divided[0]} = {context.degrees[divided[0]]}: torch\'s '
                "DistributedDataParallel reduces in every backward of a stage, and does not know DTensors",
                hint='write reducer = "unit"',
            )
        if self.reducer == "bucketed" and context.dtypes("").reduce not in (None, torch.float32):
            raise PluginError(
                "the buckets reduce gradients in the dtype of the weights, float32, "
                "and another reduce_dtype is asked for",
                hint='write reducer = "unit"',
            )

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        """Attach the reducer."""
        return Transform(
            name="ddp",
            phase=Phase.DATA,
            select=self._select,
            apply=self._apply_units if self.reducer == "unit" else self._apply_buckets,
            uses=context.data_axes(REPLICAS),
            averages=context.data_axes(REPLICAS),
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Reduce after the last micro-batch only."""
        actions = [StepAction(name="ddp", point=StepPoint.BEFORE_MICROBATCH, run=self._before_microbatch)]
        if self.reducer == "unit" and any(self._whole_parameters(part.module, context) for part in context.parts):
            actions.append(averaging_action("ddp.whole", self._average_whole, context))
        if self.reducer == "bucketed" and not (self.find_unused_parameters or self.static_graph):
            actions.append(StepAction(name="ddp.unused", point=StepPoint.AFTER_MICROBATCH, run=self._refuse_unused))
        if self.reducer == "bucketed":
            left = StepAction(
                name="ddp.left", point=StepPoint.AFTER_MICROBATCH, run=self._reduce_left, after=("ddp.unused",)
            )
            actions.append(left)
        return actions

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        if self.reducer == "unit":
            units = context.units(self.units)
            return divide_by_dtype(model, units, context, ignored=self._whole_parameters(model, context)).units
        # Here, where all plugins have been configured.
        held = next((fqn for fqn in context.fqns if context.offload_policy(fqn) is not None), None)
        if held is not None:
            raise PluginError(
                f'reducer = "bucketed" gathers no parameters for their use, and those of {held or "the model"} are to '
                "be in host memory",
                hint='write reducer = "unit"',
            )
        if context.claimants("moved_gradients") and context.layout.degree(Role.BATCH, Role.SEQUENCE) > 1:
            raise PluginError(
                'reducer = "bucketed" reduces gradients where they lie, and they are to be in host memory before',
                hint='write reducer = "unit"',
            )
        return context.units(())

    def _apply_units(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        from torch.distributed.fsdp import OffloadPolicy

        divided = divide_by_dtype(model, fqns, context, ignored=self._whole_parameters(model, context))
        context.state.setdefault(self, set()).update(divided.whole, whole_in_own_meshes(model, context))
        whole = self._whole_parameters(model, context)
        own = own_meshes(model, context)
        for fqn in sorted(dict.fromkeys([*fqns, *own]), key=lambda name: -len(name.split(".")) if name else 1):
            make_unit(
                torch_compat.replicate_units,
                fqn,
                model,
                context,
                mesh=context.data_mesh(own.get(fqn), replicas=REPLICAS),
                offload_policy=context.offload_policy(fqn) or OffloadPolicy(),
                ignored_params=whole,
            )
        return list(fqns)

    def _whole_parameters(self, model: nn.Module, context: RunContext) -> set[nn.Parameter]:
        """Return the parameters in no unit: those that FSDP2 does not handle, or of another dtype than their module."""
        names = context.state.get(self, ()) if self.reducer == "unit" else ()
        of_dtype = {p for fqn, p in model.named_parameters(remove_duplicate=False) if fqn in names}
        return of_dtype | torch_compat.whole_parameters(model)

    def _average_whole(self, state: StepState) -> None:
        for part in state.parts:
            whole = self._whole_parameters(part.module, state.context)
            ordered = [parameter for parameter in part.module.parameters() if parameter in whole]
            average_whole(ordered, axes=state.context.data_axes(REPLICAS), context=state.context)

    def _apply_buckets(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        from torch import is_grad_enabled

        # The reducer has the parameters alone, so torch's own broadcast_buffers would do nothing.
        options: dict[str, Any] = {
            "bucket_cap_mb" if name == "bucket_mib" else name: getattr(self, name)
            for name in BUCKET_OPTIONS
            if name != "broadcast_buffers" and getattr(self, name) is not None
        }
        if self.broadcast_buffers:
            model.register_forward_pre_hook(lambda module, _: _broadcast_buffers(module, context))
        _compute_in(model, context)
        loop = loop_of(self, context)

        def look(module: Any, *_: Any) -> None:
            if is_grad_enabled() or not loop.trained:
                loop.look(module, finds_unused=self.find_unused_parameters is True and not self.static_graph)
            module.set_requires_gradient_sync(loop.is_wanted and not loop.is_passed_over)

        def arm(module: nn.Module, *_: Any) -> None:
            loop.is_armed = is_grad_enabled() and not loop.is_passed_over

        model.register_forward_pre_hook(look)
        model.register_forward_hook(arm)
        mesh = context.data_mesh(None, replicas=REPLICAS)
        torch_compat.replicate_buckets(model, device_mesh=mesh, **options)
        if self.find_unused_parameters:
            model.register_forward_hook(lambda module, _, output: _apart(output))
        read = second_gradient(lambda: [fqn for fqn, p in model.named_parameters() if p.requires_grad])
        context.stash(TorchErrors).readings.append(read)
        group = mesh.get_group()

        def replace(reduce: Callable[..., None]) -> None:
            loop.is_replaced = True
            torch_compat.replace_bucket_reduction(model, reduce, group)

        context.stash(ReplicaReductions).made.append(
            ReplicaReduction(
                parameters=lambda: list(torch_compat.bucket_parameters(model).values()),
                group=group,
                replace=replace,
            )
        )
        return list(fqns)

    def _before_microbatch(self, state: StepState) -> None:
        for part in state.parts:
            module: Any = part.module
            if self.reducer == "unit":
                module.set_is_last_backward(state.is_last)
                module.set_requires_gradient_sync(state.is_last)
            elif state.forward_done:
                # A backward without a forward since the last one is not reduced: of two forwards before it, or of a
                # graph that was kept. One that is reduced also reduces what those before it have left.
                loop = loop_of(self, state.context)
                if loop.is_armed and state.loss is not None:
                    torch_compat.find_unused_in(module, state.loss)
                loop.is_left, loop.is_armed = not loop.is_armed, False
            else:
                # The reducer is armed in the forward; in a loop with its own forward every backward reduces.
                # It learns a static graph in the first backward, which must therefore reduce; reducing a
                # micro-batch early changes nothing but the traffic.
                first = self.static_graph is True and state.context.state.setdefault(self, state.step) == state.step
                loop_of(self, state.context).is_wanted = state.is_last or (first and state.index == 0)

    def _reduce_left(self, state: StepState) -> None:
        """Average gradients once more that a backward has left a rank's own: what is average stays as it is."""
        loop = loop_of(self, state.context)
        # What is trained now may be frozen before the loop's next backward.
        if not (state.is_last or (state.forward_done and (loop.late or loop.is_passed_over))):
            return
        late, is_left = loop.late, loop.is_left or loop.is_passed_over
        loop.is_left, loop.is_passed_over, loop.late = False, False, {}
        if not is_left:
            return average_whole(late, axes=state.context.data_axes(REPLICAS), context=state.context)
        if loop.is_replaced:
            raise StepError(
                "two backwards without a forward between them: torch's DistributedDataParallel reduces in the first "
                "alone, and another plugin has replaced what it reduces with; add the losses up and call run.backward "
                'once, or write reducer = "unit" in [sharding.ddp]'
            )
        parameters = [parameter for part in state.parts for parameter in part.module.parameters()]
        average_whole(parameters, axes=state.context.data_axes(REPLICAS), context=state.context)
        loop.penalised = state.index, [(weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def _refuse_unused(self, state: StepState) -> None:
        """Raise where the reducer waits for a gradient in vain: it has reduced none, and says so a step later."""
        if not state.is_last:
            return
        if (loop := loop_of(self, state.context)).is_passed_over or not loop.trained:  # or a penalty's at the start
            return
        named = [pair for part in state.parts for pair in part.module.named_parameters()]
        known = [pair for pair, is_trained in zip(named, loop.trained, strict=True) if is_trained]
        left = loop.unchanged(state.index)
        unused = [fqn for fqn, p in known if p.grad is None or not p.requires_grad or id(p.grad) in left]
        if unused and any(parameter.grad is not None for _, parameter in known):
            raise StepError(
                f'no gradient reached "{unused[0]}" in step {state.step}, and torch\'s DistributedDataParallel waits '
                "for one of every parameter before it reduces any; in [sharding.ddp] write find_unused_parameters = "
                'true for parameters that the forward leaves out, and reducer = "unit" for those that a penalty, a '
                "gradient of the output, does not depend on"
            )


def _compute_in(model: nn.Module, context: RunContext) -> None:
    """Make every module compute on its parameters in param_dtype, cast in each forward.

    DistributedDataParallel's own mixed precision needs to hold the model's forward. The casts are inside the modules'
    forwards, not in hooks around a unit, so that recomputation repeats them; through them gradients reach the float32
    weights.
    """
    for fqn, module in model.named_modules():
        dtypes = context.dtypes(fqn)
        if dtypes.param is not None and any(parameter is not None for parameter in module._parameters.values()):
            module.forward = _casting(module, module.forward, dtypes.param)
        if dtypes.output is not None:
            module.register_forward_hook(lambda _, args, output, dtype=dtypes.output: _cast(output, dtype))


def _casting(module: nn.Module, forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = module._parameters
        kept = dict(parameters)
        try:
            parameters.update({name: _cast(parameter, dtype) for name, parameter in kept.items()})
            return forward(*_cast(args, dtype), **_cast(kwargs, dtype))
        finally:
            parameters.update(kept)

    return casting


def _cast(value: Any, dtype: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _apart(output: Any) -> Any:
    """Return a view of each number of an output: from DDP all come from one node, that does not tell them apart."""
    return map_tensors(lambda tensor: tensor if tensor.dim() else tensor.view(()), output)


def _broadcast_buffers(module: nn.Module, context: RunContext) -> None:
    import torch.distributed as dist

    mesh = context.data_mesh(None, replicas=REPLICAS)
    (axis,), group = mesh.mesh_dim_names or (REPLICAS,), mesh.get_group()
    for buffer in module.buffers():
        with context.span("broadcast", group="buffers", axis=axis, bytes=buffer.nbytes):
            dist.broadcast(buffer, group=group, group_src=0)
