"""Sharded constants beside gathered parameters: importance and earlier weights in a penalty that follows a forward.

Between a forward and its backward a loop that reads `run.model.parameters()` may get the plain tensors that units have
gathered. Beside them a DTensor without a gradient is computed with as the whole, and what autograd saves of it is the
DTensor: without these records its backward would make a sharded gradient of a plain one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from composer3d import torch_compat
from composer3d.errors import StepError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["are_whole_constants", "forget_constants", "record_constants", "record_sharded"]

_WHOLE: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_SHARDED: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def record_sharded(place: Callable[[], str], tensors: Sequence[Tensor]) -> None:
    """Record constants that were computed with beside sharded parameters.

    Args:
        place: Returns the loop's line for a message, with a colon and a space.
        tensors: Operands of an operator, all DTensors, some with gradients.

    Raises:
        StepError: Others of this step's terms have taken them for the whole.
    """
    constants = {id(tensor): tensor for tensor in tensors if not tensor.requires_grad and tensor.dim()}
    _refuse_both(place, constants, _WHOLE)
    _SHARDED.update(constants)


def _refuse_both(place: Callable[[], str], constants: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> None:
    if any(number in others for number in constants):
        raise StepError(
            f"{place()}a constant is computed with beside a sharded parameter, and in the same step beside the one "
            "that the forward has gathered, and its gradients would be of one kind; give one of the terms "
            "constant.clone()"
        )


def forget_constants() -> None:
    """Forget both: a step has ended, and its graphs with it."""
    for constants in (_WHOLE, _SHARDED):
        if constants:  # emptying an empty dictionary of weak references raises and catches an exception, in every step
            constants.clear()


def record_constants(place: Callable[[], str], tensors: Sequence[Tensor]) -> None:
    """Record sharded constants that were computed with as the whole, beside plain tensors with gradients.

    Args:
        place: Returns the loop's line for a message, with a colon and a space.
        tensors: Operands of an operator: DTensors without gradients, and plain tensors.

    Raises:
        StepError: What was gathered is rounded for the forward, and the constants are not; or a term before has taken
            them for shards.
    """
    from torch.distributed.tensor import DTensor

    constants = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor.dim()]
    for tensor in tensors:
        if tensor.requires_grad and tensor.dim() and any(_is_rounded(tensor, beside) for beside in constants):
            raise StepError(
                f"{place()}a parameter that the forward has gathered in {tensor.dtype} is computed with beside a "
                f"constant in {constants[0].dtype}, in which one device has both, and their difference would be one "
                "of roundings; compute the term before the forward, or after run.backward(loss) in a backward of its "
                "own"
            )
    found = {id(tensor): tensor for tensor in constants}
    _refuse_both(place, found, _SHARDED)
    _WHOLE.update(found)


def _is_rounded(tensor: Tensor, beside: Tensor) -> bool:
    import torch

    if not (tensor.is_floating_point() and beside.is_floating_point()):
        return False
    return torch.finfo(tensor.dtype).eps > torch.finfo(beside.dtype).eps


def are_whole_constants(tensors: Sequence[Tensor]) -> bool:
    """Return whether a backward multiplies a plain gradient by sharded constants that its forward took for the whole.

    Args:
        tensors: Operands of an operator.
    """
    from torch.distributed.tensor import DTensor

    if not _WHOLE or not torch_compat.in_backward():
        return False
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor.dim()]
    return bool(sharded) and all(id(tensor) in _WHOLE for tensor in sharded)
