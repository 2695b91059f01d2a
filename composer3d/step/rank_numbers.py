"""A number of every rank that travels with the step guard's all-reduce."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RankNumbers"]


@dataclass(kw_only=True)
class RankNumbers:
    """One integer of each rank, on the all-reduce that begins a step: no collective is added. A stash of the context.

    Attributes:
        names: By whom the places are taken, in their order; filled before the first step, alike on all ranks.
        own: This rank's numbers by name, sent with the next batch; between 0 and 2**62.
        everyone: By name those of the ranks of one global batch, in the order of `ranks`, as of the last batch.
        ranks: Global ranks of a batch; empty before the first step.
    """

    names: list[str] = field(default_factory=list)
    own: dict[str, int] = field(default_factory=dict)
    everyone: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    def add(self, name: str) -> None:
        """Take a place on the all-reduce.

        Args:
            name: Of the numbers, such as the plugin's.
        """
        if name not in self.names:
            self.names.append(name)
            self.names.sort()
