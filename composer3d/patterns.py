"""Patterns over FQNs: `layers.*.attention.wq`.

A `*` stands for characters inside one component, as in a shell; `**` stands for any number of components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from composer3d.errors import PatternError, TransformError, did_you_mean
from composer3d.routed_lists import RoutedList, routed_list

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_blocks", "left_out", "matches", "select", "sharing_nothing"]


def matches(pattern: str, fqn: str) -> bool:
    """Return whether the FQN has the pattern's form.

    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.norm"), matches("**.norm", "layers.0.norm")
    (True, False, True)
    """
    return _match(pattern.split("."), fqn.split("."))


def _match(pattern: list[str], fqn: list[str]) -> bool:
    # The numbers of components that the pattern so far can have taken, so that many `**` cost no more than few.
    taken = {0}
    for part in pattern:
        if part == "**":
            taken = set(range(min(taken), len(fqn) + 1))
        else:
            taken = {num + 1 for num in taken if num < len(fqn) and fnmatchcase(fqn[num], part)}
        if not taken:
            return False
    return len(fqn) in taken


def select(pattern: str, fqns: Iterable[str]) -> list[str]:
    """Return the FQNs that match, in their order.

    Raises:
        PatternError: Nothing matches; the message shows the nearest name.
    """
    names = [fqn for fqn in fqns if fqn]
    found = [fqn for fqn in names if matches(pattern, fqn)]
    if not found:
        # A pattern is compared with the names as patterns: layers.* stands for layers.0, layers.1, ...
        forms = [".".join("*" if part.isdigit() else part for part in fqn.split(".")) for fqn in names]
        near = did_you_mean(pattern, list(dict.fromkeys(forms)) if "*" in pattern else names) or ""
        raise PatternError(
            pattern, near if near.startswith("did you mean") else "the model has " + ", ".join(names[:8])
        )
    return found


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


def sharing_nothing(units: Sequence[str], ties: Iterable[Sequence[str]], *, stated: bool) -> list[str]:
    """Return the units that share no parameter with another one; what others hold is left to the root.

    Args:
        units: FQNs of modules.
        ties: Groups of FQNs that are one parameter.
        stated: Whether the user has chosen them.

    Raises:
        TransformError: Stated units share a parameter: each of them would shard it.
    """
    shared: set[str] = set()
    for group in ties:
        inside = {max((unit for unit in units if fqn.startswith(f"{unit}.")), key=len, default="") for fqn in group}
        holders = sorted(inside - {""})
        if stated and len(holders) > 1:
            raise TransformError(
                f'the units "{holders[0]}" and "{holders[1]}" share the parameter "{group[0]}", which one unit holds: '
                "name a module that has both inside, or leave them to the root"
            )
        shared.update(holders if len(holders) > 1 else ())
    return [unit for unit in units if unit not in shared]
