"""Digests of full values that loops write into sharded parameters.

Ranks keep a shard each of what they were given: of two files they make one model that neither of them holds, and no
rank notices. What was written since the last step is therefore part of what ranks compare when the next one begins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["WRITTEN", "WrittenValues", "is_compared", "sum_of_words"]

WRITTEN = "values written into "

_KEPT = 1 << 12
_WORD = 8  # bytes


def is_compared(context: RunContext) -> bool:
    """Return whether ranks compare their writes."""
    return context.purpose == "run" and context.world_size > 1


class WrittenValues:
    """Writes since the last step, each kept as one number, computed in one pass over the value.

    Without steps, as in a process that only evaluates, the last few thousand are kept.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Callable[[], str], Tensor]] = []
        self._found: list[tuple[Callable[[], str], int]] = []

    def add(self, name: str | Callable[[], str], value: Tensor) -> None:
        """Record a value.

        Args:
            name: Name of the parameter, or a function that finds it, called where ranks differ.
            value: Whole.
        """
        import torch

        if type(value.detach()) is torch.Tensor and not value.is_meta and value.numel():
            found = sum_of_words(value.detach())
            self._entries.append((name if callable(name) else lambda: name, found))
            del self._entries[: -_KEPT if len(self._entries) >= 2 * _KEPT else 0]

    def take(self) -> int:
        """Return a digest of all values since the last call, 0 if there are none; an accelerator is waited for."""
        import torch

        if not self._entries:
            self._found = []
            return 0
        names, sums = zip(*self._entries, strict=True)
        self._entries = []
        self._found = list(zip(names, torch.stack([value.cpu() for value in sums]).tolist(), strict=True))
        return zlib.crc32(repr([value for _, value in self._found]).encode()) or 1

    def described(self) -> Mapping[str, int]:
        """Return the components of the last digest, by names that users know."""
        found: dict[str, int] = {}
        for name, value in self._found:
            fqn = name()
            found[fqn] = found.get(fqn, 0) * 31 + value
        return {f'{WRITTEN}"{fqn}"': value % (1 << 31) for fqn, value in found.items()}


def sum_of_words(tensor: Tensor) -> torch.Tensor:
    """Return the sum of a tensor's memory as words of 8 bytes, modulo 2**64, int64 without dims.

    What is left at the end are words of one element. Of smaller words torch makes a copy that is as wide as their sum:
    of float32, summing those takes five times as long. Equal values have the same sum wherever they lie in memory.

    Memory: none, but for tensors that are not contiguous or begin inside of a word, which are copied.
    """
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    size = flat.element_size()
    if flat.stride(0) != 1 or flat.storage_offset() * size % _WORD:
        flat = flat.clone(memory_format=torch.contiguous_format)
    whole = flat.numel() - flat.numel() % max(1, _WORD // size)
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == flat.numel() else total + flat[whole:].view(sizes[size]).sum(dtype=torch.int64)
