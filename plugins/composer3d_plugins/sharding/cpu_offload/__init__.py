"""Optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from composer3d import PluginError, RunContext, hookimpl, plugin, select_fqns
from composer3d_plugins.sharding.cpu_offload.optimizer import offloaded
from composer3d_plugins.sharding.cpu_offload.transfers import transfers_for

if TYPE_CHECKING:
    from torch.optim import Optimizer

MIB = 2**20


@plugin(family="sharding")
class CPUOffload:
    """Keep the optimizer's state in host memory and bring it to the device piece by piece while it steps.

    The state of the next piece travels while a piece is stepped, and what was stepped travels back at the same time, on
    a stream of its own. The optimizer is the class that was asked for, and computes on the device what it would compute
    without. On a machine without accelerator host and device are the same memory: the pieces are copied all the same.
    Memory: no optimizer state on the device but that of three pieces while it steps; all of it in host memory, pinned
        where there is an accelerator.
    Collectives: none.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840.

    Args:
        parameters: Patterns of modules or parameters whose state is kept in host memory; default: all.
        piece_mib: Parameters of at most this size, MiB, are stepped at once; a larger one by itself.
    """

    parameters: tuple[str, ...] | None = None
    piece_mib: float = Field(default=64.0, gt=0)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse patterns that match nothing."""
        self._chosen(context)

    @hookimpl
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer:
        """Make the optimizer, of the class that was asked for."""
        if any(group.get("differentiable") for group in groups):
            raise PluginError(
                "cpu_offload does not do what differentiable = true asks: its pieces are stepped in place"
            )
        chosen = self._chosen(context)
        kept = {p for fqn, p in context.named_parameters() if fqn in chosen}
        transfers = transfers_for(context.device)
        context.state[self] = transfers
        made: Optimizer = offloaded(cls, kept=kept, piece_bytes=int(self.piece_mib * MIB), transfers=transfers)(groups)
        return made

    def _chosen(self, context: RunContext) -> set[str]:
        if self.parameters is None:
            return set(context.parameter_fqns)
        names = [*context.fqns, *context.parameter_fqns]
        found = [fqn for pattern in self.parameters for fqn in select_fqns(pattern, names)]
        return {fqn for fqn in context.parameter_fqns if any(f"{fqn}.".startswith(f"{name}.") for name in found)}
