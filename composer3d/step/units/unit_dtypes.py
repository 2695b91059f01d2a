"""Division of units whose parameters have several dtypes: torch gathers and reduces those of a unit as one buffer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext

__all__ = ["DividedUnits", "divide_by_dtype"]


def divide_by_dtype(
    model: nn.Module, units: Sequence[str], context: RunContext, *, ignored: Collection[nn.Parameter]
) -> DividedUnits:
    """Divide units by dtype; modules with parameters tied to another module stay in their unit.

    Args:
        model: Of the part.
        units: FQNs of the units.
        context: Of the run.
        ignored: Parameters in no unit.
    """
    tied = {name for group in context.ties for name in group}
    shared = {id(p) for fqn, p in model.named_parameters(remove_duplicate=False) if fqn in tied}
    found = DividedUnits()
    for fqn in sorted((fqn for fqn in units if fqn in context.fqns), key=lambda name: -len(name)):
        found.add(model, fqn, others=set(units), whole={id(parameter) for parameter in ignored}, shared=shared)
    more, found.units = found.units, list(units)
    if more:
        found.units = [fqn for fqn in context.fqns if fqn and fqn in {*units, *more}] + [""]
    return found


@dataclass(kw_only=True)
class DividedUnits:
    """Units of one dtype each.

    Attributes:
        units: FQNs of all units, in the model's order: those given, and modules that become units of their own.
        whole: FQNs of the parameters that stay replicated, because their module has another dtype too.
    """

    units: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def add(
        self, model: nn.Module, fqn: str, *, others: Collection[str], whole: Collection[int], shared: Collection[int]
    ) -> None:
        """Divide one unit.

        Args:
            model: The part that holds it.
            fqn: Of the unit.
            others: FQNs of all units.
            whole: `id` of parameters in no unit.
            shared: `id` of parameters that other modules have too.
        """
        held: dict[str, list[tuple[str, nn.Parameter]]] = {}
        sizes: dict[torch.dtype, int] = {}
        seen: set[int] = set()
        inner = [other for other in others if _is_inside(other, fqn)]
        for owner, module in model.get_submodule(fqn).named_modules(prefix=fqn):
            if any(owner == other or owner.startswith(f"{other}.") for other in inner):
                continue
            for name, parameter in module.named_parameters(prefix=owner, recurse=False):
                if parameter.requires_grad and id(parameter) not in seen and id(parameter) not in whole:
                    seen.add(id(parameter))
                    held.setdefault(owner, []).append((name, parameter))
                    sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        for owner, parameters in held.items():
            if all(parameter.dtype == most for _, parameter in parameters):
                continue
            inside = [p for other, each in held.items() if f"{other}.".startswith(f"{owner}.") for _, p in each]
            is_one = len({parameter.dtype for parameter in inside}) == 1
            if is_one and owner != fqn and not any(id(parameter) in shared for parameter in inside):
                self.units.append(owner)
            else:
                self.whole += [name for name, parameter in parameters if parameter.dtype != most]


def _is_inside(fqn: str, other: str) -> bool:
    return fqn != other and (not other or fqn.startswith(f"{other}."))
