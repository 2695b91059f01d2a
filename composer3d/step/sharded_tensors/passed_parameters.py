"""Tensors that a loop, or a model's forward, passes in the place of parameters."""

from __future__ import annotations

from typing import NoReturn

from composer3d.errors import StepError

__all__ = ["refuse_passed"]


def refuse_passed(fqn: str) -> NoReturn:
    """Refuse what `torch.func.functional_call` has put in the place of a parameter that the composition gathers there.

    Args:
        fqn: Of the parameter.

    Raises:
        StepError: Always.
    """
    owner = fqn.rpartition(".")[0]
    inside = f'; what a forward makes of the weights of "{owner}" is computed in its own forward' if owner else ""
    raise StepError(
        f'the forward is given a tensor for "{fqn}" (torch.func.functional_call, or one that was put in its place), '
        "and would compute with the composed parameter; to write to that use copy_ under torch.no_grad(), to evaluate "
        "other weights load them with run.model.load_state_dict, or use "
        f"composer3d.runner.EMA{inside}"
    )
