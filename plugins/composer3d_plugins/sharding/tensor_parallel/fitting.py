"""Search for the least change under which a block's own code is correct on local shards.

A run of the block in which every sharded tensor is propagated gives the right results. Code that writes `-1` where
heads are sharded gives the same by itself. Code that reads the number of heads from an attribute does, once the
attribute holds this rank's number. Code that reads the length of a sharded sequence does, if it is given the gathered
sequence and only projects it. Where none helps, as with sizes computed from replicated activations, the smallest
enclosing module is propagated in every forward. Each way is tried on meta, and taken only if functions, numbers,
tensors and results all equal those of the propagated run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from composer3d.propagation import Call, PropagationError, Record
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from composer3d_plugins.sharding.tensor_parallel.module_activations import ModuleActivations
from composer3d_plugins.sharding.tensor_parallel.module_roles import Code, Roles

if TYPE_CHECKING:
    from torch import nn

__all__ = ["fit", "fits"]

NUMBERS = re.compile(r"\.\d+\b")  # of modules in lists
# Of attributes changed together, and of runs that are tried for one block.
MOST_TOGETHER, MOST_RUNS = 3, 80


def fit(
    block: nn.Module, *, roles: Roles, degree: int, call: Call, regions: Mapping[str, str], apart: frozenset[str]
) -> Code | None:
    """Return how the block's code is run; None where all of it has to be propagated.

    Args:
        block: The first of its form.
        roles: Of its linear layers.
        degree: Ranks along tp.
        call: Arguments of one call.
        regions: Of every expanding projection the module around it in which what it gives is sharded.
        apart: FQNs of modules that draw from the sharded stream by their rule.

    Raises:
        PropagationError: The code does with sharded features what cannot be done with them.
    """
    search = Search(block=block, roles=roles, degree=degree, call=call, regions=regions)
    return search.run(Code(apart=dict.fromkeys(apart)))


def fits(block: nn.Module, *, code: Code, roles: Roles, degree: int, call: Call, training: bool = True) -> bool:
    """Return whether code gives the same as if it were propagated, on another call or in evaluation."""
    try:
        search = Search(block=block, roles=roles, degree=degree, call=call, regions={}, training=training)
    except PropagationError:
        return False
    return search.agreeing(code) == search.length


@dataclass(kw_only=True)
class Search:
    """Search over the ways to run a block, least change first.

    Attributes:
        training: Whether the block is in training mode.
        right: Record of the run in which all code is propagated.
        given: As in `Code`, in that run.
        activations: Likewise.
        num_runs: Ways tried so far.
        is_spreading: Whether what helps in one block of a list is tried for all.
    """

    block: nn.Module
    roles: Roles
    degree: int
    call: Call
    regions: Mapping[str, str]
    training: bool = True
    right: Record = field(init=False)
    given: dict[str, tuple[bool, ...]] = field(init=False)
    activations: dict[str, ModuleActivations] = field(init=False)
    num_runs: int = 0
    is_spreading: bool = True

    def __post_init__(self) -> None:
        dry_run = self._dry_run()
        dry_run.propagate(self.call, type(self.block).__name__)
        self.right, self.given = dry_run.record, dict(dry_run.given)
        self.activations = dry_run.activations.sharded()

    def _dry_run(self) -> BlockDryRun:
        return BlockDryRun(block=self.block, degree=self.degree, roles=self.roles, training=self.training)

    @property
    def length(self) -> int:
        """Length that `agreeing` returns where all is right."""
        return len(self.right.entries) + 1

    def agreeing(self, code: Code) -> int:
        """Return how far a run is right: how many entries, and one more if it is to the end."""
        self.num_runs += 1
        dry_run = self._dry_run()
        try:
            dry_run.run_as(code, self.call)
        except Exception:  # a model's own code may raise anything
            return self.right.agreeing(dry_run.record)
        same = dry_run.record.entries == self.right.entries
        return self.length if same else self.right.agreeing(dry_run.record)

    def run(self, code: Code) -> Code | None:
        """Return what makes every entry right."""
        code = replace(code, given=self.given, activations=self.activations)
        for self.is_spreading in (True, False):
            found, reached = code, self.agreeing(code)
            while reached < self.length and (better := self._better(found, reached)) is not None:
                found, reached = better
            if reached == self.length:
                return found
        return None

    def _better(self, code: Code, reached: int) -> tuple[Code, int] | None:
        """Return what gets further than `code` does, by as little as possible."""
        ways = (self._drawing(code, reached), self._sized(code, reached), self._gathering(code, reached))
        for candidate in itertools.chain(*ways):
            if self.num_runs >= MOST_RUNS:
                break
            further = self.agreeing(candidate)
            if further > reached:
                return self._spread(code, candidate, further)
        for candidate in self._propagating(code, reached):
            further = self.agreeing(candidate)
            if further > reached:
                return self._spread(code, candidate, further)
        return None

    def _spread(self, code: Code, better: Code, reached: int) -> tuple[Code, int]:
        """Return what helped for one module, done to those of its name in all blocks of a list if it helps there."""
        sizes, propagated = dict(better.sizes), set(better.propagated)
        for (fqn, name), value in better.sizes.items() - code.sizes.items():
            before = vars(self.block.get_submodule(fqn))[name]
            others = {other: vars(self.block.get_submodule(other)) for other in self._alike(fqn, better)}
            sizes |= {(other, name): value for other, attributes in others.items() if attributes.get(name) == before}
        for fqn in better.propagated - code.propagated:
            propagated |= self._alike(fqn, better) & set(self.regions.values())
        sizes = {key: size for key, size in sizes.items() if not any(_is_in(key[0], fqn) for fqn in propagated)}
        spread = replace(better, sizes=sizes, propagated=frozenset(propagated))
        further = self.agreeing(spread) if spread != better and self.is_spreading else 0
        # What is propagated is right by itself; the next function to go wrong may be of another module's.
        least = reached if propagated != better.propagated else reached + 1
        return (spread, further) if further >= least else (better, reached)

    def _alike(self, fqn: str, code: Code) -> set[str]:
        form, kind = NUMBERS.sub(".*", fqn), type(self.block.get_submodule(fqn))
        return {
            other
            for other, module in self.block.named_modules()
            if NUMBERS.sub(".*", other) == form and type(module) is kind
            if not any(_is_in(other, each) for each in code.propagated)
        }

    def _around(self, reached: int) -> list[str]:
        """Return the module at work where a run went wrong, and those around it, innermost first."""
        place = self.right.place(reached)
        names = place.split(".") if place else []
        return [".".join(names[:count]) for count in range(len(names), -1, -1)]

    def _drawing(self, code: Code, reached: int) -> Iterator[Code]:
        if not self.right.draws_apart(reached):
            return
        for fqn in self._around(reached):
            if fqn and fqn not in code.apart:
                yield replace(code, apart={**code.apart, fqn: self.right.placed_in(fqn)})

    def _sized(self, code: Code, reached: int) -> Iterator[Code]:
        sizes: dict[tuple[str, str], int] = {}
        for fqn in self._around(reached):
            for name, value in vars(self.block.get_submodule(fqn)).items():
                is_size = type(value) is int and value >= self.degree and value % self.degree == 0
                if is_size and (fqn, name) not in code.sizes and not name.startswith("_"):
                    sizes[fqn, name] = value // self.degree
        for count in range(1, MOST_TOGETHER + 1):
            for keys in itertools.combinations(sizes, count):
                yield replace(code, sizes={**code.sizes, **{key: sizes[key] for key in keys}})

    def _gathering(self, code: Code, reached: int) -> Iterator[Code]:
        if self.roles.sequence_dim is None:
            return
        for fqn in self._around(reached):
            # What it is given is shared by the projections of one region.
            regions = {region for name, region in self.regions.items() if _is_in(name, fqn)}
            if len(regions) == 1 and not any(_is_in(fqn, other) for other in code.gathered):
                gathered = replace(code, gathered=code.gathered | {fqn})
                yield gathered
                yield from self._sized(gathered, reached)

    def _propagating(self, code: Code, reached: int) -> Iterator[Code]:
        for fqn in self._around(reached):
            if fqn not in self.regions.values() or any(_is_in(fqn, other) for other in code.propagated):
                continue
            # Code that is propagated sees whole sizes.
            yield replace(
                code,
                sizes={key: value for key, value in code.sizes.items() if not _is_in(key[0], fqn)},
                propagated=frozenset({fqn, *(other for other in code.propagated if not _is_in(other, fqn))}),
                gathered=frozenset(other for other in code.gathered if not _is_in(other, fqn)),
            )


def _is_in(fqn: str, other: str) -> bool:
    return not other or fqn == other or fqn.startswith(f"{other}.")
