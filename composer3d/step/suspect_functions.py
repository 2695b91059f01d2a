"""Autograd functions of a model's own whose backward is possibly not linear in its gradient, by what its code names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

__all__ = ["is_ours", "is_suspect"]

_DEPTH = 3  # of functions that a backward calls
# Names in the code of a backward that is possibly not linear in its gradient. Comparisons are, too.
_NONLINEAR = frozenset(
    "abs amax amin bernoulli bernoulli_ ceil clamp clamp_ clamp_max clamp_min clip clip_ copysign floor hardtanh item "
    "masked_fill masked_fill_ max maximum median min minimum nan_to_num norm normalize pow quantile rand_like "
    "randn_like round round_ sgn sign softsign sort sqrt square std tanh topk trunc var vector_norm "
    "where".split()
)


def is_ours(module: str) -> bool:
    """Return whether the name of a module is one of torch, of this package or of its plugins."""
    return module.partition(".")[0] == "torch" or module.startswith("composer3d")


@functools.cache
def is_suspect(function: type) -> bool:
    """Return whether the backward of an autograd function has names, or comparisons, of what is not linear."""
    backward: Any = inspect.unwrap(getattr(function, "backward", None) or function)
    if is_ours(function.__module__):
        return False
    return isinstance(backward, FunctionType) and any(_is_nonlinear(code) for code in _codes(backward, _DEPTH))


def _codes(function: FunctionType, depth: int) -> Iterator[CodeType]:
    """Yield the code of a function, of those inside of it, and of those of its module's names that it calls."""
    pending: list[CodeType] = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names if depth else ():
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__.partition(".")[0] != "torch":
                yield from _codes(called, depth - 1)


def _is_nonlinear(code: CodeType) -> bool:
    import dis

    names: Sequence[str] = code.co_names
    return bool(_NONLINEAR.intersection(names)) or any(
        instruction.opname == "COMPARE_OP" for instruction in dis.get_instructions(code)
    )
