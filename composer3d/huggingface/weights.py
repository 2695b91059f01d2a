"""The weights of a folder as a model's tensors, of which every rank reads its own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from composer3d.errors import ModelError, did_you_mean
from composer3d.huggingface.files import WeightFiles
from composer3d.huggingface.weight_names import Group, Tile, ignorable, origins, tiles
from composer3d.initialisation import ties

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["FolderWeights"]

T = TypeVar("T")


class FolderWeights:
    """A source of a model's parameters and persistent buffers; see `composer3d.initialisation.TensorSource`.

    Tensors that the model stacks or joins out of stored ones (experts) are read part by part too; what takes more than
    that to convert is read in full.

    Args:
        files: Of the folder.
        model: On meta will do.

    Raises:
        ModelError: The model needs a tensor that is not there, there is one that it has no place for, or one of another
            shape; each message names the first.
    """

    def __init__(self, files: WeightFiles, model: nn.Module) -> None:
        self.files, self._model = files, model
        self._shapes = {name: stored.shape for name, stored in files.tensors.items()}
        self._targets = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._tiles: dict[str, list[Tile]] = {}
        self._groups: dict[str, Group] = {}
        groups, unexpected = origins(model, files.tensors)
        self._refuse_unexpected(unexpected)
        for group in groups:
            self._add(group)
        self._add_ties()
        self._refuse_missing()
        self._converted: tuple[str, dict[str, Tensor]] | None = None

    def __contains__(self, fqn: str) -> bool:
        """Return whether the folder has the tensor; else the model's configuration makes it."""
        return fqn in self._tiles or fqn in self._groups

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self._targets[fqn]

    def fingerprint(self) -> int:
        """Return a 64-bit digest of names, shapes, dtypes and sizes of files."""
        return self.files.fingerprint()

    def read(self, fqn: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Read a part, on the CPU."""
        import torch

        if fqn in self._groups:
            return self._convert(fqn)[tuple(slice(start, stop) for start, stop in ranges)]
        parts = [(tile, part) for tile in self._tiles[fqn] if (part := _overlap(tile, ranges)) is not None]
        if len(self._tiles[fqn]) == 1:
            return self.files.read(self._tiles[fqn][0].name, ranges)
        result: Tensor | None = None
        for tile, part in parts:
            inner = [(first - begin, last - begin) for (first, last), begin in zip(part, tile.start, strict=True)]
            stored = inner if tile.stacked is None else inner[: tile.stacked] + inner[tile.stacked + 1 :]
            value = self.files.read(tile.name, stored)
            value = value if tile.stacked is None else value.unsqueeze(tile.stacked)
            if result is None:
                result = torch.empty([stop - start for start, stop in ranges], dtype=value.dtype)
            result[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, ranges, strict=True))] = value
        return result if result is not None else torch.empty([stop - start for start, stop in ranges])

    def _convert(self, fqn: str) -> Tensor:
        """Convert a whole group, and keep its last result: several tensors may come from one."""
        group = self._groups[fqn]
        if self._converted is None or self._converted[0] != group.target:
            values = {name: self.files.read(name, [(0, size) for size in self._shapes[name]]) for name in group.names}
            self._converted = (group.target, group.convert(values, self._model))
        return self._converted[1][fqn]

    # ---- what is where -----------------------------------------------------------------------------------------------

    def _add(self, group: Group) -> None:
        import torch

        if group.converter is None and len(group.names) > 1:
            raise ModelError(f'{self.files.folder} holds "{group.target}" twice: {" and ".join(group.names[:2])}')
        found = tiles(group, self._shapes)
        if found is not None:
            ends = [[a + b for a, b in zip(tile.start, tile.shape, strict=True)] for tile in found]
            self._check_shape(group.target, tuple(map(max, zip(*ends, strict=True))) if ends[0] else (), group)
            self._tiles[group.target] = found
            return
        blanks = {name: torch.empty(self._shapes[name], device="meta") for name in group.names}
        for target, value in group.convert(blanks, self._model).items():
            if target in self._targets:
                self._check_shape(target, tuple(value.shape), group)
                self._groups[target] = group

    def _check_shape(self, target: str, shape: tuple[int, ...], group: Group) -> None:
        if shape != self._targets[target]:
            raise ModelError(
                f'"{group.names[0]}" in {self.files.folder} makes "{target}" of shape {shape}, and the configuration '
                f"asks for {self._targets[target]}",
                hint="the weights are of another configuration",
            )

    def _add_ties(self) -> None:
        """Let a tied tensor be found under each of its names."""
        for group in ties(self._model):
            _spread(self._tiles, group)
            _spread(self._groups, group)

    def _refuse_unexpected(self, unexpected: Sequence[str]) -> None:
        _, allowed = ignorable(self._model)
        left = [name for name in unexpected if not allowed.search(name)]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ModelError(
                f'{self.files.folder} holds "{left[0]}"{more}, for which {type(self._model).__name__} has no place',
                hint=did_you_mean(left[0], list(self._targets)) if len(self._targets) < 1000 else None,
            )

    def _refuse_missing(self) -> None:
        allowed, _ = ignorable(self._model)
        missing = [fqn for fqn in self._targets if fqn not in self and not allowed.search(fqn)]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ModelError(
                f'{self.files.folder} holds no "{missing[0]}"{more}, which {type(self._model).__name__} needs',
                hint='weights = "init" starts from the configuration alone',
            )


def _spread(held: dict[str, T], group: Sequence[str]) -> None:
    present = [name for name in group if name in held]
    if present:
        held |= {name: held[present[0]] for name in group if name not in held}


def _overlap(tile: Tile, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return the part of a tile inside the ranges; None if there is none."""
    part = [
        (max(first, begin), min(last, begin + size))
        for (first, last), begin, size in zip(ranges, tile.start, tile.shape, strict=True)
    ]
    return part if all(first < last for first, last in part) else None
