"""Modules of one form: nothing that code can look at differs between them, but which of them it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PLAIN", "are_equal_trees", "shared_objects"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTENTS = ("_parameters", "_buffers")
_HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)


def are_equal_trees(one: nn.Module, other: nn.Module, *, num_hooks: int) -> bool:
    """Return whether two modules have equal classes, attributes, hooks, and forms of tensors on meta, inside too.

    Modules that both hold make them unequal: they have one name, of the first. So do objects that are not the same,
    and functions: what those hold is not known.

    Args:
        one: Whose class, and those inside, may be a subclass of its own, as recording makes them.
        other: Likewise.
        num_hooks: Hooks of each kind that each of the two has for whoever asks; those inside have one less. Of
            themselves they have none.
    """
    ours, theirs = list(one.named_modules(remove_duplicate=False)), list(other.named_modules(remove_duplicate=False))
    if len(ours) != len(theirs):
        return False
    pairs: dict[int, int] = {}
    for (name, module), (another, twin) in zip(ours, theirs, strict=True):
        if name != another or module is twin or type(module).__mro__[1:] != type(twin).__mro__[1:]:
            return False
        if pairs.setdefault(id(module), id(twin)) != id(twin):
            return False
        expected = num_hooks - bool(name)
        if any(
            (len(each._forward_pre_hooks), len(each._forward_hooks)) != (expected, expected) for each in (module, twin)
        ):
            return False
        if not _have_equal_attributes(vars(module), vars(twin), is_root=not name):
            return False
    return len(set(pairs.values())) == len(pairs)


def _have_equal_attributes(one: Mapping[str, Any], other: Mapping[str, Any], *, is_root: bool) -> bool:
    """Compare what two modules hold; a root's forward is that of whoever asks."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        twin = other[name]
        if name in _HOOKS or (is_root and name == "forward"):
            continue
        if name == "_modules":
            is_equal = list(value) == list(twin)
        elif name in _CONTENTS:
            is_equal = value.keys() == twin.keys() and all(map(_are_twins, value.values(), twin.values()))
        else:
            is_equal = _is_equal(value, twin)
        if not is_equal:
            return False
    return True


def _are_twins(one: Any, other: Any) -> bool:
    """Return whether two parameters or buffers, or two missing ones, have one form."""
    if one is None or other is None:
        return one is other
    is_odd = any(not each.is_meta or set(vars(each)) for each in (one, other))
    return one is other or (
        not is_odd
        and type(one) is type(other)
        and (one.shape, one.stride(), one.dtype, one.requires_grad)
        == (other.shape, other.stride(), other.dtype, other.requires_grad)
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether code cannot tell two values apart but by their identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in PLAIN:
        return repr(one) == repr(other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_equal, one.values(), other.values()))
    is_set = isinstance(one, set | frozenset) and all(type(each) in PLAIN for each in (*one, *other))
    return is_set and one == other


def shared_objects(one: nn.Module, other: nn.Module, prefix: str) -> frozenset[str]:
    """Return the names of objects that modules of both blocks hold: their attributes have one name, of the first."""
    theirs = dict(other.named_modules())
    return frozenset(
        f"{prefix}{fqn}.{name}".replace("..", ".")
        for fqn, module in one.named_modules()
        for name, value in vars(module).items()
        if hasattr(value, "__dict__") and fqn in theirs and vars(theirs[fqn]).get(name) is value
    )
