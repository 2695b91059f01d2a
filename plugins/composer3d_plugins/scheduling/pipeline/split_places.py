"""Modules before whose calls a model can be divided, where nobody names its blocks and there is no one list of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["around", "block_lists", "inner_lists", "outermost"]

_FEWEST = 2  # children that make a list


def block_lists(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the outermost lists of blocks, equal or not: children of ModuleList, Sequential and ModuleDict.

    Children without parameters are left out, and a list among the children that cannot be called is replaced by its
    own.
    """
    return list(_lists(model, ""))


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, ...]]:
    if _holds_blocks(module):
        names = tuple(_callable(module, prefix))
        if len(names) >= _FEWEST:
            yield names
            return
    for name, child in module.named_children():
        yield from _lists(child, f"{prefix}{name}.")


def _holds_blocks(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _callable(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of children that have parameters and can be called."""
    from torch import nn

    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}"


def outermost(model: nn.Module, *, num_stages: int) -> tuple[str, ...]:
    """Return the blocks of all lists, and the outermost modules beside them: embeddings, heads, whatever is called.

    Args:
        model: The whole model.
        num_stages: A module beside the lists with more than 1 / num_stages of the parameters is replaced by its own
            children.
    """
    most = sum(parameter.numel() for parameter in model.parameters()) / num_stages
    listed = {name for names in block_lists(model) for name in names}
    return tuple(_places(model, "", listed, most))


def _places(module: nn.Module, prefix: str, listed: set[str], most: float) -> Iterator[str]:
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        size = sum(parameter.numel() for parameter in child.parameters())
        if not size:
            continue
        holds_list = any(other.startswith(f"{fqn}.") for other in listed)
        if fqn not in listed and (holds_list or (size > most and len(list(_callable(child, ""))) >= _FEWEST)):
            yield from _places(child, f"{fqn}.", listed, most)
        else:
            yield fqn


def around(model: nn.Module, named: Sequence[str]) -> tuple[str, ...]:
    """Return named modules and the outermost ones beside them, in the order of the model; named ones stay whole.

    Args:
        model: The whole model.
        named: FQNs of modules, whether in a list or not.
    """
    opened = {name[:end] for name in named for end, letter in enumerate(name) if letter == "."}
    return tuple(_around(model, "", set(named), opened))


def _around(module: nn.Module, prefix: str, named: set[str], opened: set[str]) -> Iterator[str]:
    from torch import nn

    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if fqn not in named and (is_list or fqn in opened):
            yield from _around(child, f"{fqn}.", named, opened)
        elif fqn in named or any(True for _ in child.parameters()):
            yield fqn


def inner_lists(model: nn.Module, places: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the lists inside of some modules, those first that hold most, by the module: stages of blocks, experts."""
    found: dict[str, tuple[str, ...]] = {}
    for fqn in places:
        module = model.get_submodule(fqn)
        size = sum(parameter.numel() for parameter in module.parameters())
        for names in _lists(module, f"{fqn}."):
            held = sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
            if 2 * held > size:
                found[fqn] = names
    return found
