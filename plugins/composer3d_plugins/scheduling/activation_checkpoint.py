"""Activation checkpointing: compute activations again in the backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import Phase, PluginError, RunContext, Transform, hookimpl, plugin, resolve_reference, select_fqns

if TYPE_CHECKING:
    from torch import nn

PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten._scaled_mm", "aten._grouped_mm")
# On any device.
ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
COLLECTIVES = (
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
)
POLICIES = {
    "expensive": (*PRODUCTS, *ATTENTION, *COLLECTIVES),
    "attention": (*ATTENTION, *COLLECTIVES),
    "every_second_product": (*PRODUCTS, *ATTENTION, *COLLECTIVES),
}


_ONCE = (
    "its backward comes in two halves, and what torch's selective checkpoints keep can be used once; "
    'write mode = "full"'
)


@plugin(family="scheduling")
class ActivationCheckpoint:
    """Recompute blocks in the backward.

    mode = "full" keeps only a block's inputs. mode = "selective" also keeps the results of some operators, and
    recomputes the rest: those that `policy` names, or those in `save`. FQNs stay: the block's forward is replaced, not
    the block.
    Memory: of a recomputed block its inputs (and saved results), and one block's activations while it is recomputed.
    Collectives: those of the forward once more, unless saved; FSDP2's are not repeated.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; Korthikanti et al., Reducing
    Activation Recomputation in Large Transformer Models, arXiv:2205.05198.

    Args:
        mode: What is recomputed.
        units: Patterns of the modules that are recomputed as one; default: the model's blocks.
        every: Recompute every k-th of them, starting with the first.
        policy: What "selective" keeps. "expensive", the default: matrix products, attention and collectives.
            "attention": attention and collectives. "every_second_product": as "expensive", but of a block's matrix
            products only the first, the third, and so on. `module:function`: whatever the function says, called with
            the operator and its arguments, in the forward and in the recomputation, where it must say the same.
        save: Instead of a policy the operators themselves, as `namespace.name` or `namespace.name.overload`.
        preserve_rng_state: Recompute with the random numbers of the forward; only models without dropout do without.
    """

    mode: Literal["full", "selective"] = "full"
    units: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1)
    policy: str | None = None
    save: tuple[str, ...] | None = None
    preserve_rng_state: bool = True

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse operators that do not exist, and a list that would do nothing."""
        for name in ("policy", "save"):
            if getattr(self, name) is not None and self.mode == "full":
                raise PluginError(f'{name} has no effect with mode = "full"', hint='write mode = "selective"')
        if self.policy is not None and self.save is not None:
            raise PluginError("policy and save both say what is kept", hint="leave one of them out")
        if self.policy is not None and ":" not in self.policy and self.policy not in POLICIES:
            raise PluginError(
                f'policy = "{self.policy}" is not one of {", ".join(POLICIES)}, nor a function as module:function'
            )
        self._function(context)
        for name in self.save or ():
            if not _overloads(name):
                raise PluginError(f'save names the operator "{name}", which torch does not have')

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        """Replace the forwards of the chosen blocks."""
        # With mode = "full" each half of the backward computes again.
        conflicts = {"zero_bubble_pipeline": _ONCE} if self.mode == "selective" else {}
        return Transform(
            name="activation_checkpoint",
            phase=Phase.RECOMPUTE,
            select=self._select,
            apply=self._apply,
            conflicts=conflicts,
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        patterns = (context.blocks,) if self.units is None else self.units
        return [fqn for pattern in patterns for fqn in select_fqns(pattern, context.fqns)[:: self.every]]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        if self.mode == "selective":
            options["context_fn"] = self._selection(context)
        for fqn in fqns:
            block: Any = model.get_submodule(fqn)
            block.forward = _recomputed(block.forward, options)
        return list(fqns)

    def _function(self, context: RunContext) -> Callable[..., Any] | None:
        """Return the policy that the user wrote, if there is one."""
        if self.policy is None or ":" not in self.policy:
            return None
        function = resolve_reference(self.policy, context.manifest.document.folder)
        if not callable(function):
            raise PluginError(f'policy = "{self.policy}" is no function')
        found: Callable[..., Any] = function
        return found

    def _selection(self, context: RunContext) -> Any:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        function = self._function(context)
        names = POLICIES[self.policy or "expensive"] if function is None and self.save is None else self.save or ()
        kept = [overload for name in names for overload in _overloads(name)]
        if function is not None:
            return lambda: create_selective_checkpoint_contexts(
                _asking(lambda is_recompute, operator, *args, **kwargs: function(operator, *args, **kwargs))
            )
        if self.policy == "every_second_product":
            products = {overload for name in PRODUCTS for overload in _overloads(name)}
            # Counted anew in every forward of a block.
            return lambda: create_selective_checkpoint_contexts(_asking(_every_second(set(kept), products)))
        return functools.partial(create_selective_checkpoint_contexts, kept)


def _asking(keeps: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's form of a policy that tells from phase, operator and arguments what is kept."""
    from torch.utils.checkpoint import CheckpointPolicy

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = keeps(context.is_recompute, operator, *args, **kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _every_second(kept: set[Any], products: set[Any]) -> Callable[..., bool]:
    counts = {False: 0, True: 0}

    def keeps(is_recompute: bool, operator: Any, *args: Any, **kwargs: Any) -> bool:
        if operator in products:
            counts[is_recompute] += 1
            return counts[is_recompute] % 2 == 1
        return operator in kept

    return keeps


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
