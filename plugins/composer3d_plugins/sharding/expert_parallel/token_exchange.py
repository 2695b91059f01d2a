"""Exchange of token rows between the ranks of ep, which hold different experts: all-to-alls, or gathered tokens.

No token is dropped or padded: as many rows travel as were chosen, and a rank that gets none takes part in everything.

Shape suffixes: T tokens of this rank, K experts a token, E experts, D width, R rows: pairs of a token and an expert.
Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d import PluginError, torch_compat
from composer3d_plugins.sharding.expert_parallel.routed_rows import combined, dispatched, places_of

__all__ = [
    "Compute",
    "Note",
    "Rows",
    "all_gather",
    "count_rows",
    "evenly",
    "exchanged",
    "exchange_counts",
    "experts_of",
    "gather_tokens",
    "padded",
    "scale_gradients",
    "scaled",
    "send_pieces",
    "send_rows",
    "send_tokens",
]

# Called with the number of rows of each of this rank's experts, and of this rank's rows for each expert of all ranks.
Note = Callable[[list[int], list[int]], None]
# Returns rows_RD, given rows_RD and of each the index among this rank's experts.
Compute = Callable[[Tensor, Tensor], Tensor]
Exchange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Numbers of rows by destination.

    Args:
        chosen: Rows of this rank's tokens for each expert of all ranks.
        sent: Rows to each rank.
        received: Rows from each rank.
        received_per_expert: By source rank, rows for each of this rank's experts.
        is_assumed: Whether routing is assumed to be balanced, because fake tensors have no values.
    """

    chosen: list[int]
    sent: list[int]
    received: list[int]
    received_per_expert: list[list[int]]
    is_assumed: bool = False

    @property
    def per_expert(self) -> list[int]:
        """Rows for each of this rank's experts, of all ranks together."""
        return [sum(column) for column in zip(*self.received_per_expert, strict=True)]


def exchange_counts(counts_E: Tensor, *, group: Any, num_rows: int, skew: float = 1.0) -> Rows:
    """Tell every rank how many rows come for each of its experts.

    Fake tensors have no values: there every expert gets the same number of rows, and this rank's `skew` times as many.

    Args:
        counts_E: This rank's rows for each expert, int64; a rank has consecutive experts.
        group: Process group of ep.
        num_rows: Their sum, which is known without reading it.
        skew: Rows of this rank's experts over the mean of all ranks, where nothing is known.

    Collectives: one all-to-all of E int64.
    """
    degree = dist.get_world_size(group)
    # A fake process group leaves it as it is: as if every rank routed its tokens as this one does.
    received_E = counts_E.clone()
    with torch_compat.operator_span("all_to_all", group, bytes=counts_E.nbytes, what="counts"):
        dist.all_to_all_single(received_E, counts_E, group=group)
    if torch_compat.active_fake_mode() is not None:
        even = evenly(num_rows, counts_E.shape[0])
        local = len(even) // degree
        sent = [sum(even[rank * local : (rank + 1) * local]) for rank in range(degree)]
        mine = [evenly(round(skew * rows), local) for rows in sent]
        return Rows(chosen=even, sent=sent, received=list(map(sum, mine)), received_per_expert=mine, is_assumed=True)
    told = torch.stack([counts_E, received_E]).view(2, degree, -1).tolist()  # one wait for the accelerator
    return Rows(
        chosen=[count for counts in told[0] for count in counts],
        sent=list(map(sum, told[0])),
        received=list(map(sum, told[1])),
        received_per_expert=told[1],
    )


def evenly(total: int, number: int) -> list[int]:
    """Return a number of rows as equal parts, the first of which have one more."""
    return [total // number + (index < total % number) for index in range(number)]


class _Exchange(torch.autograd.Function):
    """An exchange between ranks; gradients take its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, adjoint: Exchange, anchor: Tensor | None = None) -> Tensor:
        ctx.adjoint = adjoint
        return exchange(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            # What `scale_gradients` does to rows is not what second derivatives by parameters would need.
            raise PluginError(
                "expert_parallel: a loss is made of gradients (create_graph=True) that pass through experts sharded "
                "over ep, whose exchanges have first derivatives alone",
                hint="set ep = 1, or leave these experts out of [sharding.expert_parallel] experts",
            )
        return ctx.adjoint(grad), None, None, None


def exchanged(x: Tensor, exchange: Exchange, adjoint: Exchange) -> Tensor:
    """Return what an exchange between ranks makes of a tensor, whose gradient takes the adjoint."""
    result: Tensor = _Exchange.apply(x, exchange, adjoint)
    return result


def _all_to_all(x_RD: Tensor, *, sent: list[int], received: list[int], group: Any) -> Tensor:
    x_RD = x_RD.contiguous()
    result_RD = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    with torch_compat.operator_span("all_to_all", group, bytes=x_RD.nbytes, what="rows"):
        dist.all_to_all_single(result_RD, x_RD, received, sent, group=group)
    return result_RD


def send_rows(x_RD: Tensor, rows: Rows, *, group: Any, back: bool = False) -> Tensor:
    """Send each rank its rows, which stand in order of ranks; return those that come, in order of their sources.

    Args:
        x_RD: Rows.
        rows: How many go where.
        group: Process group of ep.
        back: Return rows to where they came from.

    Collectives: one all-to-all forward, one backward.
    """
    sent, received = (rows.received, rows.sent) if back else (rows.sent, rows.received)
    return send_pieces(x_RD, sent, received, group=group)


def send_pieces(x_RD: Tensor, sent: list[int], received: list[int], *, group: Any) -> Tensor:
    """Send each rank its rows, or elements, given how many; return those that come, in order of their sources.

    Collectives: one all-to-all forward, one backward.
    """
    # Another rank's rows may need gradients where this one has none to send.
    anchor = x_RD.new_zeros(0).requires_grad_(torch.is_grad_enabled())
    forth = partial(_all_to_all, sent=sent, received=received, group=group)
    back_again = partial(_all_to_all, sent=received, received=sent, group=group)
    result: Tensor = _Exchange.apply(x_RD, forth, back_again, anchor)
    return result


class _Scaled(torch.autograd.Function):
    """The same values; their gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return the same values, whose gradient is multiplied."""
    result: Tensor = _Scaled.apply(x, factor)
    return result


def scale_gradients(compute: Callable[[Tensor], Tensor], x_RD: Tensor, *, degree: int) -> Tensor:
    """Run experts so that the gradients of their parameters, and those alone, are divided by the degree.

    Tokens of all ranks along ep have added to them. A data-parallel plugin then averages them over the ranks that hold
    the same experts, which are fewer than its ranks by this factor, as it does with any gradient. FSDP2's own divide
    factor would be a sum on gloo, and divides twice where one rank has an expert.
    """
    return scaled(compute(scaled(x_RD, float(degree))), 1.0 / degree)


class _Weighted(torch.autograd.Function):
    """Weighted sum of each token's results, whose gradients are multiplied, and not those of the weights."""

    @staticmethod
    def forward(ctx: Any, out_TKD: Tensor, weights_TK: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(out_TKD, weights_TK)
        ctx.factor = factor
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_TKD, weights_TK = ctx.saved_tensors
        grad_out_TKD = grad_TD.unsqueeze(1) * (weights_TK * ctx.factor).unsqueeze(-1)
        grad_weights_TK = (out_TKD * grad_TD.unsqueeze(1)).sum(-1)
        return grad_out_TKD.to(out_TKD.dtype), grad_weights_TK.to(weights_TK.dtype), None


def send_tokens(
    compute: Compute,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    group: Any,
    degree: int,
    note: Note,
    skew: float = 1.0,
) -> Tensor:
    """Run experts that lie on other ranks; tokens travel to them and back.

    Weights are applied by the sender, after the way back, so that gradients of routers stay on their rank. Gradients of
    experts are divided as in `scale_gradients`, where that takes the fewest products: at tokens and weights.

    Args:
        compute: Runs this rank's experts.
        hidden_TD: Tokens.
        index_TK: Experts of each; a number that no expert has for what is sent to none.
        weights_TK: Of what they return.
        num_experts: On all ranks.
        group: Process group of ep.
        degree: What gradients of the experts' parameters are divided by.
        note: Called with the number of rows of each of this rank's experts, and of this rank's rows for each expert.
        skew: As of `exchange_counts`.

    Memory: two copies of the rows sent, and two of those received. Collectives: 3 all-to-alls forward (counts, rows,
    results), 2 backward.
    """
    chosen_R, top_k = index_TK.reshape(-1), index_TK.shape[-1]
    order_R = chosen_R.argsort(stable=True)
    rows = exchange_counts(count_rows(chosen_R, num_experts), group=group, num_rows=chosen_R.shape[0], skew=skew)
    note(rows.per_expert, rows.chosen)
    if sum(rows.sent) == chosen_R.shape[0]:
        options: dict[str, Any] = {"rows": rows, "group": group}
        places_R = places_of(order_R)
        sent_RD = send_rows(dispatched(hidden_TD, order_R, places_R, top_k=top_k, factor=float(degree)), **options)
        back_RD = send_rows(compute(sent_RD, experts_of(rows, like=order_R)), back=True, **options)
        return combined(back_RD, weights_TK, order_R, places_R, factor=1.0 / degree).to(hidden_TD.dtype)
    order_R = order_R[: sum(rows.sent)]  # what no expert has comes last
    hidden_TD = scaled(hidden_TD, float(degree))
    sent_RD = send_rows(hidden_TD[order_R // top_k], rows, group=group)
    out_RD = compute(sent_RD, experts_of(rows, like=order_R))
    back_RD = send_rows(out_RD, rows, group=group, back=True)
    out_RD = back_RD.new_zeros(chosen_R.shape[0], back_RD.shape[1]).index_copy(0, order_R, back_RD)
    out_TKD = out_RD.unflatten(0, tuple(index_TK.shape))
    result: Tensor = _Weighted.apply(out_TKD, weights_TK, 1.0 / degree).to(hidden_TD.dtype)
    return result


def count_rows(chosen_R: Tensor, num_experts: int) -> Tensor:
    """Return how many rows each expert has; of a known size on fake tensors, where `bincount` has none.

    A number that no expert has is not counted.
    """
    ones_R = torch.ones_like(chosen_R)
    return chosen_R.new_zeros(num_experts + 1).scatter_add_(0, chosen_R.clamp(max=num_experts), ones_R)[:-1]


def experts_of(rows: Rows, *, like: Tensor) -> Tensor:
    """Return of each received row the index among this rank's experts."""
    sizes = [size for source in rows.received_per_expert for size in source]
    local = len(rows.received_per_expert[0])
    experts = [index % local for index in range(len(sizes))]
    if rows.is_assumed:
        return like.new_empty(sum(sizes))
    pieces = torch.tensor([experts, sizes], device=like.device, dtype=like.dtype)
    return pieces[0].repeat_interleave(pieces[1], output_size=sum(sizes))


def all_gather(x: Tensor, *, group: Any, is_read: bool = False) -> Tensor:
    """Gather rows; where their values are read, a fake process group leaves this rank's for those of the others."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    if is_read:
        result.view(-1, *x.shape).copy_(x)
    with torch_compat.operator_span("all_gather", group, bytes=result.nbytes, what="tokens"):
        torch_compat.all_gather_single(result, x.contiguous(), group=group)
    return result


def _reduce_scatter(x: Tensor, *, group: Any) -> Tensor:
    result = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    with torch_compat.operator_span("reduce_scatter", group, bytes=x.nbytes, what="tokens"):
        torch_compat.reduce_scatter_single(result, x.contiguous(), group=group)
    return result


def gather_tokens(
    compute: Compute,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    group: Any,
    degree: int,
    note: Note,
    skew: float = 1.0,
) -> Tensor:
    """Run experts that lie on other ranks; every rank gathers all tokens, and results are summed where they came from.

    Fewer bytes than `send_tokens` where a token has more experts than ep has ranks. Arguments as there.

    Memory: the tokens of all ranks, and the rows of this rank's experts. Collectives: 4 all-gathers forward (lengths,
    tokens, choices, weights) and 1 reduce-scatter; 1 all-gather and 2 reduce-scatters backward.
    """
    rank, top_k, num_tokens = dist.get_rank(group), index_TK.shape[-1], hidden_TD.shape[0]
    is_fake, local = torch_compat.active_fake_mode() is not None, num_experts // dist.get_world_size(group)
    length = torch.full((1,), num_tokens, dtype=torch.int64, device=hidden_TD.device)
    lengths = all_gather(length, group=group, is_read=True)
    longest = num_tokens if is_fake else int(lengths.max())
    hidden_TD, weights_TK = (padded(x, longest, 0.0) for x in (hidden_TD, weights_TK))
    # The gradient of what is gathered is the sum of all ranks', of this rank's rows.
    gather, scatter = partial(all_gather, group=group), partial(_reduce_scatter, group=group)
    all_TD = exchanged(hidden_TD, gather, scatter)
    weights_R = exchanged(weights_TK, gather, scatter).reshape(-1)
    chosen_R = all_gather(padded(index_TK, longest, -1), group=group, is_read=True).reshape(-1) - rank * local
    # Rows of other ranks' experts, and of padding, come after the last of this rank's.
    chosen_R = torch.where((chosen_R >= 0) & (chosen_R < local), chosen_R, local)
    order_R = chosen_R.argsort(stable=True)
    if is_fake:
        per_expert = evenly(round(skew * num_tokens * top_k), local)
        note(per_expert, evenly(num_tokens * top_k, num_experts))
    else:
        own_E = count_rows(index_TK.reshape(-1), num_experts)
        told = torch.cat([count_rows(chosen_R, local), own_E]).tolist()  # one wait for the accelerator
        per_expert = told[:local]
        note(per_expert, told[local:])
    order_R = order_R[: sum(per_expert)]
    token_R = order_R // top_k
    experts_R = chosen_R[order_R]
    out_RD = scale_gradients(lambda rows_RD: compute(rows_RD, experts_R), all_TD[token_R], degree=degree)
    out_RD = out_RD * weights_R[order_R].unsqueeze(-1)
    sum_TD = out_RD.new_zeros(all_TD.shape[0], out_RD.shape[-1]).index_add(0, token_R, out_RD)
    return exchanged(sum_TD, scatter, gather)[:num_tokens].to(hidden_TD.dtype)


def padded(x: Tensor, length: int, value: float) -> Tensor:
    """Return a tensor with as many rows, the last ones of a value."""
    missing = length - x.shape[0]
    return x if not missing else torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])
