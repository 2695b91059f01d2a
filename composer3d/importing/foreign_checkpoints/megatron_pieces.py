"""Tensors that Megatron-LM saved in pieces: halves of gated projections, and experts each by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d.checkpoint import Saved, read_into
from composer3d.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Pieces", "check_gates", "check_shared_widths", "pieces_of"]

# With `singleton_local_shards` the gate's half and the other have a name each, and so have experts.
_HALF = re.compile(r"^(?P<name>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])$")
_EXPERT = re.compile(r"^(?P<before>.+\.mlp\.experts\.experts\.)(?P<number>\d+)\.(?P<after>.+)$")
_GATED = ".linear_fc1.weight"
_SHARED, _ROUTED = ".mlp.shared_experts", ".mlp.experts.experts"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Keys of a checkpoint that are one tensor.

    Args:
        keys: Of each expert, its halves; of what is saved whole a single key.
        are_experts: Whether the outer ones are experts, along a dim of their own.
    """

    keys: tuple[tuple[str, ...], ...]
    are_experts: bool

    def shape(self, saved: Saved) -> tuple[int, ...]:
        """Return the shape of the whole."""
        halves = self.keys[0]
        whole = tuple(saved.entries[halves[0]].shape)
        if len(halves) > 1 and whole:
            whole = (whole[0] * len(halves), *whole[1:])
        return (len(self.keys), *whole) if self.are_experts else whole

    def read(self, saved: Saved) -> Tensor:
        """Return the whole.

        Raises:
            CheckpointError: Pieces have different shapes.

        Memory: the pieces and the whole, where there are several.
        """
        import torch

        keys = [key for expert in self.keys for key in expert]
        entries = [saved.entries[key] for key in keys]
        different = next((n for n, entry in enumerate(entries) if entry.shape != entries[0].shape), None)
        if different is not None:
            raise CheckpointError(
                f"{saved.path}: {keys[0]} has the shape {list(entries[0].shape)}, and {keys[different]} "
                f"{list(entries[different].shape)}"
            )
        tensors = {key: torch.empty(entry.shape, dtype=entry.dtype) for key, entry in zip(keys, entries, strict=True)}
        read_into(saved, tensors)
        wholes = [
            tensors[each[0]] if len(each) == 1 else torch.cat([tensors[key] for key in each]) for each in self.keys
        ]
        return torch.stack(wholes) if self.are_experts else wholes[0]


def pieces_of(keys: Mapping[str, str], saved: Saved) -> dict[str, Pieces]:
    """Return the pieces of each whole tensor, by its name.

    Args:
        keys: Keys of the checkpoint by Megatron-LM's names.
        saved: The checkpoint, named in errors.

    Raises:
        CheckpointError: A half is missing, or the experts have no numbers from 0 without a gap.
    """
    found: dict[str, dict[int | None, dict[str, str]]] = {}
    for name, key in keys.items():
        half = _HALF.match(name)
        whole = name if half is None else half["name"]
        expert = _EXPERT.match(whole)
        number = None if expert is None else int(expert["number"])
        whole = whole if expert is None else expert["before"] + expert["after"]
        found.setdefault(whole, {}).setdefault(number, {})["" if half is None else half["half"]] = key
    return {name: _whole(name, experts, saved) for name, experts in found.items()}


def _whole(name: str, experts: Mapping[int | None, Mapping[str, str]], saved: Saved) -> Pieces:
    numbers = sorted(-1 if number is None else number for number in experts)
    if numbers not in ([-1], list(range(len(numbers)))):
        there = ", ".join(str(number) for number in numbers if number >= 0)
        raise CheckpointError(f"{saved.path}: {name}: of its experts {there} are there, and others are not")
    is_apart = any(len(each) > 1 for each in experts.values())
    for each in experts.values():
        if set(each) != (set("wv") if is_apart else {""}):
            raise CheckpointError(
                f"{saved.path}: {next(iter(each.values()))} is half of a projection, and the other half is not there"
            )
    ordered = [experts[None if number < 0 else number] for number in numbers]
    keys = tuple(tuple(each[half] for half in sorted(each, reverse=True)) for each in ordered)
    return Pieces(keys=keys, are_experts=numbers != [-1])


def check_gates(weights: Mapping[str, Pieces], saved: Saved) -> None:
    """Raise if the first projection of a feed-forward is not twice as wide as the second.

    Raises:
        CheckpointError: It has no gate; the names and sizes are in the message.
    """
    for name, rows, columns in _projections(weights, saved):
        if rows != 2 * columns:
            raise CheckpointError(
                f"{saved.path}: {name} has {rows} rows, and its linear_fc2.weight {columns} columns: the feed-forward "
                "has no gate, and those of the models that are read have one"
            )


def check_shared_widths(weights: Mapping[str, Pieces], saved: Saved) -> None:
    """Raise if a shared expert has a width that a model has no place for whose shared ones are several routed ones.

    Raises:
        CheckpointError: It is no multiple of a routed expert's; the names and widths are in the message.
    """
    for name, pieces in weights.items():
        routed = weights.get(name.replace(_SHARED, _ROUTED)) if name.endswith(f"{_SHARED}.linear_fc2.weight") else None
        if routed is None or not (shape := pieces.shape(saved)) or not (other := routed.shape(saved)):
            continue
        if shape[-1] % other[-1]:
            raise CheckpointError(
                f"{saved.path}: {name} is of an expert {shape[-1]} wide, and routed ones are {other[-1]} wide: shared "
                "experts of composer3d.models:moe are num_shared_experts times as wide as those; transformers' models "
                "(--names huggingface) have a width of their own for them"
            )


def _projections(weights: Mapping[str, Pieces], saved: Saved) -> Iterator[tuple[str, int, int]]:
    gated: Iterable[str] = (name for name in weights if name.endswith(_GATED))
    for name in gated:
        second = weights.get(name.removesuffix(_GATED) + ".linear_fc2.weight")
        shape = weights[name].shape(saved)
        if second is not None and len(shape) > 1 and second.shape(saved):
            yield name, shape[-2], second.shape(saved)[-1]
