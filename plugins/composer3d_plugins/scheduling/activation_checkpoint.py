"""Activation checkpointing: compute activations again in the backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import Phase, PluginError, RunContext, Transform, hookimpl, plugin, select_fqns

if TYPE_CHECKING:
    from torch import nn

# What is expensive to compute again: matrix products, attention on any device, and collectives.
EXPENSIVE = (
    "aten.mm",
    "aten.bmm",
    "aten.addmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
)


@plugin(family="scheduling")
class ActivationCheckpoint:
    """Recompute blocks in the backward.

    mode = "full" keeps only a block's inputs. mode = "selective" also keeps the results of the operators in `save`, and
    recomputes the rest, which is cheap. FQNs stay: the block's forward is replaced, not the block.
    Memory: of a recomputed block its inputs (and saved results), and one block's activations while it is recomputed.
    Collectives: those of the forward once more, unless saved; FSDP2's are not repeated.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; Korthikanti et al., Reducing
    Activation Recomputation in Large Transformer Models, arXiv:2205.05198.

    Args:
        mode: What is recomputed.
        units: Patterns of the modules that are recomputed as one; default: the model's blocks.
        every: Recompute every k-th of them, starting with the first.
        save: Operators whose results "selective" keeps, as `namespace.name` or `namespace.name.overload`; default:
            matrix products, attention and collectives.
        preserve_rng_state: Recompute with the random numbers of the forward; only models without dropout do without.
    """

    mode: Literal["full", "selective"] = "full"
    units: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1)
    save: tuple[str, ...] | None = None
    preserve_rng_state: bool = True

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse operators that do not exist, and a list that would do nothing."""
        if self.save is not None and self.mode == "full":
            raise PluginError('save has no effect with mode = "full"', hint='write mode = "selective"')
        for name in self.save or ():
            if not _overloads(name):
                raise PluginError(f'save names the operator "{name}", which torch does not have')

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        """Replace the forwards of the chosen blocks."""
        return Transform(name="activation_checkpoint", phase=Phase.RECOMPUTE, select=self._select, apply=self._apply)

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        patterns = (context.blocks,) if self.units is None else self.units
        return [fqn for pattern in patterns for fqn in select_fqns(pattern, context.fqns)[:: self.every]]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        if self.mode == "selective":
            options["context_fn"] = self._selection()
        for fqn in fqns:
            block: Any = model.get_submodule(fqn)
            block.forward = _recomputed(block.forward, options)
        return list(fqns)

    def _selection(self) -> Any:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        names = EXPENSIVE if self.save is None else self.save
        return functools.partial(
            create_selective_checkpoint_contexts, [overload for name in names for overload in _overloads(name)]
        )


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Wrap a forward; a function rather than a partial, because torch.compile traces into functions only."""
    from torch.utils.checkpoint import checkpoint

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _overloads(name: str) -> list[Any]:
    """Return the operator's overloads; none where this build of torch does not have it."""
    import torch

    namespace, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), operator, None) if operator else None
    if packet is None:
        return []
    names = [overload] if overload else packet.overloads()
    return [getattr(packet, each) for each in names if hasattr(packet, each)]
