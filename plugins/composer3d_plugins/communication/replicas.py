"""Groups of ranks that leave and come back while the others train on."""

from __future__ import annotations

from pydantic import Field

from composer3d import (
    Axis,
    Decisions,
    PluginError,
    ReplicaPolicy,
    Role,
    RunContext,
    hookimpl,
    plugin,
    torch_compat,
)

__all__ = ["Replicas"]

AXIS = "replica"
_LEAST_BYTES = 4  # of an element on the way: sums of few digits lose more than they carry


@plugin(family="communication", owns=(AXIS,), axes=(Axis(name=AXIS, role=Role.REPLICA),))
class Replicas:
    """Train one model on several groups of ranks, of which some may be lost and come back.

    `[mesh] replica = 2` starts two groups, each a world of its own with all other axes inside. Before every step it is
    found out which of them take part; these divide the global batch, average their gradients, and agree in one place
    that all of them have the result. Where a group is lost meanwhile, the others divide the same batch among them and
    do the step again, so that no sample and no step is left out: the run is the undisturbed one, whoever took part. A
    lost group is started again, takes parameters, optimizer and everything else from the memory of another one, and
    takes part in the next step. Where all are lost, the run goes on from its last checkpoint (`run.max_restarts`). On
    several machines the one that knows who takes part may be lost too, where others are listed in `--endpoint`.

    The first group that takes part writes metrics and checkpoints. Every group reads the whole global batch.

    Memory: a bucket of 32 MiB in host memory.
    Collectives: of the mesh none. Over replica, through host memory: one all-reduce of a number a parameter, one of all
    gradients of a rank; two messages of a rank to the launcher a step.

    Source: the same aim as torchft, https://github.com/meta-pytorch/torchft, which leaves out a lost group's samples.

    Args:
        minimum: Groups without which no step is made: those that are left wait for others to come back.
        spares: Groups that are ready, and take part only in the place of one that is lost.
        silent_s: Seconds without a sign of life after which a group is lost: its machine is gone, or it was stopped.
            The last one that has the state has four times as long; a process that ends is noticed at once.
        late_s: Seconds that the others wait for a group that lives and does not come to a step.
        join_s: Seconds in which groups are to come at the beginning, and where fewer than `minimum` are left.
        replay_every: Steps between two in which each group computes the piece of another one too, and gradients are
            compared to the bit: a machine that computes wrong and says nothing is found. A step that differs is done
            again, and where it differs again the run, or of three and more groups the one to blame, ends and names it.
            Needs kernels that are deterministic, as on the CPU (`run.deterministic`). Such a step takes twice as long.
        restarts: How often a group is started again that is lost before it takes part in a step.
    """

    minimum: int = Field(default=1, ge=1, examples=[1])
    spares: int = Field(default=0, ge=0, examples=[0])
    silent_s: float = Field(default=15.0, gt=0, examples=[15.0])
    late_s: float = Field(default=600.0, gt=0, examples=[600.0])
    join_s: float = Field(default=600.0, gt=0, examples=[600.0])
    replay_every: int | None = Field(default=None, ge=1, examples=[2])
    restarts: int = Field(default=3, ge=0, examples=[3])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse groups that cannot be, and batches that cannot be divided among them."""
        groups = context.layout.num_groups
        if groups == 1:
            raise PluginError(
                "replica = 1: there is one group of ranks, and none that could go on without it",
                hint="write [mesh] replica = 2, or remove the table",
            )
        if self.minimum + self.spares > groups:
            raise PluginError(
                f"minimum = {self.minimum} and spares = {self.spares} are more than the {groups} groups there are: no "
                "step could be made",
                hint=f"at most {groups} together",
            )
        context.claim("gradients", by=self)
        moved = context.claimants("moved_gradients")
        if moved:
            raise PluginError(
                f"gradients are moved elsewhere by {moved[0]} before they are averaged over groups",
                hint="remove that table, or the groups",
            )

    @hookimpl
    def composer3d_replicas(self, context: RunContext) -> ReplicaPolicy:
        """Return the options."""
        return ReplicaPolicy(
            minimum=self.minimum,
            spares=self.spares,
            silent_s=self.silent_s,
            late_s=self.late_s,
            join_s=self.join_s,
            replay_every=self.replay_every,
            restarts=self.restarts,
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> None:
        """Let a plan say what groups exchange: it is in no trace of one group."""
        groups = context.layout.num_groups
        trained = [parameter for _, parameter in context.planned_parameters() if parameter.requires_grad]
        local = [torch_compat.local_of(parameter) for parameter in trained]
        num_bytes = sum(each.numel() * max(each.element_size(), _LEAST_BYTES) for each in local)
        context.stash(Decisions).notes.append(
            f"over {AXIS}, outside of the trace: a rank averages {num_bytes:,} bytes of gradients with those of "
            f"{groups - 1} other group{'s' * (groups > 2)}, and sends {2 * (groups - 1) * num_bytes // groups:,} of "
            "them through host memory a step"
        )
        if self.replay_every is not None:
            every = f"a step of {self.replay_every}" if self.replay_every > 1 else "every step"
            context.stash(Decisions).notes.append(
                f"replay_every = {self.replay_every}: in {every} a group computes the piece of another one too, which "
                "takes twice as long"
            )
