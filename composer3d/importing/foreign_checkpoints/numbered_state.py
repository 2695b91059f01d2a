"""Optimizer state that numbers parameters, named by the order of the model's own parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError
from composer3d.huggingface import CONFIG, HuggingFaceModel
from composer3d.importing.foreign_checkpoints.found_state import FoundState
from composer3d.importing.foreign_checkpoints.torch_archive import read_archive

if TYPE_CHECKING:
    from torch import nn

__all__ = ["read_numbered_state"]

# What is not decayed: `Trainer.get_decay_parameter_names` of transformers 5, and of 4 from 4.46 on.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Of transformers before: by the modules' classes and biases alone.
_BIAS = re.compile(r"bias")


def read_numbered_state(file: Path, found: FoundState) -> str | None:
    """Read the moments of transformers' Trainer, or of a loop over one group; return why they cannot be read.

    The file numbers parameters: those that are decayed first, then the others, both in the order of the model, which is
    made on meta from the folder's configuration by transformers. An order is taken where every moment has the shape
    of its parameter. Code that lies in the folder is not run.

    Args:
        file: `optimizer.pt`, read as data.
        found: The weights; filled with the moments.
    """
    if not (file.parent / CONFIG).is_file():
        return f"numbers parameters in the order of a model, and no {CONFIG} beside it says which"
    content = read_archive(file)
    groups = content.get("param_groups") if isinstance(content, dict) else None
    state = content.get("state") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not isinstance(state, dict):
        return "is no state of one of torch's optimizers"
    numbers = [list(group.get("params", ())) if isinstance(group, dict) else [] for group in groups]
    try:
        model = HuggingFaceModel(file.parent, weights="init")
        orders = list(_orders(_made(model)))
    except ComposerError as error:
        return f"numbers parameters in the order of the model, which cannot be made here: {error}"
    for order in orders:
        named = _named(numbers, order, state, found)
        if named is not None:
            found.moments.update(named)
            return None
    return "numbers parameters in no order that fits the model: some may be frozen, or in groups of a program's own"


def _made(model: HuggingFaceModel) -> nn.Module:
    import torch

    with torch.device("meta"):
        return model()


def _orders(model: nn.Module) -> Iterator[list[list[str]]]:
    """Yield the parameters of each group, in the orders that are known."""
    from torch import nn

    names = [name for name, _ in model.named_parameters()]
    for pattern, classes in ((_NOT_DECAYED, ("LayerNorm",)), (_BIAS, ("LayerNorm", "RMSNorm"))):
        exempt = {name for name in names if pattern.search(name.lower())}
        for fqn, module in model.named_modules():
            if type(module).__name__.endswith(classes) and (isinstance(module, nn.LayerNorm) or len(classes) > 1):
                exempt |= {f"{fqn}.{name}" for name, _ in module.named_parameters(recurse=False)}
        yield [[name for name in names if name not in exempt], [name for name in names if name in exempt]]
    yield [names]


def _named(
    numbers: list[list[Any]], order: list[list[str]], state: dict[Any, Any], found: FoundState
) -> dict[str, dict[str, Any]] | None:
    """Return the state of each parameter; None where the order is another."""
    import torch

    if [len(group) for group in numbers] != [len(group) for group in order]:
        return None
    result: dict[str, dict[str, Any]] = {}
    for group, names in zip(numbers, order, strict=True):
        for number, name in zip(group, names, strict=True):
            held = state.get(number)
            if held is None:
                continue
            tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
            step = held.get("step")
            if isinstance(step, int | float) and not isinstance(step, bool):
                tensors["step"] = torch.tensor(float(step))
            weight = found.weights.get(name)
            if weight is None or any(value.numel() != 1 and value.shape != weight.shape for value in tensors.values()):
                return None
            result[name] = tensors
    return result
