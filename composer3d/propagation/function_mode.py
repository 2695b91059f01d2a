"""Propagation of shards through a model's code, which computes with the sizes of the whole model on local shards.

Attention code writes `q_BSF.view(B, S, num_heads, head_dim)` or reads `q.shape[-1]`. Inside a region every tensor that
is sharded over tp has a shadow: a tensor on meta, without memory, of the global size. Each torch function runs on
shadows with the code's own arguments, and on the local shards with arguments that fit them; comparing both results
tells which dim is sharded: where the shadow of a result is x_BSF and the local one x_BS(F/T), it is the last. A
function that mixes features of different ranks, such as a softmax over a sharded dim, cannot be propagated and is an
error, never another number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.propagation.contractions import Products, bias_of, keep_weight, summed_size
from composer3d.propagation.decision_cache import Decision, Memory
from composer3d.propagation.depthwise import CONVOLUTIONS, arguments_of, keeps_apart
from composer3d.propagation.dry_run.meta_records import Record
from composer3d.propagation.function_dims import (
    CASTS,
    EXPANDS,
    SIZES,
    SPLITS,
    VIEWS,
    dims_of,
    mixes,
    name_of,
    narrowed,
)
from composer3d.propagation.random_functions import Drawing, draws
from composer3d.propagation.result_shards import marked, pair
from composer3d.propagation.shards import (
    Cut,
    PropagationError,
    cut_of,
    cuts_in,
    ranges_of,
    run_of,
)
from composer3d.propagation.view_shapes import Indivisible, Placed, Unplaceable, inside, regroup
from composer3d.propagation.whole_operands import Meeting, is_in_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Propagation"]


class Propagation(TorchFunctionMode):
    """Propagates sharded tensors through torch functions while it is entered.

    Args:
        degree: Ranks along tp.
        where: FQN or option, for messages.
        mesh: Of one dim, tp; None in a dry run on meta.
        drawing: Gives random functions on sharded tensors their stream; None in a dry run on meta.
        record: Records each function, for comparison with another run.
        memory: Decisions of earlier forwards.
    """

    def __init__(
        self,
        degree: int,
        where: str,
        *,
        mesh: DeviceMesh | None = None,
        drawing: Drawing | None = None,
        record: Record | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        self._degree, self._where, self.drawing, self._record = degree, where, drawing, record
        self._num_draws = 0
        self._memory = memory
        # What the function at hand comes to on local shards, if that can be done again.
        self._work: Decision | None = None
        self._meeting = Meeting(degree, mesh)
        self.mesh = mesh
        self.products = Products()

    @property
    def num_acts(self) -> int:
        """Number of interventions, without which code run on local shards alone would be wrong."""
        return self._meeting.num_acts

    @property
    def num_moves(self) -> int:
        """How often tensors were gathered or narrowed for a function."""
        return self._meeting.num_moves

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function on local shards."""
        if self._memory is not None:
            return self._remembered(self._memory, func, args, dict(kwargs or {}))
        if self._record is None:
            return self.run(func, args, dict(kwargs or {}))
        acts, draws = self.num_acts, self._num_draws
        result = self.run(func, args, dict(kwargs or {}))
        has_acted, is_apart = self.num_acts > acts, self._num_draws > draws
        self._record.note(func, args, dict(kwargs or {}), result, has_acted=has_acted, is_apart=is_apart)
        return result

    def _remembered(self, memory: Memory, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if not cuts_in(args, options):
            return func(*args, **options)
        key = memory.key(func, args, options)
        decision = None if key is None else memory.get(key)
        if decision is not None:
            return decision(func, args, options)
        self._forget()
        acts, draws = self.num_acts, self._num_draws
        result = self.run(func, args, dict(options))
        if key is None or self.num_acts > acts or self._num_draws > draws or is_in_place(name_of(func)):
            return result
        if self._work is not None:
            memory.keep(key, self._work, result)
        elif name_of(func) in SIZES:
            memory.keep_answer(key, result)
        return result

    def _forget(self) -> None:
        self._work = None

    def run(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run one function; where nothing is sharded, as it is.

        Raises:
            PropagationError: It cannot be run on local shards.
        """
        cuts = cuts_in(args, options)
        if not cuts:
            return func(*args, **options)
        name = name_of(func)
        if name in SIZES:
            return func(*map(_shadow, args), **options)
        if name in CASTS and cut_of(args[0]) is None:
            return func(*args, **options)
        if (bias := bias_of(name, args, options)) is not None and any(cut.is_weight for cut in cuts):
            result = self.run(torch.add, [self.run(func, list(args[:2]), {}), bias], {})
            self._forget()
            return result
        along = [cut for cut in cuts if cut.is_sequence]
        if along and len(along) < len(cuts):
            # Of the others every rank has other features, for all of the sequence.
            args, options = self._gathered(name, args, options, is_summed=True)
            return self._run(func, name, args, options, [cut for cut in cuts if not cut.is_sequence])
        try:
            return self._run(func, name, args, options, cuts)
        except PropagationError:
            if not along or (is_in_place(name) and cut_of(args[0]) is not None):
                raise
        # It needs the full sequence, and does the same with it on all ranks.
        args, options = self._gathered(name, args, options, is_summed=False)
        return func(*args, **options)

    def _gathered(
        self, name: str, args: Sequence[Any], options: dict[str, Any], *, is_summed: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """All-gather arguments that are sharded along the sequence."""
        first = cut_of(args[0]) if args else None
        if is_in_place(name) and first is not None and first.is_sequence:
            raise PropagationError(
                f'"{self._where}": {name} writes cut features along a cut sequence', sources=first.sources
            )

        def gather(value: Any) -> Any:
            cut = cut_of(value)
            if cut is None or not cut.is_sequence:
                return value
            if len(set(cut.placed.parts)) > 1:
                raise PropagationError(f'"{self._where}": {name} on a sequence cut in parts', sources=cut.sources)
            return self._meeting.gathered(value, cut.placed, is_summed=is_summed)

        with torch_compat.without_torch_functions():
            return torch_compat.tree_map(gather, list(args)), torch_compat.tree_map(gather, options)

    def _run(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], cuts: Sequence[Cut]) -> Any:
        leaves = torch_compat.tree_leaves([list(args), options])
        sources = frozenset().union(*(cut.sources for cut in cuts))
        given = args, options
        try:
            # Unseen by a module's mode around this one.
            with torch_compat.without_torch_functions():
                if self.products.is_partial(name, args, options):
                    self._forget()
                    return self._meeting.reduced(self._local(func, args, options))
                if is_in_place(name) and cut_of(args[0]) is None:
                    raise PropagationError("it writes them into a tensor that is whole")
                whole = self._on_shadows(func, name, args, options)
                placed = {id(leaf): (leaf.ndim, cut.placed) for leaf in leaves if (cut := cut_of(leaf)) is not None}
                args, options = self._meeting.prepare(name, args, options, placed)
                with self._stream(name, args, options, cuts[0].placed):
                    result = self._on_shares(func, name, args, options, whole, cuts)
                keep_weight(result, cuts, leaves)
                return result
        except (Unplaceable, PropagationError) as error:
            edge = error.edge if isinstance(error, PropagationError) else None
            raise PropagationError(
                f'"{self._where}": {name} on cut features: {error}',
                sources=sources,
                edge=edge,
                ranges=ranges_of(cuts),
                number=error.number if isinstance(error, Indivisible) else None,
                summed=summed_size(name, *given),
            ) from None
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise PropagationError(
                f'"{self._where}": {name} does not work on cut features ({text})',
                sources=sources,
                ranges=ranges_of(cuts),
                summed=summed_size(name, *given),
            ) from error

    def _stream(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], placed: Placed
    ) -> contextlib.AbstractContextManager[None]:
        """Return the random stream of a function: per rank for sharded tensors."""
        if not draws(name, args, options):
            return contextlib.nullcontext()
        if options.get("generator") is not None:
            raise PropagationError("it draws from a generator of its own, which is in the same state on all ranks")
        self._num_draws += 1
        return contextlib.nullcontext() if self.drawing is None else self.drawing.sharded(placed)

    def _on_shadows(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if name in CASTS:
            return _shadow(args[0])
        # Tensors that are sharded alike share a shadow, which is not to be changed.
        shadow = _shadow if not is_in_place(name) else _own_shadow
        with torch.no_grad():
            return func(*torch_compat.tree_map(shadow, list(args)), **torch_compat.tree_map(shadow, options))

    def _on_shares(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], whole: Any, cuts: Sequence[Cut]
    ) -> Any:
        if name in CONVOLUTIONS and (convolved := self._convolved(func, args, options, whole, cuts)) is not None:
            return convolved
        if any(mixes(name, args, options, ndim=cut.shadow.ndim, dim=cut.placed.dim) for cut in cuts):
            raise PropagationError("it goes along the dim that is cut")
        x, cut = args[0] if args else None, cut_of(args[0]) if args else None
        if cut is not None and isinstance(x, Tensor):
            if name in VIEWS and isinstance(whole, Tensor) and whole.numel() == cut.shadow.numel():
                return self._view(name, x, cut, whole)
            if name in EXPANDS:
                sizes = list(whole.shape)
                dim = cut.placed.dim + whole.ndim - x.ndim
                if sizes[dim] == cut.shadow.shape[cut.placed.dim]:
                    sizes[dim] = x.shape[cut.placed.dim]
                self._work = lambda func, args, options: args[0].expand(sizes)
                return self._paired(x.expand(sizes), whole, cuts, name)
            if name in SPLITS:
                dim = options.get("dim", args[2] if len(args) > 2 else 0)
                if dim % x.ndim == cut.placed.dim:
                    return self._split(x, cut, whole)
            if name in ("__getitem__", "narrow"):
                index = args[1] if name == "__getitem__" else narrowed(args, options, x.ndim)
                return self._take(x, cut, index, whole, cuts)
            if name in ("repeat", "tile"):
                return self._repeat(func, x, cut, args, options, whole)
            if name == "__setitem__":
                self._refuse_indices(args[1], x.ndim, cut)
            if name == "glu" and options.get("dim", args[1] if len(args) > 1 else -1) % x.ndim == cut.placed.dim:
                return self._glu(func, x, cut, args, options, whole)
        self._work = None if name == "__setitem__" else partial(torch_compat.call_beside, self._hidden)
        return self._paired(self._local(func, args, options), whole, cuts, name)

    @property
    def _hidden(self) -> type[TorchFunctionMode]:
        """Modes that do not see work on local shards; those of others see runs, and no rehearsal."""
        return TorchFunctionMode if self.mesh is None else Propagation

    def _local(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        return torch_compat.call_beside(self._hidden, func, args, options)

    def _convolved(
        self, func: Any, args: Sequence[Any], options: dict[str, Any], whole: Any, cuts: Sequence[Cut]
    ) -> Any:
        given, cut = arguments_of(args, options), cuts[0]
        dim, channels = cut.placed.dim, cut.shadow.shape[cut.placed.dim]
        if len(cuts) > 1 or cut_of(given["input"]) is None or not keeps_apart(given, channels=channels, dim=dim):
            return None
        for name in ("weight", "bias"):
            if given.get(name) is not None:
                given[name] = self._meeting.narrowed(given[name], 0, cut.placed.parts)
        return self._paired(func(**{**given, "groups": channels // self._degree}), whole, cuts, "convolution")

    def _view(self, name: str, x: Tensor, cut: Cut, whole: Tensor) -> Tensor:
        placed = regroup(cut.shadow.shape, cut.placed, whole.shape, degree=self._degree)
        shape = list(whole.shape)
        shape[placed.dim] //= self._degree
        strictly = name in ("view", "view_as")
        self._work = lambda func, args, options: args[0].view(shape) if strictly else args[0].reshape(shape)
        result = self._work(None, [x], {})
        scale = cut.scale * sum(cut.placed.parts) // sum(placed.parts) if len(cut.placed.parts) == 1 else cut.scale
        return marked(result, whole, placed, cut.sources, start=cut.start, scale=max(scale, 1), gathered=cut.whole)

    def _split(self, x: Tensor, cut: Cut, whole: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dim = cut.placed.dim
        result, start = [], 0
        for piece in whole:
            stop = start + piece.shape[dim]
            result.append(self._range(x, cut, start, stop, piece))
            start = stop
        runs = [run_of(x, piece, dim) for piece in result]
        self._work = lambda func, args, options: tuple(args[0].narrow(dim, *run) for run in runs)
        return tuple(result)

    def _range(self, x: Tensor, cut: Cut, start: int, stop: int, whole: Tensor) -> Tensor:
        share = inside(cut.placed, start, stop, self._degree)
        if share is None:
            size = cut.shadow.shape[cut.placed.dim]
            edge = cut.features(start, stop)
            raise PropagationError(f"{start}:{stop} of {size} is no whole part", sources=cut.sources, edge=edge)
        first, last, parts = share
        piece, placed = x.narrow(cut.placed.dim, first, last - first), Placed(dim=cut.placed.dim, parts=parts)
        if len(set(parts)) == 1 and cut.is_gathered(start, stop):
            # What comes of it is the same on all ranks, until it meets sharded features: its gradient is whole, too.
            return self._meeting.gathered(piece, placed, is_summed=False)
        begin, _ = cut.features(start, stop)
        return marked(piece, whole, placed, cut.sources, start=begin, scale=cut.scale, gathered=cut.whole)

    def _repeat(
        self, func: Any, x: Tensor, cut: Cut, args: Sequence[Any], options: dict[str, Any], whole: Tensor
    ) -> Tensor:
        """Repeat: along the sharded dim the parts come one after another again."""
        dim = cut.placed.dim + whole.ndim - x.ndim
        times = whole.shape[dim] // cut.shadow.shape[cut.placed.dim]
        return marked(func(*args, **options), whole, Placed(dim=dim, parts=cut.placed.parts * times), cut.sources)

    def _glu(
        self, func: Any, x: Tensor, cut: Cut, args: Sequence[Any], options: dict[str, Any], whole: Tensor
    ) -> Tensor:
        """Gate the first half of the sharded dim by the second, which have to be two parts."""
        half = whole.shape[cut.placed.dim]
        if cut.placed.parts != (half, half):
            raise PropagationError(
                "its halves are no parts", sources=cut.sources, edge=(cut.start, cut.start + half * cut.scale)
            )
        return marked(func(*args, **options), whole, Placed(dim=cut.placed.dim, parts=(half,)), cut.sources)

    def _take(self, x: Tensor, cut: Cut, index: Any, whole: Any, cuts: Sequence[Cut]) -> Any:
        entries = list(index) if isinstance(index, tuple) else [index]
        dims = dims_of(entries, x.ndim)
        position = next((at for at, dim in dims.items() if dim == cut.placed.dim), None)
        entry = slice(None) if position is None else entries[position]
        run: tuple[int, int] | None = None
        if isinstance(entry, slice) and entry != slice(None):
            start, stop, step = entry.indices(cut.shadow.shape[cut.placed.dim])
            if step != 1:
                raise PropagationError("it takes a step along the dim that is cut")
            shape = list(cut.shadow.shape)
            shape[cut.placed.dim] = stop - start
            taken = self._range(x, cut, start, stop, torch.empty(shape, device="meta"))
            if cut_of(taken) is None:
                entries[position or 0] = slice(None)
                return taken[tuple(entries)]
            run, x = run_of(x, taken, cut.placed.dim), taken
            entries[position or 0] = slice(None)
        elif isinstance(entry, Tensor | int | list):
            raise PropagationError("it picks elements along the dim that is cut")
        if not any(isinstance(entry, Tensor | list) for entry in entries):
            dim = cut.placed.dim
            self._work = lambda func, args, options: (args[0] if run is None else args[0].narrow(dim, *run))[
                tuple(entries)
            ]
        return self._paired(x[tuple(entries)], whole, [c for c in (cut_of(x), *cuts) if c is not None], "__getitem__")

    def _paired(self, share: Any, whole: Any, cuts: Sequence[Cut], name: str) -> Any:
        return pair(share, whole, cuts, name, degree=self._degree)

    def _refuse_indices(self, index: Any, ndim: int, cut: Cut) -> None:
        entries = list(index) if isinstance(index, tuple) else [index]
        at = next((at for at, dim in dims_of(entries, ndim).items() if dim == cut.placed.dim), None)
        if (at is not None and entries[at] != slice(None)) or any(isinstance(entry, Tensor) for entry in entries):
            raise PropagationError("it writes into some of the dim that is cut")


def _shadow(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    cut = cut_of(value)
    if cut is not None:
        return cut.shadow
    return value if value.is_meta else torch.empty_like(value, device="meta")


def _own_shadow(value: Any) -> Any:
    shadow = _shadow(value)
    return torch.empty_like(shadow) if isinstance(shadow, Tensor) else shadow
