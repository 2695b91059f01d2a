"""Arguments of a model that are sharded along the sequence: those that become activations token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from composer3d import Batch, BatchError, torch_compat

__all__ = ["place", "sharded_inputs"]

# Names of arguments that become activations, beside the first tensor. Masks, positions, documents and images stay
# whole: their positions are taken where they meet sharded activations.
NAMES = frozenset(
    "input_ids inputs_embeds decoder_input_ids decoder_inputs_embeds labels shift_labels targets target tokens".split()
)


def sharded_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], dim: int
) -> dict[int | str, int]:
    """Return the dims along which a call's arguments are sharded, by place or name.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        names: Names of the model's parameters, in order.
        dim: The one that is the sequence.
    """
    called: list[tuple[int | str, str, Any]] = [
        (at, names[at] if at < len(names) else "", value) for at, value in enumerate(args)
    ]
    called += [(name, name, value) for name, value in kwargs.items()]
    tensors = [(at, name, value) for at, name, value in called if isinstance(value, Tensor) and value.ndim > dim]
    stated = [at for at, name, _ in tensors if name in NAMES]
    # Of an image's dims none is a sequence: it begins inside of the model.
    sequences = [(at, value) for at, _, value in tensors if not (value.is_floating_point() and value.ndim > dim + 2)]
    first: int | str | None = next((at for at, _ in sequences if isinstance(at, int) and at == 0), None)
    if first is None and not stated and sequences and len(sequences) == len(tensors):
        first = sequences[0][0]
    return dict.fromkeys([*([] if first is None else [first]), *stated], dim)


def place(
    batch: Batch,
    *,
    dims: Mapping[int | str, int],
    dim: int,
    shares_target: bool,
    unit: int,
    take: Callable[[Tensor, int], Tensor],
) -> Batch:
    """Return a batch of which this rank's positions are taken.

    Args:
        batch: Whole.
        dims: As of `sharded_inputs`.
        dim: The dim of targets that is the sequence.
        shares_target: Whether the model's output is sharded, so that its targets are.
        unit: What lengths have to be multiples of.
        take: Returns this rank's positions along a dim.

    Raises:
        BatchError: A length is no multiple of the unit.
    """
    lengths: set[int] = set()

    def placed(x: Tensor, along: int) -> Tensor:
        length = x.shape[along]
        if length % unit:
            lower, upper = length // unit * unit, -(-length // unit) * unit
            near = f"{upper}" if not lower else f"{lower} or {upper}"
            raise BatchError(
                f"a sequence of {length} tokens does not divide into {unit} equal chunks, as context_parallel needs; "
                f"use {near}"
            )
        lengths.add(length)
        return take(x, along)

    args = tuple(placed(x, dims[at]) if at in dims else x for at, x in enumerate(batch.args))
    kwargs = {name: placed(x, dims[name]) if name in dims else x for name, x in batch.kwargs.items()}

    def target(leaf: Any) -> Any:
        is_sequence = isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] in lengths
        return take(leaf, dim) if is_sequence else leaf

    targets = batch.target if batch.target is None or not shares_target else torch_compat.tree_map(target, batch.target)
    return Batch(args=args, kwargs=kwargs, target=targets)
