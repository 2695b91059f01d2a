"""Functions that read other positions of a sharded sequence: its neighbours are exchanged, or all of it is gathered.

What was gathered is computed on every rank alike, and where its result has positions each rank goes on with its own.

Shapes as in `sequence_mode`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.decision_cache import Memory
from composer3d.propagation.function_mode import Propagation
from composer3d.propagation.functions.function_dims import name_of
from composer3d.propagation.functions.random_functions import VALUED, draws, draws_whole
from composer3d.propagation.functions.view_shapes import Placed, Unplaceable, regroup
from composer3d.propagation.functions.whole_operands import is_in_place
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.neighbours import neighbours_of, padding_of, sums_channels
from composer3d.propagation.sequences.position_draws import SequenceDraws
from composer3d.propagation.sequences.sequence_operands import SequenceOperands, windows_along
from composer3d.propagation.shards import SEQUENCE, PropagationError, ShardSpec, shadow_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequenceWholes"]

# Functions that take some of the positions, which code calls again and again in loops.
INDEXING = frozenset("__getitem__ select narrow unbind __iter__ split split_with_sizes chunk tensor_split".split())
# Parts of names of functions whose results are shorter or longer sequences.
RESAMPLING = ("conv", "pool", "interpolate", "upsample")
# What makes a dual number, by which code differentiates forward.
DUAL = "_make_dual"
STACKS = frozenset("stack cat concat concatenate".split())


class SequenceWholes(Propagation):
    """Runs functions of other positions.

    Args:
        degree: Ranks along the axis.
        where: FQN, for messages.
        rules: Of the plugin that shards the sequence.
        mesh: Of one dim, the axis; None in a dry run on meta.
        axis: Its name.
        memory: Decisions of earlier forwards.
        draws_of: Gives what draws for a sharded sequence the numbers of its positions; None in a dry run on meta.
    """

    def __init__(
        self,
        degree: int,
        where: str,
        *,
        rules: SequenceRules,
        mesh: DeviceMesh | None,
        axis: str,
        memory: Memory | None,
        draws_of: SequenceDraws | None,
    ) -> None:
        self._operands = SequenceOperands(degree, mesh, rules)
        super().__init__(degree, where, mesh=mesh, memory=memory, axis=axis, meeting=self._operands)
        self._rules, self._sequence_draws, self._is_dry = rules, draws_of, mesh is None

    def _unsharded(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if self._is_dry:
            self._refuse_transformed(name_of(func), args, options)
        with self._everywhere(name_of(func), args, options):
            result = super()._unsharded(func, args, options)
        if self._operands.lengths:
            name = name_of(func)
            if is_in_place(name) and args and isinstance(args[0], Tensor):
                self._operands.write_back(args[0])
            elif name in STACKS:
                return self._stacked(name, args, options, result)
        return result

    def _refuse_transformed(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Refuse what a transform of torch.func is given of a sharded sequence, which has no mark inside of it.

        Its sizes would be a rank's own: a mean over positions would be that of some, without an error.
        """
        for leaf in torch_compat.tree_leaves([list(args), dict(options)]):
            if not isinstance(leaf, Tensor) or (given := torch_compat.untransformed(leaf)) is leaf:
                continue
            if self._spec_of(given) is not None:
                raise PropagationError(
                    f'"{self._where}": {name} inside of torch.vmap, or of another transform of torch.func, of a '
                    f"sequence that is sharded: what is done there cannot be seen{beside()}; write it with operators "
                    "on whole batches, and gradients as a loss"
                )

    def _stream(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], placed: Placed
    ) -> contextlib.AbstractContextManager[None]:
        """Return where a function draws the numbers of this rank's positions."""
        super()._stream(name, args, options, placed)
        if name == DUAL:
            raise PropagationError("marks are lost where code differentiates forward")
        if draws(name, args, options) and (name in VALUED or self._is_seeded()):
            raise PropagationError("it draws for all positions at once")
        specs = self._specs_in(args, options)
        return self._at_positions(name, args, options, specs[0]) if specs else contextlib.nullcontext()

    def _at_positions(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec
    ) -> contextlib.AbstractContextManager[None]:
        if self._sequence_draws is None or not draws(name, args, options):
            return contextlib.nullcontext()
        return self._sequence_draws.at(spec)

    def _is_seeded(self) -> bool:
        """Return whether the model's code has seeded torch's generators, which draw one number after another then."""
        return self._sequence_draws is not None and self._sequence_draws.is_seeded()

    def _everywhere(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Return where a function draws for tensors that every rank has whole: the same numbers on all of them."""
        if self._sequence_draws is None or not draws_whole(name, args, options):
            return contextlib.nullcontext()
        return self._sequence_draws.everywhere()

    def _local_size(self, size: int) -> int:
        return self._rules.local_length(size)

    def _regrouped(self, old: Sequence[int], placed: Placed, new: Sequence[int]) -> Placed:
        found = regroup(old, placed, new, degree=1)
        self._check_lengths(placed.parts, found.parts)
        return found

    def _paired(self, share: Any, whole: Any, specs: Sequence[ShardSpec], name: str) -> Any:
        result = super()._paired(share, whole, specs, name)
        parts = [part for spec in specs for part in spec.placed.parts]
        for leaf in torch_compat.tree_leaves(result):
            spec = self._spec_of(leaf)
            if spec is not None:
                self._check_lengths(parts, spec.placed.parts)
        return result

    def _check_lengths(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Refuse lengths that a function changes where ranks' positions of the new one are not those that they hold.

        So windows of neighbouring positions stay sharded where every rank has whole ones.
        """
        for length in set(after) - set(before):
            pairs = [(min(other, length), max(other, length)) for other in set(before)]
            if not any(fine % coarse == 0 and self._rules.divides(coarse=coarse, fine=fine) for coarse, fine in pairs):
                raise Unplaceable(f"a sequence of {before[0]} is not sharded as one of {length} is")

    def _gathered(
        self, name: str, args: Sequence[Any], options: dict[str, Any], *, is_summed: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        self._rules.note("gathered", name)
        return super()._gathered(name, args, options, is_summed=True)

    def _can_be_whole(self, name: str, args: Sequence[Any]) -> bool:
        return True

    def _on_whole(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a function that needs the full sequence on all ranks alike; a result with positions is sharded again."""
        first = args[0] if args else None
        specs = self._specs_in(args, options)
        if is_in_place(name) and self._spec_of(first) is not None:
            return self._written(func, name, args, options)
        given, others = self._gathered(name, args, options, is_summed=False)
        if name in INDEXING:
            # A mask's dims are none of the result's.
            specs = [each for each in specs if each.shadow.dtype is not torch.bool]
        if name in INDEXING and isinstance(first, Tensor) and (spec := self._spec_of(first)) is not None:
            self._operands.keep(first, given[0], spec.placed)
        with self._everywhere(name, args, options):
            result = func(*given, **others)
        return self._narrowed(name, result, specs)

    def _written(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Write into gathered positions, and those of this rank into its shard."""
        share: Tensor = args[0]
        spec = self._spec_of(share)
        assert spec is not None, "asked only then"
        self._rules.note("gathered", name)
        given, others = torch_compat.tree_map(self._whole, [list(args), options])
        with self._within():
            self._operands.keep(share, given[0], spec.placed)
            with self._everywhere(name, args, options):
                result = func(*given, **others)
            self._operands.write_back(given[0])
        return result if result is None else share

    def _narrowed(self, name: str, result: Any, specs: Sequence[ShardSpec]) -> Any:
        """Return what was computed of gathered arguments with this rank's positions of it, where it has positions.

        Numbers without gradients, as of documents or masks, stay whole: they are indexed where they meet shards.
        """
        if name == DUAL:
            return result  # marks would be lost with it
        places = {(spec.placed.dim, spec.shadow.ndim, spec.placed.parts) for spec in specs}

        is_resampled = any(word in name for word in RESAMPLING)

        def narrowed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            shape = list(leaf.shape)
            for dim, ndim, parts in sorted(places):
                # With fewer dims it has no positions any more: one was taken, or all were summed.
                for at in dict.fromkeys((dim, dim + leaf.ndim - ndim)) if leaf.ndim >= ndim else ():
                    if found := self._lengths_of(shape[at], parts, is_resampled=is_resampled):
                        return self._again(name, leaf, Placed(dim=at, parts=found))
            return leaf

        with self._within():
            if isinstance(result, Tensor):
                return narrowed(result)
            leaves = torch_compat.tree_leaves(result)
            again = [narrowed(leaf) for leaf in leaves]
            if all(one is other for one, other in zip(leaves, again, strict=True)):
                return result
            replaced = {id(one): other for one, other in zip(leaves, again, strict=True)}
            return torch_compat.tree_map(lambda leaf: replaced.get(id(leaf), leaf), result)

    def _lengths_of(self, size: int, parts: tuple[int, ...], *, is_resampled: bool) -> tuple[int, ...]:
        """Return the lengths of sequences that a dim of a result has, of arguments that had such; empty if none."""
        if size == sum(parts):
            return parts
        # As after a convolution with a stride: of equal chunks, so that blocks know the length by a rank's part of it.
        is_shorter = is_resampled and len(parts) == 1 and 8 * size >= parts[0]
        return (size,) if is_shorter and size % (2 * self._degree) == 0 else ()

    def _again(self, name: str, whole: Tensor, placed: Placed) -> Tensor:
        self._rules.note("narrowed", name)
        self._operands.num_acts += 1
        share = self._operands.indexed(whole, placed.dim, placed.parts)
        return self._marked(share, shadow_of(whole.shape), placed, frozenset({SEQUENCE}))

    def _stacked(self, name: str, args: Sequence[Any], options: Mapping[str, Any], result: Tensor) -> Tensor:
        """Return this rank's positions of what a loop over gathered positions has computed one by one."""
        dim = options.get("dim", options.get("axis", args[1] if len(args) > 1 else 0)) % result.ndim
        with self._within():
            size = int(result.shape[dim])
            if size not in self._operands.lengths or not result.is_floating_point():
                return result
            return self._again(name, result, Placed(dim=dim, parts=(size,)))

    def _with_neighbours(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], spec: ShardSpec
    ) -> Tensor | None:
        """Return a rank's positions of what a function makes of neighbours; None where it is no such function."""
        x, dim = args[0], spec.placed.dim
        padding = padding_of(name, args, options, spec)
        with self._within():
            if padding is not None and min(padding.before, padding.after) >= 0:
                self._forget()
                result = padding.around(x, dim, self._rules.local_length)
                return self._of_neighbours(result, spec, dim, padding.parts(spec.placed.parts))
            found = neighbours_of(func, name, args, options, spec)
            if found is None and sums_channels(name, args, options, spec):
                self._rules.note("channels", name)
            sizes = None if found is None else self._rules.window_sizes(found.reach)
            if found is None or sizes is None or not x.is_floating_point():
                return None
            self._forget()
            if not found.span and not found.reach.before:
                return self._of_neighbours(found.of_windows(x), spec, dim, found.reach.written)
            self._rules.note("neighbours", name)
            if not found.is_causal:
                self._rules.note("follows", name)
            self._operands.num_acts += 1
            result = found.of_windows(windows_along(x, dim, found.reach, self._rules))
            dim += result.ndim - x.ndim
            if len(sizes) > 1 and found.span:
                starts = [sum(sizes[:at]) for at in range(len(sizes))]
                pairs = zip(starts, sizes, strict=True)
                result = torch.cat([result.narrow(dim, start, size - found.span) for start, size in pairs], dim)
            return self._of_neighbours(result, spec, dim, found.reach.written)

    def _of_neighbours(self, result: Tensor, spec: ShardSpec, dim: int, parts: tuple[int, ...]) -> Tensor:
        shape = [*result.shape[:dim], sum(parts), *result.shape[dim + 1 :]]
        return self._marked(result, shadow_of(shape), Placed(dim=dim, parts=parts), spec.sources)

    def _whole(self, x: Any) -> Any:
        spec = self._spec_of(x)
        if spec is None:
            return x
        with self._within():
            return self._meeting.gathered(x, spec.placed, is_summed=True)
