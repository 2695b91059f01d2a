"""Inputs of a model: which of them have the sequence, and along which dim.

Shapes: an input [B, S, ...] has the sequence in `dim`; images [B, C, H, W], and signals [B, C, frames] that a
convolution takes, have channels there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import PluginError, torch_compat
from composer3d.propagation import Call

__all__ = ["LABELS", "ModelInputs"]

# Names of arguments that are sharded, besides the first tensor. Masks, positions, documents and images are not: they
# are indexed where they are combined with sharded activations.
LABELS = frozenset("labels shift_labels targets target".split())
NAMES = LABELS | frozenset("input_ids inputs_embeds decoder_input_ids decoder_inputs_embeds tokens".split())


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs of a model.

    Args:
        names: Of the parameters of its forward, in order.
        dim: The sequence dim.
        whole: Places and names of inputs whose dim is none of positions.
    """

    names: tuple[str, ...]
    dim: int
    whole: frozenset[int | str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, dim: int) -> ModelInputs:
        """Return those of a model.

        Args:
            model: The model.
            dim: The sequence dim.
        """
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(model.forward).parameters.values()
        return cls(names=tuple(each.name for each in found if each.kind in kinds and each.name != "self"), dim=dim)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, str, Any]]:
        """Yield the key, the name and the value of each argument."""
        for at, value in enumerate(args):
            yield at, self.names[at] if at < len(self.names) else "", value
        for name, value in kwargs.items():
            yield name, name, value

    def sharded(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, int]:
        """Return the dims along which a call's arguments are sharded, by place or name.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        dim, called = self.dim, list(self.named(args, kwargs))
        tensors = [(at, name, value) for at, name, value in called if isinstance(value, Tensor) and value.ndim > dim]
        stated = [at for at, name, _ in tensors if name in NAMES]
        # An image has no sequence dim; the model creates its sequence.
        sequences = [
            (at, value)
            for at, name, value in tensors
            if not (value.is_floating_point() and value.ndim > dim + 2) and not {at, name} & self.whole
        ]
        first: int | str | None = next((at for at, _ in sequences if isinstance(at, int) and at == 0), None)
        if first is None and not stated and sequences and len(sequences) == len(tensors):
            first = sequences[0][0]
        return dict.fromkeys([*([] if first is None else [first]), *stated], dim)

    def without_features(self, call: Call) -> ModelInputs | None:
        """Return them with the input whole in whose place a sequence of features may be; None where none is such."""
        found = {
            key
            for at, name, value in self.named(call.args, call.kwargs)
            if at in self.sharded(call.args, call.kwargs) and name not in NAMES and value.is_floating_point()
            for key in ([name] if name else [at])
        }
        return replace(self, whole=self.whole | found) if found else None

    def with_all_taken(self, call: Call) -> Call:
        """Return a call whose masks, which are known by their names, leave nothing out."""

        def taken(name: str, value: Any) -> Any:
            is_mask = "mask" in name and isinstance(value, Tensor) and not value.is_floating_point()
            return torch.ones_like(value) if is_mask else value

        named = {key: taken(name, value) for key, name, value in self.named(call.args, call.kwargs)}
        args = tuple(named[at] for at in range(len(call.args)))
        return replace(call, args=args, kwargs={name: named[name] for name in call.kwargs})

    def divisible(self, call: Call, unit: int) -> Call:
        """Return a call whose lengths divide: a padded one may be more than the model has positions for."""
        dims = self.sharded(call.args, call.kwargs)
        given = [call.args[key] if isinstance(key, int) else call.kwargs[key] for key in dims]
        lengths = {x.shape[self.dim] for x in given if x.shape[self.dim] > unit}

        def divisible(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            for at in [self.dim] if any(leaf is x for x in given) else range(1, leaf.ndim):
                if leaf.shape[at] in lengths:
                    leaf = leaf.narrow(at, 0, leaf.shape[at] // unit * unit)
            return leaf

        args, kwargs = torch_compat.tree_map(divisible, [list(call.args), dict(call.kwargs)])
        return replace(call, args=tuple(args), kwargs=kwargs)

    def refuse(self, call: Call, *, has_blocks: bool) -> None:
        """Refuse a call without a sequence; an image's, which the model makes, begins at a block.

        Args:
            call: Of the model.
            has_blocks: Whether blocks are known.

        Raises:
            PluginError: No tensor among its arguments has the sequence dim, or there are no blocks either.
        """
        tensors = [x for x in torch_compat.tree_leaves([list(call.args), dict(call.kwargs)]) if isinstance(x, Tensor)]
        most = max((x.ndim for x in tensors), default=0)
        if 1 < most <= self.dim:
            raise PluginError(
                f"sequence_dim = {self.dim} is no dim of the model's inputs, which have {most} at most, counted from 0",
                hint=f"write a number from 1 to {most - 1}",
                keys=("sequence_dim",),
            )
        if not has_blocks and not self.sharded(call.args, call.kwargs):
            sizes = " and ".join(dict.fromkeys(str(list(x.shape)) for x in tensors)) or "no tensor"
            raise PluginError(
                f"context_parallel takes dim {self.dim} of no input of the model for a sequence, of inputs of {sizes}, "
                "and finds no list of blocks between which one could be",
                hint='state the repeated blocks: [model] blocks = "PATTERN"' + self.other_dims(call),
            )

    def other_dims(self, call: Call) -> str:
        """Return what to write where the sequence is another dim of the inputs; empty where they have none.

        Args:
            call: Of the model.
        """
        tensors = [x for x in torch_compat.tree_leaves([list(call.args), dict(call.kwargs)]) if isinstance(x, Tensor)]
        dims = sorted({dim for x in tensors for dim in range(1, x.ndim)} - {self.dim})
        stated = " or ".join(map(str, dims))
        return f"; if it is another dim of the inputs, write sequence_dim = {stated}" if dims else ""
