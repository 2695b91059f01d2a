"""The repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from composer3d.composition.experts.routed_lists import RoutedList, routed_list

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_blocks", "left_out"]


def find_blocks(model: nn.Module) -> str | None:
    """Return the pattern of the repeated blocks, if the model has exactly one outermost list of equal blocks.

    Where there is no list, an `nn.ModuleDict` may hold them; beside one, such a dict is taken for heads or the like.
    Experts that a loop calls where some row goes to them are no blocks: other ranks may call others.
    """
    found, _ = _lists(model)
    return found[0] if len(found) == 1 else None


def left_out(model: nn.Module) -> list[RoutedList]:
    """Return the lists that would be blocks, did the forward not choose among their entries by values."""
    _, routed = _lists(model)
    return routed


def _lists(model: nn.Module) -> tuple[list[str], list[RoutedList]]:
    from torch import nn

    found, routed = _outermost(model, lambda module: all(name.isdigit() for name, _ in module.named_children()))
    if not found:
        found, more = _outermost(model, lambda module: isinstance(module, nn.ModuleDict))
        routed += [each for each in more if each not in routed]
    return found, routed


def _outermost(model: nn.Module, holds: Callable[[nn.Module], bool]) -> tuple[list[str], list[RoutedList]]:
    found: list[str] = []
    skipped: list[RoutedList] = []
    for fqn, module in model.named_modules():
        prefixes = [*found, *(f"{each.fqn}." for each in skipped)]
        children = list(module.children())
        if len(children) < 2 or not holds(module) or any(fqn.startswith(prefix) for prefix in prefixes):
            continue
        routed = routed_list(model, fqn) if fqn else None
        if routed is not None:
            skipped.append(routed)
        elif _equal(children):
            found.append(f"{fqn}." if fqn else "")
    return [f"{prefix}*" for prefix in found], skipped


def _equal(blocks: list[nn.Module]) -> bool:
    """Blocks are equal when their type and the names and shapes of their parameters are, and they have some."""
    forms = {(type(block), tuple((name, p.shape) for name, p in block.named_parameters())) for block in blocks}
    return len(forms) == 1 and any(True for _ in blocks[0].parameters())
