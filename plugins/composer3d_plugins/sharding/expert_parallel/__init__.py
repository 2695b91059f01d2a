"""Expert parallelism: experts of a mixture sharded over ranks, which exchange the tokens that are routed to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import (
    DataDependent,
    Decisions,
    LayoutOffer,
    LayoutTraits,
    Metric,
    ParameterMesh,
    Phase,
    PluginError,
    Role,
    RunContext,
    Transform,
    hookimpl,
    plugin,
)
from composer3d_plugins.sharding.expert_parallel.stacked_experts import Dispatch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d_plugins.sharding.expert_parallel.expert_selection import Experts

__all__ = ["ExpertParallel"]

AXIS = "ep"
_STARVED = 50  # steps


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Shard experts where `ep` has several ranks."""
    return {} if degrees.get(AXIS, 1) > 1 else None


@dataclass
class _Found:
    """State of a run.

    Attributes:
        experts: Of the whole model.
        fqns: What `composer3d_parameter_mesh` is asked of: prefixes of their parameters.
        loads: Rows of each of this rank's experts since the last measurement, by FQN.
        choices: Of this rank's rows since then, those for each expert of all ranks, by FQN.
        idle: Of each of this rank's experts, the step since which it has had no row, by FQN and number.
        starved: What was last written of those.
    """

    experts: list[Experts] = field(default_factory=list)
    loads: dict[str, list[int]] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)
    idle: dict[tuple[str, int], int] = field(default_factory=dict)
    starved: str = ""

    def holds(self, parameter: str) -> bool:
        """Return whether a parameter is one of experts."""
        return any(each.holds(parameter) for each in self.experts)

    def note(self, fqn: str, rows: Sequence[int], chosen: Sequence[int]) -> None:
        """Add the rows of a forward."""
        for found, more in ((self.loads, rows), (self.choices, chosen)):
            before = found.get(fqn, [0] * len(more))
            found[fqn] = [one + other for one, other in zip(before, more, strict=True)]


def _write_starved(found: _Found, context: RunContext, step: int) -> None:
    """Write to the run's folder which experts have had no token for many steps, where that has changed."""
    first = context.coordinates[AXIS]
    for fqn, rows in found.loads.items():
        for place, count in enumerate(rows):
            key = (fqn, first * len(rows) + place)
            if count:
                found.idle.pop(key, None)
            else:
                found.idle.setdefault(key, step)
    late = sorted((fqn, number) for (fqn, number), since in found.idle.items() if step - since >= _STARVED)
    told = ", ".join(f'expert {number} of "{fqn}"' for fqn, number in late)
    if told == found.starved or context.purpose != "run":
        return
    found.starved = told
    folder = context.output / "expert_parallel"
    folder.mkdir(parents=True, exist_ok=True)
    row = {"step": step, "finding": told and f"{told} had no token for {_STARVED} steps or more"}
    with (folder / f"rank-{context.rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


@plugin(family="sharding", owns=(AXIS,), offer=LayoutOffer(table=_table), provides={"findings": {}})
class ExpertParallel:
    """Shard the experts of a mixture over the ranks of ep, which is carved out of dp_shard x cp, or of these x tp.

    A rank holds num_experts / ep consecutive experts of each layer. Tokens travel to the ranks of their experts and
    back, as many as were routed: none is dropped, none is padded, and a rank whose experts get none takes part.
    Experts are modules with stacked weights, which are called with tokens, the experts of each and their weights (those
    of transformers 5, and `composer3d.models:moe`; of two dims too, with the rows of one expert after those of another,
    as DBRX's), with rows in order of experts and how many each has (torchtitan's, ScatterMoE's), or as many for each
    (Llama 4's); or modules of a list or dict, or of lists in one, around whose loop the exchange is made: the block's
    own code runs twice, once to record what each expert is given, once to use what they return. Rows that are made of
    what experts return are exchanged by themselves, in one run more. So are those that a block's own code multiplies
    with weights of experts, in parameter lists or stacked beside its router, one product after the other; biases in
    such lists, and what else a block has, stay whole. What a dict holds without parameters, such as a dropout, runs
    where the code calls it. Layers may share their experts: each exchanges its own rows. Experts
    that choose their tokens do so among those of a rank, in every layout, which `verify` says.

    Data-parallel plugins reduce and shard the experts' parameters over the ranks that hold the same ones: dp_replicate
    and efsdp, which is dp_shard x cp / ep. Their gradients are divided by ep where experts are run. An ep that does not
    divide dp_shard x cp is a multiple of tp and takes its ranks too, for stacked weights: each sends its part of the
    tokens that they all have.
    Buffers inside of experts of a list, and rows of those that have one for each stacked expert, are those of the rank
    that holds it when they are averaged, evaluated or saved.
    Memory: experts / ep; rows sent and received, twice each.
    Collectives: a layer and micro-batch 3 all-to-alls forward (counts, rows, results) and 2 backward, as many again for
    rows that are made of results; all_gather: 4 all-gathers and 1 reduce-scatter forward, 1 all-gather and 2
    reduce-scatters backward. Around the code of a block, where experts are sharded over efsdp too, 1 all-reduce of two
    numbers after each exchange of counts.

    Source: Lepikhin et al., GShard, arXiv:2006.16668; Rajbhandari et al., DeepSpeed-MoE, arXiv:2201.05596.

    Args:
        experts: Patterns of what holds experts; "auto" finds it.
        dispatch: How tokens reach experts: sent to them, or gathered by all ranks. "auto" gathers where a token has
            more experts than ep has ranks, which takes fewer bytes. Experts of lists are always sent their rows.
    """

    experts: str | tuple[str, ...] = "auto"
    dispatch: Dispatch = "auto"

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse ep where nobody averages gradients over the ranks that it is carved out of."""
        owned = any(axis in context.owners for axis in context.layout.names(Role.BATCH, Role.SEQUENCE))
        if context.degrees[AXIS] > 1 and not owned:
            raise PluginError(
                f"ep = {context.degrees[AXIS]} is carved out of the ranks that share a batch, and no plugin of this "
                "manifest averages gradients over those",
                hint="add a data-parallel plugin, for example [sharding.fsdp2]",
            )

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        """Shard experts."""
        return Transform(
            name="expert_parallel",
            phase=Phase.TENSOR,
            select=self._select,
            apply=self._apply,
            uses=(AXIS,),
            rows=self._rows,
            before=("tensor_parallel",),
        )

    @hookimpl
    def composer3d_parameter_mesh(self, context: RunContext, fqn: str) -> ParameterMesh | None:
        """Place experts on their own mesh; data-parallel plugins shard them along dim 1, which ep leaves whole."""
        found = context.state.get(self)
        if found is None or context.degrees[AXIS] == 1 or not found.holds(fqn):
            return None
        of = next(each for each in found.experts if each.holds(fqn))
        mesh, is_rowwise = context.expert_mesh(AXIS), of.is_list or not of.is_multiplied
        dim, rank, degree = 0 if of.is_list else 1, context.coordinates[AXIS], context.degrees[AXIS]
        held = of.held(fqn, rank=rank, degree=degree)
        return ParameterMesh(mesh=mesh, shard_dim=dim, is_rowwise=is_rowwise, within=of.list_of(fqn), held=held)

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric]:
        """Measure how evenly tokens are routed.

        The entropy is of a rank's rows over experts, 1 where all have as many and 0 where one has all, as the mean over
        layers and ranks. Experts that have had no token for 50 steps are named in the run's folder, for `doctor`.
        """
        found: _Found | None = context.state.get(self)
        if found is None or context.degrees[AXIS] == 1:
            return []
        _write_starved(found, context, step)
        # On every rank, those of stages without experts among them.
        loads = [(rows, sum(found.choices[fqn])) for fqn, rows in found.loads.items() if sum(found.choices[fqn])]
        entropies = [_entropy(rows) for rows in found.choices.values() if sum(rows)]
        found.loads, found.choices = {}, {}
        # Ranks choose as many rows each, so the mean over all experts is known without the others.
        fullest = max((max(rows) * len(rows) / chosen for rows, chosen in loads), default=1.0)
        starved = sum(rows.count(0) for rows, _ in loads)
        return [
            Metric(name="expert_load_max", value=fullest, reduction="max"),
            Metric(name="experts_without_tokens", value=float(starved), reduction="max"),
            Metric(name="router_entropy", value=sum(entropies) / len(entropies) if entropies else 1.0),
            Metric(name="tokens_dropped", value=0.0, reduction="sum"),
        ]

    def _select(self, model: nn.Module, context: RunContext) -> Sequence[str]:
        from composer3d_plugins.sharding.expert_parallel.expert_selection import find_experts

        patterns = (self.experts,) if isinstance(self.experts, str) else self.experts
        experts = find_experts(model, None if patterns == ("auto",) else patterns, context)
        self._refuse_dispatch(experts)
        context.state[self] = _Found(experts=experts)
        stacked = [each for each in experts if not each.is_list and context.degrees[AXIS] > 1]
        context.stash(DataDependent).stacked = frozenset(
            fqn for fqn in context.parameter_fqns if any(each.holds(fqn) for each in stacked)
        )
        return [each.fqn for each in experts]

    def _refuse_dispatch(self, experts: Sequence[Experts]) -> None:
        """Refuse to gather tokens for experts that are always sent their rows."""
        if self.dispatch == "all_gather" and all(
            each.is_list or each.is_multiplied or each.is_sorted for each in experts
        ):
            raise PluginError(
                f'dispatch = "all_gather" does nothing for "{experts[0].fqn}": tokens are gathered for modules with '
                "stacked weights that are called with tokens and the experts of each, and all others are sent rows",
                hint="leave dispatch out",
            )

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        found: _Found | None = context.state.get(self)
        rows: dict[str, list[str]] = {}
        for each in found.experts if found is not None else ():
            kind = "list" if each.is_list else "stacked"
            rows.setdefault(f"{kind} of {each.number}", []).append(each.fqn)
        return rows

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        from functools import partial

        from composer3d_plugins.sharding.expert_parallel.listed_experts import shard_listed
        from composer3d_plugins.sharding.expert_parallel.multiplied_experts import shard_multiplied
        from composer3d_plugins.sharding.expert_parallel.stacked_experts import shard_stacked

        if context.degrees[AXIS] == 1:
            return fqns
        found: _Found = context.state[self]
        mesh, peers = context.expert_mesh(AXIS)[AXIS], _peers(context)
        tensor = _tensor_mesh(context)
        dependent = context.stash(DataDependent)
        dependent.axes.add(AXIS)
        if any(each.is_list for each in found.experts):  # rows of experts of lists may be reduced over tensor axes
            dependent.axes.update(context.layout.names(Role.TENSOR))
        context.stash(Decisions).notes.append(
            "routing is assumed to be balanced: all experts are sent the same number of rows"
            if dependent.routing_skew == 1.0
            else f"a rank's experts are assumed to be sent {dependent.routing_skew:g} times the mean of all ranks"
        )
        held = dict(model.named_modules(remove_duplicate=False))  # of a stage
        done: set[tuple[nn.Module, nn.Module]] = set()  # a tied module has several names
        for each in found.experts:
            for fqn, block in each.blocks.items():
                if fqn not in held or (pair := (held[block], held[fqn])) in done:
                    continue
                done.add(pair)
                note = partial(found.note, fqn)
                if each.is_multiplied:
                    stated: Any = {"names": each.names, "is_list": each.is_list, "fqn": block, "held_in": fqn}
                    shard_multiplied(*pair, mesh, note=note, dependent=dependent, peers=peers, **stated)
                elif each.is_list:
                    name = "" if fqn == block else fqn.removeprefix(f"{block}.")
                    options: Any = {"note": note, "dependent": dependent, "names": each.names, "peers": peers}
                    shard_listed(pair[0], name, mesh, fqn=block, **options)
                    _forget_flat_weights(pair[1])
                else:
                    options = {"dispatch": self.dispatch, "skew": dependent.routing_skew, "tensor": tensor}
                    shard_stacked(pair[1], mesh, fqn=fqn, note=note, **options)
        return fqns


def _forget_flat_weights(experts: nn.Module) -> None:
    """Let recurrent layers of other ranks' experts forget parameters, which they keep in a list besides."""
    from torch import nn

    for layer in experts.modules():
        lacking = [name for name, held in layer._parameters.items() if held is None]
        for name in lacking if isinstance(layer, nn.RNNBase) else ():
            setattr(layer, name, None)  # their own writes it into the list


def _entropy(rows: Sequence[int]) -> float:
    shares = [count / sum(rows) for count in rows if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(rows))


def _peers(context: RunContext) -> Any:
    """Return the group of the ranks that gather shards of the same experts; None where each holds its own whole."""
    mesh = context.expert_mesh(AXIS)
    names = [name for name in mesh.mesh_dim_names or () if "efsdp" in name and mesh[name].size() > 1]
    return mesh[names[0]].get_group() if names else None


def _tensor_mesh(context: RunContext) -> DeviceMesh | None:
    """Return the ranks with the same tokens among those of ep, where there are any."""
    axes = [axis for axis in context.layout.names(Role.TENSOR) if axis in context.layout.carved_from(AXIS)]
    return context.views.joined(axes) if axes else None
