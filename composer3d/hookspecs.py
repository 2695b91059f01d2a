"""Hook specifications: every hook that a plugin may implement, with its call time and return value.

Hooks are grouped into five families and the life cycle. A plugin's family is the table that configures it and restricts
nothing: any plugin may implement any hook. Implementations may take fewer arguments than a spec has; specs only grow.

A *query* has one answer: every implementation is called, None is no answer, and two answers are an error that names
both plugins. Call order has no meaning; `tryfirst`, `trylast` and wrappers are refused. Hooks are called once, during
`compose`. Implementations of *frozen* hooks are collected once and called in every step, without pluggy in between.

`compose` calls hooks in this order:

1. `composer3d_configure`
2. `composer3d_convert`, `_shard`, `_reschedule`, `_collectives`: transforms; each `select` runs on the whole model
3. `composer3d_group_options`, then the mesh is created; `composer3d_replicas`
4. `composer3d_split`
5. the transforms' `apply`, by phase; these query `composer3d_dtypes`, `_offload_policy`, `_parameter_mesh`
6. parameters are loaded: `composer3d_load_parameter`; then the transforms of phase MATERIALISE
7. `composer3d_schedule`, `_grad_scaler`, `_step_actions`, `_recorder`, `_state`
8. `composer3d_optimizer`, when the loop creates its optimizer
9. `composer3d_close`

Commands that simulate a step call `composer3d_actions` after 2; those that compare layouts call `composer3d_layout`
before 1.
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
            context: Has degrees and coordinates; the mesh only inside `apply`.

        Returns:
            Transforms in the phases TENSOR, DATA or MATERIALISE.
        """

    @_hookspec
    def composer3d_parameter_mesh(self, context: RunContext, fqn: str) -> ParameterMesh | None:
        """Query: return the mesh of a parameter that is not on the data-parallel mesh, such as an expert's.

        Data-parallel plugins query it in `apply`, through `context.data_mesh(fqn)`. Modules of such parameters are
        units of their own, whose gradients are averaged over the mesh dims that are not expert axes.

        Args:
            context: Has the mesh and `context.expert_mesh()`.
            fqn: FQN of a parameter.

        Returns:
            The parameter's mesh; None for the data-parallel mesh.
        """

    @_hookspec
    def composer3d_offload_policy(self, context: RunContext, fqn: str) -> Any | None:
        """Query: return torch's `OffloadPolicy` of a unit.

        Data-parallel plugins query it in `apply`, through `context.offload_policy(fqn)`.

        Args:
            context: Has the mesh.
            fqn: FQN of a unit; the empty string is the root.

        Returns:
            A policy; None does not offload.
        """

    @_hookspec
    def composer3d_place_batch(self, context: RunContext, batch: Batch) -> Batch | None:
        """Shard a batch, for example along its sequence, or move it, before it is split into micro-batches. Frozen.

        Implementations are chained in the order of plugin names. They also receive the arguments of forwards that the
        loop runs itself. A result with fewer samples is refused, unless the plugin claims "samples".

        Args:
            context: Complete.
            batch: As passed by the loop; for a forward that the loop runs itself, `is_own_forward` and without a
                target.

        Returns:
            Another batch; None leaves it unchanged.
        """

    # ---- scheduling --------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_split(self, context: RunContext, model: nn.Module) -> Split | None:
        """Query: split the model into this rank's stages, before any transform.

        Args:
            context: Has the mesh.
            model: The whole model; on meta if a factory built it.

        Returns:
            Parts that keep the FQNs of the whole model; None does not split it.
        """

    @_hookspec
    def composer3d_schedule(self, context: RunContext, parts: Sequence[Part], loss_fn: LossFunction) -> Schedule | None:
        """Query: return the schedule that runs a step's micro-batches.

        Args:
            context: Complete.
            parts: Parts of this rank, with their weights.
            loss_fn: `(output, target) -> scalar`, already scaled for the backward; the schedule must not scale it.

        Returns:
            A schedule; None runs micro-batches one after the other and accumulates gradients. A schedule that bypasses
            the core's micro-batch actions (`BEFORE_MICROBATCH`) calls `context.microbatches.begin(index, is_last,
            stage)` and `context.microbatches.end()` itself.
        """

    @_hookspec
    def composer3d_actions(self, context: RunContext, num_microbatches: int) -> Sequence[Sequence[Action]] | None:
        """Query: return the actions of every rank of the pipeline, in the order in which the schedule runs them.

        `composer3d schedule` and simulations of a step query it, without a mesh.

        Args:
            context: Has degrees and coordinates.
            num_microbatches: Number of micro-batches per batch.

        Returns:
            Actions by rank along the pipeline's axis; None without a pipeline.
        """

    @_hookspec
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits | None:
        """Describe the plugin's effect on a layout: ZeRO stage, schedule, recomputation, dtypes.

        `plan` (for advice), `suggest` and explanations of a layout call it, without a context. A plugin that supports
        layouts other than its table's declares them in `@plugin(offer=...)`.

        Args:
            degrees: Degree of every axis.

        Returns:
            Traits of the plugin; those that it does not affect are None.
        """

    @_hookspec
    def composer3d_reschedule(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare which modules are recomputed, have their activations offloaded, or are compiled.

        Args:
            context: As for `composer3d_shard`.

        Returns:
            Transforms in the phases RECOMPUTE and COMPILE.
        """

    @_hookspec
    def composer3d_step_actions(self, context: RunContext) -> StepAction | Sequence[StepAction] | None:
        """Declare actions at points of every step. Frozen, ordered like transforms.

        Args:
            context: Complete.

        Returns:
            Actions. At DECIDE, an action may return a reason to skip the optimizer step on all ranks.
        """

    # ---- precision ---------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_convert(self, context: RunContext) -> Transform | Sequence[Transform] | None:
        """Declare modules to convert to another precision.

        Args:
            context: As for `composer3d_shard`.

        Returns:
            Transforms in phase CONVERT; they may add FQNs, never rename or drop one.
        """

    @_hookspec
    def composer3d_dtypes(self, context: RunContext, fqn: str) -> Dtypes | None:
        """Query: return the dtypes of a unit. An answer that no transform queries is an error of `compose`.

        Data-parallel plugins query it in `apply`, through `context.dtypes(fqn)`.

        Args:
            context: Has the mesh.
            fqn: FQN of a unit; the empty string is the root.

        Returns:
            Dtypes; None keeps the model's.
        """

    @_hookspec
    def composer3d_load_parameter(self, context: RunContext, fqn: str, tensor: Tensor) -> Tensor | None:
        """Query: convert a full tensor from initialisation or a checkpoint before it is sharded.

        Args:
            context: Has the mesh.
            fqn: FQN of a parameter or buffer.
            tensor: The full tensor, on CPU.

        Returns:
            Another tensor of the parameter's dtype; None leaves it unchanged.
        """

    @_hookspec
    def composer3d_grad_scaler(self, context: RunContext) -> GradScaler | None:
        """Query: return the loss scaler.

        Args:
            context: Complete.

        Returns:
            A scaler; None does not scale the loss.
        """

    @_hookspec
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer | None:
        """Query: create the optimizer instead of `cls(groups)`.

        Args:
            context: Complete.
            cls: Requested class; refuse one that you do not replace.
            groups: Parameter groups with all hyperparameters.

        Returns:
            A real `torch.optim.Optimizer` that steps every parameter of `groups`, or None. An optimizer whose state is
            not plain tensors sharded like their parameters has a method `plain_state(*, write: bool)`. It returns a
            context manager in which the state is, for checkpoints; with `write`, values that are loaded inside are
            written back to the optimizer on exit.
        """

    # ---- communication -----------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_group_options(self, context: RunContext, axis: str) -> GroupOptions | None:
        """Query: return the options of an axis' process group, before the mesh is created.

        Args:
            context: Has degrees and coordinates.
            axis: Name of the axis.

        Returns:
            Options; None uses torch's defaults.
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
        """Query: return the policy for replica groups that may leave and rejoin, along an axis of role REPLICA.

        Such an axis is not part of the mesh: every group is a world of its own. The core starts the groups, divides
        every batch among the members, averages gradients over them, and transfers the state to a group that rejoins.

        Args:
            context: Has all degrees; coordinates and everything else are those of one group.

        Returns:
            The policy; None without replica groups.
        """

    # ---- profiling ---------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Return a recorder of spans; the recorders of all plugins are called. Frozen.

        Args:
            context: Complete.

        Returns:
            A recorder, or None.
        """

    @_hookspec
    def composer3d_observe_batch(self, context: RunContext, batch: Batch) -> None:
        """Observe this rank's batch after plugins have placed it, without writing into it, which is refused. Frozen.

        Unlike `composer3d_place_batch`, it does not affect which ranks the step guard expects to have the same batch.

        Args:
            context: Complete.
            batch: On this rank's device, before it is split into micro-batches.
        """

    @_hookspec
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric] | None:
        """Return this rank's metrics at the end of a step. Frozen.

        Collectives: one all-gather per step for the metrics of all plugins.

        Args:
            context: Complete.
            step: Number of the step.

        Returns:
            Metrics; their names and number must not depend on the rank.
        """

    @_hookspec
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Export the metrics of a step, reduced over ranks. Called on every rank. Frozen.

        Args:
            context: Complete.
            step: Number of the step.
            metrics: Values by name.
        """

    # ---- life cycle --------------------------------------------------------------------------------------------------

    @_hookspec
    def composer3d_configure(self, context: RunContext) -> None:
        """Validate the run before anything is built; raise a ComposerError to refuse it.

        A plugin that creates the optimizer, scales the loss, needs gradients after the backward, moves them before they
        are reduced, or drops samples of a batch claims that here (`context.claim`), so that `check` finds conflicts.

        Args:
            context: `context.purpose` is run, check, plan or verify: outside run open no file, port or socket.
        """

    @_hookspec
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Release all resources.

        Args:
            context: As in the other hooks.
            error: Error that ended the run, or None.
        """

    @_hookspec
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Return the plugin's state, which checkpoints store under its name.

        A checkpoint and the run that loads it must have the same names, except for those marked as dispensable.

        Args:
            context: Complete.

        Returns:
            Stateful objects by name, or None.
        """
