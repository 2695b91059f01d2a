"""Patterns over FQNs: `layers.*.attention.wq`.

A `*` stands for characters inside one component, as in a shell; `**` stands for any number of components.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from composer3d.errors import PatternError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_blocks", "matches", "select"]


def matches(pattern: str, fqn: str) -> bool:
    """Tell whether the FQN has the pattern's form.

    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.norm"), matches("**.norm", "layers.0.norm")
    (True, False, True)
    """
    return _match(pattern.split("."), fqn.split("."))


def _match(pattern: list[str], fqn: list[str]) -> bool:
    if not pattern:
        return not fqn
    if pattern[0] == "**":
        return any(_match(pattern[1:], fqn[start:]) for start in range(len(fqn) + 1))
    return bool(fqn) and fnmatchcase(fqn[0], pattern[0]) and _match(pattern[1:], fqn[1:])


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
    """Return the pattern of the repeated blocks, if the model has exactly one outermost list of equal blocks."""
    candidates: list[str] = []
    for fqn, module in model.named_modules():
        children = list(module.children())
        named = [name for name, _ in module.named_children()]
        inside = any(fqn.startswith(other.removesuffix("*")) for other in candidates)
        if not inside and len(children) > 1 and all(name.isdigit() for name in named) and _equal(children):
            candidates.append(f"{fqn}.*" if fqn else "*")
    return candidates[0] if len(candidates) == 1 else None


def _equal(blocks: list[nn.Module]) -> bool:
    """Blocks are equal when their type and the names and shapes of their parameters are, and they have some."""
    forms = {(type(block), tuple((name, p.shape) for name, p in block.named_parameters())) for block in blocks}
    return len(forms) == 1 and any(True for _ in blocks[0].parameters())
