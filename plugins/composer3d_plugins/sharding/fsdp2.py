"""Fully sharded data parallelism, torch's FSDP2, at any of the three ZeRO stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    LayoutOffer,
    LayoutTraits,
    Part,
    Phase,
    PluginError,
    RunContext,
    StepAction,
    SteppedUnit,
    SteppedUnits,
    StepPoint,
    StepState,
    Transform,
    average_whole,
    averaging_action,
    divide_by_dtype,
    hookimpl,
    make_unit,
    own_meshes,
    plugin,
    select_fqns,
    torch_compat,
    whole_in_own_meshes,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

REPLICAS, SHARDS = "dp_replicate", "dp_shard"


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Shard at the ZeRO stage that is wanted."""
    return {"zero": wanted.zero} if wanted.zero else None


@plugin(
    family="sharding",
    owns=(SHARDS, REPLICAS),
    offer=LayoutOffer(table=_table, choices={"zero": (1, 2, 3)}),
)
class FSDP2:
    """Shard parameters, gradients and optimizer state over dp_shard; with dp_replicate > 1, hybrid sharding (HSDP).

    Parameters of a unit are gathered before it runs. The ZeRO stage determines when they are resharded and gradients
    are reduced. With U units (the root is one of them) and M micro-batches a step:

    zero = 3: parameters are freed after every forward and gradients reduced after every backward.
        Memory: parameters, gradients and optimizer state / dp_shard, and one or two units unsharded.
        Collectives: 2 U M - M all-gathers (the root is kept from forward to backward), U M reduce-scatters.
    zero = 2: parameters are kept until the backward is over, gradients reduced after the last micro-batch.
        Memory: as above, and parameters and gradients unsharded while micro-batches run.
        Collectives: U M all-gathers, U reduce-scatters.
    zero = 1: parameters are kept until the last micro-batch is over.
        Memory: as zero = 2; optimizer state / dp_shard.
        Collectives: U all-gathers, U reduce-scatters.
    dp_replicate > 1 adds an all-reduce of the shard to every reduce-scatter.
    Axes that shard sequences (cp) count as dp_shard: its ranks have other positions of the same samples. Modules whose
    plugin answers `composer3d_parameter_mesh`, experts, are units on a mesh of their own. Where that has one rank, as
    dp_shard may, a unit is read and reduced where it lies, unless its weights are cast.
    What a rank has not used of a unit is reduced as zeros, and what no rank has used has no gradient. A unit itself is
    called on every rank, in the same order: experts that only some ranks call belong to the unit around them.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054;
    Zhao et al., PyTorch FSDP, arXiv:2304.11277.

    Args:
        zero: The ZeRO stage.
        units: Patterns of the modules that are gathered as one; default: the model's blocks. The root is always a unit.
            A unit has one dtype, which is gathered and reduced as one: in a unit with several, modules of another one
            than most of its elements have become units of their own.
        unit_classes: Names of classes whose modules are units, besides those of `units`; the model's blocks are then
            units only if they are named.
        unit_numel: Instead of both: least number of elements of a unit, in which no smaller one lies. Modules are
            taken from the inside out, as by FSDP1's `size_based_auto_wrap_policy`, and a model that has none of that
            size is one unit.
        reshard_after_forward: Instead of the stage's choice: true, false, or the number of ranks among which parameters
            are kept after the forward (it divides dp_shard): less memory than keeping them unsharded, and a backward
            all-gather inside that smaller group. Only with zero = 3.
        reshard_root: Free the root's parameters after the forward too: M all-gathers more.
        forward_prefetch: How many units ahead all-gathers are issued in the forward; 0 leaves it to torch. Memory: so
            many units more, unsharded.
        backward_prefetch: The same in the backward.
        gather_early: How many units are gathered for the next forward from the end of a step on, the root first, beside
            what follows the optimizer: metrics, logs, the next batch. Before they are used ranks compare their shards
            with those that were sent, in one all-reduce a step, and gather again what has changed since. Memory: so
            many units, unsharded between steps, and a copy of their shards.
        overlap_optimizer: How many units, the root first, the optimizer steps one after the other, before all others,
            each of which is gathered for the next forward as soon as it is stepped, beside the steps of the rest. Else
            as gather_early. Memory: the same, from the optimizer's step on, beside the gradients. The optimizer steps
            every parameter by itself: torch's elementwise ones, muon, or a class with `is_elementwise = True`.
        delay_all_reduce: Average over dp_replicate after the last micro-batch alone: U all-reduces in place of U M.
            Memory: until then the sum of a shard's gradients is kept in the reduction's dtype. Only with zero = 3,
            whose gradients are reduced after every backward.
        ignored: Patterns of parameters that stay replicated on every rank; their gradients are averaged in one
            all-reduce. Parameters without dims or elements, which cannot be sharded, are always among them, and those
            of another dtype than others of the same module.
    """

    zero: Literal[1, 2, 3] = 3
    units: tuple[str, ...] | None = None
    unit_classes: tuple[str, ...] = ()
    unit_numel: int | None = Field(default=None, ge=1, examples=[])
    reshard_after_forward: bool | int | None = None
    reshard_root: bool = False
    forward_prefetch: int = Field(default=0, ge=0)
    backward_prefetch: int = Field(default=0, ge=0)
    gather_early: int = Field(default=0, ge=0)
    overlap_optimizer: int = Field(default=0, ge=0)
    delay_all_reduce: bool = False
    ignored: tuple[str, ...] = ()

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(zero=self.zero)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse contradictory settings."""
        chosen = self.reshard_after_forward
        if self.unit_numel is not None and (self.units is not None or self.unit_classes):
            other = "units" if self.units is not None else "unit_classes"
            raise PluginError(f"unit_numel and {other} both say what is a unit", hint="leave one of them out")
        if chosen is not None and self.zero != 3:
            raise PluginError(
                f"reshard_after_forward is zero = 3's choice, and zero is {self.zero}", hint="leave one of them out"
            )
        if self.delay_all_reduce and (self.zero != 3 or context.degrees[REPLICAS] == 1):
            reason = f"zero = {self.zero} reduces once a step anyway" if self.zero != 3 else f"{REPLICAS} = 1"
            raise PluginError(f"delay_all_reduce has no effect: {reason}", hint="remove it", keys=("delay_all_reduce",))
        if self._num_early:
            context.claim("first_step", by=self)
        if self._num_early > 1:  # beyond the root the first blocks are unlike others
            context.claim("depth", by=self)
        if self.overlap_optimizer:
            context.claim("stepped_units", by=self)
        axes = [axis for axis in context.data_axes(SHARDS) if axis == SHARDS or context.degrees[axis] > 1]
        shards = math.prod(context.degrees[axis] for axis in axes)
        if isinstance(chosen, int) and not isinstance(chosen, bool) and (chosen < 2 or shards % chosen):
            raise PluginError(
                f"reshard_after_forward = {chosen} does not divide {' x '.join(axes)} = {shards} into groups of at "
                "least 2"
            )

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        """Shard the units, then the root."""
        self._refuse_foreign(context)
        return Transform(
            name="fsdp2",
            phase=Phase.DATA,
            select=self._select,
            apply=self._apply,
            uses=context.data_axes(REPLICAS, SHARDS),
            averages=context.data_axes(REPLICAS, SHARDS),
            conflicts=self._excluded(),
        )

    def _refuse_foreign(self, context: RunContext) -> None:
        """Refuse to begin what other plugins replace, or have to begin themselves."""
        key = "overlap_optimizer" if self.overlap_optimizer else "gather_early"
        if self._num_early and (found := context.claimants("all_gather")):
            raise PluginError(f"{key} begins all-gathers, and {found[0]} replaces them", hint="remove one of them")
        if self.overlap_optimizer and (found := context.claimants("optimizer", each_alone=True)):
            raise PluginError(
                f"overlap_optimizer steps units one after the other, and {found[0]} pieces of many parameters, whose "
                "transfers hide behind each other",
                hint="write gather_early, which waits for all of them",
                keys=("overlap_optimizer",),
            )

    def _excluded(self) -> dict[str, str]:
        """Exclude schedules for which parameters would be resharded too early; by default they are kept."""
        asked = "reshard_root = true" if self.reshard_root else None
        if self.reshard_after_forward:
            asked = f"reshard_after_forward = {str(self.reshard_after_forward).lower()}"
        if asked is None:
            return {}
        reason = (
            f"{asked} frees parameters between a micro-batch's forward and the end of its backward, and the schedule "
            "looks at them in between: torch would give wrong gradients, silently"
        )
        return {"zero_bubble_pipeline": reason}

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Set before every micro-batch which gradients are reduced and parameters resharded after it."""
        actions = [StepAction(name="fsdp2", point=StepPoint.BEFORE_MICROBATCH, run=self._before_microbatch)]
        # Without them, nothing reads gradients after the backward.
        if any(self._ignored_parameters(part.module, context) for part in context.parts):
            actions.append(averaging_action("fsdp2.ignored", self._average_ignored, context))
        if self._num_early:
            actions.append(StepAction(name="fsdp2.early", point=StepPoint.END, run=self._gather_early, gradients=False))
        return actions

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Wait for all-gathers that nobody needs any more."""
        if self._num_early and error is None:
            torch_compat.drop_early(self._early(context.parts))

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        for pattern in self.ignored:
            select_fqns(pattern, context.parameter_fqns)
        units = context.units(self._unit_patterns(model))
        return divide_by_dtype(model, units, context, ignored=self._ignored_parameters(model, context)).units

    def _unit_patterns(self, model: nn.Module) -> Sequence[str] | None:
        """Return the patterns of units, classes and sizes as the names of their modules; None is the blocks."""
        if self.unit_numel is not None:
            return [fqn for fqn in _of_size(model, self.unit_numel) if fqn]
        if self.unit_classes:
            return [*(self.units or ()), *_of_classes(model, self.unit_classes)]
        return self.units

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        from torch.distributed.fsdp import OffloadPolicy, fully_shard

        divided = divide_by_dtype(model, fqns, context, ignored=self._ignored_parameters(model, context))
        context.state.setdefault(self, set()).update(divided.whole, whole_in_own_meshes(model, context))
        ignored = self._ignored_parameters(model, context)
        own = own_meshes(model, context)
        # Inner units first: fully_shard takes the parameters that no unit inside has taken.
        for fqn in sorted(dict.fromkeys([*fqns, *own]), key=lambda name: -len(name.split(".")) if name else 1):
            make_unit(
                fully_shard,
                fqn,
                model,
                context,
                mesh=context.data_mesh(own.get(fqn), replicas=REPLICAS, shards=SHARDS),
                shard_placement_fn=_along(own.get(fqn), context),
                reshard_after_forward=self._reshard(context, is_root=not fqn),
                offload_policy=context.offload_policy(fqn) or OffloadPolicy(),
                ignored_params=ignored,
            )
        units: list[Any] = [model.get_submodule(fqn) for fqn in fqns if fqn]
        for index, unit in enumerate(units):
            if self.forward_prefetch:
                unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + self.forward_prefetch])
            if self.backward_prefetch:
                unit.set_modules_to_backward_prefetch(units[max(0, index - self.backward_prefetch) : index][::-1])
        names = {module: fqn for fqn, module in model.named_modules()}
        context.stash(SteppedUnits).units += [
            SteppedUnit(
                name=names[unit] or "(root)",
                parameters=partial(_shards_of, unit),
                then=partial(torch_compat.gather_early, unit),
            )
            for unit in _units_of(model)[: self.overlap_optimizer]
        ]
        return list(fqns)

    def _reshard(self, context: RunContext, *, is_root: bool) -> bool | int:
        if self.zero < 3 or (context.split is not None and context.split.keep_unsharded):
            return False
        if is_root:
            return self.reshard_root
        return True if self.reshard_after_forward is None else self.reshard_after_forward

    def _early(self, parts: Sequence[Part]) -> list[nn.Module]:
        """Return the units of each part that are gathered early, in the order of modules."""
        return [unit for part in parts for unit in _units_of(part.module)[: self._num_early]]

    @property
    def _num_early(self) -> int:
        return max(self.gather_early, self.overlap_optimizer)

    def _gather_early(self, state: StepState) -> None:
        for unit in self._early(state.parts):
            torch_compat.gather_early(unit)

    def _confirm_early(self, state: StepState) -> None:
        import torch
        import torch.distributed as dist

        def agree(group: Any, changed: list[bool]) -> list[bool]:
            found = torch.tensor(changed, dtype=torch.int32, device=state.context.device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
            return changed if state.context.purpose == "plan" else [bool(each) for each in found.tolist()]

        is_real = state.context.purpose != "plan"
        torch_compat.confirm_early(self._early(state.parts), compare=is_real, agree=agree)

    def _before_microbatch(self, state: StepState) -> None:
        if self._num_early and state.index == 0:
            self._confirm_early(state)
        for part in state.parts:
            root: FSDPModule = part.module  # type: ignore[assignment]
            root.set_is_last_backward(state.is_last)
            if self.delay_all_reduce:
                root.set_requires_all_reduce(state.is_last)
            if self.zero < 3:
                root.set_requires_gradient_sync(state.is_last)
            if self.zero == 1:
                root.set_reshard_after_backward(state.is_last)

    def _ignored_parameters(self, model: nn.Module, context: RunContext) -> set[nn.Parameter]:
        names = {fqn for pattern in self.ignored for fqn in select_fqns(pattern, context.parameter_fqns)}
        names |= context.state.get(self, set())
        named = {p for fqn, p in model.named_parameters(remove_duplicate=False) if fqn in names}
        return named | torch_compat.whole_parameters(model)

    def _average_ignored(self, state: StepState) -> None:
        for part in state.parts:
            ignored = self._ignored_parameters(part.module, state.context)
            ordered = [parameter for parameter in part.module.parameters() if parameter in ignored]
            average_whole(ordered, axes=state.context.data_axes(REPLICAS, SHARDS), context=state.context)


def _units_of(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if hasattr(each, "unshard")]


def _shards_of(unit: nn.Module) -> list[nn.Parameter]:
    return [getattr(module, name) for module, name in torch_compat.unit_parameters(unit)]


def _along(own: str | None, context: RunContext) -> Callable[[nn.Parameter], Shard] | None:
    """Return along which dim the parameters of a unit are sharded, where their plugin says so."""
    from torch.distributed.tensor import Shard

    answer = None if own is None else context.parameter_mesh(own)
    if answer is None:
        return None
    return lambda parameter: Shard(answer.shard_dim if parameter.ndim > answer.shard_dim else 0)


def _of_classes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the modules of classes of these names.

    Raises:
        PluginError: A name is no module's class.
    """
    found = {fqn: type(module).__name__ for fqn, module in model.named_modules() if fqn}
    for name in names:
        if name not in found.values():
            raise PluginError(
                f'unit_classes has "{name}", and no module is of that class; the model has '
                f"{', '.join(sorted(set(found.values())))}",
                keys=("unit_classes",),
            )
    return [fqn for fqn, cls in found.items() if cls in names]


def _of_size(model: nn.Module, least: int) -> list[str]:
    """Return the modules, from the inside out, that have at least so many elements outside of smaller ones."""
    from torch import nn

    def walk(module: nn.Module, name: str) -> tuple[list[str], int]:
        numel = sum(parameter.numel() for parameter in module.parameters())
        if numel < least or isinstance(module, nn.MultiheadAttention):  # whose forward reads its projection's weights
            return [], 0
        inner: list[str] = []
        taken = 0
        for child_name, child in module.named_children():
            names, wrapped = walk(child, f"{name}.{child_name}".lstrip("."))
            inner += names
            taken += wrapped
        if numel - taken < least or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return inner, taken
        return [*inner, name], numel

    return walk(model, "")[0]
