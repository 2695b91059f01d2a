"""Experts whose weights a block's own code multiplies rows with: in parameter lists, or stacked beside its router.

What the code reads in their place has no values; each product with one expert's matrix is a call of it, whose rows
travel to the rank that holds the matrix. Products with results wait for these, so a block whose experts have two
matrices one after the other exchanges rows twice.

Shape suffixes: R rows, I inputs, O outputs; a matrix is A x B as it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer3d import DataDependent, standing_in
from composer3d_plugins.sharding.expert_parallel.block_exchange import exchange_around
from composer3d_plugins.sharding.expert_parallel.call_sources import Caller
from composer3d_plugins.sharding.expert_parallel.listed_experts import local_experts
from composer3d_plugins.sharding.expert_parallel.stacked_experts import shard_weights
from composer3d_plugins.sharding.expert_parallel.token_exchange import Note

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["shard_multiplied"]

_REMEDY = "leave these out of [sharding.expert_parallel] experts = [...], which names what is sharded"


def shard_multiplied(
    block: nn.Module,
    holder: nn.Module,
    mesh: DeviceMesh,
    *,
    names: Sequence[str],
    is_list: bool,
    fqn: str,
    held_in: str,
    note: Note,
    dependent: DataDependent,
    peers: Any = None,
) -> None:
    """Leave this rank its experts' weights, and exchange rows of products with them around the block's forward.

    Args:
        block: Whose forward multiplies rows with them.
        holder: Module that has the weights as its own parameters: a parameter list, or any with stacks.
        mesh: Of one dim, ep.
        names: Of a list, its entries, of two dims, one for each expert; of others, parameters of three dims, whose
            first one is of experts.
        is_list: Whether the holder is a list.
        fqn: Of the block, for messages.
        held_in: FQN of the holder, for messages.
        note: Called in every exchange, as `token_exchange.Note`.
        dependent: Of the run; learns which experts were run without rows.
        peers: As of `block_exchange.exchange_around`.

    Memory: experts / ep. Collectives: as of `block_exchange.BlockExchange`.
    """
    shapes = {name: tuple(holder.get_parameter(name).shape) for name in names}
    exchange = exchange_around(block, mesh, fqn=fqn, dependent=dependent, peers=peers)
    degree, rank = mesh.size(), mesh.get_local_rank()
    if is_list:
        held = local_experts(len(names), degree=degree, rank=rank)
        for index, name in enumerate(names):
            if index not in held:
                holder._parameters[name] = None
        matrices = [_Matrix(name, 0, *shapes[name]) for name in names]
        exchange.add(_Multiplied(holder, matrices, held, fqn=held_in, note=note, dependent=dependent))
        return
    others = {name for name, _ in holder.named_parameters(remove_duplicate=False)} - set(names)
    shard_weights(holder, mesh, others)
    for name in names:
        number, *sizes = shapes[name]
        matrices = [_Matrix(name, index, *sizes) for index in range(number)]
        held = local_experts(number, degree=degree, rank=rank)
        exchange.add(_Multiplied(holder, matrices, held, fqn=f"{held_in}.{name}".lstrip("."), note=note))


@dataclass(frozen=True)
class _Matrix:
    """One expert's matrix.

    Args:
        name: Of the parameter.
        index: Among those that it stacks; 0 where it is no stack.
        num_rows: A.
        num_columns: B.
    """

    name: str
    index: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True)
class _Place:
    """Rows and columns of a matrix that a view of it has.

    Args:
        is_turned: Whether outputs are its columns.
        inputs: Those that it is multiplied along.
        outputs: Those of the result.
    """

    is_turned: bool
    inputs: slice
    outputs: slice


def _placed(view: Tensor, rest: int, matrix: _Matrix) -> _Place:
    """Return what a view w_OI has of a matrix, from where it begins there and its strides."""
    row, column = divmod(rest, matrix.num_columns)
    rows, columns = (row, matrix.num_columns, matrix.num_rows), (column, 1, matrix.num_columns)
    for is_turned, dims in enumerate(((rows, columns), (columns, rows))):
        found = [_steps(*of, *dim) for of, dim in zip(zip(view.shape, view.stride(), strict=True), dims, strict=True)]
        if found[0] is not None and found[1] is not None:
            return _Place(bool(is_turned), found[1], found[0])
    raise AssertionError("a view of one matrix has rows and columns of it")


def _steps(size: int, stride: int, first: int, unit: int, limit: int) -> slice | None:
    """Return which rows, or columns, a view's dim has; None where its stride is none of them.

    Args:
        size: Of the dim.
        stride: Of the dim.
        first: That it begins with.
        unit: Stride from one to the next.
        limit: How many there are.
    """
    step = stride // unit if size > 1 else 1
    last = first + (size - 1) * step
    return slice(first, last + 1, step) if step and last < limit and (size == 1 or stride % unit == 0) else None


class _Entry(nn.Module):
    """A parameter of a module, as a module of its own."""

    def __init__(self, holder: nn.Module, name: str) -> None:
        super().__init__()
        self._of = (holder, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield it."""
        found = self._of[0]._parameters[self._of[1]]
        if found is not None:
            yield found


class _Multiplied:
    """Matrices of experts, as `call_sources.Source`: of each the products along its columns, then along its rows.

    Arguments as of `shard_multiplied`; without `dependent` they are stacked.
    """

    is_varied, is_rowwise = False, True

    def __init__(
        self,
        holder: nn.Module,
        matrices: Sequence[_Matrix],
        held: range,
        *,
        fqn: str,
        note: Note,
        dependent: DataDependent | None = None,
    ) -> None:
        self.fqn, self.total, self._holder, self._matrices, self._held = fqn, 2 * len(matrices), holder, matrices, held
        self._note, self._dependent = note, dependent
        self._entries = {number: _Entry(holder, matrices[number].name) for number in held}
        self._number = {(matrix.name, matrix.index): number for number, matrix in enumerate(matrices)}
        if dependent is not None:
            holder.forward = self._products  # data-parallel plugins gather a unit around it

    @contextmanager
    def running(self, exchange: Caller) -> Iterator[None]:
        """Let the block's code find weights without values."""
        shapes: dict[tuple[Any, str], list[int]] = {}
        for matrix in self._matrices:
            sizes = [matrix.num_rows, matrix.num_columns]
            number = sum(each.name == matrix.name for each in self._matrices) if self._dependent is None else 0
            shapes[self._holder, matrix.name] = [number, *sizes] if number else sizes
        like = next(held for held in self._holder._parameters.values() if held is not None)
        product = partial(self._product, exchange)
        with standing_in(shapes, product, like=like, fqn=self.fqn, by="expert_parallel", remedy=_REMEDY):
            yield

    def _product(self, exchange: Caller, key: tuple[Any, str], x: Tensor, w_OI: Tensor) -> Tensor:
        """Return the product of rows and a view of a matrix: of the whole one, with zeros for inputs that it lacks."""
        first = self._matrices[self._number[key[1], 0]]
        index, rest = divmod(int(w_OI.storage_offset()), first.num_rows * first.num_columns)
        number = self._number[key[1], index]
        matrix = self._matrices[number]
        place = _placed(w_OI, rest, matrix)
        given, made = (
            (matrix.num_rows, matrix.num_columns) if place.is_turned else (matrix.num_columns, matrix.num_rows)
        )
        if x.shape[-1] != w_OI.shape[1]:
            raise RuntimeError(f"rows of {x.shape[-1]} elements are multiplied with a matrix of {w_OI.shape[1]} inputs")
        if x.shape[-1] != given:
            at = torch.arange(given, device=x.device)[place.inputs]
            x = x.new_zeros(*x.shape[:-1], given).index_copy(-1, at, x)
        y = exchange.called(self, 2 * number + place.is_turned, x)
        return y if w_OI.shape[0] == made else y[..., place.outputs]

    def result(self, number: int, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the elements of a row of results."""
        matrix = self._matrices[number // 2]
        return (matrix.num_columns if number % 2 else matrix.num_rows,)

    def given(self) -> tuple[int, ...]:
        """Return nothing that is known: without rows there are no products."""
        return ()

    def note(self, local: list[int], chosen: list[int]) -> None:
        """Take the numbers of rows of both products of a matrix together."""
        self._note(
            *([one + other for one, other in zip(rows[::2], rows[1::2], strict=True)] for rows in (local, chosen))
        )

    def compute(self, rows: Sequence[Tensor], is_called: Sequence[bool]) -> list[Tensor]:
        """Multiply rows with this rank's matrices."""
        if self._dependent is None:
            return self._products(list(rows))
        for place, number in enumerate(self._held):
            used, entry = self._dependent.used, self._entries[number]
            used[entry] = used.get(entry, False) or any(is_called[2 * place : 2 * place + 2])
        made: list[Tensor] = nn.Module.__call__(self._holder, list(rows))  # a parameter list's own says that it is none
        return made

    def _products(self, rows: list[Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        weights: dict[str, Tensor] = {}
        for place, number in enumerate(self._held):
            matrix = self._matrices[number]
            if matrix.name not in weights:
                weights[matrix.name] = _local(self._holder._parameters[matrix.name])
            weight = weights[matrix.name]
            w_AB = weight if weight.ndim == 2 else weight[place]
            for x_RI, w_OI in zip(rows[2 * place : 2 * place + 2], (w_AB, w_AB.t()), strict=True):
                # A row of zeros keeps the parameter in the graph, which data-parallel plugins reduce on all ranks.
                is_ghost = x_RI.shape[0] == 0
                given = x_RI.new_zeros(1, w_OI.shape[1]) if is_ghost else x_RI
                y_RO = (given @ w_OI.t().to(given.dtype)).to(x_RI.dtype)
                made.append(y_RO[:0] if is_ghost else y_RO)
        return made


def _local(parameter: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    found: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found
