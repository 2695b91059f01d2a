"""Random streams of torch functions: on sharded tensors one that differs along tp, on replicated ones a common one.

Replicated activations are equal on all ranks along tp and have to stay so. Of sharded ones each rank holds other
features (or another part of the sequence), whose masks have to be independent.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer3d import torch_compat
from composer3d.context import RunContext
from composer3d.propagation.functions.view_shapes import Placed

__all__ = ["VALUED", "Drawing", "draws", "draws_whole", "eagerly", "may_draw", "site_of"]

# Functions with a probability, and whether they are called in training.
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout".split()
)
DRAWING = frozenset(
    "rand_like randn_like randint_like bernoulli multinomial normal gumbel_softmax uniform_ normal_ "
    "bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_".split()
)


# Functions that draw a tensor of a size.
FACTORIES = frozenset("rand randn randint randperm".split())
# Those that draw as many numbers as values ask for, so that those of a position depend on the others.
VALUED = frozenset("poisson binomial _standard_gamma _sample_dirichlet".split())
# Layers of torch's recurrent networks, between which there is dropout.
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())


def eagerly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a forward from compilation: it changes the generators' state, or decides at run time."""
    forward.composer3d_eager = True  # type: ignore[attr-defined]
    return forward


def site_of(fqn: str) -> int:
    """Return a number for a place in the model, the same on every rank and in every stage."""
    return zlib.crc32(fqn.encode()) << 16


def draws(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call of a function of that name draws random numbers."""

    def argument(at: int, key: str, default: Any) -> Any:
        return options.get(key, args[at] if len(args) > at else default)

    if name in DRAWING | VALUED:
        return True
    if name.rstrip("_") in DROPOUTS:
        return bool(argument(1, "p", 0.5)) and argument(2, "train" if "train" in options else "training", True) is True
    if name in RECURRENT:
        return bool(argument(5, "dropout", 0.0)) and argument(6, "train", False) is True
    if name == "scaled_dot_product_attention":
        return bool(argument(4, "dropout_p", 0.0))
    return name in ("rrelu", "rrelu_") and argument(3, "training", False) is True


def may_draw(name: str) -> bool:
    """Return whether a function of that name draws random numbers, if it is asked to, into a tensor that it returns."""
    return name in DRAWING | FACTORIES or name.rstrip("_") in DROPOUTS


def draws_whole(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call of a function of that name draws random numbers, also for a tensor that it makes."""
    return name in FACTORIES or draws(name, args, options)


class Drawing:
    """Numbers the draws on sharded tensors of one forward; a recomputation repeats the numbers, and the draws.

    Args:
        fqn: Of the module, from which its draws are seeded.
    """

    def __init__(self, context: RunContext, fqn: str) -> None:
        self._context, self._site, self._count = context, site_of(fqn), 0

    def sharded(self, placed: Placed) -> contextlib.AbstractContextManager[None]:
        """Draw inside for tensors that are sharded over tp, each rank its shard.

        Raises:
            CaptureError: A graph is being captured, which would draw the same numbers on every rank.
        """
        if torch_compat.capture_is_on():
            raise torch_compat.CaptureError("it draws random numbers for sharded tensors")
        self._count += 1
        return self._context.streams.sharded(self._site + self._count, dim=placed.dim, parts=placed.parts)
