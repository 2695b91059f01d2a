"""Errors that torch raises inside of a step, and the readings of plugins that know their cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from composer3d.errors import StepError
from composer3d.observation.lost_peers import chain_of

__all__ = ["TorchErrors"]


@dataclass
class TorchErrors:
    """Stash of the readings of torch's errors: `context.stash(TorchErrors)`.

    Attributes:
        readings: Each returns, of the text of an error that torch raised first, what the user can do; None of others.
    """

    readings: list[Callable[[str], str | None]] = field(default_factory=list)

    def refuse(self, error: RuntimeError) -> None:
        """Raise what a plugin reads in an error; return where none knows its cause.

        Raises:
            StepError: With the cause, and the key of the manifest to change.
        """
        origin = str(chain_of(error)[-1])
        for read in self.readings:
            if (text := read(origin)) is not None:
                raise StepError(text) from error
