"""Replicated operands of functions on sharded tensors: each rank takes its shard; gradients are all-reduced over tp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.function_dims import JOINS
from composer3d.propagation.functions.view_shapes import Placed, Unplaceable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Meeting", "is_in_place"]

# Functions that pair the elements of their arguments by position, counted from the last dim.
PAIRING = (
    "add sub subtract mul multiply div divide truediv true_divide floordiv pow mod remainder fmod matmul bmm and or "
    "xor eq ne lt le gt ge maximum minimum where masked_fill addcmul addcdiv lerp atan2 logaddexp heaviside "
    "copysign hypot gather take_along_dim scatter scatter_add scatter_reduce "
    "cat concat concatenate stack broadcast_tensors scaled_dot_product_attention"
)
PAIRED = frozenset(
    form.format(name) for name in PAIRING.split() for form in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
)
# Of these, that read and write by index where another dim than the sharded one is indexed: sizes need not be equal.
BY_INDEX = frozenset(
    form.format(name)
    for name in "gather take_along_dim scatter scatter_add scatter_reduce".split()
    for form in ("{}", "{}_")
)
BATCHED = frozenset({"matmul", "bmm", "__matmul__", "__rmatmul__"})


def is_in_place(name: str) -> bool:
    """Return whether a function, by its name, changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


class Meeting:
    """Preparation of replicated tensors among the arguments of a function that works on sharded ones.

    Where the sharded dim is one of theirs too, this rank's shard is taken. Each rank then has the gradient of its shard
    of the work: those are summed, once for each tensor however often it is used.

    Args:
        degree: Ranks along tp.
        mesh: Of one dim, tp; None in a dry run on meta.

    Attributes:
        num_acts: How often something was done that code alone, run on local shards, would not do.
        num_moves: How often tensors were gathered or narrowed for it.
        narrowings: Of the arguments prepared last, by place, what `narrow` did to each; None where they were prepared
            otherwise too.
    """

    narrowings: dict[int, list[tuple[int, tuple[int, ...]]]] | None

    def __init__(self, degree: int, mesh: DeviceMesh | None) -> None:
        self._degree, self._mesh = degree, mesh
        self._rank = 0 if mesh is None else mesh.get_local_rank()
        self._summed: list[tuple[Tensor, Tensor]] = []
        self.num_acts = self.num_moves = 0
        self.narrowings = None

    def prepare(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], sharded: Mapping[int, tuple[int, Placed]]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments of which every tensor is a local shard, or replicated and broadcast correctly.

        Args:
            args: Its arguments.
            options: Its keyword arguments.
            sharded: Number of dims and sharded dim of each sharded tensor, by `id`.

        Raises:
            Unplaceable: They cannot fit.
        """
        places = {(ndim - placed.dim, placed.parts) for ndim, placed in sharded.values()}
        if len(places) > 1:
            _refuse_repeated(name, args, options, sharded)
        labelled = _labelled(name, args, sharded)
        narrowings: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

        def fit(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in sharded:
                return value
            dims = list(labelled.get(id(value), {}).items())
            if name in PAIRED:
                dims += self._met(name, value, places, options, args)
            if dims:
                narrowings[id(value)] = dims
            return self.narrow(self._with_summed_gradient(value), dims)

        before = self.num_acts
        given, others = torch_compat.tree_map(fit, list(args)), torch_compat.tree_map(fit, dict(options))
        acts = self.num_acts - before
        found = {at: narrowings[id(x)] for at, x in enumerate(args) if isinstance(x, Tensor) and id(x) in narrowings}
        self.narrowings = found if sum(map(len, found.values())) == acts else None
        return given, others

    def narrow(self, whole: Tensor, dims: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
        """Return this rank's shard of a whole tensor, along each dim with its parts."""
        for dim, parts in dims:
            whole = self.narrowed(whole, dim, parts)
        return whole

    def gathered(self, share: Tensor, placed: Placed, *, is_summed: bool) -> Tensor:
        """All-gather the local shards of all ranks.

        Args:
            share: This rank's, x_...(F/T)... along `placed.dim`.
            placed: What is sharded; if it has parts, as samples one after the other are, they are of equal size.
            is_summed: Whether each rank does other work with the result, so that its gradient is reduce-scattered.
        """
        self.num_acts += 1
        self.num_moves += 1
        dim, num = placed.dim, len(placed.parts)
        if num > 1:
            share, dim = share.unflatten(dim, (num, -1)), dim + 1
        if self._mesh is None:
            whole = torch.cat([share] * self._degree, dim)
        else:
            from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

            wrapped: Any = DTensor.from_local(share, self._mesh, [Shard(dim)], run_check=False)
            placements = [Partial() if is_summed else Replicate()]
            wrapped = wrapped.redistribute(placements=[Replicate()])
            whole = torch_compat.unviewed(wrapped.to_local(grad_placements=placements))
        if num > 1:
            whole = whole.flatten(dim - 1, dim)
        if is_summed:
            self._summed.append((whole, whole))
        return whole

    def can_gather(self, placed: Placed) -> bool:
        """Return whether a dim can be gathered at once: its parts are of equal size."""
        return len(set(placed.parts)) <= 1

    def reduced(self, share: Tensor) -> Tensor:
        """All-reduce the partial sums of all ranks; the gradient of the sum is that of each."""
        self.num_acts += 1
        if self._mesh is None:
            return share
        from torch.distributed.tensor import DTensor, Partial, Replicate

        wrapped: Any = DTensor.from_local(share, self._mesh, [Partial()], run_check=False)
        return torch_compat.unviewed(wrapped.redistribute(placements=[Replicate()]).to_local())

    def _with_summed_gradient(self, whole: Tensor) -> Tensor:
        if not whole.requires_grad or not torch.is_grad_enabled():
            return whole
        self.num_acts += 1
        if self._mesh is None:
            return whole
        for seen, summed in self._summed:
            if seen is whole:
                return summed
        from torch.distributed.tensor import DTensor, Partial, Replicate

        wrapped = DTensor.from_local(whole, self._mesh, [Replicate()], run_check=False)
        summed = torch_compat.unviewed(wrapped.to_local(grad_placements=[Partial()]))
        self._summed.append((whole, summed))
        return summed

    def _met(
        self,
        name: str,
        whole: Tensor,
        places: set[tuple[int, tuple[int, ...]]],
        options: Mapping[str, Any],
        args: Sequence[Any],
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return the dims of a whole tensor that meet sharded ones, with their parts."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for back, parts in places:
            if whole.ndim < back or whole.shape[-back] == 1 or (name in BATCHED and back <= 2):
                continue
            size = whole.shape[-back]
            if name.startswith(("cat", "concat")) and self._joins_along(options, args, whole.ndim - back, whole.ndim):
                continue
            if name == "scaled_dot_product_attention" and size != sum(parts):
                # Groups of query heads share a key-value head.
                if size % self._degree or len(parts) > 1:
                    raise Unplaceable(f"{size} heads that are not sharded meet {sum(parts)} that are")
                parts = (size,)
            dim = whole.ndim - back
            if size == sum(parts) and dim not in dict(found):
                found.append((dim, parts))
        return found

    def _joins_along(self, options: Mapping[str, Any], args: Sequence[Any], dim: int, ndim: int) -> bool:
        along = options.get("dim", options.get("axis", args[1] if len(args) > 1 else 0))
        return bool(along % ndim == dim)

    def narrowed(self, whole: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's shard of a whole tensor, whose gradient is summed already.

        Args:
            whole: Replicated over tp.
            dim: The one to narrow.
            parts: Sizes of the parts along it, each of which is sharded over all ranks.
        """
        self.num_acts += 1
        self.num_moves += 1
        pieces = []
        for piece, size in zip(whole.split(list(parts), dim), parts, strict=True):
            pieces.append(piece.narrow(dim, self._rank * (size // self._degree), size // self._degree))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _refuse_repeated(
    name: str, args: Sequence[Any], options: Mapping[str, Any], sharded: Mapping[int, tuple[int, Placed]]
) -> None:
    """Refuse tensors sharded along different dims of which one has one element a rank: it would be broadcast."""
    pairs = _einsum_pairs(name, args)
    tensors = [("", x) for x in torch_compat.tree_leaves([list(args), dict(options)])]
    marked = [(term, x) for term, x in pairs or tensors if id(x) in sharded]
    for term, x in marked:
        ndim, placed = sharded[id(x)]
        if x.shape[placed.dim] != 1 or sum(placed.parts) == 1:
            continue
        back = ndim - placed.dim
        if not pairs and (name in JOINS or name in BY_INDEX or name == "linear" or (name in BATCHED and back <= 2)):
            continue
        for letters, other in marked:
            dim = letters.find(term[placed.dim]) if pairs else other.ndim - back
            if dim >= 0 and other.shape[dim] > 1 and sharded[id(other)][1].dim != dim:
                raise Unplaceable(
                    f"one of {sum(placed.parts)} along a dim meets all of them, and another dim is sharded"
                )


def _einsum_pairs(name: str, args: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the letters of an einsum's operands, with the operands; none of other functions, or with dots."""
    if name != "einsum" or not args or not isinstance(args[0], str) or "..." in args[0]:
        return []
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    return list(zip(args[0].replace(" ", "").partition("->")[0].split(","), operands, strict=False))


def _labelled(
    name: str, args: Sequence[Any], sharded: Mapping[int, tuple[int, Placed]]
) -> dict[int, dict[int, tuple[int, ...]]]:
    """Return, of an einsum's replicated operands, the dims with the letter of a sharded dim, and its parts."""
    pairs = _einsum_pairs(name, args)
    letters = {term[sharded[id(x)][1].dim]: sharded[id(x)][1].parts for term, x in pairs if id(x) in sharded}
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for term, x in pairs:
        if id(x) not in sharded:
            dims = {dim: letters[letter] for dim, letter in enumerate(term) if letter in letters}
            found[id(x)] = {dim: parts for dim, parts in dims.items() if x.shape[dim] == sum(parts)}
    return found
