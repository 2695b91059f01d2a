"""Counting of collectives below autograd: FSDP2's, DTensor's, those of a backward, and those issued by hand."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from composer3d.torch_compat import dispatch_mode, is_wrapper_subclass, mesh_dim, process_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Collective", "Collectives", "count_collectives"]

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
_NOT_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})

# Modules between a collective and its issuer: this one, and modes that forward calls.
_TRANSPARENT = (
    "torch.",
    f"{__name__}.",
    "composer3d.torch_compat.",
    "composer3d.planning.tracing.step_recorder.",
    "composer3d.processes.json_exchange.",
    "composer3d.step.control_numbers.",
    "composer3d.verification.arithmetic.",
    "contextlib.",
)

# Operator -> collective, and the position of the tensors that are its payload: the result of a gather, else the input.
_OPERATORS: Mapping[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "gather_": ("gather", 1),
    "irecv": ("recv", 0),
    "isend": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "reduce_": ("reduce", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "shard_dim_alltoall": ("all_to_all", 0),
}

# Of gathers, the position of what a rank puts in.
_GATHERED: Mapping[str, int] = {
    "_allgather_base_": 1,
    "all_gather_into_tensor_out": 0,
    "allgather_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "gather_": 1,
}
# The argument that names the source, in its group.
_SOURCES: Mapping[str, int] = {"broadcast": 1, "broadcast_": 2}

# Functions of torch that call a module's forward with its hooks, and that run a backward.
_CALLS = {"torch.nn.modules.module": ("_call_impl",), "torch.autograd.graph": ("_engine_run_backward",)}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, as this rank issued it.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier;
            another operator of torch's collective namespaces keeps its own name.
        axis: The mesh axis whose ranks it ran over; `world` for all ranks; axes joined by `+` for several; else the
            ranks themselves, as in `ranks(0,3)`.
        ranks: The ranks of its process group, in the group's order.
        bytes: Payload: the full result of an all_gather, the input of any other. A ring moves (n-1)/n of that per rank,
            and twice that for an all_reduce.
        dtype: Of the payload; None for a barrier.
        issuer: The function that issued it, `module.name`: the innermost one that is neither torch's nor this module's.
            Empty for what FSDP2 issued, and torch's hooks of modules and of a backward.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    bytes: int
    dtype: torch.dtype | None
    issuer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A collective that is about to run.

    Args:
        op: As of `Collective`.
        axis: As of `Collective`.
        ranks: As of `Collective`.
        tensors: What this rank puts in; of a broadcast what it sends, or what is overwritten.
        source: Of a broadcast, the rank in its group whose values all receive.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    source: int | None = None


class Collectives:
    """The collectives seen so far, in the order in which they were issued."""

    def __init__(self, axes: Mapping[frozenset[int], str], *, has_mesh: bool) -> None:
        self._axes, self._has_mesh = axes, has_mesh
        self._rows: list[Collective] = []

    @classmethod
    def over(cls, mesh: DeviceMesh | None) -> Collectives:
        """Return an empty record with a mesh's axis names, for use in another dispatch mode."""
        return cls(_axes(mesh), has_mesh=mesh is not None)

    @staticmethod
    def is_collective(operator: Any) -> bool:
        """Return whether an operator is one of torch's collectives."""
        namespace, name = operator.name().split(".")[0].split("::")
        return namespace in _NAMESPACES and name not in _NOT_COLLECTIVE

    def observe(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Count an operator that has run, if it is a collective."""
        if self.is_collective(operator):
            _record(self, operator.name().split(".")[0].split("::")[1], args)

    def sent(self, operator: Any, args: tuple[Any, ...]) -> Issued | None:
        """Return a collective of an operator before it runs; None for one without tensors of its own, and messages."""
        name = operator.name().split(".")[0].split("::")[1]
        op, position = _OPERATORS.get(name, (name, 0))
        if name in ("barrier", "monitored_barrier_", "batch_p2p_ops") or op in ("send", "recv"):
            return None
        found = process_group(_group_of(args))
        ranks = tuple(dist.get_process_group_ranks(found))
        tensors = tuple(_tensors(args[_GATHERED.get(name, position)]))
        source = args[_SOURCES[name]] if name in _SOURCES else None
        return Issued(op=op, axis=self._axis(found, ranks), ranks=ranks, tensors=tensors, source=source)

    @property
    def rows(self) -> tuple[Collective, ...]:
        """Every collective, one row each."""
        return tuple(self._rows)

    def count(self, op: str | None = None, axis: str | None = None) -> int:
        """Return how many there were, of one kind and over one axis if these are given."""
        return sum(op in (None, row.op) and axis in (None, row.axis) for row in self._rows)

    def summary(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (count, bytes) by (op, axis), sorted."""
        count: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for row in self._rows:
            count[row.op, row.axis] += 1
            size[row.op, row.axis] += row.bytes
        return {key: (count[key], size[key]) for key in sorted(count)}

    def _add(self, op: str, payload: list[torch.Tensor], group: Any, factor: int = 1) -> None:
        found = process_group(group)
        ranks = tuple(dist.get_process_group_ranks(found))
        self._rows.append(
            Collective(
                op=op,
                axis=self._axis(found, ranks),
                ranks=ranks,
                bytes=factor * sum(tensor.numel() * tensor.element_size() for tensor in payload),
                dtype=payload[0].dtype if payload else None,
                issuer=_issuer(),
            )
        )

    def _axis(self, group: Any, ranks: tuple[int, ...]) -> str:
        # A dim of a view, as that of experts, may have the ranks of an axis in a group of its own.
        dim = mesh_dim(group) if self._has_mesh and len(ranks) > 1 else None
        if dim is not None and "+" not in dim:
            return dim
        return self._axes.get(frozenset(ranks)) or f"ranks({','.join(map(str, ranks))})"


@contextmanager
def count_collectives(mesh: DeviceMesh | None = None) -> Iterator[Collectives]:
    """Count the collectives of the block, those issued in backward and inside DTensor's operators included.

    A dispatch mode sees the operators of torch.distributed and of its functional form alike. DTensor and other wrappers
    decompose an operator before it is counted, or the collectives inside would be missed. Coalesced operations are one
    row. Collectives inside one kernel of a compiled graph (asynchronous tensor parallelism's fused ops) are not
    counted.

    Args:
        mesh: Gives the names for `Collective.axis`.

    Memory: a row a collective. Collectives: none.

    >>> from composer3d.processes import fake_world
    >>> with fake_world(4), count_collectives() as collectives:
    ...     dist.all_reduce(torch.ones(6))
    >>> collectives.summary()
    {('all_reduce', 'world'): (1, 24)}
    """
    collectives = Collectives.over(mesh)

    def handle(operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(is_wrapper_subclass(cls) for cls in types):
            return NotImplemented
        result = operator(*args, **kwargs)
        collectives.observe(operator, args)
        return result

    with dispatch_mode(handle):
        yield collectives


def _record(collectives: Collectives, name: str, args: tuple[Any, ...]) -> None:
    if name == "batch_p2p_ops":
        operations, _, _, tensors, group = args
        for operation, tensor in zip(operations, tensors, strict=True):
            collectives._add(operation.removeprefix("i"), [tensor], group)
        return
    group = _group_of(args)
    if name in ("barrier", "monitored_barrier_"):
        collectives._add("barrier", [], group)
        return
    op, position = _OPERATORS.get(name, (name, 0))
    # The functional all-gathers return their result and carry only their input; its size is known all the same.
    factor = args[1] if name.startswith("all_gather_into_tensor") else 1
    collectives._add(op, list(_tensors(args[position])), group, factor)


def _group_of(args: tuple[Any, ...]) -> Any:
    # A c10d operator carries its group boxed, before anything else that is boxed; a functional one carries it last.
    return next((arg for arg in args if isinstance(arg, torch.ScriptObject)), args[-1])


def _issuer() -> str:
    """Return the innermost function that is neither torch's nor this module's; empty where that called a module.

    What FSDP2 does, and torch's hooks in a module's forward or in a backward, is not the work of what called them.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed.fsdp.") or frame.f_code.co_name in _CALLS.get(module, ()):
            return ""
        if not f"{module}.".startswith(_TRANSPARENT):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, Iterable):
        for item in argument:
            yield from _tensors(item)


def _axes(mesh: DeviceMesh | None) -> dict[frozenset[int], str]:
    """Name the sets of ranks that this rank shares a group with: one axis before the world, the world before several.

    Axes of degree 1 are not named, since every group would then have two names.
    """
    names: dict[frozenset[int], str] = {}
    world = frozenset(range(dist.get_world_size())) if dist.is_initialized() else frozenset()
    if mesh is not None:
        layout = mesh.mesh
        here = mesh.get_coordinate()
        dims = [dim for dim, degree in enumerate(layout.shape) if degree > 1]
        labels = mesh.mesh_dim_names or tuple(str(dim) for dim in range(layout.ndim))
        for size in range(len(dims), 0, -1):
            for chosen in combinations(dims, size):
                index = tuple(
                    slice(None) if d in chosen else (here or [0] * layout.ndim)[d] for d in range(layout.ndim)
                )
                ranks = frozenset(layout[index].flatten().tolist())
                names[ranks] = "world" if size > 1 and ranks == world else "+".join(labels[dim] for dim in chosen)
    names.setdefault(world, "world")
    return names
