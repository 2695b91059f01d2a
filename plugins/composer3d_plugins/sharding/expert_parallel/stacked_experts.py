"""Experts whose weights are stacked, in a module that is called with tokens, their experts and the weights of these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from composer3d import PluginError, expert_counts, expert_form, propagation, shared_by_experts, stacked_number
from composer3d_plugins.sharding.expert_parallel.expert_rows import local_rows, owners_of_rows
from composer3d_plugins.sharding.expert_parallel.sorted_rows import exchange_sorted, states_ends
from composer3d_plugins.sharding.expert_parallel.token_exchange import (
    Note,
    gather_tokens,
    scaled,
    send_tokens,
)
from composer3d_plugins.sharding.expert_parallel.token_parts import exchange_parts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Dispatch", "shard_stacked", "shard_weights"]

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

    The module's own code runs on this rank's experts: where tokens choose them, each row with one expert and a weight
    of one; where rows come in order of experts, those of all ranks in that order. What all experts share stays whole;
    its gradients are averaged over all ranks, as those of other layers, and so are not divided by the degree. Of what
    has a row for each expert the code sees those of this rank's. Experts
    without weights, whose numbers come after those of all others, are run where their tokens are.

    Args:
        module: With a form of `expert_form`.
        mesh: Of one dim, ep.
        fqn: Of the module, for messages.
        dispatch: How tokens reach experts; "auto" sends what has fewer bytes. Sorted rows are always sent.
        note: Called in every forward, as `token_exchange.Note`.
        skew: As of `token_exchange.exchange_counts`.
        tensor: Of one dim, tp, where ep is carved out of it too: each of its ranks sends a part of the tokens.

    Memory: experts / ep. Collectives: as `token_exchange.send_tokens`, `send_sorted` and `gather_tokens`; over the
    ranks of tensor 1 all-gather forward (results), 2 backward.
    """
    total, shared, inner = stacked_number(module), shared_by_experts(module), module.forward
    form, counts = expert_form(module, is_stated=True), expert_counts(module) or _unnamed_counts(module, total)
    signature, degree = inspect.signature(inner), mesh.size()
    divisor = degree // (1 if tensor is None else tensor.size())
    shard_weights(module, mesh, shared)
    held, first = dict.fromkeys(counts, total // degree), mesh.get_local_rank() * (total // degree)
    local = functools.partial(_local, module, held, shared=shared, divisor=divisor, first=first)
    more = any(held.ndim > 2 for name, held in module.named_parameters() if name in shared)
    group, owners = mesh.get_group(), [each for _, each in owners_of_rows(module)]
    options: dict[str, Any] = {"num_experts": total, "group": group, "degree": divisor, "note": note, "skew": skew}
    if form == "chosen":
        of_tokens: dict[str, Any] = {"dispatch": dispatch, "degree": degree, "tensor": tensor, "more": more}
        run = functools.partial(_exchange_chosen, inner, fqn=fqn, options=options, **of_tokens)
    else:
        are_ends = states_ends([*signature.parameters][-1])
        run = functools.partial(exchange_sorted, inner, fqn=fqn, are_ends=are_ends, **options)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).args
        with local_rows(owners, total, slice(first, first + total // degree)), local():
            return run(*given)

    module.forward = propagation.eagerly(forward)


def _unnamed_counts(module: Any, number: int) -> dict[str, int]:
    """Return the attributes that say how many experts a module has, where none is named for them."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape[1:]}
    held = {name: value for name, value in vars(module).items() if type(value) is int and value == number}
    return {name: value for name, value in held.items() if number not in sizes or len(name) == 1 or "exp" in name}


def shard_weights(module: Any, mesh: DeviceMesh, shared: Collection[str]) -> None:
    """Shard all parameters of a module along their first dim, but those of the names that are shared."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    for fqn, owner in module.named_modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and f"{fqn}.{name}".lstrip(".") not in shared:
                shards = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
                owner._parameters[name] = torch.nn.Parameter(shards, requires_grad=parameter.requires_grad)


def _exchange_chosen(
    inner: Callable[..., Tensor],
    hidden: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    fqn: str,
    dispatch: Dispatch,
    degree: int,
    tensor: DeviceMesh | None,
    more: bool,
    options: Mapping[str, Any],
) -> Tensor:
    """Run experts that tokens choose, each with its weights; arguments as of `shard_stacked`.

    Tokens may stand in several dims; the module's own code then has as many, and says whether its results have. It may
    be called with weights before choices; `more` says that there are experts without weights of their own.
    """
    if index_TK.is_floating_point() and not weights_TK.is_floating_point():
        index_TK, weights_TK, inner = weights_TK, index_TK, _weights_first(inner)
    if more:
        is_own_TK, number = index_TK < options["num_experts"], options["num_experts"]
        beside = inner(hidden, index_TK.clamp(min=number), weights_TK.masked_fill(is_own_TK, 0.0))
        own_TK = index_TK.masked_fill(~is_own_TK, number), weights_TK.masked_fill(~is_own_TK, 0.0)
        inner = inner if index_TK.shape[1] == 1 else _of_two_choices(inner, number)
        given: Any = {"fqn": fqn, "dispatch": dispatch, "degree": degree, "tensor": tensor, "options": options}
        return beside + _exchange_chosen(inner, hidden, *own_TK, more=False, **given)
    hidden_TD = hidden.flatten(0, -2) if hidden.ndim > 2 else hidden
    if hidden.ndim < 2 or index_TK.shape != weights_TK.shape or index_TK.shape[:-1] != hidden_TD.shape[:-1]:
        raise PluginError(
            f'expert_parallel: "{fqn}" is called with {list(hidden.shape)}, {list(index_TK.shape)} and '
            f"{list(weights_TK.shape)}, which are not tokens x width, and tokens x experts twice"
        )
    given = (hidden_TD, index_TK, weights_TK)
    is_gathered = dispatch == "all_gather" or (dispatch == "auto" and index_TK.shape[1] > degree)
    send, is_flat = gather_tokens if is_gathered else send_tokens, True

    def local(rows_RD: Tensor, experts_R: Tensor) -> Tensor:
        nonlocal is_flat
        out = _run_local(inner, rows_RD, experts_R, num_dims=hidden.ndim)
        is_flat = out.ndim == 2
        return out.flatten(0, -2)[: rows_RD.shape[0]]

    def shaped(out_TD: Tensor) -> Tensor:
        return out_TD if is_flat else out_TD.view(*hidden.shape[:-1], out_TD.shape[-1])

    exchange: Callable[..., Tensor] = functools.partial(send, local, **options)
    if tensor is None:
        return shaped(exchange(*map(_whole, given)))
    specs = [propagation.spec_of(x) for x in given]
    if all(spec is not None and spec.placed.dim == 0 for spec in specs):  # parts of a sequence
        return shaped(propagation.copy_mark(hidden_TD, exchange(*map(propagation.strip, given))))
    return shaped(exchange_parts(exchange, *given, group=tensor.get_group()))


def _of_two_choices(inner: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
    """Return code that is called with a second choice, of no weight: some takes a dim of one choice for none."""
    import torch

    def two(hidden: Tensor, index_RK: Tensor, weights_RK: Tensor) -> Tensor:
        index_RK = torch.cat([index_RK, torch.full_like(index_RK, number)], 1)
        return inner(hidden, index_RK, torch.cat([weights_RK, torch.zeros_like(weights_RK)], 1))

    return two


def _weights_first(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda hidden, index_TK, weights_TK: inner(hidden, weights_TK, index_TK)


def _whole(x: Tensor) -> Tensor:
    """Return all rows of tokens that an inner axis shards, whose ranks all exchange the same ones.

    Propagation gathers what is indexed along its sharded dim; autograd functions of the exchange are unknown to it.
    """
    import torch

    return x if propagation.spec_of(x) is None else x[torch.arange(x.shape[0], device=x.device)]


def _run_local(inner: Callable[..., Tensor], rows_RD: Tensor, experts_R: Tensor, *, num_dims: int) -> Tensor:
    """Run a module's own code on rows of this rank's experts, in any order; a row more where there are none.

    Args:
        inner: The code.
        rows_RD: Rows.
        experts_R: Of each.
        num_dims: Of tokens, as the code is called.
    """
    import torch

    # A row that nobody sent keeps the parameters in the graph, which data-parallel plugins reduce on all ranks, and the
    # exchange before it, whose backward all ranks have to call.
    rows, experts = rows_RD, experts_R
    if not rows_RD.shape[0]:
        rows, experts = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])]), experts_R.new_zeros(1)
    ones = torch.ones(experts.shape[0], 1, dtype=rows.dtype, device=rows.device)
    return inner(rows.view(*[1] * (num_dims - 2), *rows.shape), experts[:, None], ones)


@contextmanager
def _local(
    module: Any, counts: Mapping[str, int], *, shared: Collection[str], divisor: int, first: int
) -> Iterator[None]:
    """Let a module's code read this rank's experts: plain tensors, and as many as there are.

    Args:
        module: Of the experts.
        counts: Its attributes that say how many there are, with what they are to say.
        shared: Names of parameters that are whole; a stack is one that has rows of no expert after those of all.
        divisor: What gradients of the sharded ones are divided by.
        first: Number of this rank's first expert.
    """
    from torch.distributed.tensor import DTensor

    shadowed: list[tuple[Any, str]] = []
    before = {name: vars(module)[name] for name in counts}
    try:
        for fqn, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if f"{fqn}.{name}".lstrip(".") in shared:
                    whole = scaled(parameter, float(divisor))
                    owner.__dict__[name] = whole if whole.ndim < 3 else whole[first:]
                elif isinstance(parameter, DTensor):
                    owner.__dict__[name] = parameter.to_local()
                else:
                    continue
                shadowed.append((owner, name))
        vars(module).update(counts)
        yield
    finally:
        vars(module).update(before)
        for owner, name in shadowed:
            del owner.__dict__[name]
