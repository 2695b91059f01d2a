"""Sharding of what modules return, for stages of a pipeline that receive it: the code between blocks reads it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import PropagatedSequence, PropagationError, spec_of

__all__ = ["StageValues"]

# Of a tensor that is sharded in several parts, which one dim does not tell.
PARTS = -1
# Of each tensor that a call returns, in order: the dim along which it is sharded, None, or PARTS.
Returned = tuple[int | None, ...]


@dataclass(kw_only=True)
class StageValues:
    """Sharding of the tensors that the modules of a model returned in the dry run, for stages that receive them.

    A received shard carries no mark. Blocks mark what they take; the root's own code between blocks would take it for
    a whole sequence, and relate a rank's own positions alone.

    Args:
        axis: Over which the sequence is sharded.

    Attributes:
        returned: By FQN, of each call.
    """

    axis: str
    returned: dict[str, list[Returned]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what modules return inside, in a dry run; after hooks that are there already."""
        handles = [
            module.register_forward_hook(self._note(fqn), with_kwargs=True) for fqn, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, fqn: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch_compat.without_torch_functions():
                leaves = [leaf for leaf in torch_compat.tree_leaves(output) if isinstance(leaf, Tensor)]
                self.returned.setdefault(fqn, []).append(tuple(map(self._dim, leaves)))

        return note

    def _dim(self, leaf: Tensor) -> int | None:
        spec = spec_of(leaf, self.axis)
        return None if spec is None else spec.placed.dim if len(spec.placed.parts) == 1 else PARTS

    def complete(self, forms: Iterable[Sequence[str]]) -> None:
        """Let blocks that the dry run left out return what others of their form do."""
        for group in forms:
            known = [self.returned[fqn] for fqn in group if fqn in self.returned]
            self.returned |= {fqn: known[0] for fqn in group if known and fqn not in self.returned}

    def given(self, sequence: PropagatedSequence, fqn: str, call: int, index: int, value: Tensor) -> Tensor:
        """Return what the code of a stage is given for a value of another one: marked, if it is a shard.

        Args:
            sequence: Of the stage.
            fqn: Of the module that returned it.
            call: Index among its calls in a forward.
            index: Of the tensor in what it returned.
            value: As it was received.

        Raises:
            PropagationError: It is sharded in parts.
        """
        calls = self.returned.get(fqn, [])
        dims: Returned = calls[min(call, len(calls) - 1)] if calls else ()
        dim = dims[index] if index < len(dims) else None
        if dim is None or spec_of(value, self.axis) is not None:
            return value
        if dim == PARTS:
            raise PropagationError(
                f'"{fqn}" returns several sequences in one dim, which a stage of the pipeline receives; let it return '
                "them one by one, or begin the stage elsewhere ([scheduling.pipeline] split)"
            )
        return sequence.mark(value, dim, is_inside=True)
