"""Roles of the linear layers of a block, and the changes under which its code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer3d.propagation import Placed, Ranges, reader_of
from composer3d_plugins.sharding.tensor_parallel.module_activations import ModuleActivations
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING, Rules, features
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Code", "Roles", "roles_of", "sized"]


@dataclass(kw_only=True)
class Roles:
    """Roles of a block's linear layers, by their FQNs in it.

    Attributes:
        expanding: Those whose results are sharded, with the sizes of their parts.
        sequence_dim: The dim of activations that is sharded outside of them, None if none is.
        local: Modules whose parameters have their gradients summed by their style.
        unsharded: Linear layers that work on a full sequence though activations are sharded, as an encoder's output.
        attention: torch's attention modules that are sharded along their heads.
        gathered: Of expanding layers the features that are gathered where code takes them.
        weights: Parameters that the code multiplies itself, and how they are sharded.
    """

    expanding: dict[str, tuple[int, ...]]
    sequence_dim: int | None = None
    local: frozenset[str] = frozenset()
    unsharded: frozenset[str] = frozenset()
    attention: frozenset[str] = frozenset()
    gathered: Mapping[str, Ranges] = field(default_factory=dict)
    weights: Mapping[str, Placed] = field(default_factory=dict)

    def weights_in(self, block: nn.Module, fqn: str) -> Mapping[str, Placed]:
        """Return of the weights those that the code of one module in the block multiplies."""
        return {name: at for name, at in self.weights.items() if reader_of(block, owner_of(name)) == fqn}


def roles_of(block: nn.Module, rules: Rules, *, sequence_dim: int | None, observed: bool = False) -> Roles:
    """Return what rules say about a block.

    Args:
        block: With all of its heads and features.
        rules: By the FQNs in it.
        sequence_dim: As in `Roles`.
        observed: Whether what is whole along the sequence is yet to be seen.
    """

    def named(*styles: str) -> frozenset[str]:
        return frozenset(name for name, rule in rules.items() if rule.style in styles)

    expanding = {
        name: rules[name].parts or (features(block.get_submodule(name))[1],)
        for name in rules
        if name in named(*EXPANDING)
    }
    layers = named(*EXPANDING, *CONTRACTING) if sequence_dim is not None and not observed else frozenset()
    return Roles(
        expanding=expanding,
        sequence_dim=sequence_dim,
        local=frozenset() if observed else named("local", "sequence"),
        unsharded=frozenset(name for name in layers if not rules[name].is_sharded),
        attention=named("attention"),
        gathered={name: rules[name].ranges for name in expanding},
        weights={
            f"{owner}.{name}" if owner else name: placed
            for owner, rule in rules.items()
            for name, placed in rule.weights
        },
    )


@dataclass(frozen=True, kw_only=True)
class Code:
    """Adaptations under which a block's code runs on local shards.

    Args:
        sizes: This rank's values of attributes that are sizes of the whole model, by module and name.
        propagated: Modules whose code is propagated.
        gathered: Modules that are given the full sequence, of which all they do with it is to project it.
        given: Of torch's attention modules that are sharded: which of query, key and value are sharded along the
            sequence.
        apart: Modules that draw on nothing but sharded tensors, and the sharded dim if that is one.
        activations: Of modules that are given sharded features, or return such.
    """

    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    propagated: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    given: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    apart: Mapping[str, Placed | None] = field(default_factory=dict)
    activations: Mapping[str, ModuleActivations] = field(default_factory=dict)


@contextlib.contextmanager
def sized(block: nn.Module, sizes: Mapping[tuple[str, str], int]) -> Iterator[None]:
    """Replace size attributes of a block's modules inside."""
    modules = {fqn: block.get_submodule(fqn) for fqn, _ in sizes}
    before = {key: vars(modules[key[0]])[key[1]] for key in sizes}
    try:
        for (fqn, name), value in sizes.items():
            setattr(modules[fqn], name, value)
        yield
    finally:
        for (fqn, name), value in before.items():
            setattr(modules[fqn], name, value)
