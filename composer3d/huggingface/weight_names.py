"""Names of weights in a folder's files and in the model, as transformers converts them.

Everything of transformers that is not documented for users is called here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Group", "Tile", "ignorable", "origins", "reverted", "tied_name", "tiles"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Place of a stored tensor in a tensor of the model.

    Args:
        name: In the files.
        start: Of every dim of the model's tensor.
        shape: Of the tile, in dims of the model's tensor.
        stacked: The dim that the stored tensor does not have, because several were stacked along it.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: int | None = None


@dataclass(kw_only=True)
class Group:
    """Stored tensors that become one or several of the model.

    Args:
        target: The first name in the model.
        members: By the pattern that matched, in order.
        converter: transformers' own; None where the tensor only is renamed.
    """

    target: str
    members: dict[str, list[str]] = field(default_factory=dict)
    converter: Any = None

    @property
    def names(self) -> list[str]:
        """All names in the files."""
        return [name for names in self.members.values() for name in names]

    def convert(self, values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of the model, by name, that the stored ones become."""
        if self.converter is None:
            return {self.target: values[self.names[0]]}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.members.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, values[name])
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def origins(model: Any, names: Iterable[str]) -> tuple[list[Group], list[str]]:
    """Join stored tensors with the model's.

    Args:
        model: On meta will do.
        names: In the files.

    Returns:
        What becomes of them, and the names that the model has no place for.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Group] = {}
    unexpected: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
        if target not in tensors and name in tensors:
            target, pattern = rename_source_key(name, [], [], prefix, tensors)
        if target not in tensors:
            unexpected.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        group = groups.setdefault(target, Group(target=target, converter=converter))
        group.members.setdefault(pattern or name, []).append(name)
    return list(groups.values()), unexpected


def ignorable(model: Any) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what may be missing in the files, and what may be there for nothing, by the model's class."""
    buffers = [name for name, _ in model.named_buffers()]
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that older versions saved with the weights.
    if any(name.endswith("inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    return _any_of(missing), _any_of(unexpected)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or r"(?!)")


def tiles(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> list[Tile] | None:
    """Return the places of a group's tensors in the one that they become; None where arithmetic is needed.

    Args:
        group: With one target.
        shapes: Of the stored tensors.
    """
    if group.converter is None:
        (name,) = group.names[:1]
        return [Tile(name=name, start=(0,) * len(shapes[name]), shape=shapes[name])]
    operations = [type(operation).__name__ for operation in group.converter.operations]
    if operations not in (["MergeModulelist"], ["Concatenate"], ["MergeModulelist", "Concatenate"]):
        return None
    if len(group.converter.target_patterns) != 1 or (len(group.members) > 1 and operations[-1] != "Concatenate"):
        return None
    stacked = group.converter.operations[0].dim if operations[0] == "MergeModulelist" else None
    joined = group.converter.operations[-1].dim if operations[-1] == "Concatenate" else None
    ordered = [pattern for pattern in group.converter.source_patterns if pattern in group.members]
    if joined is not None and joined == stacked:
        return None
    found: list[Tile] = []
    offset = 0
    for pattern in ordered if joined is not None else group.members:
        for position, name in enumerate(group.members[pattern]):
            shape, start = list(shapes[name]), [0] * (len(shapes[name]) + (stacked is not None))
            if stacked is not None:
                shape.insert(stacked, 1)
                start[stacked] = position
            if joined is not None:
                start[joined] += offset
            found.append(Tile(name=name, start=tuple(start), shape=tuple(shape), stacked=stacked))
            if joined is not None and stacked is None:
                offset += shape[joined]
        if joined is not None and stacked is not None:
            offset += found[-1].shape[joined]
    return found


def reverted(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the model as `save_pretrained` writes them: other names, and what was fused taken apart."""
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
    return made


def tied_name(model: Any, group: Sequence[str]) -> str:
    """Return the name under which `save_pretrained` keeps a tied tensor."""
    from_others = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in group if name not in from_others), group[0])
