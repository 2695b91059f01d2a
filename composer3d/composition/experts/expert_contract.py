"""Modules that hold experts with stacked weights: how many, which weights, and what their forward is called with.

Shapes: T tokens, K experts a token, N experts, R rows in order of their experts, D width.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "ExpertForm",
    "expert_counts",
    "expert_form",
    "has_stacked_experts",
    "is_matrix",
    "shared_by_experts",
    "stacked_parameters",
]

# What a forward is called with: `chosen` (hidden_TD, index_TK, weights_TK), `counted` (rows_RD, rows of each expert),
# `grouped` (rows_RD), as many for each expert, or with a dim of experts.
ExpertForm = Literal["chosen", "counted", "grouped"]
_FORMS: dict[int, ExpertForm] = {1: "grouped", 2: "counted", 3: "chosen"}
# Of names of an argument that is the experts of each token.
_CHOICES = ("ind", "idx", "expert", "top_k", "topk", "select", "cho")


def expert_form(module: nn.Module) -> ExpertForm | None:
    """Return what the forward of a module with stacked weights is called with; None where it holds no experts.

    Experts of transformers (5 and later) are chosen, and so are those of `composer3d.models:moe`; those of torchtitan
    and ScatterMoE are counted, Llama 4's grouped. A module that is called with less than choices is known by its
    weights alone, each of which is a matrix for each expert, or a bias.
    """
    number = _number(module)
    form = _FORMS.get(len(_arguments(module))) if number else None
    if form == "chosen" or form is None:
        return form
    return form if all(each.ndim >= 3 or "bias" in name for name, each in module.named_parameters()) else None


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether a module has the contract `(hidden_TD, index_TK, weights_TK) -> hidden_TD`.

    It stacks its parameters, and its forward takes three positional arguments.
    """
    return expert_form(module) == "chosen"


def expert_counts(module: nn.Module) -> dict[str, int]:
    """Return the attributes of a module that say how many experts it has, by name; empty where it has none.

    They are named for experts that tokens choose, not for shared ones, which all tokens have, and are the first dim of
    each of its stacked weights.
    """
    stacked = [parameter.shape[0] for parameter in module.parameters() if parameter.ndim >= 3]
    if not stacked or len(set(stacked)) > 1:
        return {}
    named = {name: value for name, value in vars(module).items() if "expert" in name and "shared" not in name}
    return {name: value for name, value in named.items() if type(value) is int and value == stacked[0] and value > 1}


def shared_by_experts(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters in a module with stacked weights that are not stacked, such as a norm's."""
    number = next(iter(expert_counts(module).values()), 0)
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, each in named if each.ndim < 2 or each.shape[0] != number)


def stacked_parameters(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of parameters that stack those of experts: of three dims a matrix for each, of two a bias."""
    return frozenset(
        f"{fqn}.{name}"
        for fqn, module in model.named_modules()
        if _number(module)
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


def _number(module: nn.Module) -> int:
    """Return how many experts a module stacks, 0 where one of its parameters is not stacked.

    Modules inside of one that is called with tokens and their choices may have others, which its experts share.
    """
    from torch import nn

    number = next(iter(expert_counts(module).values()), 0)
    if not number or any(isinstance(inner, nn.Linear) for inner in module.modules()):
        return 0  # a block around its experts: a router has a row for each of them, too
    shared = shared_by_experts(module)
    is_chosen = len(names := _arguments(module)) == 3 and any(word in names[1] for word in _CHOICES)
    return number if not shared or (is_chosen and module._parameters and not shared & module._parameters.keys()) else 0


def _arguments(module: nn.Module) -> list[str]:
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD]
