"""Torch names for copies of composed models."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["class_before_units", "empty_containers", "unchanged_versions"]

_CONTAINERS = (OrderedDict, dict, set, list)


def class_before_units(module: Any) -> Any:
    """Return the class that a module had before FSDP2, or its kind of DDP, gave it one that is made for each class.

    That one inherits from `FSDPModule` and the module's own, which torch gives no access to (torch 2.11-2.15).
    """
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def empty_containers(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return new containers in place of those of some modules that are empty, by `id`: a memo of `copy.deepcopy`.

    A module has a dozen of them, most for hooks, and a copy takes each `OrderedDict` apart and puts it together again:
    two thirds of the time of a copy on meta.

    Args:
        modules: Not changed.
    """
    return {
        id(value): type(value)()
        for module in modules
        for value in vars(module).values()
        if type(value) in _CONTAINERS and not value
    }


@contextlib.contextmanager
def unchanged_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let writes into tensors count for nothing: a graph that has saved them takes them for what they were.

    For writes that are taken back before the graph is used. Private (torch 2.11-2.15).
    """
    from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield
