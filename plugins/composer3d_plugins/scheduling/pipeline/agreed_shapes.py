"""Comparison of what a stage sends with the shapes that stages agreed on before the first step.

A receiver's buffers are of those shapes, and a shorter message leaves the end of a buffer as it was, without an error:
only the sender knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer3d import StepError

if TYPE_CHECKING:
    import torch

__all__ = ["Boundary", "refuse_other_shapes"]


class Boundary(Protocol):
    """Names at the end of a stage: modules that return what is sent, and the first one of the next stage."""

    @property
    def sent_by(self) -> Sequence[str]:
        """For every tensor that is sent, the name of the module that returns it."""

    @property
    def next_name(self) -> str:
        """Name of the module with which the next stage begins."""


def refuse_other_shapes(output: Any, stage: Any, boundary: Boundary, microbatch: int) -> None:
    """Refuse outputs of another shape or dtype than agreed, or with a gradient that would not come back.

    Args:
        output: A stage's, of one micro-batch: a tensor or a tuple of them.
        stage: torch's, as `torch_compat.described_stage` makes it; not the last one.
        boundary: Names for the message.
        microbatch: Index in the step.

    Raises:
        StepError: With the modules' names and both shapes; other ranks, which wait for the message, report it too.
    """
    outputs = output if isinstance(output, tuple) else (output,)
    for number, (tensor, agreed) in enumerate(zip(outputs, stage.agreed_outputs(), strict=True)):
        shape, dtype, has_gradient = agreed
        if tensor.shape != shape or tensor.dtype != dtype:
            what = f"{_form(tensor.shape, tensor.dtype)} in micro-batch {microbatch} of this step"
            before = _form(shape, dtype)
            reason = (
                "A pipeline sends between stages what has the same shape whatever the values of a batch are. Rows that "
                "values choose (nonzero, a mask as an index) have to be chosen and put back in one stage: state in "
                "[scheduling.pipeline] split where stages begin; or keep all rows, and weigh the others by 0"
            )
        elif has_gradient is False and tensor.requires_grad:
            what = f"a tensor that needs a gradient in micro-batch {microbatch} of this step"
            before = "one that needs none, so that no gradient would come back"
            reason = (
                "A pipeline needs the same trained parameters in every forward; state another place in "
                "[scheduling.pipeline] split, or add what is left out, times 0"
            )
        else:
            continue
        raise StepError(
            f'"{boundary.sent_by[number]}" returns {what}, and returned {before} when stages {stage.stage_index} and '
            f'{stage.stage_index + 1} (from "{boundary.next_name}") agreed on what travels between them. {reason}'
        )


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
