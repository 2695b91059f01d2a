"""Contract of modules that hold experts with stacked weights: `(hidden_TD, index_TK, weights_TK) -> hidden_TD`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["has_stacked_experts", "is_matrix", "stacked_parameters"]


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether a module has the contract `(hidden_TD, index_TK, weights_TK) -> hidden_TD`.

    It stacks its parameters, and its forward takes three positional arguments. Experts of transformers (5 and later)
    are such modules, and those of `composer3d.models:moe`.
    """
    return _stacks(module) and _num_arguments(module) == 3


def stacked_parameters(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of parameters that stack those of experts: of three dims a matrix for each, of two a bias."""
    return frozenset(
        f"{fqn}.{name}"
        for fqn, module in model.named_modules()
        if _stacks(module)
        for name, _ in module.named_parameters(remove_duplicate=False)
    )


def is_matrix(fqn: str, parameter: Tensor, stacked: frozenset[str]) -> bool:
    """Return whether a parameter is a matrix, or one for each expert.

    Args:
        fqn: Its name.
        parameter: Itself.
        stacked: As of `stacked_parameters`.
    """
    return parameter.ndim == (3 if fqn in stacked else 2)


def _stacks(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    if not isinstance(number, int) or isinstance(number, bool) or not parameters:
        return False
    return all(parameter.ndim >= 2 and parameter.shape[0] == number for parameter in parameters)


def _num_arguments(module: nn.Module) -> int:
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments)
