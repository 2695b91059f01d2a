"""Roles of one block's linear layers, found by trial: taken for expanding, fused or whole until a dry run works."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import nn

from composer3d.propagation import Call, PropagationError, kind_of
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from composer3d_plugins.sharding.tensor_parallel.embedding_and_head import READ
from composer3d_plugins.sharding.tensor_parallel.module_roles import Roles
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import features
from composer3d_plugins.sharding.tensor_parallel.weight_shards import gives_features

__all__ = ["Derivation"]

NUMBERS = re.compile(r"\.\d+\b")  # of modules in lists


@dataclass(kw_only=True)
class Derivation:
    """The roles of one block's linear layers, found by trial.

    Attributes:
        reasons: Why layers stay replicated, by FQN.
        edges: Where the code takes results apart.
        fused: Into how many equal parts layers may yet be taken apart.
        gathered: Parts that are gathered where code takes them, by the features they begin and end with.
        first: What went wrong first with a layer, before it was taken for a fused one.
        read: FQNs in the model of modules whose parameters code outside of them reads.
    """

    block: nn.Module
    fqn: str
    call: Call
    degree: int
    read: frozenset[str] = frozenset()
    expanding: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    edges: dict[str, set[int]] = field(default_factory=dict)
    fused: dict[str, list[int]] = field(default_factory=dict)
    gathered: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    first: dict[str, PropagationError] = field(default_factory=dict)

    def run(self) -> BlockDryRun:
        """Return the first run in which every sharded result reaches a layer that contracts it, also in evaluation.

        Raises:
            PropagationError: The block cannot be run by itself; it names no layers.
        """
        for name, module in self.block.named_modules():
            if kind_of(module) in ("linear", "transposed"):
                self._consider(name, module)
        while True:
            gathered = {name: frozenset(ranges) for name, ranges in self.gathered.items()}
            roles = Roles(expanding=dict(self.expanding), gathered=gathered)
            where = self.fqn or type(self.block).__name__
            dry_run, evaluated = (
                BlockDryRun(block=self.block, degree=self.degree, roles=roles, training=mode) for mode in (True, False)
            )
            try:
                dry_run.propagate(self.call, where)
                evaluated.propagate(self.call, where)
            except PropagationError as error:
                if not error.sources:
                    raise
                self._give_way(error)
                continue
            unused = self.expanding.keys() - {name for names, _ in dry_run.contracting.values() for name in names}
            if not unused:
                return dry_run
            for name in unused:
                self._leave(name, "nothing contracts its result")
                if name in dry_run.contracting:
                    del self.reasons[name]

    def _consider(self, name: str, module: nn.Module) -> None:
        size = features(module)[1]
        if self.full(name) in self.read:
            self.reasons[name] = READ
            return
        if not gives_features(module):
            self.reasons[name] = "it gives something else than features"
            return
        if size % self.degree:
            self.reasons[name] = f"its {size} output features do not divide by tp = {self.degree}"
            return
        self.expanding[name] = (size,)
        self.fused[name] = [n for n in (3, 2) if size % (n * self.degree) == 0]

    def _give_way(self, error: PropagationError) -> None:
        """Take what an error is about for fused projections, or leave it whole."""
        sources = sorted(error.sources & self.expanding.keys())
        assert sources, "whatever is sharded comes from a layer that is taken for an expanding one"
        for name in sources:
            self.first.setdefault(name, error)
        if len(sources) == 1:
            (name,) = sources
            alike = self._alike(name)
            if self._take_for_fused(name, error):
                for other in alike:  # in a stack of blocks, which would meet the same one after another
                    self._take_for_fused(other, error)
                return
        if self._gather(error):
            return
        # The rest may do without the smallest: keys that all heads share, or that are fewer than ranks, say.
        least = min(sum(self.expanding[name]) for name in sources)
        for name in sources:
            if sum(self.expanding[name]) == least:
                self._leave(name, str(self.first[name]))

    def _alike(self, name: str) -> list[str]:
        """Return the layers of one's name in other blocks of a list, of which the same is known."""
        form, known = NUMBERS.sub(".*", name), self._known(name)
        return [o for o in self.expanding if o != name and NUMBERS.sub(".*", o) == form and self._known(o) == known]

    def _known(self, name: str) -> tuple[object, ...]:
        return self.expanding[name], self.fused[name], self.edges.get(name), self.gathered.get(name)

    def _take_for_fused(self, name: str, error: PropagationError) -> bool:
        """Take a layer apart where an error says, or into equal parts; return False where neither is left to try."""
        size = sum(self.expanding[name])
        if error.edge is not None and self._take_apart(name, size, error.edge):
            return True
        if len(self.expanding[name]) > 1 or self.edges.get(name) or not self.fused[name]:
            return False
        count = self.fused[name].pop(0)
        self.expanding[name] = (size // count,) * count
        return True

    def _gather(self, error: PropagationError) -> bool:
        """Gather the smallest part that an error is about, of a layer of which at most half is gathered then."""
        found: list[tuple[int, str, tuple[int, int]]] = []
        for name, start, stop in error.ranges:
            parts, gathered = self.expanding.get(name, ()), self.gathered.get(name, set())
            edges = [sum(parts[:at]) for at in range(len(parts) + 1)]
            for part in zip(edges, edges[1:], strict=False):
                size = part[1] - part[0]
                fits = 2 * (size + sum(last - first for first, last in gathered)) <= sum(parts)
                if start <= part[0] and part[1] <= stop and part not in gathered and fits:
                    found.append((size, name, part))
        if not found:
            return False
        _, name, part = min(found)
        self.gathered.setdefault(name, set()).add(part)
        return True

    def _take_apart(self, name: str, size: int, edge: tuple[int, int]) -> bool:
        known = self.edges.setdefault(name, {0, size})
        found = known | set(edge)
        if found == known or max(found) > size:
            return False
        self.edges[name] = found
        self.gathered.pop(name, None)
        at = sorted(found)
        parts = tuple(last - first for first, last in zip(at, at[1:], strict=False))
        if any(part % self.degree for part in parts):
            return False
        self.expanding[name] = parts
        return True

    def _leave(self, name: str, reason: str) -> None:
        del self.expanding[name]
        self.gathered.pop(name, None)
        self.reasons[name] = reason

    def full(self, name: str) -> str:
        """Return the FQN in the model of a name in the block."""
        return ".".join(filter(None, (self.fqn, name)))
