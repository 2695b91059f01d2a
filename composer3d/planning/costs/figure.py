"""A figure of a plan, with how it is known and between which bounds it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Figure", "Provenance"]

Provenance = Literal["exact", "traced", "modelled", "calibrated", "assumed"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value that somebody will rely on.

    Args:
        value: In the unit that the field which holds it names.
        known: `exact` where it was counted, `traced` where the run's own code was followed, `modelled` where formulas
            stand on published figures, `calibrated` where they stand on measurements of the machine, `assumed` where
            it was stated.
        low: What it is at least; the value itself where it is exact.
        high: What it is at most.
    """

    value: float
    known: Provenance
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Figure:
        """Return a figure that was counted."""
        return cls(value=value, known="exact", low=value, high=value)

    @classmethod
    def within(cls, value: float, part: float, known: Provenance) -> Figure:
        """Return a figure that may be off by a part of itself.

        Args:
            value: In its unit.
            part: Such as 0.25; the bounds are that factor away, so that a time stays above zero.
            known: How.
        """
        return cls(value=value, known=known, low=value / (1 + part), high=value * (1 + part))

    def scaled(self, factor: float) -> Figure:
        """Return it in another unit."""
        return Figure(value=self.value * factor, known=self.known, low=self.low * factor, high=self.high * factor)

    def inverse(self, of: float) -> Figure:
        """Return what is `of` divided by it: tokens a second from seconds a step."""
        return Figure(value=of / self.value, known=self.known, low=of / self.high, high=of / self.low)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {"value": self.value, "known": self.known, "low": self.low, "high": self.high}
