"""Functions on local shards by the sharded dim: views, splits, indices, repetitions and convolutions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.propagation.decision_cache import Work, as_it_is
from composer3d.propagation.functions.depthwise import CONVOLUTIONS, arguments_of, keeps_apart
from composer3d.propagation.functions.function_dims import EXPANDS, SPLITS, VIEWS, dims_of, mixes, narrowed
from composer3d.propagation.functions.known_functions import is_known
from composer3d.propagation.functions.result_shards import marked, pair
from composer3d.propagation.functions.view_shapes import Placed, inside, regroup
from composer3d.propagation.functions.whole_operands import Meeting
from composer3d.propagation.shards import PropagationError, ShardSpec, run_of, shadow_of, spec_of, specs_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShapeRules"]


class ShapeRules(torch_compat.ModuleFunctions, TorchFunctionMode):
    """Runs one function on local shards with arguments that fit them, and marks its results.

    Args:
        degree: Ranks along the axis.
        mesh: Of one dim, the axis; None in a dry run on meta.
        axis: The mesh axis over which marked tensors are sharded.
        meeting: Makes replicated operands fit.
    """

    def __init__(self, degree: int, *, mesh: DeviceMesh | None, axis: str, meeting: Meeting) -> None:
        super().__init__()
        self.axis, self.mesh = axis, mesh
        self._degree, self._meeting = degree, meeting
        # Propagations of inner axes that are entered inside this one: what is local here is whole to them.
        self.inside: list[ShapeRules] = []
        # What the function at hand comes to on local shards, if that can be done again.
        self._work: Work | None = None

    def _on_shares(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], whole: Any, specs: Sequence[ShardSpec]
    ) -> Any:
        if name in CONVOLUTIONS and (convolved := self._convolved(func, args, options, whole, specs)) is not None:
            return convolved
        if any(mixes(name, args, options, ndim=spec.shadow.ndim, dim=spec.placed.dim) for spec in specs):
            raise PropagationError("it goes along the sharded dim")
        if not is_known(name):
            raise PropagationError("no table of the propagation says what it does along the sharded dim")
        x, spec = args[0] if args else None, self._spec_of(args[0]) if args else None
        if spec is not None and isinstance(x, Tensor):
            if name in VIEWS and isinstance(whole, Tensor) and whole.numel() == spec.shadow.numel():
                return self._view(name, x, spec, whole)
            if name in EXPANDS:
                sizes = list(whole.shape)
                dim = spec.placed.dim + whole.ndim - x.ndim
                if sizes[dim] == spec.shadow.shape[spec.placed.dim]:
                    sizes[dim] = x.shape[spec.placed.dim]
                self._work = lambda func, args, options: args[0].expand(sizes)
                return self._paired(x.expand(sizes), whole, specs, name)
            if name in SPLITS:
                dim = options.get("dim", args[2] if len(args) > 2 else 0)
                if dim % x.ndim == spec.placed.dim:
                    return self._split(x, spec, whole)
            if name in ("__getitem__", "narrow"):
                index = args[1] if name == "__getitem__" else narrowed(args, options, x.ndim)
                return self._take(x, spec, index, whole, specs)
            if name in ("repeat", "tile"):
                return self._repeat(func, x, spec, args, options, whole)
            if name == "__setitem__":
                self._refuse_indices(args[1], x.ndim, spec)
            if name == "glu" and options.get("dim", args[1] if len(args) > 1 else -1) % x.ndim == spec.placed.dim:
                return self._glu(func, x, spec, args, options, whole)
        self._work = None if name == "__setitem__" else as_it_is
        return self._paired(self._local(func, args, options), whole, specs, name)

    def _within(self) -> AbstractContextManager[None]:
        """Return the context of work on local shards, whose sizes are those that inner axes see."""
        return contextlib.nullcontext() if self.inside else torch_compat.without_torch_functions()

    def _local(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if self.inside:
            return func(*args, **options)
        return as_it_is(func, args, options)

    def _convolved(
        self, func: Any, args: Sequence[Any], options: dict[str, Any], whole: Any, specs: Sequence[ShardSpec]
    ) -> Any:
        given, spec = arguments_of(args, options), specs[0]
        dim, channels = spec.placed.dim, spec.shadow.shape[spec.placed.dim]
        if (
            len(specs) > 1
            or self._spec_of(given["input"]) is None
            or not keeps_apart(given, channels=channels, dim=dim)
        ):
            return None
        for name in ("weight", "bias"):
            if given.get(name) is not None:
                given[name] = self._meeting.narrowed(given[name], 0, spec.placed.parts)
        return self._paired(func(**{**given, "groups": channels // self._degree}), whole, specs, "convolution")

    def _view(self, name: str, x: Tensor, spec: ShardSpec, whole: Tensor) -> Tensor:
        placed = self._regrouped(spec.shadow.shape, spec.placed, whole.shape)
        shape = list(whole.shape)
        shape[placed.dim] = sum(map(self._local_size, placed.parts))
        strictly = name in ("view", "view_as")
        self._work = lambda func, args, options: args[0].view(shape) if strictly else args[0].reshape(shape)
        result = self._work(None, [x], {})
        scale = spec.scale * sum(spec.placed.parts) // sum(placed.parts) if len(spec.placed.parts) == 1 else spec.scale
        return self._marked(
            result, whole, placed, spec.sources, start=spec.start, scale=max(scale, 1), gathered=spec.whole
        )

    def _local_size(self, size: int) -> int:
        """Return the size of this rank's shard of a part; -1 where ranks have none of equal size."""
        return -1 if size % self._degree else size // self._degree

    def _regrouped(self, old: Sequence[int], placed: Placed, new: Sequence[int]) -> Placed:
        """Return the sharded dim after a view."""
        return regroup(old, placed, new, degree=self._degree)

    def _split(self, x: Tensor, spec: ShardSpec, whole: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dim = spec.placed.dim
        result, start = [], 0
        for piece in whole:
            stop = start + piece.shape[dim]
            result.append(self._range(x, spec, start, stop, piece))
            start = stop
        runs = [run_of(x, piece, dim) for piece in result]
        self._work = lambda func, args, options: tuple(args[0].narrow(dim, *run) for run in runs)
        return tuple(result)

    def _range(self, x: Tensor, spec: ShardSpec, start: int, stop: int, whole: Tensor) -> Tensor:
        share = inside(spec.placed, start, stop, self._local_size)
        if share is None:
            size = spec.shadow.shape[spec.placed.dim]
            edge = spec.features(start, stop)
            raise PropagationError(f"{start}:{stop} of {size} is no whole part", sources=spec.sources, edge=edge)
        first, last, parts = share
        piece, placed = x.narrow(spec.placed.dim, first, last - first), Placed(dim=spec.placed.dim, parts=parts)
        if len(set(parts)) == 1 and spec.is_gathered(start, stop):
            # What comes of it is the same on all ranks, until it meets sharded features: its gradient is whole, too.
            return self._meeting.gathered(piece, placed, is_summed=False)
        begin, _ = spec.features(start, stop)
        return self._marked(piece, whole, placed, spec.sources, start=begin, scale=spec.scale, gathered=spec.whole)

    def _repeat(
        self, func: Any, x: Tensor, spec: ShardSpec, args: Sequence[Any], options: dict[str, Any], whole: Tensor
    ) -> Tensor:
        """Repeat: along the sharded dim the parts come one after another again."""
        dim = spec.placed.dim + whole.ndim - x.ndim
        times = whole.shape[dim] // spec.shadow.shape[spec.placed.dim]
        return self._marked(
            func(*args, **options), whole, Placed(dim=dim, parts=spec.placed.parts * times), spec.sources
        )

    def _glu(
        self, func: Any, x: Tensor, spec: ShardSpec, args: Sequence[Any], options: dict[str, Any], whole: Tensor
    ) -> Tensor:
        """Gate the first half of the sharded dim by the second, which have to be two parts."""
        half = whole.shape[spec.placed.dim]
        if spec.placed.parts != (half, half):
            raise PropagationError(
                "its halves are no parts", sources=spec.sources, edge=(spec.start, spec.start + half * spec.scale)
            )
        return self._marked(func(*args, **options), whole, Placed(dim=spec.placed.dim, parts=(half,)), spec.sources)

    def _take(self, x: Tensor, spec: ShardSpec, index: Any, whole: Any, specs: Sequence[ShardSpec]) -> Any:
        entries = list(index) if isinstance(index, tuple) else [index]
        dims = dims_of(entries, x.ndim)
        position = next((at for at, dim in dims.items() if dim == spec.placed.dim), None)
        entry = slice(None) if position is None else entries[position]
        run: tuple[int, int] | None = None
        if isinstance(entry, slice) and entry != slice(None):
            start, stop, step = entry.indices(spec.shadow.shape[spec.placed.dim])
            if step != 1:
                raise PropagationError("it takes a step along the sharded dim")
            shape = list(spec.shadow.shape)
            shape[spec.placed.dim] = stop - start
            taken = self._range(x, spec, start, stop, shadow_of(shape))
            if self._spec_of(taken) is None:
                entries[position or 0] = slice(None)
                return taken[tuple(entries)]
            run, x = run_of(x, taken, spec.placed.dim), taken
            entries[position or 0] = slice(None)
        elif isinstance(entry, Tensor | int | list):
            raise PropagationError("it picks elements along the sharded dim")
        if not any(isinstance(entry, Tensor | list) for entry in entries):
            dim = spec.placed.dim
            self._work = lambda func, args, options: (args[0] if run is None else args[0].narrow(dim, *run))[
                tuple(entries)
            ]
        return self._paired(
            x[tuple(entries)], whole, [c for c in (self._spec_of(x), *specs) if c is not None], "__getitem__"
        )

    def _paired(self, share: Any, whole: Any, specs: Sequence[ShardSpec], name: str) -> Any:
        return pair(share, whole, specs, name, degree=self._degree, local=self._local_size)

    def _refuse_indices(self, index: Any, ndim: int, spec: ShardSpec) -> None:
        entries = list(index) if isinstance(index, tuple) else [index]
        at = next((at for at, dim in dims_of(entries, ndim).items() if dim == spec.placed.dim), None)
        if (at is not None and entries[at] != slice(None)) or any(isinstance(entry, Tensor) for entry in entries):
            raise PropagationError("it writes into some of the sharded dim")

    def _spec_of(self, value: Any) -> ShardSpec | None:
        return spec_of(value, self.axis)

    def _specs_in(self, *values: Any) -> list[ShardSpec]:
        return specs_in(*values, axis=self.axis)

    def _marked(self, share: Tensor, whole: Tensor, placed: Placed, sources: frozenset[str], **options: Any) -> Tensor:
        return marked(share, whole, placed, sources, axis=self.axis, degree=self._degree, **options)
