"""Dependence of tensors on results that are not known yet: rows that are made of them have to wait for the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat

__all__ = ["BY_INDEX", "BY_ROWS", "ResultFlow"]

_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __contains__ equal allclose".split()
)
_WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__ __imod__".split()
)
# Of functions that write to, and read, some rows of memory.
_TO_ROWS = ("__setitem__", "index_", "scatter_", "masked_", "put_")
_FROM_ROWS = frozenset("__getitem__ index_select masked_select gather take take_along_dim".split())
# How a tensor depends on a result: by rows of memory to which results were written, which may be others than its own;
# by what was computed of one; by indexes or masks of one, which with another result may be the same by chance.
BY_ROWS, BY_VALUE, BY_INDEX = 1, 2, 3


class ResultFlow(TorchFunctionMode):
    """Marks of tensors that depend on what stands for a result, kept by memory, so that views have them too.

    Attributes:
        is_read: Whether values of such a tensor were read: what the code does next may depend on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, tuple[int, Any]] = {}  # keeps the memory, whose address is the key
        self.is_read = False

    def mark(self, tensor: Tensor, how: int = BY_VALUE) -> None:
        """Mark a tensor's memory."""
        with torch_compat.without_torch_functions():
            key = torch_compat.storage_key(tensor)
            how = how if tensor.is_floating_point() or tensor.is_complex() else BY_INDEX
            before = self._marked.get(key, (0, None))[0]
            self._marked[key] = max(how, before), tensor.untyped_storage()

    def depends(self, tensor: Tensor) -> int:
        """Return how a tensor depends on a result; 0 where it does not."""
        if self.is_read or not self._marked:
            return BY_INDEX if self.is_read else 0
        with torch_compat.without_torch_functions():
            return self._marked.get(torch_compat.storage_key(tensor), (0, None))[0]

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and mark what it makes, or writes to, of a tensor that is marked."""
        given = kwargs or {}
        result = function(*args, **given)
        if not self._marked:
            return result
        leaves = [leaf for leaf in torch_compat.tree_leaves([args, given]) if isinstance(leaf, Tensor)]
        how = max(map(self.depends, leaves), default=0)
        if not how:
            return result
        name = getattr(function, "__name__", "")
        self.is_read = self.is_read or name in _READS
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            is_row = any(word in name for word in _TO_ROWS) and how < BY_INDEX
            self.mark(args[0], BY_ROWS if is_row else how)
            return result
        how = how if how > BY_ROWS or name in _FROM_ROWS else BY_VALUE
        for tensor in torch_compat.tree_leaves([result, given.get("out")]):
            if isinstance(tensor, Tensor):
                self.mark(tensor, how)
        return result
