"""Operation log of a model factory: the operators that it ran, and the memory that they read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import neg_view, storage_key, tree_leaves, tree_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Entry", "Log", "Replay", "TensorSpec"]

# Operators that give every element of their first argument a value that does not depend on the old one.
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli cauchy copy exponential fill geometric log_normal normal random uniform zero".split())
)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A view of recorded memory.

    Args:
        storage: Number of the storage in its log.
        size: Length of every dim.
        stride: In elements.
        offset: In elements.
        dtype: Element type.
        is_conj: The memory holds the complex conjugates.
        is_neg: The memory holds the negated values.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, independent of strides; 0 if elements overlap."""
        distinct = all(stride or size <= 1 for size, stride in zip(self.size, self.stride, strict=True))
        count = self.dtype.itemsize
        for size in self.size:
            count *= size
        return count if distinct else 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One operator, or one initialiser recorded whole.

    Args:
        run: What runs again.
        name: For messages and fingerprints.
        args: Positional arguments, with a TensorSpec for each tensor.
        kwargs: Keyword arguments, likewise.
        outputs: The tensors it returned.
        reads: Storages whose values it needs.
        writes: Storages that it changes or makes.
        overwrites: The storage of which it leaves no old byte, if any.
        is_random: It draws random numbers.
        dtype: torch's default dtype when it ran.
        place: `file:line: ` of the factory, for messages.
    """

    run: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    is_random: bool
    dtype: torch.dtype
    place: str


class Log:
    """The entries in order, and the storages, kept alive so that their identities stay unique."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.constants: dict[int, Tensor] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}

    def spec(self, tensor: Tensor) -> TensorSpec:
        """Describe a tensor on meta; its storage gets a number if it has none."""
        key = storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._storages)
            self._storages.append(tensor.untyped_storage())
        return TensorSpec(
            storage=self._numbers[key],
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage has a number."""
        return storage_key(tensor) in self._numbers

    def num_bytes(self, storage: int) -> int:
        """Return the size of a storage."""
        return self._storages[storage].nbytes()

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        for storage in entry.writes:
            self._writers.setdefault(storage, []).append(len(self.entries))
        self.entries.append(entry)

    def overwritten(self, name: str, args: Sequence[Any]) -> int | None:
        """Return the storage that an operator overwrites wholly, if it does."""
        if name not in _OVERWRITING or not isinstance(args[0], TensorSpec):
            return None
        return args[0].storage if self.covers(args[0]) else None

    def covers(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is all of its storage."""
        return spec.num_bytes == self.num_bytes(spec.storage) > 0

    def history(self, storage: int, *, whole: bool = False) -> list[int]:
        """Return, in order, the numbers of the entries that the final values of a storage depend on.

        Args:
            storage: Its number.
            whole: Also those whose results were overwritten afterwards.
        """
        needed: set[int] = set()
        walked: set[tuple[int, int]] = set()
        todo = [(storage, len(self.entries))]
        while todo:
            current, until = todo.pop()
            for number in reversed(self._writers.get(current, [])):
                if number >= until:
                    continue
                if (current, number) in walked:
                    break
                walked.add((current, number))
                if number not in needed:
                    needed.add(number)
                    todo += [(read, number) for read in self.entries[number].reads]
                if self.entries[number].overwrites == current and not whole:
                    break
        return sorted(needed)


class Replay:
    """Real memory for recorded storages, filled by running entries again on the CPU."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._real: dict[int, torch.UntypedStorage] = {}

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the real tensor of a recorded one; memory without a recorded write is zero."""
        import torch

        if spec.storage not in self._real:
            constant = self._log.constants.get(spec.storage)
            if constant is None:
                constant = torch.zeros(self._log.num_bytes(spec.storage), dtype=torch.uint8, device="cpu")
            else:
                constant = constant.clone()
            self._real[spec.storage] = constant.untyped_storage()
        empty = torch.empty(0, dtype=spec.dtype, device="cpu")
        tensor = empty.set_(self._real[spec.storage], spec.offset, spec.size, spec.stride)
        tensor = neg_view(tensor) if spec.is_neg else tensor
        return tensor.conj() if spec.is_conj else tensor

    def run(self, entry: Entry) -> None:
        """Run one entry, after the entries that it reads."""
        import torch

        def real(value: Any) -> Any:
            if isinstance(value, TensorSpec):
                return self.tensor(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        result = entry.run(*tree_map(real, entry.args), **tree_map(real, entry.kwargs))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for spec, tensor in zip(entry.outputs, tensors, strict=bool(entry.outputs)):
            if spec.storage not in self._real:
                self._adopt(spec, tensor)

    def _adopt(self, spec: TensorSpec, tensor: Tensor) -> None:
        """Use a result as the recorded storage, or copy it if the CPU kernel returns other strides."""
        lies_alike = (tensor.stride(), tensor.storage_offset()) == (spec.stride, spec.offset)
        if lies_alike and (tensor.is_conj(), tensor.is_neg()) == (spec.is_conj, spec.is_neg):
            self._real[spec.storage] = tensor.untyped_storage()
        else:
            self.tensor(spec).copy_(tensor)
