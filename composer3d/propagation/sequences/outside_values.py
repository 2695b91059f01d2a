"""Propagation of sharded activations that a model keeps, through code outside of its forward: losses, and loops.

Shapes as in `sequence_mode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.function_dims import OBJECT, SIZES, name_of
from composer3d.propagation.functions.whole_operands import is_in_place
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.gradient_hooks import GradientHooks
from composer3d.propagation.sequences.position_draws import SequenceDraws
from composer3d.propagation.sequences.sequence_mode import SequencePropagation
from composer3d.propagation.shards import PropagationError, attach

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OutsideValues"]


class OutsideValues(SequencePropagation):
    """Propagates what code outside of a model computes of its activations.

    Args:
        degree: Ranks along the axis.
        rules: Of the plugin that shards the sequence.
        mesh: Of one dim, the axis.
        axis: Its name.
        padded: Numbers of tokens by padded lengths, of the batch at work: code is given tokens alone.
        refused: Why nothing sharded may be read; empty where it may.
        where: For messages.
        is_alike: Whether all ranks along the axis compute the same, of whole outputs. What has no gradient, or is
            differentiated by code itself, is whole then: code trains modules of its own with it, or keeps it.
        gathers: Whether all that is read is gathered, as after a backward: what code logs and keeps.
        draws_of: As of `SequenceWholes`.
        hooks: As of `SequencePropagation`.
    """

    def __init__(
        self,
        degree: int,
        *,
        rules: SequenceRules,
        mesh: DeviceMesh | None,
        axis: str,
        padded: Mapping[int, int],
        refused: str = "",
        where: str = "the loss",
        is_alike: bool = False,
        gathers: bool = False,
        draws_of: SequenceDraws | None = None,
        hooks: GradientHooks | None = None,
    ) -> None:
        super().__init__(degree, where, rules=rules, mesh=mesh, axis=axis, draws_of=draws_of, hooks=hooks)
        self._padded, self._refused = padded, refused
        self.has_wholes, self._gathers = is_alike, gathers

    def run(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run one function.

        Raises:
            LossError: It reads what is refused.
            PropagationError: It cannot be run on local shards.
        """
        name = name_of(func)
        if func is torch.autograd.grad and self.has_wholes:
            return self._differentiated(*args, **options)
        if self._gathers and name not in OBJECT:
            args, options = torch_compat.tree_map(self._passed_whole, [list(args), options])
        specs = [] if name in OBJECT else self._specs_in(args, options)
        if specs and self._refused:
            raise LossError(f"{name} of an activation that the model keeps{beside()}: {self._refused}")
        if specs and self._padded:
            if is_in_place(name) and self._tokens(args[0]) is not args[0]:
                raise PropagationError(
                    f"{self._where}: {name} writes into an activation of a sequence that is padded{beside()}, of "
                    "which code is given its tokens; return another tensor, or use lengths that need no padding"
                )
            args, options = torch_compat.tree_map(self._tokens, [list(args), options])
        if specs and self.has_wholes and name not in SIZES and not is_in_place(name):
            is_kept = self._gathers or name == "detach"
            args, options = torch_compat.tree_map(
                lambda x: self._whole(x) if is_kept or not getattr(x, "requires_grad", True) else x,
                [list(args), options],
            )
        return super().run(func, args, options)

    def _differentiated(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that `torch.autograd.grad` is asked for: of a shard that of all positions.

        All ranks along the axis compute the same losses, and what they send each other's shards is summed.
        """
        given = [inputs] if isinstance(inputs, Tensor) else [*inputs]
        outputs, options = torch_compat.tree_map(self._whole, [outputs, options])
        assert self._hooks is not None, "a loop's"
        with self._hooks.asking():
            gradients = torch.autograd.grad(outputs, given, **options)
        return tuple(self._gradient_of(x, each) for x, each in zip(given, gradients, strict=True))

    def _gradient_of(self, x: Tensor, gradient: Tensor | None) -> Tensor | None:
        spec = self._spec_of(x)
        if spec is None or gradient is None:
            return gradient
        with self._within():
            share = attach(gradient / self._degree, spec)
        found: Tensor = self._tokens(share)
        return self._whole(found)

    def _passed_whole(self, x: Any) -> Any:
        """Return all positions of what has left the model without a mark: hooks may have kept it."""
        if self._hooks is None or not isinstance(x, Tensor) or self._spec_of(x) is not None:
            return x
        if (spec := self._hooks.passed(x)) is None:
            return x
        with self._within():
            return self._hooks.gathered(x, spec, self._padded)

    def _tokens(self, x: Any) -> Any:
        """Return all tokens of a sequence that is padded."""
        spec = self._spec_of(x)
        if spec is None or not any(length in self._padded for length in spec.placed.parts):
            return x
        whole: Tensor = self._whole(x)
        with self._within():
            ends = torch.tensor(spec.placed.parts).cumsum(0).tolist()
            starts = [end - length for end, length in zip(ends, spec.placed.parts, strict=True)]
            kept = [self._padded.get(length, length) for length in spec.placed.parts]
            runs = [torch.arange(start, start + num) for start, num in zip(starts, kept, strict=True)]
            return whole.index_select(spec.placed.dim, torch.cat(runs).to(whole.device))
