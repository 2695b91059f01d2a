"""Calls of FlexAttention, taken over where its queries are sharded: no function mode sees them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FlexCall", "taken_flex_calls"]

NAME = "torch.nn.attention.flex_attention"


@dataclass(frozen=True, kw_only=True)
class FlexCall:
    """One call of `flex_attention`, after it has validated its arguments.

    Args:
        query: As of torch's function, and so the next three.
        key: As above.
        value: As above.
        scale: As above.
        score_mod: The user's; None without one.
        block_mask: The user's, with its functions; None without one.
        whole: Runs torch's operator on these arguments.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    score_mod: Callable[..., Tensor] | None
    block_mask: Any
    whole: Callable[[], tuple[Tensor, Tensor, Tensor]]


Take = Callable[[FlexCall], "tuple[Tensor, Tensor, Tensor]"]


class _Takes(threading.local):
    """Functions that take calls over on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: tuple[Take, ...] = ()


_takes = _Takes()
_installing = threading.Lock()
_installed = contextlib.ExitStack()
_num_inside = 0


@contextlib.contextmanager
def taken_flex_calls(take: Take) -> Iterator[None]:
    """Have a function compute what FlexAttention is called for inside, also where code has compiled it.

    `flex_attention` is a Python function that asks no mode, and hands its arguments to one operator. That operator is
    replaced in its module, with the check of the device, which knows no tensors on meta and no gradients on CPU; and
    nothing is compiled inside, since a compiled one would enter the operator by another way.

    As with a mode, calls on other threads are theirs. The module and the compiler's stance are the process's: the
    first thread that enters replaces them, and the last that leaves restores them.

    Args:
        take: Returns the output, and empty tensors for statistics that are not computed.
    """
    if NAME not in sys.modules:
        yield  # no code calls it
        return
    before = _takes.stack
    with _replaced():
        _takes.stack = (*before, take)
        try:
            yield
        finally:
            _takes.stack = before


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    global _num_inside
    with _installing:
        if _num_inside == 0:
            _install(sys.modules[NAME])
        _num_inside += 1
    try:
        yield
    finally:
        with _installing:
            _num_inside -= 1
            if _num_inside == 0:
                _installed.close()


def _install(module: Any) -> None:
    """Replace what `flex_attention` uses, until `_installed` is closed."""
    import torch

    operator, validate = module.flex_attention_hop, module._validate_device
    names = {
        "flex_attention_hop": lambda *args: _call(module, operator, args, _takes.stack),
        "_validate_device": lambda *args: None if _takes.stack else validate(*args),
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    _installed.enter_context(torch.compiler.set_stance("force_eager"))  # first: it raises where code is being compiled
    for name, value in names.items():
        _installed.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _call(module: Any, operator: Any, args: tuple[Any, ...], takes: tuple[Take, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator, or what takes it over; what runs it whole there asks those around."""
    if not takes:
        output: tuple[Tensor, Tensor, Tensor] = operator(*args)
        return output
    query, key, value, score_mod, mask, scale, _ = args
    call = FlexCall(
        query=query,
        key=key,
        value=value,
        scale=scale,
        score_mod=None if score_mod is module._identity else score_mod,
        block_mask=_mask_of(module, mask),
        whole=lambda: _call(module, operator, args, takes[:-1]),
    )
    return takes[-1](call)


def _mask_of(module: Any, mask: tuple[Any, ...]) -> Any:
    """Return the block mask whose `as_tuple` this is; None for the one that stands for no mask."""
    lengths, keys, (*size, function) = mask[:2], mask[2:6], mask[-3:]
    if size[0] >= module._LARGE_SPARSE_BLOCK_SIZE:
        return None
    return module.BlockMask.from_kv_blocks(*keys, BLOCK_SIZE=tuple(size), mask_mod=function, seq_lengths=lengths)
