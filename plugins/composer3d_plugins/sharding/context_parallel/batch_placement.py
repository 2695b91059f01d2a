"""Sharding of batches along their sequence: which arguments are sharded, and padding of their length.

A length that the degree does not divide is padded at the end if the model is causal: no token attends to later ones.
Outputs of padding are dropped before the loss, so that losses, counts and gradients are those of the unpadded batch.

Shapes: an argument [B, S, ...], with the sequence in `dim`, becomes [B, local length, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from composer3d import Batch, BatchError, torch_compat
from composer3d_plugins.sharding.context_parallel.length_numbers import named
from composer3d_plugins.sharding.context_parallel.model_inputs import LABELS, ModelInputs
from composer3d_plugins.sharding.context_parallel.packed_documents import balanced_positions
from composer3d_plugins.sharding.context_parallel.position_tables import Table
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions

__all__ = ["Placement", "Sequences"]

# Label that losses ignore.
IGNORED = -100


@dataclass(kw_only=True)
class Sequences:
    """Sequence lengths of the current batch.

    Attributes:
        lengths: Number of tokens, by padded length.
        is_own_forward: Whether a loop calls the model itself.
        relation: By what the loss relates positions; empty where it does not.
        in_order: Padded lengths in order of the arguments.
        num_samples: Of the first of them.
        positions: Positions by length, where they differ from those of all batches.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    positions: dict[int, Positions] = field(default_factory=dict)
    is_own_forward: bool = False
    relation: str = ""
    in_order: tuple[int, ...] = ()
    num_samples: int = 0

    @property
    def gathers(self) -> bool:
        """Whether outputs are gathered."""
        return self.is_own_forward or bool(self.relation)

    def unpadded(self) -> dict[int, int]:
        """Return numbers of tokens by padded length, of sequences that are padded."""
        return {length: tokens for length, tokens in self.lengths.items() if tokens != length}

    def padded(self) -> tuple[int, int] | None:
        """Return a sequence's number of tokens and its padded length; None where none is padded."""
        return next(((tokens, length) for length, tokens in self.unpadded().items()), None)

    def tokens(self, length: int) -> int:
        """Return the number of tokens of a sequence, without padding."""
        return self.lengths.get(length, length)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Sharding of batches.

    Args:
        inputs: Of the model.
        unit: Lengths are padded to a multiple of it.
        shares_target: Whether targets are sharded, as the model's output is.
        unpadded: Reason why lengths are not padded; empty if they are.
        positions: Returns the positions of every rank of a sequence of a length.
        rank: This rank's index along the axis.
        by_document: Whether positions are balanced by the documents in the inputs.
        relation: Returns by what the loss relates positions, given targets, the number of samples and the lengths.
        table: The smallest table of positions that the model reads.
    """

    inputs: ModelInputs
    unit: int
    shares_target: bool
    unpadded: str
    positions: Callable[[int], Positions]
    rank: int
    by_document: bool = False
    relation: Callable[[Any, int, tuple[int, ...]], str] = lambda target, num_samples, lengths: ""
    table: Table | None = None

    def place(self, batch: Batch) -> tuple[Batch, Sequences]:
        """Return the batch sliced to this rank's positions, and its lengths.

        Raises:
            BatchError: A length is no multiple of the unit, and is not padded.
        """
        dims = self.inputs.sharded(batch.args, batch.kwargs)
        named = list(self.inputs.named(batch.args, batch.kwargs))
        sharded = [(x.shape[0], x.shape[dims[at]]) for at, _, x in named if at in dims]
        tokens = tuple(length for _, length in sharded)
        found = Sequences(
            is_own_forward=batch.is_own_forward,
            in_order=tuple(map(self._padded, tokens)),
            num_samples=sharded[0][0] if sharded else 0,
        )
        found.lengths |= zip(found.in_order, tokens, strict=True)
        padded = {tokens: length for length, tokens in found.lengths.items() if tokens != length}
        if self.by_document:
            whole = [(name, x) for at, name, x in named if at not in dims and isinstance(x, Tensor)]
            for length in found.lengths.keys() - padded.values():
                if (assigned := balanced_positions(whole, self.positions(length))) is not None:
                    found.positions[length] = assigned
        positions = partial(_assigned, found, self.positions)

        def placed(key: int | str, name: str, x: Any) -> Any:
            if key in dims:
                return self._taken(x, dims[key], name in LABELS, positions)
            return self._extended(x, name, padded) if isinstance(x, Tensor) and padded else x

        values = {key: placed(key, name, x) for key, name, x in named}
        args = tuple(values[at] for at in range(len(batch.args)))
        kwargs = {name: values[name] for name in batch.kwargs}
        targets = batch.target
        if targets is not None and self.shares_target and sharded and not batch.is_own_forward:
            found.relation = self.relation(targets, found.num_samples, tokens)
        if targets is not None and self.shares_target and not found.gathers:
            lengths = set(found.lengths.values())
            targets = torch_compat.tree_map(lambda leaf: self._target(leaf, lengths, positions), targets)
        copy = (self.rank, self.positions(found.in_order[0]).degree) if found.relation else batch.copy
        return replace(batch, args=args, kwargs=kwargs, target=targets, copy=copy), found

    def _padded(self, length: int) -> int:
        """Return the length with padding."""
        if length % self.unit and self.unpadded:
            self._refuse(length, self.unpadded)
        padded = -(-length // self.unit) * self.unit
        if self.table is not None and length <= self.table.rows < padded:
            self._refuse(length, f"{named(self.table.where)} reads a table of {self.table.rows} positions")
        return padded

    def _refuse(self, length: int, why: str) -> NoReturn:
        raise BatchError(
            f"a sequence of {length} tokens does not divide into {self.unit} equal chunks, as context_parallel needs, "
            f"and is not padded, since {why}; use {' or '.join(map(str, self._nearest(length)))}"
            f"{self._unbalanced(length)}"
        )

    def _nearest(self, length: int) -> list[int]:
        """Return the nearest lengths that divide, and that the model's tables have."""
        lower, upper = length // self.unit * self.unit, -(-length // self.unit) * self.unit
        most = upper if self.table is None else self.table.rows
        return [each for each in (lower, upper) if each and (each <= most or not lower)]

    def _unbalanced(self, length: int) -> str:
        """Return what to write where a chunk for each rank would divide the length."""
        degree = self.positions(self.unit).degree
        return ", or write balanced = false" if self.unit > degree and length % degree == 0 else ""

    def _taken(self, x: Tensor, dim: int, is_label: bool, positions: Callable[[int], Positions]) -> Tensor:
        """Return this rank's positions of x_BS...; padding repeats the last token, with labels that losses ignore."""
        length = x.shape[dim]
        index = positions(self._padded(length)).index(self.rank).to(x.device)
        index_S = index.clamp(max=length - 1)
        taken: Tensor = _Taken.apply(x, dim, index_S) if x.requires_grad else x.index_select(dim, index_S)
        if not is_label or self._padded(length) == length:
            return taken
        if x.is_floating_point():
            self._refuse(length, "labels of floating point have no value that losses leave out")
        shape = [1] * x.ndim
        shape[dim] = -1
        return taken.masked_fill((index >= length).view(shape), IGNORED)

    def _extended(self, x: Tensor, name: str, padded: Mapping[int, int]) -> Tensor:
        """Pad a mask, positions or documents to the padded length by repeating the last column."""
        dims = [at for at in range(1, x.ndim) if x.shape[at] in padded]
        if not dims or x.is_floating_point() and len(dims) == 1:
            return x  # sizes of images are not numbers of tokens
        length = x.shape[dims[0]]
        if len(dims) > 1:
            self._refuse(length, f'"{name}" of {list(x.shape)} has a row and a column a token')
        index = torch.arange(padded[length], device=x.device).clamp(max=length - 1)
        return x.index_select(dims[0], index)

    def _target(self, leaf: Any, lengths: set[int], positions: Callable[[int], Positions]) -> Any:
        """Return this rank's positions of a target [B, S, ...], without padding."""
        dim = self.inputs.dim
        if not isinstance(leaf, Tensor) or leaf.ndim <= dim or leaf.shape[dim] not in lengths:
            return leaf
        length = leaf.shape[dim]
        held = positions(self._padded(length))
        index = held.index(self.rank).to(leaf.device)
        return leaf.index_select(dim, index[: held.num_below(self.rank, length)])


class _Taken(torch.autograd.Function):
    """Positions of an input, in whose backward nothing is freed: that of each micro-batch runs through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, index_S: Tensor) -> Tensor:
        """Return x_BS... of these positions."""
        ctx.dim, ctx.index_S, ctx.shape = dim, index_S, x.shape
        return x.index_select(dim, index_S)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of all positions."""
        return gradient.new_zeros(ctx.shape).index_add(ctx.dim, ctx.index_S, gradient), None, None


def _assigned(found: Sequences, standard: Callable[[int], Positions], length: int) -> Positions:
    """Return the positions of a length in a batch."""
    return found.positions.get(length) or standard(length)
