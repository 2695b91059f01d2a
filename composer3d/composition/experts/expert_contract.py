"""Modules that hold experts with stacked weights: how many, which weights, and what their forward is called with.

A weight is stacked along a dim of its own, or has the rows of all experts, one expert's after another's.

Shapes: T tokens, K experts a token, N experts, R rows in order of their experts, D width.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal

from composer3d.composition.experts.flat_experts import reads_own_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "ExpertForm",
    "expert_counts",
    "expert_form",
    "has_stacked_experts",
    "is_matrix",
    "shared_by_experts",
    "stacked_layers",
    "stacked_number",
    "stacked_parameters",
]

# What a forward is called with: `chosen` (hidden_TD, index_TK, weights_TK), `counted` (rows_RD, rows of each expert),
# `grouped` (rows_RD), as many for each expert, or with a dim of experts.
ExpertForm = Literal["chosen", "counted", "grouped"]
_FORMS: dict[int, ExpertForm] = {1: "grouped", 2: "counted", 3: "chosen"}
# Of names of an argument that is the experts of each token.
_CHOICES = ("ind", "idx", "expert", "top_k", "topk", "select", "cho")


def expert_form(module: nn.Module, *, is_stated: bool = False) -> ExpertForm | None:
    """Return what the forward of a module with stacked weights is called with; None where it holds no experts.

    Experts of transformers (5 and later) are chosen, and so are those of `composer3d.models:moe`; those of torchtitan
    and ScatterMoE are counted, Llama 4's grouped. A module that is called with less than choices is known by its
    weights alone, each of which is a matrix for each expert, or a bias.

    Args:
        module: Any.
        is_stated: Whether it is said to hold experts; then it need not say how many.
    """
    number = _number(module, is_stated=is_stated)
    form = _FORMS.get(len(_arguments(module))) if number else None
    if form == "chosen" or form is None:
        return form
    return form if all(each.ndim >= 3 or "bias" in name for name, each in module.named_parameters()) else None


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether a module has the contract `(hidden_TD, index_TK, weights_TK) -> hidden_TD`.

    It stacks its parameters, and its forward takes three positional arguments.
    """
    return expert_form(module) == "chosen" and any(each.ndim >= 3 for each in module.parameters())


def stacked_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the modules with stacked weights of experts, each with both dims of one matrix after the other."""
    found: dict[str, tuple[int, ...]] = {}
    for fqn, module in model.named_modules():
        sizes = tuple(size for parameter in module.parameters() if parameter.ndim == 3 for size in parameter.shape[1:])
        if sizes and has_stacked_experts(module):
            found[fqn] = sizes
    return found


def expert_counts(module: nn.Module) -> dict[str, int]:
    """Return the attributes of a module that say how many experts it has, by name; empty where it has none.

    They are named for experts that tokens choose, not for shared ones, which all tokens have, and are the first dim of
    each of its stacked weights; of weights of two dims its rows are those of so many experts, one after the other.
    Where it says that there are more without weights of their own, as LongCat's that return their tokens, a stack may
    be of all of them, and the smallest is of those that have weights.
    """
    named = {
        name: value
        for name, value in vars(module).items()
        if "expert" in name and "shared" not in name and type(value) is int and value > 1
    }
    stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.ndim >= 3}
    if len(stacked) > 1 and stacked <= {*named.values()}:
        stacked = {min(stacked)}
    if not stacked:
        stacked = {number for number in named.values() if _is_flat(module, number)}
    return {name: value for name, value in named.items() if stacked == {value}}


def _is_flat(module: nn.Module, number: int) -> bool:
    """Return whether tokens choose experts whose matrices stand one below the other, in weights of two dims."""
    shapes = [parameter.shape for parameter in module.parameters()]
    if not shapes or any(len(shape) != 2 or shape[0] % number or shape[0] == number for shape in shapes):
        return False
    return _takes_choices(module) and reads_own_rows(module, number)


def stacked_number(module: nn.Module) -> int:
    """Return how many experts a module stacks: what it says, or else the first dim of all weights of three dims.

    It is 0 where these are of several numbers, and where there are none.
    """
    from torch import nn

    def is_layer(owner: nn.Module) -> bool:  # a convolution's weight has three dims, too
        return type(owner).__module__.startswith("torch.") and not isinstance(
            owner, nn.ParameterDict | nn.ParameterList
        )

    counts = expert_counts(module)
    owners = [owner for owner in module.modules() if not is_layer(owner)]
    stacked = {p.shape[0] for owner in owners for p in owner._parameters.values() if p is not None and p.ndim >= 3}
    return next(iter(counts.values()), 0) or (max(stacked) if len(stacked) == 1 and stacked != {1} else 0)


def shared_by_experts(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters in a module with stacked weights that are not stacked, such as a norm's.

    One of three dims that is among them has rows of no expert after those of all.
    """
    number = stacked_number(module)
    named = module.named_parameters(remove_duplicate=False)
    if not any(each.ndim >= 3 for each in module.parameters()):
        return frozenset()
    return frozenset(name for name, each in named if each.ndim < 2 or each.shape[0] != number)


def stacked_parameters(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of parameters that stack those of experts: of three dims a matrix for each, of two a bias."""
    return frozenset(
        f"{fqn}.{name}"
        for fqn, module in model.named_modules()
        if _number(module) and any(each.ndim >= 3 for each in module.parameters())
        for name in dict(module.named_parameters(remove_duplicate=False)).keys() - shared_by_experts(module)
    )


def is_matrix(fqn: str, parameter: Tensor, stacked: frozenset[str]) -> bool:
    """Return whether a parameter is a matrix, or one for each expert.

    Args:
        fqn: Its name.
        parameter: Itself.
        stacked: As of `stacked_parameters`.
    """
    return parameter.ndim == (3 if fqn in stacked else 2)


def _number(module: nn.Module, *, is_stated: bool = False) -> int:
    """Return how many experts a module stacks, 0 where one of its parameters is not stacked.

    Modules inside of one that is called with tokens and their choices may have others, which its experts share.
    """
    from torch import nn

    number = stacked_number(module) if is_stated else next(iter(expert_counts(module).values()), 0)
    if not number or any(isinstance(inner, nn.Linear) for inner in module.modules()):
        return 0  # a block around its experts: a router has a row for each of them, too
    shared = shared_by_experts(module)
    own = {name for name, held in module._parameters.items() if held is not None and name in shared and held.ndim < 3}
    return number if not shared or (_takes_choices(module) and module._parameters and not own) else 0


def _takes_choices(module: nn.Module) -> bool:
    return len(names := _arguments(module)) == 3 and any(word in names[1] for word in _CHOICES)


def _arguments(module: nn.Module) -> list[str]:
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD]
