"""Patterns over FQNs: `layers.*.attention.wq`.

A `*` stands for characters inside one component, as in a shell; `**` stands for any number of components.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from fnmatch import fnmatchcase

from composer3d.errors import PatternError, TransformError, did_you_mean

__all__ = ["called", "matches", "select", "sharing_nothing"]


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


def called(fqns: Sequence[str], uncalled: Container[str], chosen: Iterable[str]) -> list[str]:
    """Return modules with the entries of those that have no forward in their place, at any depth.

    Args:
        fqns: Of all modules.
        uncalled: Those of them without a forward.
        chosen: Some of them.
    """
    found: list[str] = []
    for fqn in chosen:
        inside = [name for name in fqns if name.rpartition(".")[0] == fqn and name] if fqn in uncalled else []
        found += called(fqns, uncalled, inside) if fqn in uncalled else [fqn]
    return found


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
