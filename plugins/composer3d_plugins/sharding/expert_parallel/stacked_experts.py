"""Experts whose weights are stacked, in a module that is called with tokens, their experts and the weights of these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from composer3d import PluginError, propagation
from composer3d_plugins.sharding.expert_parallel.token_exchange import (
    Note,
    exchange_parts,
    gather_tokens,
    send_tokens,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Dispatch", "shard_stacked"]

Dispatch = Literal["auto", "all_to_all", "all_gather"]


def shard_stacked(
    module: Any,
    mesh: DeviceMesh,
    *,
    fqn: str,
    dispatch: Dispatch,
    note: Note,
    skew: float,
    tensor: DeviceMesh | None = None,
) -> None:
    """Shard stacked experts over the ranks of a mesh, along their first dim, and exchange tokens around their forward.

    The module's own code runs on this rank's experts, each row with one expert and a weight of one.

    Args:
        module: With the contract of `has_stacked_experts`.
        mesh: Of one dim, ep.
        fqn: Of the module, for messages.
        dispatch: How tokens reach experts; "auto" sends what has fewer bytes.
        note: Called in every forward, as `token_exchange.Note`.
        skew: As of `token_exchange.exchange_counts`.
        tensor: Of one dim, tp, where ep is carved out of it too: each of its ranks sends a part of the tokens.

    Memory: experts / ep. Collectives: as `token_exchange.send_tokens` and `gather_tokens`; over the ranks of tensor 1
    all-gather forward (results), 2 backward.
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    total, degree, inner = module.num_experts, mesh.size(), module.forward
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                shards = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
                owner._parameters[name] = torch.nn.Parameter(shards, requires_grad=parameter.requires_grad)
    group = mesh.get_group()
    run, divisor = functools.partial(_run_local, inner), degree // (1 if tensor is None else tensor.size())
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden_TD, index_TK, weights_TK = signature.bind(*args, **kwargs).args
        if hidden_TD.ndim != 2 or index_TK.ndim != 2 or index_TK.shape != weights_TK.shape:
            raise PluginError(
                f'expert_parallel: "{fqn}" is called with {list(hidden_TD.shape)}, {list(index_TK.shape)} and '
                f"{list(weights_TK.shape)}, which are not tokens x width, and tokens x experts twice"
            )
        is_gathered = dispatch == "all_gather" or (dispatch == "auto" and index_TK.shape[1] > degree)
        exchange = gather_tokens if is_gathered else send_tokens
        given = (hidden_TD, index_TK, weights_TK)
        options: Any = {"num_experts": total, "group": group, "degree": divisor, "note": note, "skew": skew}
        with _local(module, total // degree):
            if tensor is None:
                return exchange(run, *given, **options)
            specs = [propagation.spec_of(x) for x in given]
            if all(spec is not None and spec.placed.dim == 0 for spec in specs):  # parts of a sequence
                return propagation.copy_mark(hidden_TD, exchange(run, *map(propagation.strip, given), **options))
            return exchange_parts(functools.partial(exchange, run, **options), *given, group=tensor.get_group())

    module.forward = propagation.eagerly(forward)


def _run_local(inner: Callable[..., Tensor], rows_RD: Tensor, experts_R: Tensor) -> Tensor:
    """Run a module's own code on rows of this rank's experts, in any order."""
    import torch

    # A row that nobody sent keeps the parameters in the graph, which data-parallel plugins reduce on all ranks, and the
    # exchange before it, whose backward all ranks have to call.
    rows, experts = rows_RD, experts_R
    if not rows_RD.shape[0]:
        rows, experts = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])]), experts_R.new_zeros(1)
    ones = torch.ones(experts.shape[0], 1, dtype=rows.dtype, device=rows.device)
    return inner(rows, experts[:, None], ones)[: rows_RD.shape[0]]


@contextmanager
def _local(module: Any, num_experts: int) -> Iterator[None]:
    """Let a module's code read this rank's experts: plain tensors, and as many as there are."""
    from torch.distributed.tensor import DTensor

    shadowed: list[tuple[Any, str]] = []
    number = module.num_experts
    try:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if isinstance(parameter, DTensor):
                    owner.__dict__[name] = parameter.to_local()
                    shadowed.append((owner, name))
        module.num_experts = num_experts
        yield
    finally:
        module.num_experts = number
        for owner, name in shadowed:
            del owner.__dict__[name]
