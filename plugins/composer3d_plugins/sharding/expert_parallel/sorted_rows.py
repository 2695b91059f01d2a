"""Experts that are called with rows in their order: as many as counts say, or as many for each of them.

Shapes: R rows, N experts, D width; rows_RD, or x_NRD with a dim of experts and any between it and the rows' width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import PluginError, torch_compat
from composer3d_plugins.sharding.expert_parallel.token_exchange import (
    Note,
    evenly,
    exchange_counts,
    experts_of,
    scale_gradients,
    send_rows,
)

__all__ = ["exchange_sorted", "states_ends"]

Sizes = Sequence[int] | Tensor


def exchange_sorted(
    inner: Callable[..., Tensor],
    x: Tensor,
    sizes: Sizes | None = None,
    *,
    are_ends: bool,
    num_experts: int,
    fqn: str,
    group: Any,
    degree: int,
    note: Note,
    skew: float,
) -> Tensor:
    """Run experts that lie on other ranks on rows in order of experts.

    Args:
        inner: The module's own code, on this rank's experts.
        x: Rows, or rows of each expert.
        sizes: Rows of each expert, or where each one's end; None where each has as many.
        are_ends: As of `states_ends`.
        num_experts: On all ranks.
        fqn: Of the module, for messages.
        group: As of `send_sorted`.
        degree: As there.
        note: As there.
        skew: As there.

    Raises:
        PluginError: It is called with something else.
    """
    is_by_expert = sizes is None and x.ndim > 2
    if x.ndim < 2 or (x.shape[0] != num_experts if is_by_expert else sizes is None and x.shape[0] % num_experts):
        raise PluginError(
            f'expert_parallel: "{fqn}" is called with {list(x.shape)}, which are not rows in order of {num_experts} '
            "experts, as many for each, nor a dim of experts before them"
        )
    rows_RD = x.flatten(0, -2)
    is_fake = torch_compat.active_fake_mode() is not None
    counts_N = _counts(rows_RD, sizes, are_ends, num_experts, fqn)
    num_rows = rows_RD.shape[0] if is_fake else int(counts_N.sum())

    def ordered(given_RD: Tensor, held: list[int]) -> Tensor:
        if sizes is None:
            shape = [len(held), *[1] * (x.ndim - 3), -1, x.shape[-1]] if is_by_expert else list(given_RD.shape)
            out_RD = inner(given_RD.reshape(shape)).flatten(0, -2)
        else:
            out_RD = inner(given_RD, _like(sizes, held, are_ends))
        if out_RD.shape[0] != given_RD.shape[0]:
            raise PluginError(f'expert_parallel: "{fqn}" returns {list(out_RD.shape)} of {list(given_RD.shape)} rows')
        return out_RD

    out_RD = send_sorted(ordered, rows_RD[:num_rows], counts_N, group=group, degree=degree, note=note, skew=skew)
    if num_rows < rows_RD.shape[0]:  # rows of no expert
        out_RD = torch.cat([out_RD, out_RD.new_zeros(rows_RD.shape[0] - num_rows, out_RD.shape[1])])
    return out_RD.view(*x.shape[:-1], out_RD.shape[-1])


def send_sorted(
    ordered: Callable[[Tensor, list[int]], Tensor],
    rows_RD: Tensor,
    counts_E: Tensor,
    *,
    group: Any,
    degree: int,
    note: Note,
    skew: float = 1.0,
) -> Tensor:
    """Run experts that lie on other ranks on rows that stand in order of experts; return their results, in that order.

    Args:
        ordered: Runs this rank's experts on rows in their order, given how many each has; it may return another width.
        rows_RD: As many as the counts add up to.
        counts_E: Rows of each expert of all ranks, int64.
        group: Process group of ep.
        degree: What gradients of the experts' parameters are divided by.
        note: As of `token_exchange.send_tokens`.
        skew: As of `token_exchange.exchange_counts`.

    Memory: a copy of the rows sent, and one of those received. Collectives: 3 all-to-alls forward, 2 backward.
    """
    rows = exchange_counts(counts_E, group=group, num_rows=rows_RD.shape[0], skew=skew)
    note(rows.per_expert, rows.chosen)
    order_R = experts_of(rows, like=counts_E).argsort(stable=True)
    held = rows.per_expert

    def compute(x_RD: Tensor) -> Tensor:
        # Rows that nobody sent keep the parameters in the graph, which data-parallel plugins reduce on all ranks, and
        # the exchange before it, whose backward all ranks have to call.
        if not x_RD.shape[0]:
            return ordered(torch.cat([x_RD, x_RD.new_zeros(len(held), x_RD.shape[1])]), [1] * len(held))[:0]
        out_RD = ordered(x_RD[order_R], held)
        return torch.empty_like(out_RD).index_copy(0, order_R, out_RD)

    out_RD = scale_gradients(compute, send_rows(rows_RD, rows, group=group), degree=degree)
    return send_rows(out_RD, rows, group=group, back=True)


def states_ends(name: str) -> bool:
    """Return whether an argument of this name says where each expert's rows end, and not how many they are."""
    return any(word in name for word in ("off", "cum", "end"))


def _counts(rows_RD: Tensor, sizes: Sizes | None, are_ends: bool, num_experts: int, fqn: str) -> Tensor:
    """Return the rows of each expert, int64."""
    number, device = rows_RD.shape[0], rows_RD.device
    if sizes is None or torch_compat.active_fake_mode() is not None:
        return torch.tensor(evenly(number, num_experts), device=device)
    counts_N = torch.as_tensor(sizes, device=device).to(torch.int64)
    given = counts_N.tolist()
    if counts_N.shape == (num_experts,) and are_ends:
        counts_N = counts_N.diff(prepend=counts_N.new_zeros(1))
    if counts_N.shape != (num_experts,) or bool((counts_N < 0).any()) or int(counts_N.sum()) > number:
        what = "where the rows of each end" if are_ends else "how many rows each has"
        raise PluginError(
            f'expert_parallel: "{fqn}" is called with {number} rows and {given}, which does not say of '
            f"{num_experts} experts {what}"
        )
    return counts_N


def _like(sizes: Sizes, held: list[int], are_ends: bool) -> Any:
    """Return the rows of each expert in the form in which the code gave them."""
    numbers = list(itertools.accumulate(held)) if are_ends else held
    if isinstance(sizes, Tensor):
        return torch.tensor(numbers, dtype=sizes.dtype, device=sizes.device)
    return type(sizes)(numbers)  # type: ignore[call-arg]
