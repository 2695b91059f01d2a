"""CPU offloading: parameters, gradients or optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    HostMemory,
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    Role,
    RunContext,
    StepAction,
    StepPoint,
    Transform,
    hookimpl,
    plugin,
    select_fqns,
)
from composer3d_plugins.sharding.cpu_offload.host_gradients import HostGradients, refuse_foreign
from composer3d_plugins.sharding.cpu_offload.piecewise_optimizer import offloaded
from composer3d_plugins.sharding.cpu_offload.transfers import transfers_for
from composer3d_plugins.sharding.cpu_offload.visiting import visiting

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

MIB = 2**20


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Offload where optimizer state is to lie in host memory."""
    return {} if wanted.offloads_state else None


@plugin(family="sharding", offer=LayoutOffer(table=_table, choices={"offloads_state": (True,)}))
class CPUOffload:
    """Keep optimizer state, gradients or parameters in host memory, and bring them to the device for their use.

    mode = "optimizer": the state comes to the device piece by piece while it steps. The state of the next piece is
        fetched while a piece is stepped, and stepped state is copied back at the same time, on separate streams.
    mode = "gradients": a gradient is copied to the host as soon as it is accumulated, and later micro-batches add to
        it; all are copied back when the backward is over, to be reduced, clipped and stepped with.
    mode = "parameters": a rank's shards of parameters and gradients are in host memory; a unit's shards are copied to
        the device before they are all-gathered. The optimizer's state is on the device, and so is the step, for which
        parameters and gradients are copied piece by piece.
    mode = "all": parameters, gradients and state are in host memory, and the host steps.
    The optimizer is of the requested class, and computes the same as without offloading. On a machine without
    accelerator host and device are the same memory: pieces are copied all the same.
    Memory: on the device nothing of what is kept in host memory but the unit or the pieces at work (three of
        piece_mib), and, with "gradients", all gradients from the end of the backward to the end of the step; in host
        memory all of it, pinned where there is an accelerator.
    Collectives: none.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840.

    Args:
        mode: What is kept in host memory. "parameters" and "all" need a plugin that gathers parameters for their use
            (fsdp2, at any degree, or ddp's units).
        parameters: Patterns of the modules or parameters that are offloaded; default: all. For "parameters" and "all",
            of units of the data-parallel plugin.
        piece_mib: Parameters of at most this size, MiB, are stepped at once; a larger one by itself. "gradients": so
            much may be on its way to the host while the backward goes on. Default 64; not with "all", where nothing but
            units moves.
    """

    mode: Literal["optimizer", "gradients", "parameters", "all"] = "optimizer"
    parameters: tuple[str, ...] | None = None
    piece_mib: float | None = Field(default=None, gt=0, le=1 << 20, examples=[])

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(offloads_state=True)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse patterns that match nothing, and parameters that no plugin would copy to the device."""
        if not self._chosen(context):
            raise PluginError(
                "parameters = [] names none, so nothing is offloaded", hint="leave it out for all of them"
            )
        if self.mode == "all" and self.piece_mib is not None:
            raise PluginError(
                'piece_mib has no effect with mode = "all", in which units move, and nothing by pieces',
                hint="remove piece_mib",
            )
        if self.mode in ("optimizer", "parameters"):
            context.claim("optimizer", by=self)
        if self.mode in ("gradients", "all"):
            context.claim("gradients", by=self)
        if self.mode == "gradients":
            context.claim("moved_gradients", by=self)
        if self._moves_parameters and not any(name in context.owners for name in context.layout.names(Role.BATCH)):
            raise PluginError(
                f'mode = "{self.mode}" needs a data-parallel plugin, which gathers parameters for their use',
                hint="add [sharding.fsdp2]; on one rank it works too",
            )

    @hookimpl
    def composer3d_offload_policy(self, context: RunContext, fqn: str) -> Any | None:
        """Let the data-parallel plugin keep a unit's parameters in host memory."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        if not self._moves_parameters or (self.parameters is not None and fqn not in self._modules(context)):
            return None
        context.state.setdefault((self, "units"), set()).add(fqn)
        return CPUOffloadPolicy(pin_memory=context.device.type != "cpu")

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform | None:
        """Copy the shards to the host once they have values."""
        if not self._moves_parameters:
            return None
        return Transform(
            name="cpu_offload",
            phase=Phase.MATERIALISE,
            select=lambda model, context: [""] if self.parameters is None else self._modules(context),
            apply=self._to_host,
        )

    def _to_host(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        told: set[str] = context.state.get((self, "units"), set())
        for fqn in fqns:
            if fqn not in told:
                raise PluginError(
                    f'mode = "{self.mode}": the data-parallel plugin does not gather {fqn or "the model"} as a unit',
                    hint="name its units in [sharding.cpu_offload] parameters, or let fsdp2 or ddp's units gather it",
                )
        if context.device.type != "cpu":
            for fqn in fqns:
                model.get_submodule(fqn).cpu()
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(context.device)
        return list(fqns)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Copy gradients to the host in backwards and after micro-batches, and back before they are used."""
        if self.mode != "gradients":
            return ()
        chosen = self._chosen(context)
        mine = {fqn: p for fqn, p in context.named_parameters() if fqn in chosen and p.requires_grad}
        if self.parameters is None:  # one number frees nothing, and is reduced where it lies
            mine = {fqn: parameter for fqn, parameter in mine.items() if parameter.dim()}
        if context.purpose == "check":  # nothing is sharded there, and no backward comes
            mine = {}
        refuse_foreign(context, mine)
        gradients = HostGradients(mine.values(), transfers_for(context, ahead_bytes=self._piece_bytes))
        context.state[self] = gradients
        return (
            StepAction(name="cpu_offload.away", point=StepPoint.AFTER_MICROBATCH, run=gradients.sweep),
            StepAction(name="cpu_offload.back", point=StepPoint.GRADIENTS_LOCAL, run=gradients.bring_back),
        )

    @hookimpl
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer | None:
        """Make the optimizer, a subclass of the requested class."""
        if context.purpose == "plan" and self.mode in ("parameters", "all"):
            self._plan_parameters(context)
        if self.mode in ("gradients", "all"):
            return None
        if any(group.get("differentiable") for group in groups):
            raise PluginError(
                "cpu_offload does not do what differentiable = true asks: its pieces are stepped in place"
            )
        chosen = self._chosen(context)
        kept = {p for fqn, p in context.named_parameters() if fqn in chosen}
        transfers = transfers_for(context, stores_beside=True)
        context.state[self] = transfers
        make = offloaded if self.mode == "optimizer" else visiting
        made: Optimizer = make(cls, kept=kept, piece_bytes=self._piece_bytes, transfers=transfers)(groups)
        return made

    def _plan_parameters(self, context: RunContext) -> None:
        """Tell a plan that shards of parameters lie in host memory, and gradients once they are there."""
        host, chosen = context.stash(HostMemory), self._chosen(context)
        for fqn, parameter in context.named_parameters():
            if fqn in chosen:
                host.keep(parameter)
                host.stepped.update([parameter] if self.mode == "all" else [])
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda parameter: host.keep(parameter.grad))

    @property
    def _piece_bytes(self) -> int:
        return int((64.0 if self.piece_mib is None else self.piece_mib) * MIB)

    @property
    def _moves_parameters(self) -> bool:
        return self.mode in ("parameters", "all")

    def _modules(self, context: RunContext) -> list[str]:
        return [fqn for pattern in self.parameters or () for fqn in select_fqns(pattern, context.fqns)]

    def _chosen(self, context: RunContext) -> set[str]:
        if self.parameters is None:
            return set(context.parameter_fqns)
        names = [*context.fqns, *context.parameter_fqns]
        found = [fqn for pattern in self.parameters for fqn in select_fqns(pattern, names)]
        return {fqn for fqn in context.parameter_fqns if any(f"{fqn}.".startswith(f"{name}.") for name in found)}
