"""The hooks: what a plugin may implement, when it is called, and what it gives.

Five families and the life cycle. The family of a plugin is the table it stands in, not what it may do: any plugin may
implement any hook. Implementations may take fewer arguments than a spec has; specs only grow.

A *query* asks for one answer: every implementation is asked, None means no opinion, and two answers are an error that
names both plugins. Call order never carries meaning; `tryfirst`, `trylast` and wrappers are refused. Everything is
called once while composing, except where a docstring says "frozen": those functions are collected once and then called
in steps without pluggy in between.

The order in which `compose` calls them:

1. `composer3d_configure`
2. `composer3d_convert`, `_shard`, `_reschedule`, `_collectives`: transforms; their `select` is run on the whole model
3. `composer3d_group_options`, then the mesh is made; `composer3d_replicas`
4. `composer3d_split`
5. the transforms' `apply`, by phase; they ask `composer3d_dtypes`, `_offload_policy`, `_parameter_mesh`
6. the weights come: `composer3d_load_parameter`; then the transforms of phase MATERIALISE
7. `composer3d_schedule`, `_grad_scaler`, `_step_actions`, `_recorder`, `_state`
8. `composer3d_optimizer`, when the loop asks for its optimizer
9. `composer3d_close`

`composer3d_actions` is asked by commands that simulate a step, after 2, and `composer3d_layout` by those that reason
about layouts, before 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from composer3d.communication import GroupOptions
    from composer3d.context import RunContext
    from composer3d.interfaces import (
        Action,
        Batch,
        Dtypes,
        GradScaler,
        LayoutTraits,
        LossFunction,
        Metric,
        ParameterMesh,
        Part,
        Recorder,
        Schedule,
        Split,
        Stateful,
    )
    from composer3d.replicas import ReplicaPolicy
    from composer3d.transform import StepAction, Transform

__all__ = ["HookSpecs", "hookimpl"]

hookimpl = pluggy.HookimplMarker("composer3d")
_hookspec = pluggy.HookspecMarker("composer3d")


class HookSpecs:
    """Every hook, by family."""

    # ---- sharding ----------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_shard(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare how parameters, gradients and optimizer state are sharded.

        Args:
            context: Degrees and coordinates are there; the mesh only inside `apply`.

        Returns:
            Transforms in the phases TENSOR, DATA or MATERIALISE.
        """

    @_hookspec
    def composer3d_parameter_mesh(self, context: RunContext, fqn: str) -> ParameterMesh | None:
        """Query: return the mesh of a parameter that does not live on the data-parallel mesh (experts).

        Asked by data-parallel plugins while they apply, through `context.data_mesh(fqn)`: modules of such parameters
        are units of their own, whose gradients are averaged over the mesh's dims that are no axes of experts.

        Args:
            context: The mesh is there, and so is `context.expert_mesh()`.
            fqn: A parameter's name.

        Returns:
            Its mesh, or None.
        """

    @_hookspec
    def composer3d_offload_policy(self, context: RunContext, fqn: str) -> Any | None:
        """Query: give torch's `OffloadPolicy` for the unit with this name.

        Asked by data-parallel plugins while they apply, through `context.offload_policy(fqn)`.

        Args:
            context: The mesh is there.
            fqn: A unit's name; the empty string is the root.

        Returns:
            A policy, or None.
        """

    @_hookspec
    def composer3d_place_batch(self, context: RunContext, batch: Batch) -> Batch | None:
        """Shard or move a batch before it is split into micro-batches, for example its sequence. Frozen.

        Implementations see each other's results, in the order of plugin names. They see the arguments of forwards that
        a loop runs itself, too. Fewer samples than were passed are refused, unless the plugin claims "samples".

        Args:
            context: Complete.
            batch: As passed by the loop; of a forward of its own, `is_own_forward`, without a target.

        Returns:
            Another batch, or None to leave it.
        """

    # ---- scheduling --------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_split(self, context: RunContext, model: nn.Module) -> Split | None:
        """Query: split the model into this rank's stages, before any transform.

        Args:
            context: The mesh is there.
            model: Whole; on meta where it came from a factory.

        Returns:
            The parts, each keeping the FQNs of the whole model; None does not split it.
        """

    @_hookspec
    def composer3d_schedule(self, context: RunContext, parts: Sequence[Part], loss_fn: LossFunction) -> Schedule | None:
        """Query: decide who runs which micro-batch when. Without an answer the core accumulates micro-batches in order.

        Args:
            context: Complete.
            parts: This rank's, with their weights.
            loss_fn: `(output, target) -> scalar`, already scaled for backward; the schedule must not scale again.

        Returns:
            A schedule, or None. Where ranks run no micro-batch actions of the core (`BEFORE_MICROBATCH`), the schedule
            calls `context.microbatches.begin(index, is_last, stage)` and `context.microbatches.end()` itself.
        """

    @_hookspec
    def composer3d_actions(self, context: RunContext, num_microbatches: int) -> Sequence[Sequence[Action]] | None:
        """Query: list what every rank of the pipeline runs, in order: the very actions that the schedule would run.

        Asked by `composer3d schedule`, and by whoever simulates a step; there is no mesh.

        Args:
            context: Degrees and coordinates are there.
            num_microbatches: Of one batch.

        Returns:
            Actions by rank along the pipeline's axis, or None.
        """

    @_hookspec
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits | None:
        """Describe the plugin's part in a layout: ZeRO stage, schedule, recomputation, dtypes.

        Asked by `plan` for its advice, by `suggest` and by whoever explains a layout; there is no context. A plugin
        that can make other layouts than its table's says so in `@plugin(offer=...)`.

        Args:
            degrees: Of every axis.

        Returns:
            Its traits; every one that it has no part in stays None.
        """

    @_hookspec
    def composer3d_reschedule(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare what is recomputed, kept elsewhere, or compiled.

        Args:
            context: As for `composer3d_shard`.

        Returns:
            Transforms in the phases RECOMPUTE and COMPILE.
        """

    @_hookspec
    def composer3d_step_actions(self, context: RunContext) -> StepAction | Sequence[StepAction] | None:
        """Declare what happens at points of every step. Frozen, ordered like transforms.

        Args:
            context: Complete.

        Returns:
            Actions; at DECIDE an action may return a reason to skip the optimizer step on all ranks.
        """

    # ---- precision ---------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_convert(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare modules to be swapped for others of another precision.

        Args:
            context: As for `composer3d_shard`.

        Returns:
            Transforms in phase CONVERT; they may add FQNs, never rename or drop one.
        """

    @_hookspec
    def composer3d_dtypes(self, context: RunContext, fqn: str) -> Dtypes | None:
        """Query: give the dtypes of a unit. If a plugin answers and no transform asked, compose fails.

        Asked by data-parallel plugins while they apply, through `context.dtypes(fqn)`.

        Args:
            context: The mesh is there.
            fqn: A unit's name; the empty string is the root.

        Returns:
            Dtypes, or None.
        """

    @_hookspec
    def composer3d_load_parameter(self, context: RunContext, fqn: str, tensor: Tensor) -> Tensor | None:
        """Query: change a full tensor as it arrives from initialisation or a checkpoint, before it is sharded.

        Args:
            context: The mesh is there.
            fqn: The parameter's or buffer's name.
            tensor: Full, on CPU.

        Returns:
            Another tensor of the parameter's dtype, or None to take it as it is.
        """

    @_hookspec
    def composer3d_grad_scaler(self, context: RunContext) -> GradScaler | None:
        """Query: give a loss scaler.

        Args:
            context: Complete.

        Returns:
            A scaler, or None.
        """

    @_hookspec
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer | None:
        """Query: make the optimizer in place of `cls(groups)`.

        Args:
            context: Complete.
            cls: The requested class; refuse it if you replace another.
            groups: Parameter groups with all hyperparameters.

        Returns:
            A real `torch.optim.Optimizer` that steps every parameter of `groups`, or None. If its state is not plain
            tensors sharded as their parameters are, it has a method `plain_state(*, write: bool)` that returns a
            context in which it is, for checkpoints; with `write` what was filled in is taken back at the end.
        """

    # ---- communication -----------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_group_options(self, context: RunContext, axis: str) -> GroupOptions | None:
        """Query: say how the process group of an axis is made. Asked before the mesh exists.

        Args:
            context: Degrees and coordinates are there.
            axis: Its name.

        Returns:
            Options, or None.
        """

    @_hookspec
    def composer3d_collectives(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare codecs and communication hooks.

        Args:
            context: As for `composer3d_shard`.

        Returns:
            Transforms in phase COMMUNICATE.
        """

    @_hookspec
    def composer3d_replicas(self, context: RunContext) -> ReplicaPolicy | None:
        """Query: say how groups of ranks that come and go are kept together: those along an axis of role REPLICA.

        Such an axis is outside of the mesh: every group is a world of its own. The core starts them, divides every
        batch among those that take part, averages gradients over them, and gives the state to one that comes back.

        Args:
            context: Degrees are there; coordinates, and everything else, are those of one group.

        Returns:
            The rules, or None.
        """

    # ---- profiling ---------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Give a recorder of spans. Every plugin may give one; all are called. Frozen.

        Args:
            context: Complete.

        Returns:
            A recorder, or None.
        """

    @_hookspec
    def composer3d_observe_batch(self, context: RunContext, batch: Batch) -> None:
        """Look at a batch as it is on this rank, once plugins have placed it; it stays as it is. Frozen.

        An observer changes nothing of what the step guard compares, as a plugin that places batches does.

        Args:
            context: Complete.
            batch: Before it is split into micro-batches, on this rank's device.
        """

    @_hookspec
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric] | None:
        """Measure this rank at the end of a step. Frozen.

        Collectives: one all-gather for all plugins' metrics of a step.

        Args:
            context: Complete.
            step: Its number.

        Returns:
            Metrics; their names and number must not depend on the rank.
        """

    @_hookspec
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, reduced over ranks, wherever they should go. Called on every rank. Frozen.

        Args:
            context: Complete.
            step: Its number.
            metrics: By name.
        """

    # ---- life cycle --------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_configure(self, context: RunContext) -> None:
        """Look at the run before anything is built; raise a ComposerError to refuse it.

        A plugin that will make the optimizer, scale the loss, need gradients after the backward, move them before they
        are reduced, or leave samples of a batch to others claims so here (`context.claim`), so that `check` finds
        plugins that it conflicts with.

        Args:
            context: `context.purpose` is run, check, plan or verify: outside run open no file, port or socket.
        """

    @_hookspec
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Release everything.

        Args:
            context: As it was.
            error: Error that ended the run, or None.
        """

    @_hookspec
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Name what is saved and loaded with the checkpoint, under the plugin's name.

        A checkpoint and the run that loads it must have the same, but for what is marked as dispensable.

        Args:
            context: Complete.

        Returns:
            Stateful objects by name, or None.
        """
