"""Tied parameters across stages: one tensor in the model, a replica per stage, kept equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d import Part, RunContext, StepState, TransformError, all_gather_json, torch_compat

__all__ = ["Ties"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tie:
    """A parameter with replicas on several stages.

    Args:
        fqn: Its first name in the whole model.
        held: This rank's replicas as (part, name), that of the earliest stage first.
        group: Process group of exactly the ranks along pp that hold one; None where all are on one rank.
    """

    fqn: str
    held: tuple[tuple[Part, str], ...]
    group: Any


class Ties:
    """Sums the gradients of replicas, and updates those that no optimizer on this rank steps.

    Args:
        context: With mesh and parts.
        parts: This rank's stages.
        holders: Stages that hold a replica, by the parameter's first FQN.
        owner: The rank along pp of every stage.

    Collectives: making it, one process group for each set of ranks that is not the whole of pp.
    """

    def __init__(
        self,
        *,
        context: RunContext,
        parts: Sequence[Part],
        holders: dict[str, tuple[int, ...]],
        owner: dict[int, int],
    ) -> None:
        groups = {
            ranks: self._group(context, ranks)
            for ranks in sorted({tuple(sorted({owner[stage] for stage in stages})) for stages in holders.values()})
        }
        names = {fqn: tied for tied in context.ties for fqn in tied}
        self._ties = []
        for fqn, stages in holders.items():
            known = names.get(fqn, (fqn,))
            held = []
            for part in sorted(parts, key=lambda part: part.index):
                have = dict(part.module.named_parameters())
                held += [(part, name) for name in known if name in have and part.index in stages]
            group = groups[tuple(sorted({owner[stage] for stage in stages}))]
            if held:
                self._ties.append(_Tie(fqn=fqn, held=tuple(held), group=group))
        self._checked = self._is_summed = False

    @staticmethod
    def _group(context: RunContext, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == 1:
            return None
        axis = context.mesh["pp"]
        if len(ranks) == axis.size():
            return axis.get_group()
        layout, own = context.layout, None
        columns: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world_size):
            coordinates = layout.coordinates(rank)
            others = tuple(coordinates[other.name] for other in layout.dense_axes if other.name != "pp")
            columns.setdefault(others, []).append(rank)
        # Every rank makes every group, in one order, as torch wants it.
        for column in columns.values():
            members = [column[index] for index in ranks]
            group = dist.new_group(members)
            if context.rank in members:
                own = group
        return own

    def sum_gradients(self, state: StepState) -> None:
        """Set the gradient of a rank's first replica to the sum over all replicas, and of its others to None.

        A replica that tensor parallelism shards may have a gradient that is still Partial, and on one stage only: it is
        reduced first, so that all replicas' gradients have one placement.
        Collectives: one all-reduce for each such parameter, over the ranks that hold it.
        """
        self._is_summed = True
        for tie in self._ties:
            copies = [part.module.get_parameter(name) for part, name in tie.held]
            if not copies[0].requires_grad:
                continue
            if tie.group is not None and not self._checked:
                _check_alike(tie, copies[0])
            total = torch.zeros_like(torch_compat.local_of(copies[0]))
            for copy in copies:
                if copy.grad is not None:
                    _settle(copy)
                    total += torch_compat.local_of(copy.grad)
            if tie.group is not None:
                with state.context.span("all_reduce", group="ties", axis="pp", bytes=total.nbytes):
                    dist.all_reduce(total, group=tie.group)
            first, *others = copies
            if first.grad is None:
                first.grad = torch.zeros_like(first)
            torch_compat.local_of(first.grad).copy_(total)
            for other in others:
                other.grad = None  # no optimizer has it, so nobody else would
        self._checked = True

    def take_apart(self) -> None:
        """Leave sums to the earliest replica alone, so that gradients of a step's next batch are added to one of them.

        A loop may have changed them since, alike on all ranks.
        """
        if not self._is_summed:
            return
        self._is_summed = False
        for tie in self._ties:
            if tie.group is not None and dist.get_rank(tie.group) > 0:
                for part, name in tie.held:
                    part.module.get_parameter(name).grad = None

    def fill_copies(self, state: StepState) -> None:
        """Copy values to a rank's further replicas: its optimizer steps the first alone."""
        with torch.no_grad():
            for tie in self._ties:
                first, *others = (part.module.get_parameter(name) for part, name in tie.held)
                for other in others:
                    torch_compat.local_of(other).copy_(torch_compat.local_of(first))


def _settle(copy: nn.Parameter) -> None:
    grad: Any = copy.grad
    if isinstance(copy, DTensor) and isinstance(grad, DTensor) and grad.placements != copy.placements:
        copy.grad = grad.redistribute(placements=copy.placements)


def _check_alike(tie: _Tie, copy: nn.Parameter) -> None:
    """Refuse replicas of different placements. Collectives: one, in the first step."""
    placements = str(copy.placements) if isinstance(copy, DTensor) else "plain"
    layouts = all_gather_json(
        f"{placements} with local shape {tuple(torch_compat.local_of(copy).shape)}", group=tie.group
    )
    if len(set(layouts)) > 1:
        raise TransformError(
            f'"{tie.fqn}" is one tensor on several stages, which are placed as '
            + " and as ".join(dict.fromkeys(layouts))
            + "; plan its names alike"
        )
