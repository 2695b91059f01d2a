"""Dims along which features are sharded of what modules are given and return, as a dry run of their block sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer3d import torch_compat
from composer3d.propagation import Placed, Record, spec_of

__all__ = ["ModuleActivations", "SeenActivations"]

Dims = tuple[Placed | None, ...]


@dataclass(frozen=True, kw_only=True)
class ModuleActivations:
    """Sharded dims of the leaves of what a module is given, by place and then by name, and of those that it returns.

    Args:
        given: None of a leaf that every rank has whole, but along the sequence.
        returned: Likewise.
        is_alike: Whether all calls of the module in one forward are alike.
    """

    given: Dims
    returned: Dims
    is_alike: bool = True

    @property
    def are_sharded(self) -> bool:
        """Whether any is."""
        return not self.is_alike or any(placed is not None for placed in (*self.given, *self.returned))


@dataclass
class SeenActivations:
    """Those of a dry run, by the FQNs in the block."""

    found: dict[str, ModuleActivations] = field(default_factory=dict)

    def around(self, fqn: str, forward: Callable[..., Any], record: Record) -> Callable[..., Any]:
        """Return a forward that notes them, and is at work in a record."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            record.enter(fqn)
            try:
                output = forward(*args, **kwargs)
            finally:
                record.leave()
            with torch_compat.without_torch_functions():
                seen = ModuleActivations(given=_dims([list(args), kwargs]), returned=_dims(output))
            if self.found.setdefault(fqn, seen) != seen:
                self.found[fqn] = ModuleActivations(given=(), returned=(), is_alike=False)
            return output

        return noted

    def sharded(self) -> dict[str, ModuleActivations]:
        """Return those of modules with features that are sharded."""
        return {fqn: seen for fqn, seen in self.found.items() if seen.are_sharded}


def _dims(values: Any) -> Dims:
    specs = [spec_of(leaf) for leaf in torch_compat.tree_leaves(values)]
    return tuple(None if spec is None or spec.is_sequence else spec.placed for spec in specs)
