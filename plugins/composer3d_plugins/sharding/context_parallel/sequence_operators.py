"""Custom operators of sharded attention: each is one operator to the compiler and to selective checkpoints.

Every exchange has its adjoint as backward, so that the losses of all ranks add up to the objective.

    composer3d::block_attention   attention of a rank's queries; keys here, gathered, or around the ring
    composer3d::block_attention_kept  the same, which returns the keys that it has gathered too, for the backward
    composer3d::exchange_heads    all-to-all between shards of positions and shards of heads
    composer3d::gather_sequence   all-gather in order of positions; backward composer3d::scatter_sequence
    composer3d::take_windows      neighbours' positions, by all-to-all; backward composer3d::return_windows

Shape suffixes as in `block_attention`; S is the length of the full sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from composer3d import torch_compat
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.block_attention import (
    Sharded,
    backward_gathered,
    backward_ring,
    forward_gathered,
    forward_ring,
)
from composer3d_plugins.sharding.context_parallel.block_kernels import Result
from composer3d_plugins.sharding.context_parallel.sequence_messages import (
    gather_runs,
    heads_to_positions,
    positions_to_heads,
    return_windows,
    scatter_runs,
    take_windows,
)
from composer3d_plugins.sharding.context_parallel.sequence_positions import (
    Positions,
    Run,
    decoded_runs,
    encoded_runs,
)
from composer3d_plugins.sharding.context_parallel.summed_positions import side_by_side

__all__ = ["Way", "block_attention", "exchange_heads", "gather_sequence", "gather_windows"]

Way: TypeAlias = Literal["gather", "gather_once", "ring"]

_UNLIMITED = -1
_CALL = "int[] rows, int[] columns, int rank, int behind, int ahead, float scale, float softcap, str method, str group"


def block_attention(
    q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKMF: torch.Tensor, mask: torch.Tensor | None,
    *, rows: Positions, columns: Positions, rank: int, pattern: Pattern, scale: float, softcap: float = 0.0,
    way: Way = "gather", group: str = "",
) -> torch.Tensor:  # fmt: skip
    """Return the output [B, H, L, F] of a rank's queries.

    Args:
        q_BHLE: Queries of this rank.
        k_BKME: Keys: of this rank's shard where there is a group, else all of them in order of positions.
        v_BKMF: Values, likewise.
        mask: bool, True where a key is visible, or additive without gradient: [B|1, H|1, S|L|1, T|1].
        rows: Positions of queries by rank.
        columns: Positions of keys by rank.
        rank: This rank's place in them.
        pattern: Visibility by position.
        scale: Factor of scores.
        softcap: c of c * tanh(score / c); 0 for none.
        way: How keys come where there is a group: by an all-gather, which the backward repeats unless they are kept, or
            around the ring.
        group: Name of the process group; empty for no exchange.
    """
    behind, ahead = (_UNLIMITED if bound is None else bound for bound in (pattern.behind, pattern.ahead))
    operator = _attention_kept if way == "gather_once" and group else _attention
    o, *_ = torch_compat.operators.call_operator(
        operator, q_BHLE, k_BKME, v_BKMF, mask,
        rows.encoded, columns.encoded, rank, behind, ahead, scale, softcap, way, group,
    )  # fmt: skip
    result: torch.Tensor = o
    return result


def exchange_heads(x: torch.Tensor, *, positions: Positions, group: str, to_heads: bool) -> torch.Tensor:
    """Exchange positions for heads: [B, H, L, E] to [B, H / degree, S, E] in order of positions, or back.

    Collectives: one all-to-all, one more in the backward.
    """
    exchanged: torch.Tensor = torch_compat.operators.call_operator(_exchange, x, positions.encoded, group, to_heads)
    return exchanged


def gather_sequence(x: torch.Tensor, *, dim: int, positions: Positions, group: str) -> torch.Tensor:
    """Return a whole tensor in order of positions, of shards along one dim.

    Collectives: one all-gather; in the backward one reduce-scatter, of 16-bit gradients in float32.
    """
    return _gather(x, dim % x.dim(), positions.encoded, group)


def gather_windows(
    x: torch.Tensor, *, dim: int, positions: Positions, windows: Sequence[tuple[Run, ...]], group: str
) -> torch.Tensor:
    """Return what lies in this rank's windows of a sequence, of shards along one dim.

    Collectives: one all-to-all; in the backward one more, of 16-bit gradients in float32.
    """
    return _windows(x, dim % x.dim(), positions.encoded, encoded_runs(windows), group)


def _sharded(*call: Any) -> tuple[Sharded, Way]:
    rows, columns, rank, behind, ahead, scale, softcap, method, group = call
    pattern = Pattern(*(None if bound == _UNLIMITED else bound for bound in (behind, ahead)))
    known = Sharded(
        rows=Positions.decoded(rows),
        columns=Positions.decoded(columns),
        rank=rank,
        pattern=pattern,
        scale=scale,
        softcap=softcap,
        group=group,
    )
    return known, method


def _attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    known, way = _sharded(*call)
    result = forward_ring(q, k, v, mask, known) if way == "ring" else forward_gathered(q, (k, v), mask, known)[0]
    return result.o_BHLF, result.lse_BHL


def _kept_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *call: Any
) -> tuple[torch.Tensor, ...]:
    result, pair = forward_gathered(q, (k, v), mask, _sharded(*call)[0])
    return result.o_BHLF, result.lse_BHL, *pair


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return side_by_side(q, width=v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide)


def _kept_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *call: Any
) -> tuple[torch.Tensor, ...]:
    length = _sharded(*call)[0].columns.length
    wholes = (x.new_empty((*x.shape[:2], length, x.shape[3])) for x in (k, v))
    return *_attention_fake(q, k, v, mask, *call), *wholes


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    mask: torch.Tensor | None, *call: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    known, way = _sharded(*call)
    if way == "ring":
        found = backward_ring(grad, (q, k, v), Result(o, lse), mask, known)
    else:
        found = backward_gathered(grad, (q, k, v), Result(o, lse), mask, known, is_kept=way == "gather_once")
    return found.q_BHLE, found.k_BKME, found.v_BKMF


def _attention_backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    mask: torch.Tensor | None, *call: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    known, way = _sharded(*call)
    if way == "gather_once" and known.group:
        length = known.columns.local_lengths[known.rank]
        k, v = (x.new_empty((*x.shape[:2], length, x.shape[3])) for x in (k, v))
    return side_by_side(q), side_by_side(k), side_by_side(v)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, mask, *call = inputs
    o, lse, *kept = output
    k, v = kept or (k, v)
    ctx.set_materialize_grads(False)  # nobody else has the outputs after the first
    ctx.save_for_backward(q, k, v, o, lse, mask)
    ctx.call = call


def _attention_gradients(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, o, lse, mask = ctx.saved_tensors
    if grad is None:
        return (None,) * (4 + len(ctx.call))
    gradients = torch_compat.operators.call_operator(
        _attention_backward_operator, grad, q, k, v, o, lse, mask, *ctx.call
    )
    return (*gradients, None, *[None] * len(ctx.call))


_attention_backward_operator = torch_compat.custom_operator(
    "composer3d::block_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? mask, " + _CALL + ")"
    " -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    kind="backward",
    fake=_attention_backward_fake,
)
_attention = torch_compat.custom_operator(
    "composer3d::block_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {_CALL}) -> (Tensor, Tensor)",
    _attention_forward,
    kind="attention",
    fake=_attention_fake,
    backward=_attention_gradients,
    setup_context=_keep_attention,
)
_attention_kept = torch_compat.custom_operator(
    "composer3d::block_attention_kept",
    f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
    _kept_forward,
    kind="attention",
    fake=_kept_fake,
    backward=_attention_gradients,
    setup_context=_keep_attention,
)


def _exchange_forward(x: torch.Tensor, positions: Sequence[int], group: str, to_heads: bool) -> torch.Tensor:
    exchange = positions_to_heads if to_heads else heads_to_positions
    return exchange(x, positions=Positions.decoded(positions), group=group)


def _exchange_fake(x: torch.Tensor, positions: Sequence[int], group: str, to_heads: bool) -> torch.Tensor:
    known = Positions.decoded(positions)
    batch, heads, _, width = x.shape
    if to_heads:
        return x.new_empty(batch, heads // known.degree, known.length, width)
    rank = torch.distributed.get_rank(torch_compat.process_group(group))
    return x.new_empty(batch, heads * known.degree, known.local_lengths[rank], width)


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.call = inputs[1:]


def _exchange_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    positions, group, to_heads = ctx.call
    return _exchange(grad, positions, group, not to_heads), None, None, None


_exchange = torch_compat.custom_operator(
    "composer3d::exchange_heads",
    "(Tensor x, int[] positions, str group, bool to_heads) -> Tensor",
    _exchange_forward,
    kind="collective",
    fake=_exchange_fake,
    backward=_exchange_gradient,
    setup_context=_keep_exchange,
)


def _gather_forward(x: torch.Tensor, dim: int, positions: Sequence[int], group: str) -> torch.Tensor:
    return gather_runs([x], dim=dim, positions=Positions.decoded(positions), group=group)[0]


def _gather_fake(x: torch.Tensor, dim: int, positions: Sequence[int], group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], Positions.decoded(positions).length, *x.shape[dim + 1 :]))


def _gather_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _scatter(grad, *ctx.call), None, None, None


def _scatter_forward(x: torch.Tensor, dim: int, positions: Sequence[int], group: str) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
    return scatter_runs([wide], dim=dim, positions=Positions.decoded(positions), group=group)[0].to(x.dtype)


def _scatter_fake(x: torch.Tensor, dim: int, positions: Sequence[int], group: str) -> torch.Tensor:
    rank = torch.distributed.get_rank(torch_compat.process_group(group))
    return x.new_empty((*x.shape[:dim], Positions.decoded(positions).local_lengths[rank], *x.shape[dim + 1 :]))


def _scatter_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _gather(grad, *ctx.call), None, None, None


_scatter = torch_compat.custom_operator(
    "composer3d::scatter_sequence",
    "(Tensor x, int dim, int[] positions, str group) -> Tensor",
    _scatter_forward,
    kind="collective",
    fake=_scatter_fake,
    backward=_scatter_gradient,
    setup_context=_keep_exchange,
)
_gather = torch_compat.custom_operator(
    "composer3d::gather_sequence",
    "(Tensor x, int dim, int[] positions, str group) -> Tensor",
    _gather_forward,
    kind="collective",
    fake=_gather_fake,
    backward=_gather_gradient,
    setup_context=_keep_exchange,
)


def _windows_forward(
    x: torch.Tensor, dim: int, positions: Sequence[int], windows: Sequence[int], group: str
) -> torch.Tensor:
    return take_windows(x, dim=dim, positions=Positions.decoded(positions), windows=decoded_runs(windows), group=group)


def _windows_fake(
    x: torch.Tensor, dim: int, positions: Sequence[int], windows: Sequence[int], group: str
) -> torch.Tensor:
    rank = torch.distributed.get_rank(torch_compat.process_group(group))
    size = sum(end - start for start, end in decoded_runs(windows)[rank])
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _windows_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _returned_windows(grad, *ctx.call), None, None, None, None


def _returned_forward(
    x: torch.Tensor, dim: int, positions: Sequence[int], windows: Sequence[int], group: str
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    known, found = Positions.decoded(positions), decoded_runs(windows)
    return return_windows(wide, dim=dim, positions=known, windows=found, group=group).to(x.dtype)


def _returned_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _windows(grad, *ctx.call), None, None, None, None


_WINDOWS = "(Tensor x, int dim, int[] positions, int[] windows, str group) -> Tensor"
_returned_windows = torch_compat.custom_operator(
    "composer3d::return_windows",
    _WINDOWS,
    _returned_forward,
    kind="collective",
    fake=lambda x, dim, positions, windows, group: _scatter_fake(x, dim, positions, group),
    backward=_returned_gradient,
    setup_context=_keep_exchange,
)
_windows = torch_compat.custom_operator(
    "composer3d::take_windows",
    _WINDOWS,
    _windows_forward,
    kind="collective",
    fake=_windows_fake,
    backward=_windows_gradient,
    setup_context=_keep_exchange,
)
