"""Dependence of tensors on results that are not known yet: rows that are made of them have to wait for the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat

__all__ = ["ResultFlow"]

_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __contains__ equal allclose".split()
)
_WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__ __imod__".split()
)


class ResultFlow(TorchFunctionMode):
    """Marks of tensors that depend on what stands for a result, kept by memory, so that views have them too.

    A mark is certain where indexes or masks were made of a result: with other results they may be the same by chance.

    Attributes:
        is_read: Whether values of such a tensor were read: what the code does next may depend on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, Any] = {}  # keeps the memory, whose address is the key
        self._certain: set[int] = set()
        self.is_read = False

    def mark(self, tensor: Tensor, *, is_certain: bool = False) -> None:
        """Mark a tensor's memory."""
        with torch_compat.without_torch_functions():
            key = torch_compat.storage_key(tensor)
            self._marked[key] = tensor.untyped_storage()
            if is_certain or not (tensor.is_floating_point() or tensor.is_complex()):
                self._certain.add(key)

    def is_certain(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on a result in a way that other results do not show."""
        with torch_compat.without_torch_functions():
            return self.is_read or torch_compat.storage_key(tensor) in self._certain

    def is_marked(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on a result, or may do."""
        if self.is_read or not self._marked:
            return self.is_read
        with torch_compat.without_torch_functions():
            return torch_compat.storage_key(tensor) in self._marked

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and mark what it makes, or writes to, of a tensor that is marked."""
        given = kwargs or {}
        result = function(*args, **given)
        if not self._marked:
            return result
        leaves = [leaf for leaf in torch_compat.tree_leaves([args, given]) if isinstance(leaf, Tensor)]
        if not any(map(self.is_marked, leaves)):
            return result
        name = getattr(function, "__name__", "")
        self.is_read = self.is_read or name in _READS
        is_written = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        made = torch_compat.tree_leaves([result, given.get("out"), args[0] if is_written else None])
        is_certain = any(map(self.is_certain, leaves))
        for tensor in made:
            if isinstance(tensor, Tensor):
                self.mark(tensor, is_certain=is_certain)
        return result
