"""Process groups by axis: backends, timeouts, NCCL's options, reduce-scatters on gloo, and the machine's network.

`axis_options` has what an axis may be given, `exchanged_sums` the reduce-scatter as an all-to-all, `operator_sums` the
same for operators of DTensor, `networks` what a kind of network needs of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    GroupOptions,
    Phase,
    PluginError,
    Role,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    Units,
    hookimpl,
    plugin,
    torch_compat,
)
from composer3d_plugins.communication.process_groups.axis_options import AxisOptions
from composer3d_plugins.communication.process_groups.exchanged_sums import ExchangedReduceScatter
from composer3d_plugins.communication.process_groups.networks import NETWORKS, Machine, complaints, read_by_network
from composer3d_plugins.communication.process_groups.operator_sums import exchange_operator_sums

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ProcessGroups"]


@plugin(family="communication")
class ProcessGroups:
    """Options of the process group of each axis, the better reduce-scatter on gloo, and a check of the network.

    gloo's reduce-scatter is an all-reduce inside: over four ranks together it sends 6.0 times the gradient, where an
    all-to-all and a local sum send 3.0. The second is what this plugin makes of every reduce-scatter over gloo: of
    sharded units at all ZeRO stages, and of operators on sharded tensors under sequence parallelism, but in compiled
    code. Numbers differ by the order of summation alone: chunks are added in the order of ranks, in at least float32.

    This plugin sets no environment variable; any run whose ranks share a machine keeps the sockets of gloo and NCCL to
    its loopback interface. With `network`, what NCCL, libfabric and gloo read is compared with what the network needs,
    in `check`, which shows it, and on every rank of a run, whose environment.json records it.

    Memory: with all-to-alls, the gradient of the unit at work once more. A communicator of NCCL has buffers of its own
        on the GPU for every group of its own.
    Collectives: one all-to-all for each reduce-scatter over gloo, of the same payload; with NCCL none are replaced.

    Source: measured with torch 2.13 and gloo on the loopback interface of four ranks; ncclConfig_t,
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html; Rajeev Thakur, Rolf Rabenseifner and
    William Gropp, Optimization of Collective Communication Operations in MPICH, 2005 (reduce-scatter by pairwise
    exchange).

    Args:
        axes: Options of process groups, a table for each axis, as `[communication.process_groups.axes.tp]`, with
            backend, timeout_s, own_group, and of NCCL high_priority_stream, blocking, min_ctas, max_ctas,
            cga_cluster_size, cta_policy (default, efficiency or zero), nvls_ctas, sharp, split_share, net_name,
            traffic_class and, of the axis whose ranks hold shards, registered_buffers.
        reduce_scatter: `auto` takes the all-to-all over gloo and the backend's own elsewhere; `native` and `all_to_all`
            take the same everywhere.
        network: Kind of network between nodes: what it needs of the machine (libraries, devices, variables, interfaces)
            is there, or the run is refused with what is missing and its source.
    """

    axes: Mapping[str, AxisOptions] | None = None
    reduce_scatter: Literal["auto", "native", "all_to_all"] = "auto"
    network: Literal["efa", "gcp-tcpxo", "infiniband", "roce", "ethernet"] | None = Field(default=None, examples=[])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options that cannot be, or would do nothing."""
        for axis, options in (self.axes or {}).items():
            if axis not in context.degrees:
                raise PluginError(
                    f'"{axis}" is no axis', hint=f"the axes are {', '.join(context.degrees)}", keys=("axes", axis)
                )
            if context.degrees[axis] == 1:
                raise PluginError(
                    f"{axis} = 1: nobody communicates over it, and its options would do nothing",
                    hint=f"raise mesh.{axis}, or remove this table",
                    keys=("axes", axis),
                )
            options.refuse_contradictions(axis, backend=self._backend(axis, context), shards=context.layout.shards)
        if context.world_size == 1 and self.network is None:
            raise PluginError("one rank communicates with nobody", hint="start several ranks, or remove this table")
        self._refuse_nothing(context)
        if self.reduce_scatter == "native":
            context.claim("reduce_scatter", by=self)
        if any(options.registered_buffers for options in (self.axes or {}).values()):
            context.claim("reduce_scatter", by=self)
            context.claim("all_gather", by=self)
        if self.network is not None and context.purpose in ("run", "check"):
            self._compare_network(self.network, context)

    @hookimpl
    def composer3d_group_options(self, context: RunContext, axis: str) -> GroupOptions | None:
        """Return the options of an axis."""
        return None if axis not in (self.axes or {}) else (self.axes or {})[axis].of_group()

    @hookimpl
    def composer3d_collectives(self, context: RunContext) -> Transform:
        """Replace reduce-scatters, and register buffers."""
        return Transform(
            name="process_groups",
            phase=Phase.COMMUNICATE,
            select=lambda model, context: context.units(None) if context.has_blocks else [""],
            apply=self._apply,
            rows=self._rows,
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction | None:
        """Replace the reduce-scatters of operators before the first step."""
        if not self._acts(context) or not self._has_operators(context):
            return None
        return StepAction(name="process_groups", point=StepPoint.BEGIN, run=self._exchange_operators)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Give operators their own reduce-scatter back."""
        end = context.state.pop(self, None)
        if end is not None:
            end()

    def _refuse_nothing(self, context: RunContext) -> None:
        """Refuse a choice of reduce-scatter that changes nothing, where nothing else is asked for."""
        is_alone = not self.axes and self.network is None
        if not self._scattered(context) and (is_alone or self.reduce_scatter != "auto"):
            raise PluginError(
                "nothing is reduce-scattered in this run: nobody shards parameters, activations or experts",
                hint="remove reduce_scatter, or this table if nothing else stands in it",
            )
        if is_alone and not self._acts(context):
            raise PluginError(
                f'reduce_scatter = "{self.reduce_scatter}" is what runs without this table, which has nothing else',
                hint="give an axis options, or remove this table",
            )

    def _scattered(self, context: RunContext) -> list[str]:
        """Return the axes over which reduce-scatters run."""
        axes = (context.layout.shards, *context.layout.names(Role.TENSOR, Role.SEQUENCE, Role.EXPERT))
        return [axis for axis in axes if context.degrees[axis] > 1]

    def _backend(self, axis: str, context: RunContext) -> str:
        """Return the backend of an axis for the run's device: the stated one, else the device's own."""
        options = (self.axes or {}).get(axis)
        stated = None if options is None else options.backend
        if stated is None:
            return "gloo" if context.run_device.type == "cpu" else "nccl"
        split = [part.rpartition(":") for part in stated.lower().split(",")]
        parts = {device: backend for device, _, backend in split}
        return parts.get(context.run_device.type, parts.get("", "none"))

    def _acts(self, context: RunContext) -> bool:
        """Return whether any reduce-scatter is exchanged."""
        return any(self._is_exchanged_over(axis, context) for axis in self._scattered(context))

    def _is_exchanged_over(self, axis: str, context: RunContext) -> bool:
        return self.reduce_scatter == "all_to_all" or (
            self.reduce_scatter == "auto" and self._backend(axis, context) == "gloo"
        )

    def _is_exchanged(self, group: Any, context: RunContext) -> bool:
        """Return whether the reduce-scatters of a process group are; a fake one is judged by its axes."""
        if self.reduce_scatter != "auto":
            return self.reduce_scatter == "all_to_all"
        backend = torch_compat.backend_of(group, context.device)
        if backend != "fake":
            return backend == "gloo"
        # As for views of the mesh, the outermost axis with options decides.
        axes = context.layout.axes_of(torch_compat.mesh_dim(group) or "")
        stated = [axis for axis in axes if axis in (self.axes or {})]
        return self._backend(next(iter([*stated, *axes]), ""), context) == "gloo"

    def _has_operators(self, context: RunContext) -> bool:
        roles = (Role.TENSOR, Role.SEQUENCE, Role.EXPERT)
        return any(context.degrees[axis] > 1 for axis in context.layout.names(*roles))

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        is_claimed = bool(context.claimants("reduce_scatter"))
        registered = any(options.registered_buffers for options in (self.axes or {}).values())
        for module in model.modules():
            unit = context.stash(Units).by_module.get(module)
            if unit is None:
                continue
            if registered:
                unit.register_buffers()
            elif self._acts(context) and not is_claimed:
                exchange = ExchangedReduceScatter(is_exchanged=lambda group: self._is_exchanged(group, context))
                unit.set_reduce_scatter(exchange)
        return list(fqns)

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        label = "all_to_all" if self._acts(context) and not context.claimants("reduce_scatter") else "groups"
        rows: dict[str, Sequence[str]] = {label: context.units(None) if context.has_blocks else [""]}
        if self.network is not None and context.purpose == "check":
            found = [f"{name}={value}" for name, value in read_by_network(os.environ).items()]
            rows["environment"] = found or ["no variable of NCCL, libfabric or gloo"]
        return rows

    def _exchange_operators(self, state: StepState) -> None:
        context = state.context
        if self not in context.state:
            context.state[self] = exchange_operator_sums(lambda group: self._is_exchanged(group, context))

    def _compare_network(self, network: str, context: RunContext) -> None:
        backends = {self._backend(axis, context) for axis, degree in context.degrees.items() if degree > 1}
        if network != "ethernet" and "nccl" not in backends:
            raise PluginError(
                f'network = "{network}" is reached through NCCL, and every axis of this run is on '
                f"{' and '.join(sorted(backends)) or 'no backend'}",
                hint='write network = "ethernet", or run on GPUs',
                keys=("network",),
            )
        names = [options.net_name for options in (self.axes or {}).values() if options.net_name]
        machine = Machine.this(named=bool(names))
        found = complaints(NETWORKS[network], machine, backends=backends)
        if found:
            raise PluginError(
                f'network = "{network}", and on {machine.host}: {"; ".join(found)}',
                hint="nothing is set for you: export these where ranks are started, or name the network that is there",
                keys=("network",),
            )
