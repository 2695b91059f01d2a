"""Calls of FlexAttention, taken over where its queries are sharded: no function mode sees them."""

from __future__ import annotations

import contextlib
import sys
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


@contextlib.contextmanager
def taken_flex_calls(take: Callable[[FlexCall], tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    """Have a function compute what FlexAttention is called for inside, also where code has compiled it.

    `flex_attention` is a Python function that asks no mode, and hands its arguments to one operator. That operator is
    replaced in its module, with the check of the device, which knows no tensors on meta and no gradients on CPU; and
    nothing is compiled inside, since a compiled one would enter the operator by another way.

    Args:
        take: Returns the output, and empty tensors for statistics that are not computed.
    """
    import torch

    if NAME not in sys.modules:
        yield  # no code calls it
        return
    module: Any = sys.modules[NAME]
    operator = module.flex_attention_hop

    def taken(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: tuple[Any, ...], scale: float, options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = FlexCall(
            query=query,
            key=key,
            value=value,
            scale=scale,
            score_mod=None if score_mod is module._identity else score_mod,
            block_mask=_mask_of(module, mask),
            whole=lambda: operator(query, key, value, score_mod, mask, scale, options),
        )
        return take(call)

    names = {
        "flex_attention_hop": taken,
        "_validate_device": lambda query, key, value: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _mask_of(module: Any, mask: tuple[Any, ...]) -> Any:
    """Return the block mask whose `as_tuple` this is; None for the one that stands for no mask."""
    lengths, keys, (*size, function) = mask[:2], mask[2:6], mask[-3:]
    if size[0] >= module._LARGE_SPARSE_BLOCK_SIZE:
        return None
    return module.BlockMask.from_kv_blocks(*keys, BLOCK_SIZE=tuple(size), mask_mod=function, seq_lengths=lengths)
