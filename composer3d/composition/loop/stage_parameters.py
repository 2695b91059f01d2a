"""Parameters of a pipeline's rank as a loop reads them: what one device computes of all is not to be of one stage's.

Numbers that a loop draws for parameters come one after another, also for those that other stages hold; and a norm of
gradients is of all stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["named_parameters", "refuse_norms_of_stages"]

_CONTEXTS: weakref.WeakSet[RunContext] = weakref.WeakSet()


def named_parameters(context: RunContext, *, of_all_stages: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters of a pipeline, in the order of the whole model.

    Args:
        context: Of the run.
        of_all_stages: Yield, for a parameter that other stages hold, a scratch one of its shape, with a gradient of
            zeros where it is trained: what a loop draws for it is drawn as on one device, and dropped.

    Raises:
        StepError: The loop has drawn random numbers for a parameter, and passes over those of other stages.

    Memory: one whole parameter and its gradient at a time, for those of other stages.
    """
    own = dict(context.named_parameters())
    if of_all_stages:
        for fqn, like in context.parameter_forms.items():
            yield fqn, own[fqn] if fqn in own else _scratch(like, context.device)
        return
    for fqn, parameter in own.items():
        before = _drawn(context.device)
        yield fqn, parameter
        after = _drawn(context.device)
        if before[0] == after[0] and before[1] != after[1]:  # else the loop has seeded the generator for it
            raise StepError(
                f'random numbers were drawn for "{fqn}" in a loop over the parameters of this stage, which is then not '
                "what one device draws, whose loop has drawn for all before; write "
                "for fqn, parameter in run.named_parameters(of_all_stages=True):"
            )


def _scratch(like: Tensor, device: torch.device) -> nn.Parameter:
    import torch

    parameter = torch.nn.Parameter(torch.zeros_like(like, device=device), requires_grad=like.requires_grad)
    if like.requires_grad:
        parameter.grad = torch.zeros_like(parameter)
    return parameter


def _drawn(device: torch.device) -> tuple[list[int], list[bytes]]:
    """Return the seeds of torch's default generators, and how far they have come."""
    generators = torch_compat.default_generators(device)
    with torch_compat.with_values():  # a plan's loop runs among fake tensors, and a fake state is memory of nobody
        states = [g.get_state() for g in generators]
        return [g.initial_seed() for g in generators], [bytes(state.numpy()) for state in states]


def refuse_norms_of_stages(context: RunContext) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` of a pipeline's gradients be refused, in this process from now on."""
    if not _CONTEXTS:
        torch_compat.watch_total_norm(_refuse)
    _CONTEXTS.add(context)


def _refuse(gradients: Sequence[Any]) -> None:
    given = set(map(id, gradients))
    for context in _CONTEXTS:
        if any(
            id(parameter.grad) in given for _, parameter in context.named_parameters() if parameter.grad is not None
        ):
            raise StepError(
                "the norm of the gradients of one stage was asked for, and every stage of a pipeline would clip by "
                "another one; write run.clip_grad_norm_(max_norm)"
            )
