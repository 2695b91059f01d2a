"""Gradients of what a loop gives the model to differentiate by, as one device has them: soft prompts, attacks, maps.

`.grad` of a leaf, such as `inputs_embeds.requires_grad_()`, has what the backward of this rank has summed for it: as
much larger as losses are, and where ranks share sequences the part of this rank's positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.step.losses.inside_values import InsideValues

__all__ = ["InputGradients"]

# Functions in front of an input that are looked at: a loop computes one with a few, another model with many.
_NUM_NODES = 64


class InputGradients:
    """Divides gradients of leaves among inputs of forwards, and adds the parts of ranks that share a sequence.

    Memory: none. Collectives: one all-reduce of each such gradient over cp, in a backward.

    Args:
        inside: Knows the ranks that share sequences.
        factor: Returns by which gradients of the backward at work are larger than one device's; 1 in none.
        trained: Leaves whose gradients an optimizer averages; kept up to date.
    """

    def __init__(self, inside: InsideValues, factor: Callable[[], float], trained: Sequence[Tensor]) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._inside, self._factor, self._trained = inside, factor, trained
        self._seen = WeakTensorKeyDictionary()
        self._of_step: dict[int, Callable[[], Tensor | None]] = {}

    def forget(self) -> None:
        """Begin a step."""
        self._of_step.clear()

    def of_step(self) -> list[Tensor]:
        """Return the leaves that backwards of this step have reached; their gradients are scaled as parameters' are."""
        found = [reference() for reference in self._of_step.values()]
        return [leaf for leaf in found if leaf is not None and leaf.grad is not None]

    def watch(self, inputs: Any) -> None:
        """Watch the leaves among inputs, and those of which they are computed; parameters are left alone."""
        for value in tensors(inputs):
            if value.requires_grad:
                for leaf in _leaves(value):
                    if leaf not in self._seen:
                        self._seen[leaf] = True
                        self._hook(leaf)

    def _hook(self, leaf: Tensor) -> None:
        from torch.utils.hooks import unserializable_hook

        reference = weakref.ref(leaf)

        @unserializable_hook
        def one_devices(gradient: Tensor) -> Tensor | None:
            factor = self._factor()
            if factor == 1.0 or any(each is reference() for each in self._trained):
                return None
            self._of_step[id(reference)] = reference
            hooks = self._inside.hooks
            return (gradient if hooks is None else hooks.summed(gradient)) / factor

        handle = leaf.register_hook(one_devices)
        table = torch_compat.gradient_hooks(leaf)[0]
        for key in [key for key in table if key != handle.id]:
            table[key] = table.pop(key)  # behind this one: hooks of the loop are given the same


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a tensor that are no parameters."""
    from torch import nn

    if value.is_leaf:
        if not isinstance(value, nn.Parameter):
            yield value
        return
    pending: list[Any] = [value.grad_fn]
    seen = set(pending)
    while pending and len(seen) < _NUM_NODES:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            yield leaf
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                pending.append(other)
