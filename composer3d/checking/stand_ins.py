"""Models that stand in for one that a manifest does not name, so that what does not depend on it is checked.

They are unlike: a dense model by its defaults, and a mixture of experts that the manifest's degrees divide. A problem
is the manifest's own if it is found with each of them, in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d.errors import PatternError
from composer3d.mesh import AXES, Role

if TYPE_CHECKING:
    from composer3d.checking.check import Inspection
    from composer3d.manifest import Manifest

__all__ = ["StandIn", "inspect_any", "stand_ins"]

_BLOCKS, _MOST_BLOCKS, _HEADS, _EXPERTS, _WIDTH, _ROWS = 12, 128, 8, 8, 128, 1 << 20


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A model in the place of one that is not known.

    Args:
        name: Its factory.
        overrides: Of the manifest, which make it the manifest's.
    """

    name: str
    overrides: tuple[str, ...]


def stand_ins(manifest: Manifest) -> tuple[StandIn, StandIn]:
    """Return the models, the usual one first.

    Args:
        manifest: Whose degrees divide the second one's sizes.
    """
    degrees = {axis.role: max(manifest.degrees.get(axis.name) or 1, 1) for axis in AXES if axis.role is not Role.BATCH}
    stages, shared = degrees[Role.STAGE], math.lcm(degrees[Role.TENSOR], degrees[Role.SEQUENCE])
    heads = _HEADS * shared
    sizes = {
        "dim": 32 * heads,
        "num_layers": stages * max(2, min(_BLOCKS, _MOST_BLOCKS // stages)),
        "num_heads": heads,
        "ffn_multiple_of": _WIDTH * shared,
        "vocab_size": -(-_ROWS // shared) * shared,
        "num_experts": _EXPERTS * degrees[Role.EXPERT],
    }
    # Names of blocks are of the model that is not known.
    named = () if manifest.model.blocks is None else ('model.blocks="layers"',)
    mixture = tuple(f"model.args.{name}={size}" for name, size in sizes.items())
    return (
        StandIn(name="composer3d.models:llama", overrides=('model.use="composer3d.models:llama"', *named)),
        StandIn(name="composer3d.models:moe", overrides=('model.use="composer3d.models:moe"', *mixture, *named)),
    )


def inspect_any(models: Sequence[StandIn], inspect: Callable[[Sequence[str]], Inspection]) -> Inspection:
    """Inspect a manifest with one model after the other, and keep what is wrong with each of them.

    Args:
        models: At least one.
        inspect: Inspects it with further overrides.

    Returns:
        The inspection with the first model of which there is no error, by that one's name; without a plan where there
        is none.
    """
    shared, best = None, None
    for model in models:
        found = inspect(model.overrides)
        told = [problem for problem in found.problems if PatternError.SAID not in problem.message]
        shared = told if shared is None else [problem for problem in shared if problem in told]
        if best is None and found.ok(strict=False):
            best = found
            found.stand_in = model.name
        if not shared:
            break
    assert shared is not None, "there is a model"
    if best is None:
        best = found
        best.preparation, best.stand_in = None, ""
    best.problems = shared
    return best
