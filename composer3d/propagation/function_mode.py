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
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.decision_cache import UNSHARDED, Memory
from composer3d.propagation.dry_run.meta_records import Record
from composer3d.propagation.functions.contractions import (
    Products,
    added_product,
    bias_of,
    keep_weight,
    product_chain,
    summed_size,
)
from composer3d.propagation.functions.function_dims import (
    CASTS,
    OBJECT,
    SIZES,
    STRIDED,
    name_of,
)
from composer3d.propagation.functions.random_functions import Drawing, draws
from composer3d.propagation.functions.shape_rules import ShapeRules
from composer3d.propagation.functions.view_shapes import Indivisible, Placed, Unplaceable
from composer3d.propagation.functions.whole_operands import Meeting, is_in_place
from composer3d.propagation.shards import (
    AXES,
    TENSOR_AXIS,
    PropagationError,
    ShardSpec,
    is_dense,
    ranges_of,
    shadow_of,
)
from composer3d.torch_compat.compilers.captured_graphs import outside_capture

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Propagation"]

# Context without torch functions.
UNSEEN = type(torch_compat.without_torch_functions())


class Propagation(ShapeRules):
    """Propagates sharded tensors through torch functions while it is entered.

    Args:
        degree: Ranks along the axis.
        where: FQN or option, for messages.
        mesh: Of one dim, the axis; None in a dry run on meta.
        drawing: Gives random functions on sharded tensors their stream; None in a dry run on meta.
        record: Records each function, for comparison with another run.
        memory: Decisions of earlier forwards.
        axis: The mesh axis over which marked tensors are sharded.
        meeting: Makes replicated operands fit; default: contiguous shards, whose gradients are summed over the axis.
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
        axis: str = TENSOR_AXIS,
        meeting: Meeting | None = None,
    ) -> None:
        super().__init__(degree, mesh=mesh, axis=axis, meeting=meeting or Meeting(degree, mesh))
        self._where, self.drawing, self._record = where, drawing, record
        self._num_draws = 0
        self._outer: list[list[Propagation]] = []
        self._memory = memory
        self.products = Products(axis=axis)

    @property
    def num_acts(self) -> int:
        """Number of interventions, without which code run on local shards alone would be wrong."""
        return self._meeting.num_acts

    @property
    def num_moves(self) -> int:
        """Number of tensors that were gathered or narrowed for a function."""
        return self._meeting.num_moves

    def __enter__(self) -> Self:
        """Enter; propagations over outer axes that are entered already see each function first."""
        entered = super().__enter__()
        modes = [mode for mode in torch_compat.function_modes() if isinstance(mode, Propagation)]
        around = {mode.axis: mode for mode in modes if AXES.index(mode.axis) < AXES.index(self.axis)}
        self._outer.append([around[axis] for axis in reversed(AXES) if axis in around])
        for mode in self._outer[-1]:
            mode.inside.append(self)
            TorchFunctionMode.__enter__(mode)
        return entered

    def __exit__(self, *raised: Any) -> None:
        """Leave."""
        for mode in reversed(self._outer.pop()):
            TorchFunctionMode.__exit__(mode, *raised)
            mode.inside.pop()
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function on local shards."""
        if self._memory is not None and not self.inside:
            return self._remembered(self._memory, func, args, dict(kwargs or {}))
        if self._record is None:
            try:
                return self.run(func, args, dict(kwargs or {}))
            finally:
                self._note_changes(name_of(func), args, kwargs or {})
        acts, draws = self.num_acts, self._num_draws
        result = self.run(func, args, dict(kwargs or {}))
        has_acted, is_apart = self.num_acts > acts, self._num_draws > draws
        self._record.note(func, args, dict(kwargs or {}), result, has_acted=has_acted, is_apart=is_apart)
        return result

    def _remembered(self, memory: Memory, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Do what was decided about a function; the way of nearly every one of a step, and so in a single call."""
        name = name_of(func)
        if name in OBJECT:
            return func(*args, **options)
        with UNSEEN():
            key = memory.key(func, args, options)
            if key:
                decision = memory.get(key)
                if decision is not None:
                    return decision(self._meeting, func, args, options)
        if key is UNSHARDED or (key is None and not self._specs_in(args, options)):
            return self._unsharded(func, args, options)
        return self._decided(memory, key, name, func, args, options)

    def _decided(
        self, memory: Memory, key: Any, name: str, func: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Run a function as rules say, and remember what they came to if it is the same again for an equal key."""
        self._forget()
        acts, draws = self.num_acts, self._num_draws
        result = self.run(func, args, dict(options))
        self._note_changes(name, args, options)
        narrowings = self._meeting.narrowings or {}
        num_others = self.num_acts - acts - sum(map(len, narrowings.values()))
        if key is None or num_others or self._num_draws > draws or is_in_place(name):
            return result
        if self._work is not None:
            memory.keep(key, self._work, result, narrowings)
        elif name in SIZES:
            memory.keep_answer(key, result)
        return result

    def _note_changes(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Notice a function that may have changed the sizes of a tensor in place."""
        if self._memory is not None and (is_in_place(name) or name == "__set__" or "out" in options):
            self._memory.changed(args, options)

    def _unsharded(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run a function of tensors that every rank has whole."""
        return func(*args, **options)

    def _forget(self) -> None:
        self._work, self._meeting.narrowings = None, {}

    def run(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run one function; where nothing is sharded, as it is.

        Raises:
            PropagationError: It cannot be run on local shards.
        """
        specs = self._specs_in(args, options)
        if not specs:
            return self._unsharded(func, args, options)
        name = name_of(func)
        if name in STRIDED and args and not is_dense(args[0]):
            raise PropagationError(
                f'"{self._where}": {name} of a shard that does not lie densely in memory of its own{beside()}; '
                "call contiguous() before, or clone()",
                sources=specs[0].sources,
            )
        if name in SIZES:
            return func(*map(self._shadow, args), **options)
        if name in CASTS and self._spec_of(args[0]) is None:
            return func(*args, **options)
        if (bias := bias_of(name, args, options)) is not None and any(spec.is_weight for spec in specs):
            result = self.run(torch.add, [self.run(func, list(args[:2]), {}), bias], {})
            self._forget()
            return result
        if (added := added_product(name, args, options)) is not None:
            term, one, other, beta, alpha = added
            result = self.run(torch.mul, [self.run(torch.matmul, [one, other], {}), alpha], {})
            # As torch has it, what is multiplied by 0 is not read: code passes memory without values.
            result = self.run(torch.add, [result, self.run(torch.mul, [term, beta], {})], {}) if beta else result
            self._forget()
            return result
        if not all(spec.is_sequence for spec in specs) and (chain := product_chain(name, args, options)) is not None:
            result, rest = chain
            for equation, operand in rest:
                result = self.run(torch.einsum, [equation, result, operand], {})
            self._forget()
            return result
        along = [spec for spec in specs if spec.is_sequence]
        if along and len(along) < len(specs):
            # Of the others every rank has other features, for all of the sequence.
            args, options = self._gathered(name, args, options, is_summed=True)
            return self._run(func, name, args, options, [spec for spec in specs if not spec.is_sequence])
        try:
            return self._run(func, name, args, options, specs)
        except PropagationError:
            if not along or not self._can_be_whole(name, args):
                raise
        return self._on_whole(func, name, args, options)

    def _can_be_whole(self, name: str, args: Sequence[Any]) -> bool:
        """Return whether a function may be computed with gathered arguments: what it writes into is not sharded."""
        return not is_in_place(name) or self._spec_of(args[0]) is None

    def _on_whole(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a function that needs the full sequence, on all ranks alike."""
        args, options = self._gathered(name, args, options, is_summed=False)
        return func(*args, **options)

    def _gathered(
        self, name: str, args: Sequence[Any], options: dict[str, Any], *, is_summed: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """All-gather arguments that are sharded along the sequence."""
        first = self._spec_of(args[0]) if args else None
        if is_in_place(name) and first is not None and first.is_sequence:
            raise PropagationError(
                f'"{self._where}": {name} writes sharded features along a sharded sequence{beside()}',
                sources=first.sources,
            )

        def gather(value: Any) -> Any:
            spec = self._spec_of(value)
            if spec is None or not spec.is_sequence:
                return value
            if not self._meeting.can_gather(spec.placed):
                raise PropagationError(
                    f'"{self._where}": {name} on a sequence spec in parts{beside()}', sources=spec.sources
                )
            return self._meeting.gathered(value, spec.placed, is_summed=is_summed)

        with self._within():
            return torch_compat.tree_map(gather, list(args)), torch_compat.tree_map(gather, options)

    def _run(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], specs: Sequence[ShardSpec]
    ) -> Any:
        leaves = torch_compat.tree_leaves([list(args), options])
        sources = frozenset().union(*(spec.sources for spec in specs))
        given = args, options
        try:
            # Unseen by a module's mode around this one.
            with self._within():
                if self.products.is_partial(name, args, options):
                    self._forget()
                    return self._meeting.reduced(self._local(func, args, options))
                if is_in_place(name) and self._spec_of(args[0]) is None:
                    raise PropagationError("it writes them into a tensor that is whole")
                whole = self._on_shadows(func, name, args, options)
                placed = {
                    id(leaf): (leaf.ndim, spec.placed) for leaf in leaves if (spec := self._spec_of(leaf)) is not None
                }
                args, options = self._meeting.prepare(name, args, options, placed)
                with self._stream(name, args, options, specs[0].placed):
                    result = self._on_shares(func, name, args, options, whole, specs)
                keep_weight(result, specs, leaves)
                return result
        except (Unplaceable, PropagationError) as error:
            edge = error.edge if isinstance(error, PropagationError) else None
            raise PropagationError(
                f'"{self._where}": {name} on sharded features: {error}{beside()}',
                sources=sources,
                edge=edge,
                ranges=ranges_of(specs),
                number=error.number if isinstance(error, Indivisible) else None,
                summed=summed_size(name, *given, self.axis),
            ) from None
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            text = str(error).partition("\n")[0]
            raise PropagationError(
                f'"{self._where}": {name} does not work on sharded features ({text}){beside()}',
                sources=sources,
                ranges=ranges_of(specs),
                summed=summed_size(name, *given, self.axis),
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
        if self._record is not None:
            self._record.placed = placed
        return contextlib.nullcontext() if self.drawing is None else self.drawing.sharded(placed)

    def _on_shadows(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if name in CASTS:
            return self._shadow(args[0])
        # Tensors that are sharded alike share a shadow, which is not to be changed.
        shadow = self._shadow if not is_in_place(name) else self._own_shadow
        shadows, others = torch_compat.tree_map(shadow, list(args)), torch_compat.tree_map(shadow, options)
        outside = outside_capture() if torch_compat.capture_is_on() else contextlib.nullcontext()
        with torch.no_grad(), torch_compat.without_torch_functions(), outside:
            return func(*shadows, **others)

    def _shadow(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return torch.device("meta") if isinstance(value, torch.device) else value
        spec = self._spec_of(value)
        if spec is not None:
            return spec.shadow
        if self.inside:
            return shadow_of(value.shape, value.dtype)
        if torch_compat.capture_is_on():
            with outside_capture():
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value if value.is_meta else torch.empty_like(value, device="meta")

    def _own_shadow(self, value: Any) -> Any:
        shadow = self._shadow(value)
        return shadow_of(shadow.shape, shadow.dtype) if isinstance(shadow, Tensor) else shadow
