"""Spans around the collectives of torch.distributed that Python code calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["watch_group_collectives"]

# Method -> collective, and the position of its payload: the result of a gather, else the input. torch 2.13 has the
# names in `single`, torch 2.11 those in `base`.
_METHODS = {
    "_allgather_base": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "all_to_all_single": ("all_to_all", 1),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "recv": ("recv", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
}


def watch_group_collectives(span: Callable[..., Any], needs_span: Callable[[str], bool]) -> Callable[[], None]:
    """Open spans around collectives that are called for by Python code; return what ends that.

    Every function of torch.distributed ends in a method of its ProcessGroup, a class of C++ whose methods can be
    replaced (torch 2.11-2.15): code that imported a function before is seen, too. Operators call none of them.

    Args:
        span: Given a name, the process group and the payload's `bytes`, opens a span.
        needs_span: Whether a collective that is called for now is to have one. Groups of one rank have none.
    """
    from torch.distributed import ProcessGroup

    # As the class holds them: what getattr returns could not be put back, since it would not be bound.
    plain = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}

    def watched(name: str, method: Any) -> Any:
        op, position = _METHODS[name]

        @functools.wraps(method)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not needs_span(op) or group.size() == 1:
                return method(group, *args, **kwargs)
            given = (*args, *kwargs.values())
            payload = () if position is None else _tensors(given[position])
            with span(op, group, bytes=sum(tensor.nbytes for tensor in payload)):
                return method(group, *args, **kwargs)

        return collective

    for name, method in plain.items():
        setattr(ProcessGroup, name, watched(name, method))

    def end() -> None:
        for name, method in plain.items():
            setattr(ProcessGroup, name, method)

    return end


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)
