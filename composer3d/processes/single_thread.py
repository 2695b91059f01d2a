"""Tensor operators on one thread, after which a process may still be forked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["single_threaded"]


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run operators on one thread meanwhile, so that none starts OpenMP's pool, which a fork does not copy.

    For code that computes little, before ranks or a second process are forked.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
