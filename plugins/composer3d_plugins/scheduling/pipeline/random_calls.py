"""Blocks that a model's code leaves out at random, as LayerDrop does: a pipeline needs all of them in every forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from composer3d import TransformError
from composer3d.propagation import Call, on_meta, patched
from composer3d_plugins.scheduling.pipeline.values import LARGEST_DRAW

if TYPE_CHECKING:
    from torch import nn

__all__ = ["refuse_random_calls"]

# Functions that draw a number which code may compare with a rate.
_DRAWS = frozenset("rand random uniform uniform_ bernoulli bernoulli_ random_sample rand_like".split())
# Every number that is drawn in a run: below any rate above 0, and above any below 1.
_EXTREMES = (0.0, LARGEST_DRAW)
_PROBE = (2, 8)


def refuse_random_calls(model: nn.Module, blocks: Sequence[str], example: Any) -> None:
    """Run the model on meta twice, once with the smallest numbers drawn outside of blocks and once with the largest.

    It runs only where such code draws numbers by name; blocks of one form run once. What does not run on meta like that
    is left to the run, whose stages notice a block that is not called.

    Args:
        model: The whole model, in the mode in which it trains.
        blocks: FQNs of its repeated blocks.
        example: `(args, kwargs)` of a forward; None tries a batch of token numbers.

    Raises:
        TransformError: The two runs call different blocks; with the first that one of them leaves out.
    """
    drawing = next((fqn for fqn, module in _outside(model, blocks) if _draws(type(module).forward)), None)
    if drawing is None or not model.training:
        return
    try:
        few, many = sorted((_called(model, blocks, example, number) for number in _EXTREMES), key=len)
    except Exception:  # a model's own code may raise anything, and the observation of its calls reports it
        return
    if few != many:
        name = next((fqn for fqn in many if fqn not in few), many[0])
        where = f'"{drawing}"' if drawing else type(model).__name__
        raise TransformError(
            f'{where} leaves out "{name}" at random, as LayerDrop does, and in a pipeline every block is called once '
            "in each forward: stages would wait for each other; set its rate to 0, or draw inside of the block, which "
            "returns its input where it does nothing"
        )


def _outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    inside = tuple(f"{fqn}." for fqn in blocks)
    for fqn, module in model.named_modules():
        if not f"{fqn}.".startswith(inside or ("\0",)):
            yield fqn, module


def _draws(function: Any) -> bool:
    """Return whether a function's code names one that draws."""
    pending = [getattr(function, "__code__", None)]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            if not _DRAWS.isdisjoint(code.co_names):
                return True
            pending += code.co_consts
    return False


def _called(model: nn.Module, blocks: Sequence[str], example: Any, number: float) -> list[str]:
    """Return the blocks that a forward calls, in order, where all numbers that are drawn are one."""
    called: list[str] = []
    outputs: dict[Any, Any] = {}

    def noting(fqn: str, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward
        form = type(block), tuple(tuple(parameter.shape) for parameter in block.parameters())

        def note(*args: Any, **kwargs: Any) -> Any:
            called.append(fqn)
            if form not in outputs:
                outputs[form] = forward(*args, **kwargs)
            return outputs[form]

        return note

    args, kwargs = example if example is not None else ((torch.zeros(_PROBE, dtype=torch.int64, device="meta"),), {})
    forwards = {model.get_submodule(fqn): noting(fqn, model.get_submodule(fqn)) for fqn in blocks}
    with patched(forwards), _numbers(number):
        on_meta(model, Call(args=tuple(args), kwargs=dict(kwargs)).without_values())
    return called


class _Drawn(TorchFunctionMode):
    """Has functions that draw one number return a given one, which code can read on meta too."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _DRAWS or result.numel() != 1:
            return result
        return torch.full(result.shape, self._number, dtype=result.dtype, device="cpu")


@contextmanager
def _numbers(number: float) -> Iterator[None]:
    """Draw one number inside, in torch, Python and numpy."""
    modules: list[Any] = [random, np.random]
    before = [module.random for module in modules]
    try:
        for module in modules:
            module.random = lambda: number
        with _Drawn(number):
            yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.random = own
