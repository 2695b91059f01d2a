"""Propagation of activations that are sharded along the sequence over a mesh axis that averages gradients, such as cp.

Every rank's loss is a part of the objective, and every exchange has its adjoint as backward: what is gathered has its
gradient reduce-scattered, and what is replicated has partial gradients, which data-parallel plugins sum. So nothing
else sums over the axis.

Shapes: B batch, H heads, S queries, T keys, E head dim, D model dim; a rank's shards are x_B(S/cp)D, q_BH(S/cp)E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.decision_cache import Memory
from composer3d.propagation.functions.contractions import operands_of
from composer3d.propagation.functions.function_dims import CASTS, OBJECT, SIZES, name_of
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.functions.whole_operands import BATCHED, BY_INDEX, PAIRED, is_in_place
from composer3d.propagation.sequences.attention_call import AttentionCall, SequenceRules
from composer3d.propagation.sequences.gradient_hooks import GradientHooks
from composer3d.propagation.sequences.position_draws import SequenceDraws
from composer3d.propagation.sequences.sequence_wholes import SequenceWholes
from composer3d.propagation.shards import SEQUENCE, PropagationError, ShardSpec, shadow_of, strip
from composer3d.torch_compat.multihead_attention import NAME, attend_with_heads, call_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequencePropagation"]

ATTENTION = "scaled_dot_product_attention"
# Source of what flex_attention returns beside its output, and functions that carry it along.
STATISTICS = "statistics of flex_attention"
CARRIED = frozenset({*CASTS, *SIZES, "mul"})
# Losses whose sum over a rank's positions is its part of the objective.
LOSSES = frozenset({"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "kl_div"})


class SequencePropagation(SequenceWholes):
    """Propagates a sharded sequence; attention is the plugin's rule.

    Args:
        degree: Ranks along the axis.
        where: FQN, for messages.
        rules: Of the plugin that shards the sequence.
        mesh: Of one dim, the axis; None in a dry run on meta.
        axis: Its name.
        memory: Decisions of earlier forwards.
        draws_of: As of `SequenceWholes`.
        hooks: Calls hooks on gradients that code registers; None where they are as they are.

    Attributes:
        has_wholes: Whether what has no mark is whole on every rank.
    """

    has_wholes = True

    def __init__(
        self,
        degree: int,
        where: str,
        *,
        rules: SequenceRules,
        mesh: DeviceMesh | None = None,
        axis: str = "cp",
        memory: Memory | None = None,
        draws_of: SequenceDraws | None = None,
        hooks: GradientHooks | None = None,
    ) -> None:
        super().__init__(degree, where, rules=rules, mesh=mesh, memory=memory, axis=axis, draws_of=draws_of)
        # Of rowwise modules at work, whose code sees its local shard: what they were given, None for whole tensors, and
        # their FQNs.
        self.pauses: list[tuple[ShardSpec | None, str]] = []
        self._is_busy, self._hooks = False, hooks

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave functions inside to another propagation."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function on local shards, unless a rowwise module or this propagation itself calls it."""
        if func is Tensor.register_hook and self._hooks is not None and not self._is_busy:
            args = [args[0], self._hooks.of_tensor(args[0], args[1], is_inside=self.has_wholes)]
        if not (self._is_busy or self.pauses or self.inside) and (memory := self._memory) is not None:
            return self._remembered(memory, func, args, kwargs or {})  # type: ignore[arg-type]
        if self._is_busy or self.pauses:
            if self._is_busy:
                return func(*args, **(kwargs or {}))
            return self._passed(name_of(func), func, args, kwargs or {}, self.pauses[0][0])
        self._is_busy = True
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self._is_busy = False

    def _passed(
        self, name: str, func: Any, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec | None
    ) -> Any:
        """Run a function of a rowwise module, which was given a local shard, or what every rank has whole."""
        try:
            with (
                self._everywhere(name, args, options) if spec is None else self._at_positions(name, args, options, spec)
            ):
                return func(*args, **options)
        finally:
            self._note_changes(name, args, options)

    def _decided(
        self, memory: Memory, key: Any, name: str, func: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        self._is_busy = True
        try:
            return super()._decided(memory, key, name, func, args, options)
        finally:
            self._is_busy = False

    def run(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run one function; where nothing is sharded, as it is.

        Raises:
            PropagationError: It cannot be run on local shards.
        """
        name = name_of(func)
        if name in OBJECT:
            return func(*args, **options)
        specs = self._specs_in(args, options)
        if not specs:
            return self._unsharded(func, args, options)
        if name not in CARRIED and any(STATISTICS in spec.sources for spec in specs):
            raise PropagationError(
                f'"{self._where}": {name} of the log-sum-exp of flex_attention, which sharded attention does not '
                f"return{beside()}; compute with scaled_dot_product_attention, or write the softmax out"
            )
        if name == ATTENTION:
            inputs = [*args[:3], *(options.get(each) for each in ("query", "key", "value"))]
            of_batch = [place(spec) > 2 for x in inputs if (spec := self._spec_of(x)) is not None]
            if not of_batch or not all(of_batch):
                self._forget()
                return self._attention(*args, **options)
            # Within windows of neighbouring positions, of which each is on one rank.
            self._rules.note("attention", name)
        if name == NAME and (given := call_of(args, options)) is not None:
            return self._inside(given)
        if name in LOSSES and options.get("reduction") == "sum" and len(specs) > 1:
            self._forget()
            with self._within():
                return self._local(func, args, options)
        if name in PAIRED and len({place(spec) for spec in specs}) > 1:
            args, options = self._aligned(name, args, options)
        if name in BY_INDEX and not self._fit(args, options):
            self._forget()
            return self._on_whole(func, name, args, options)
        if len(specs) == 1 and args and self._spec_of(args[0]) is specs[0]:
            found = self._with_neighbours(func, name, args, options, specs[0])
            if found is not None:
                return found
        args = self._product(name, args)
        return super().run(func, args, options)

    def _inside(self, given: Mapping[str, Any]) -> Any:
        """Run attention with its projections, each function of which is propagated."""
        self._is_busy = False
        TorchFunctionMode.__enter__(self)
        try:
            return attend_with_heads(given)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)
            self._is_busy = True
            self._forget()  # what the last function inside was decided to be

    # ---- products ----------------------------------------------------------------------------------------------------

    def _aligned(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return arguments paired by position, of which the largest stays sharded, and what differs from it is whole.

        So a mask by key that code makes of its tokens is gathered, and not the scores that it is added to.
        """
        if name in BATCHED:
            return args, options
        leaves = torch_compat.tree_leaves([list(args), options])
        specs = [spec for leaf in leaves if (spec := self._spec_of(leaf)) is not None]
        kept = place(specs[0] if is_in_place(name) else max(specs, key=lambda spec: spec.shadow.numel()))

        def aligned(value: Any) -> Any:
            spec = self._spec_of(value)
            return value if spec is None or place(spec) == kept else self._whole(value)

        self._rules.note("products", name)
        return torch_compat.tree_map(aligned, list(args)), torch_compat.tree_map(aligned, options)

    def _fit(self, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Return whether all operands have the same positions of a dim: torch would take the first ones of larger."""
        leaves = [x for x in torch_compat.tree_leaves([list(args), options]) if isinstance(x, Tensor) and x.ndim]
        specs = [spec for leaf in leaves if (spec := self._spec_of(leaf)) is not None]
        if len({(spec.shadow.ndim, spec.placed) for spec in specs}) != 1:
            return False
        dim, size = specs[0].placed.dim, sum(specs[0].placed.parts)
        wholes = [leaf for leaf in leaves if self._spec_of(leaf) is None]
        return all(whole.ndim == specs[0].shadow.ndim and whole.shape[dim] == size for whole in wholes)

    def _product(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Return a product's arguments: of two that are sharded, the rows of the first stay so, the second is whole."""
        found = operands_of(name, args)
        if found is None:
            return args
        (one, other), output, operands, place = found
        first, second = (self._spec_of(operand) for operand in operands)
        if first is None or second is None:
            return args
        row, column = one[first.placed.dim], other[second.placed.dim]
        if row == column and row in output:
            return args  # the same positions of both, as of a batch
        if row not in output or row == column:
            return args
        self._rules.note("products", name)
        if column not in output:
            with self._within():
                length = int(second.shadow.shape[second.placed.dim])
                self._rules.weigh(
                    strip(operands[0]), row=first.placed.dim, column=one.index(column),
                    rows=int(first.shadow.shape[first.placed.dim]), columns=length,
                )  # fmt: skip
        return place(self._whole(operands[1]))

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        specs = [self._spec_of(x) for x in (query, key, value)]
        others = [spec for spec in specs if spec is not None and (place(spec) != 2 or len(spec.placed.parts) > 1)]
        if others:
            # Features of all positions in turn, or several sequences one after another.
            query, attn_mask = self._whole(query), None if attn_mask is None else self._whole(attn_mask)
        if others or specs[0] is None:
            # All ranks do the same with all queries.
            self._rules.note("gathered", ATTENTION)
            key, value, specs = self._whole(key), self._whole(value), [None, None, None]
        elif (specs[1] is None) != (specs[2] is None):
            key, value, specs = self._whole(key), self._whole(value), [specs[0], None, None]
        lengths = [None if spec is None else int(spec.shadow.shape[-2]) for spec in specs]
        mask, has_own_rows = self._mask(attn_mask, lengths[0])
        self._rules.note("attention", ATTENTION)
        call = partial(AttentionCall, q_length=lengths[0], k_length=lengths[1], has_own_rows=has_own_rows, scale=scale)
        drawing: AbstractContextManager[None] = nullcontext()
        if dropout_p and (draws_of := self._sequence_draws) is not None:
            drawing = draws_of.everywhere() if specs[0] is None else draws_of.of_queries(specs[0])
            call = partial(call, of_heads=draws_of.of_heads)
        with drawing, self._within():
            result = attend_by(
                query, key, value, mask, dropout_p, is_causal, enable_gqa=enable_gqa, call=call, rules=self._rules
            )
            if specs[0] is None:
                return result
            shape = [*specs[0].shadow.shape[:-1], value.shape[-1]]
            shape[:-2] = result.shape[:-2]
            placed = Placed(dim=result.ndim - 2, parts=specs[0].placed.parts)
            return self._marked(result, shadow_of(shape), placed, frozenset({SEQUENCE}))

    def attend_flexibly(self, flex: torch_compat.FlexCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return what FlexAttention's operator does; statistics that code may carry along and not compute with.

        The functions of scores and masks may read sharded tensors, which are gathered for them.
        """
        query, key, value = flex.query, flex.key, flex.value
        specs = [self._spec_of(x) for x in (query, key, value)]
        if specs[0] is None or any(
            place(spec) != 2 or len(spec.placed.parts) > 1 for spec in specs if spec is not None
        ):
            raise PropagationError(f'"{self._where}": flex_attention of queries that are not sharded by position')
        if specs[1] is None or specs[2] is None:
            raise PropagationError(f'"{self._where}": flex_attention of sharded queries and whole keys')
        self._rules.note("attention", "flex_attention")
        self._forget()
        lengths = [int(spec.shadow.shape[-2]) for spec in (specs[0], specs[1])]
        result = self._rules.attend(
            AttentionCall(
                q_BHSE=strip(query),
                k_BKTE=strip(key),
                v_BKTF=strip(value),
                q_length=lengths[0],
                k_length=lengths[1],
                scale=flex.scale,
                score_mod=flex.score_mod,
                block_mask=flex.block_mask,
            )
        )
        shape = [*result.shape[:-2], lengths[0], result.shape[-1]]
        placed = Placed(dim=result.ndim - 2, parts=specs[0].placed.parts)
        with torch_compat.without_torch_functions():
            whole = shadow_of(shape)
            self._marked(result, whole, placed, frozenset({SEQUENCE}))
            unknown = [result.new_full(result.shape[:-1], math.nan) for _ in range(2)]
            for each in unknown:
                self._marked(each, whole[..., 0], placed, frozenset({STATISTICS}))
        return result, unknown[0], unknown[1]

    def _mask(self, mask: Tensor | None, length: int | None) -> tuple[Tensor | None, bool]:
        """Return the mask with all columns, and whether its rows are this rank's alone."""
        spec = self._spec_of(mask)
        if mask is None or spec is None:
            return mask, False
        if spec.placed.dim == mask.ndim - 2 and length is not None:
            return mask, True
        return self._whole(mask), False


def place(spec: ShardSpec) -> int:
    """Return the sharded dim, counted from the last, as functions pair their arguments' dims."""
    return spec.shadow.ndim - spec.placed.dim


def attend_by(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    enable_gqa: bool,
    call: Callable[..., AttentionCall],
    rules: SequenceRules,
) -> Tensor:
    """Attend by a plugin's rule; where an inner axis shards heads, on this rank's.

    Args:
        query: As of `scaled_dot_product_attention`, and so the next five.
        key: As above.
        value: As above.
        attn_mask: As above.
        dropout_p: As above.
        is_causal: As above.
        enable_gqa: As above.
        call: Makes the plugin's arguments.
        rules: The plugin's.
    """
    if has_torch_function((query, key, value)):
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        options: dict[str, Any] = {"enable_gqa": enable_gqa, "call": call, "rules": rules}
        result: Tensor = handle_torch_function(attend_by, (query, key, value), *given, **options)
        return result
    return _attend_by(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, call=call, rules=rules)


def _attend_by(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    enable_gqa: bool,
    call: Callable[..., AttentionCall],
    rules: SequenceRules,
) -> Tensor:
    return rules.attend(
        call(q_BHSE=query, k_BKTE=key, v_BKTF=value, mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal)
    )


# Inner axes treat it as torch's function; what draws in it is the function that it calls.
attend_by.__name__ = ATTENTION
attend_by.composer3d_written = _attend_by  # type: ignore[attr-defined]
