"""Random numbers that one forward draws: where, and from which generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from composer3d.step import Site

__all__ = ["Foreign", "recorded_draws"]


class Foreign:
    """The generators of Python and numpy, which no stream of a run sets."""

    def __init__(self) -> None:
        self._before = self._states()

    def moved(self) -> str:
        """Return which of them have been drawn from since; empty for none."""
        names = ("Python's random", "numpy.random")
        return " and ".join(
            name for name, old, new in zip(names, self._before, self._states(), strict=True) if old != new
        )

    def _states(self) -> tuple[str, str]:
        numpy = sys.modules.get("numpy")
        return repr(random.getstate()), "" if numpy is None else _digest(numpy.random.get_state(legacy=False))


def _digest(state: Any) -> str:
    inner = state["state"]
    return f"{inner.get('pos')} {hash(bytes(inner['key'].data))}" if "key" in inner else repr(inner)


@contextlib.contextmanager
def recorded_draws(model: nn.Module, *, num_samples: int) -> Iterator[list[Site]]:
    """Record the calls inside that draw random numbers, each place once.

    Args:
        model: Whose modules' code is looked for.
        num_samples: Of the batch it is called with.
    """
    from composer3d import torch_compat
    from composer3d.step import Site, caller, draw_of

    names = {id(module): fqn for fqn, module in model.named_modules()}
    found: dict[str, Site] = {}

    def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draw = draw_of(func, args, kwargs)
        if draw is not None and draw.written is not None:
            with mode:
                return draw.written()
        if draw is not None:
            owner, place = caller(names)
            site = Site(
                fqn=names.get(owner, "") if owner is not None else "",
                function=func.__name__,
                place=place,
                shape=draw.shape,
                num_samples=num_samples,
                # A number with a dim of 1 is that of a sample where a micro-batch has one.
                by_sample=draw.has_samples(num_samples) or (draw.is_common(num_samples) and not draw.shape),
            )
            found.setdefault(str(site), site)
        return func(*args, **kwargs)

    sites: list[Site] = []
    mode = torch_compat.function_mode(look)
    with mode:
        yield sites
    sites += found.values()
