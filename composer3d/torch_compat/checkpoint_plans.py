"""Plans and results of a distributed save as values that JSON carries; torch's own `save` sends pickles of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

__all__ = ["plan_items", "plan_of_items", "planned_items", "results_of_items", "with_items", "write_items"]


def plan_items(plan: Any) -> list[Any]:
    """Return a rank's save plan, of tensors alone, as lists of numbers and text, one an item."""
    return [_item(item) for item in plan.items]


def plan_of_items(items: Sequence[Any]) -> Any:
    """Return the save plan of which `plan_items` made this."""
    from torch.distributed.checkpoint.planner import SavePlan

    return SavePlan([_write_item(item) for item in items])


def planned_items(plan: Any, items: Sequence[Any]) -> list[list[int | None]]:
    """Return what a rank writes after all: positions in what `plan_items` returned, with torch's hint of each chunk."""
    numbers = {(fqn, tuple(offset or ())): number for number, ((fqn, offset, _), *_) in enumerate(items)}
    return [[numbers[item.index.fqn, tuple(item.index.offset or ())], item.index.index] for item in plan.items]


def with_items(plan: Any, kept: Sequence[Sequence[int]]) -> Any:
    """Return this rank's plan with the items that `planned_items` says."""
    items = [plan.items[number] for number, _ in kept]
    hints = [hint for _, hint in kept]
    return replace(
        plan,
        items=[replace(item, index=replace(item.index, index=hint)) for item, hint in zip(items, hints, strict=True)],
    )


def write_items(results: Sequence[Any]) -> list[Any]:
    """Return where a rank wrote its chunks, as lists of numbers and text.

    The class of the place is private; it also names transforms of the file, of which there are none (torch 2.11-2.15).
    """
    return [
        [_index(each.index), each.size_in_bytes, place.relative_path, place.offset, place.length]
        for each in results
        for place in [each.storage_data]
    ]


def results_of_items(items: Sequence[Any]) -> list[Any]:
    """Return the results of which `write_items` made this."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    return [
        WriteResult(_metadata_index(index), size_bytes, _StorageInfo(path, offset, length))
        for index, size_bytes, path, offset, length in items
    ]


def _item(item: Any) -> list[Any]:
    data, properties = item.tensor_data, item.tensor_data.properties
    described = [str(value) for value in (properties.dtype, properties.layout, properties.memory_format)]
    flags = [properties.requires_grad, properties.pin_memory]
    chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [_index(item.index), item.type.name, chunk, list(data.size), described, flags]


def _write_item(item: Sequence[Any]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    index, kind, (offsets, sizes), size, described, (requires_grad, pin_memory) = item
    dtype, layout, memory_format = (getattr(torch, name.removeprefix("torch.")) for name in described)
    return WriteItem(
        index=_metadata_index(index),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=TensorProperties(
                dtype=dtype,
                layout=layout,
                requires_grad=requires_grad,
                memory_format=memory_format,
                pin_memory=pin_memory,
            ),
            size=torch.Size(size),
        ),
    )


def _index(index: Any) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _metadata_index(values: Sequence[Any]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    fqn, offset, hint = values
    return MetadataIndex(fqn, None if offset is None else torch.Size(offset), hint)
