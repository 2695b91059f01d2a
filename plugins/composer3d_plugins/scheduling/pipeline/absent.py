"""Tensors that stand for what another stage holds, and that nothing may be computed with unnoticed.

Every stage runs the whole forward, so its code computes with parameters and values of other stages and throws the
results away. What the traced forward did not need there, another batch's may: then the output would be made
of zeros. So results of absent tensors are absent too, and using one where it counts is an error. A tensor of the
model's own cannot become absent when one is written into it: it gets NaN there, which reaches whatever is computed from
it, by views too, and is looked for in what leaves the stage. From the first such write to the end of the forward,
operators whose results would not show it (comparisons, `nan_to_num`) are looked at too.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from composer3d import StepError, torch_compat

__all__ = ["Absent", "Stage", "absent_zeros", "end_reading", "refuse_absent"]

# A call may be given what it does not need: hooks cast it, autograd takes aliases of it.
_COPIES = frozenset({"aten::_to_copy", "aten::alias", "aten::clone", "aten::detach", "aten::view", "aten::view_as"})

_HIDING = frozenset(
    "nan_to_num nansum nanmedian fmax fmin sign sgn heaviside hardshrink softshrink threshold xlogy".split()
)

_SHOWING = ("native_dropout", "_scaled_dot_product")  # which return masks and seeds beside numbers


class Stage(Protocol):
    """The runner of a stage.

    Attributes:
        written: The absent tensor that its forward wrote into a tensor of the model's own first; None if none.
        readers: The context in which operators that hide NaN are looked at; None if nothing was written.
        absent: Modules, with the attributes that stand for parameters of other stages.
        casts: The dtype of a batch's numbers, and that to which a hook has cast them; None if it has not.
    """

    written: str | None
    readers: AbstractContextManager[Any] | None
    absent: list[tuple[Any, str]]
    casts: tuple[torch.dtype, torch.dtype] | None

    @property
    def is_inside(self) -> bool:
        """Whether a block or call of the stage itself is running."""


class Absent(Tensor):
    """Zeros that remember what they stand for; so do all tensors that are computed with them.

    Attributes:
        composer3d_absent: For observers of modules' outputs, that there are no values to look at.
        source: A parameter, a buffer, or what a module returns, with its FQN, for messages.
        stage: Of the runner that is asked whether the stage's own modules are running.
        plain: The zeros, on the same memory.
    """

    composer3d_absent = True
    source: str
    stage: Stage
    plain: Tensor

    __torch_function__ = torch_compat.no_torch_function()  # functions are left as they are; operators are looked at

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on zeros; its results are absent.

        Raises:
            StepError: The stage's own modules compute with it, something reads a number of it, or writes it into
                integers of the model's own.
        """
        kwargs = kwargs or {}
        leaves = torch_compat.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, Absent))
        if first.stage.is_inside and func.name() not in _COPIES:
            _refuse(first.source)
        targets = torch_compat.written_tensors(func, args, kwargs)
        own = [tensor for tensor in targets if not isinstance(tensor, Absent)]
        plain_args, plain_kwargs = torch_compat.tree_map(_spoiled if own else _plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        _spoil(own, leaves, first)
        if not any(isinstance(leaf, Tensor) for leaf in torch_compat.tree_leaves(result)) and func._schema.returns:
            _refuse(first.source)
        written = {id(_plain(tensor)): tensor for tensor in targets}

        def marked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return written[id(leaf)] if id(leaf) in written else _stand_for(leaf, first.source, first.stage)

        return torch_compat.tree_map(marked, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Stand for the same in a copy of a stage."""
        return _stand_for(self.plain.clone(), self.source, self.stage)


def absent_zeros(like: Tensor, *, device: torch.device, source: str, stage: Stage, is_written: bool = False) -> Tensor:
    """Return zeros of a tensor's shape, which take no memory unless they are written to.

    Args:
        like: Of the shape and dtype.
        device: Of the zeros.
        source: As in `Absent`.
        stage: As in `Absent`.
        is_written: Something may be written into them.
    """
    if is_written:
        return _stand_for(torch.zeros(like.shape, dtype=like.dtype, device=device), source, stage)
    return _stand_for(torch.zeros((), dtype=like.dtype, device=device).expand(like.shape), source, stage)


def refuse_absent(tensors: Any, *, stage: Stage) -> None:
    """Refuse what a stage sends, or the model returns, where it is made of absent tensors.

    Args:
        tensors: What leaves the stage.
        stage: The runner of the stage. Where it has written absent tensors into others, values are looked at.

    Raises:
        StepError: Names the first.
    """
    for tensor in tensors:
        if isinstance(tensor, Absent):
            _refuse(tensor.source)
        if stage.written is not None and isinstance(tensor, Tensor) and bool(tensor.isnan().any()):
            _refuse(stage.written)


def _stand_for(plain: Tensor, source: str, stage: Stage) -> Tensor:
    """Mark a plain tensor; one of a class of its own, such as a plan's fake tensor, cannot be of this class too."""
    if type(plain) is not Tensor:
        return plain
    made: Absent = plain.as_subclass(Absent)
    made.source, made.stage, made.plain = source, stage, plain
    return made


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Absent) else value


def _spoiled(value: Any) -> Any:
    """Return NaN for an absent tensor that is written into another one."""
    if not isinstance(value, Absent):
        return value
    return torch.full_like(value.plain, math.nan) if _holds_nan(value) else value.plain


def _spoil(own: list[Tensor], leaves: list[Any], first: Absent) -> None:
    """Note what was written into tensors of the model's own; what absent indices chose may be any of their elements."""
    for tensor in own:
        if not _holds_nan(tensor):
            _refuse(first.source)
        if any(isinstance(leaf, Absent) and not _holds_nan(leaf) for leaf in leaves):
            tensor.fill_(math.nan)
    if own and first.stage.written is None:
        first.stage.written = first.source
        first.stage.readers = torch_compat.dispatch_mode(functools.partial(_read, first.source), compiles=False)
        first.stage.readers.__enter__()


def end_reading(stage: Stage) -> None:
    """End what a forward's first write of an absent tensor has begun."""
    readers, stage.readers = stage.readers, None
    if readers is not None:
        readers.__exit__(None, None, None)


def _read(source: str, func: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; where its result would not show the NaN that it is given, refuse."""
    result = func(*args, **kwargs)
    if _hides(func, result):
        for tensor in torch_compat.tree_leaves((args, kwargs)):
            if type(tensor) is Tensor and _holds_nan(tensor) and bool(tensor.isnan().any()):
                _refuse(source)
    return result


def _hides(func: Any, result: Any) -> bool:
    """Return whether an operator may be given NaN and return none: numbers that are no floats, or by what it does."""
    name = func.name().removeprefix("aten::").partition(".")[0].removesuffix("_")
    leaves = torch_compat.tree_leaves(result)
    if name.startswith(_SHOWING):
        return False
    return name in _HIDING or any(not (isinstance(leaf, Tensor) and _holds_nan(leaf)) for leaf in leaves)


def _holds_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse(source: str) -> None:
    raise StepError(
        f"the forward of this batch computes with {source}, which another stage of the pipeline holds: the "
        "forward by which the model was split did not need it here; let one module hold both ways of a decision, so "
        "that both are on its stage, or hand compose an example that takes this way"
    )
