"""Torch names for copies of composed models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["class_before_units", "unchanged_versions"]


def class_before_units(module: Any) -> Any:
    """Return the class that a module had before FSDP2, or its kind of DDP, gave it one that is made for each class.

    That one inherits from `FSDPModule` and the module's own, which torch gives no access to (torch 2.11-2.15).
    """
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


@contextlib.contextmanager
def unchanged_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let writes into tensors count for nothing: a graph that has saved them takes them for what they were.

    For writes that are taken back before the graph is used. Private (torch 2.11-2.15).
    """
    from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield
