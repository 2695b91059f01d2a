"""Codecs by their names in the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d import block_codec
from composer3d_plugins.communication.compression.biased_codecs import Largest, Signs

if TYPE_CHECKING:
    import torch

    from composer3d import Codec

__all__ = ["make_codec"]


def make_codec(name: str, *, block: int, generator: torch.Generator | None = None, ratio: float = 0.01) -> Codec:
    """Return a codec by its name in the manifest.

    Args:
        name: topk, onebit, or as of `composer3d.block_codec`.
        block: Elements that share a scale.
        ratio: Part of the elements that topk sends.
        generator: For stochastic rounding of integers; None rounds to nearest.
    """
    if name == "topk":
        return Largest(ratio=ratio, block=block)
    if name == "onebit":
        return Signs(block=block)
    return block_codec(name, block=block, generator=generator)
