"""Selective checkpoints of torch, made to bear ranges of the profiler, sizes on meta, and writes into results."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat.modes import works_on_meta

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["selective_contexts"]

_CHANGED = "has been mutated"  # as torch says it, by an error that has no class of its own


def selective_contexts(policy: Any) -> tuple[Any, Any]:
    """Return torch's contexts of a selective checkpoint, which let ranges of the profiler and sizes on meta pass.

    torch counts every operator of the forward, and the recomputation may have no further ones. A unit of FSDP2 inside
    the checkpoint opens a range in every backward that it did not open in the forward, and ranges are operators here.
    What torch lets pass is a private set for all checkpoints of the process (torch 2.11-2.15), so the two contexts get
    a class of their own.

    A result that is kept may be written in place, as a router's choices that are divided by their sum: torch refuses
    its recomputation, which would begin with what was written. It is kept as it was before the write; one that code
    after the checkpoint writes into is recomputed, as if the policy had not kept it.

    Memory: a copy of each result that the checkpoint keeps and its own code writes into.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keeping, kept = create_selective_checkpoint_contexts(policy)
    kinds: tuple[Any, Any] = type(keeping), type(kept)
    keeping.__class__, kept.__class__ = _keeping(kinds[0]), _kept(kinds[1])
    return keeping, kept


@functools.cache
def _keeping(kind: Any) -> Any:
    class Keeping(kind):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "profiler" or works_on_meta(args):
                return func(*args, **(kwargs or {}))
            schema = getattr(func, "_schema", None)
            by_storage = self.__dict__.setdefault("by_storage", {})
            if by_storage and schema is not None and schema.is_mutable:
                for written in _written(schema, args, kwargs or {}):
                    for kept in by_storage.pop(_storage(written), {}).values():
                        kept.val = kept.val.clone()
                        kept.version = kept.val._version
            out = super().__torch_dispatch__(func, types, args, kwargs)
            for kept in _newest(self.storage.get(func)):
                by_storage.setdefault(_storage(kept.val), {})[id(kept)] = kept
            return out

        def __exit__(self, *error: Any) -> Any:
            self.__dict__.pop("by_storage", None)  # which would hold what the backward frees
            return super().__exit__(*error)

    return Keeping


@functools.cache
def _kept(kind: Any) -> Any:
    class Kept(kind):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "profiler" or works_on_meta(args):
                return func(*args, **(kwargs or {}))
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError as error:
                if _CHANGED not in str(error):
                    raise
            return func(*args, **(kwargs or {}))

    return Kept


def _newest(entries: Any) -> Iterator[Any]:
    """Yield what torch has kept of an operator's last call: tensors with their versions, in a private class."""
    from torch.utils._pytree import tree_leaves

    if entries:  # by number, and in a list before torch 2.13
        last = next(reversed(entries.values() if isinstance(entries, dict) else entries))
        yield from (leaf for leaf in tree_leaves(last) if getattr(leaf, "version", None) is not None)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes into."""
    import torch
    from torch.utils._pytree import tree_leaves

    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; of a DTensor that of its local shard."""
    storage: int = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
    return storage
