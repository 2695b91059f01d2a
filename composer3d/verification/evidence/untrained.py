"""Parameters that nothing trains: their modules run, and no gradient reaches them, on one device either.

A comparison with one device cannot find them. A router is one whose scores are detached, or only choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.verification.evidence.module_outputs import Outputs

__all__ = ["notes_of_untrained", "untrained"]

_TINY = 1e-13  # of the largest element of all gradients: what is left of a sum that is zero


def untrained(trained: Collection[str], steps: Sequence[Mapping[str, Tensor]]) -> tuple[str, ...]:
    """Return the parameters that have no gradient in any step.

    One of zeros is none in several steps, where it is so of all parameters of its module: weights that are zeros at the
    start leave others without in the first, and a bias of keys never has any.

    Args:
        trained: Names of parameters that require gradients.
        steps: The gradients of each, by name.
    """
    largest = [max((float(g.abs().max()) for g in step.values() if g.numel()), default=0.0) for step in steps]

    def is_none(fqn: str) -> bool:
        return all(step.get(fqn) is None for step in steps)

    def is_zero(fqn: str) -> bool:
        found = [(step.get(fqn), limit) for step, limit in zip(steps, largest, strict=True)]
        return all(g is None or not g.numel() or float(g.abs().max()) <= _TINY * limit for g, limit in found)

    modules: dict[str, list[str]] = {}
    for fqn in trained:
        modules.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    dead = {fqn for fqns in modules.values() if len(steps) > 1 and all(map(is_zero, fqns)) for fqn in fqns}
    return tuple(fqn for fqn in trained if fqn in dead or is_none(fqn))


def notes_of_untrained(fqns: Sequence[str], outputs: Sequence[Outputs]) -> Iterator[str]:
    """Yield a note that names them, those of modules that returned something alone: tokens may leave experts without.

    Args:
        fqns: As of `untrained`.
        outputs: Of modules in the first step.
    """
    ran = {fqn for each in outputs for fqn, made in each.items() if any(output.num_elements for output in made)}
    found = [fqn for fqn in fqns if fqn.rpartition(".")[0] in ran]
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        yield (
            f"no gradient reaches {', '.join(found[:4])}{more}, on one device either, so that nothing trains what its "
            "module computes with: that is detached or computed under no_grad, only chooses (argmax, one_hot, the "
            "indices of topk), comes out the same whatever it is (one weight divided by itself), or is not used"
        )
