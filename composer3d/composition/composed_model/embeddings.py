"""Options of embeddings under which ranks with samples of their own compute something else than one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer3d.mesh import Layout, Role

if TYPE_CHECKING:
    from torch import nn

__all__ = ["other_embeddings", "unsuitable_embeddings"]


def unsuitable_embeddings(model: nn.Module, layout: Layout) -> Iterator[str]:
    """Yield why embeddings cannot be composed: sparse gradients, weights that each rank's forward renormalises."""
    has_samples, exchanges = _degrees(layout)
    for fqn, module in _embeddings(model):
        if module.sparse and module.weight.requires_grad and exchanges:
            yield (
                f'"{fqn}" has sparse=True, and its gradient is a sparse tensor, which ranks do not reduce; write '
                "sparse=False"
            )
        if module.max_norm is not None and has_samples:
            yield (
                f'"{fqn}" has max_norm={module.max_norm:g}, by which its forward writes into the rows that a batch '
                "has: each rank into those of its own samples, so that ranks would hold different weights; write "
                "max_norm=None, and divide the rows by their norms in the forward, or all weights after each step"
            )


def other_embeddings(model: nn.Module, layout: Layout) -> Iterator[str]:
    """Yield which embeddings have other gradients than on one device."""
    for fqn, module in _embeddings(model) if _degrees(layout)[0] else ():
        if module.scale_grad_by_freq and module.weight.requires_grad:
            yield (
                f'"{fqn}" has scale_grad_by_freq=True, and divides the gradient of a row by how often the row is in '
                "its forward: each rank counts its own samples, so that gradients are others than one device's, as "
                "they are in micro-batches; write scale_grad_by_freq=False"
            )


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    from torch import nn

    for fqn, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield fqn, module


def _degrees(layout: Layout) -> tuple[bool, bool]:
    """Return whether ranks have samples of their own, and whether they reduce gradients of weights."""
    has_samples = layout.degree(Role.BATCH, Role.SEQUENCE) > 1
    return has_samples, has_samples or layout.degree(Role.TENSOR) > 1
