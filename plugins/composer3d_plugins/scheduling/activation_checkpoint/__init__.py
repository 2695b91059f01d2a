"""Activation checkpointing: activations are recomputed in the backward instead of kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    LayoutOffer,
    LayoutTraits,
    Metric,
    Phase,
    PluginError,
    RunContext,
    Transform,
    Units,
    hookimpl,
    plugin,
    resolve_reference,
    select_fqns,
    torch_compat,
)
from composer3d_plugins.scheduling.activation_checkpoint import segments
from composer3d_plugins.scheduling.activation_checkpoint.budget import Budget
from composer3d_plugins.scheduling.activation_checkpoint.buffer_updates import Found

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
# The experts of a token: where sums have no fixed order, scores that are alike would choose others.
CHOICES = ("aten.topk",)
POLICIES = {
    "expensive": (*PRODUCTS, *ATTENTION, *COLLECTIVES, *CHOICES),
    "attention": (*ATTENTION, *COLLECTIVES, *CHOICES),
    "every_second_product": (*PRODUCTS, *ATTENTION, *COLLECTIVES, *CHOICES),
}


_ONCE = (
    "its backward comes in two halves, and what torch's selective checkpoints keep can be used once; "
    'write mode = "full"'
)


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Recompute whole blocks, or all but every second matrix product."""
    if wanted.recompute in (None, "none"):
        return None
    policy = {"policy": "every_second_product"} if wanted.recompute == "selective" else {}
    return {"mode": wanted.recompute, **policy}


@plugin(
    family="scheduling",
    offer=LayoutOffer(table=_table, choices={"recompute": ("selective", "full")}),
)
class ActivationCheckpoint:
    """Recompute blocks in the backward.

    mode = "full" keeps only a block's inputs. mode = "selective" also keeps the results of some operators, and
    recomputes the rest: those that `policy` names, or those in `save`. mode = "sqrt" divides a stage's n blocks into
    about sqrt(n) runs, keeps a run's inputs, and recomputes all of it when its backward begins. mode = "budget"
    measures every block's operators in the first forward, the bytes that the backward needs of each and the time it
    took, and keeps what saves most time a byte until the budget is used: single results of a block, or the block as it
    is. FQNs stay: the block's forward is replaced, not the block. A recomputation reads buffers, and calls hooks of the
    block's modules, as the forward found them, and leaves them as they are.
    Memory: of a recomputed block its inputs (and saved results, of which those that it writes into are copied before
        the write), and one block's activations while it is recomputed;
        "sqrt": of a run its inputs, and one run's activations, under fsdp2 its gathered parameters too.
    Collectives: those of the forward once more, unless saved; FSDP2's are not repeated. "budget": one broadcast along
        tp, in the first forward, and those of the forward once more to measure it.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; Korthikanti et al., Reducing
    Activation Recomputation in Large Transformer Models, arXiv:2205.05198.

    Args:
        mode: Selects what is recomputed, as above.
        units: Patterns of the modules that are recomputed as one; default: the model's blocks.
        every: Recompute every k-th of them, starting with the first.
        policy: What "selective" keeps. "expensive", the default: matrix products, attention, collectives, and choices
            of a router (`topk`). "attention": the same without products. "every_second_product": as "expensive", but
            of a block's matrix products only the first, the third, and so on. `module:function`: whatever the function
            says, called with the operator and its arguments, in the forward and in the recomputation, where it must say
            the same.
        save: Instead of a policy the operators themselves, as `namespace.name` or `namespace.name.overload`.
        budget_gib: What the blocks of one forward on this rank may keep for the backward, GiB.
        budget_fraction: The same, as a part of what they keep if nothing is recomputed.
        preserve_rng_state: Recompute with the random numbers of the forward; only models without dropout do without.
    """

    mode: Literal["full", "selective", "sqrt", "budget"] = "full"
    units: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1)
    policy: str | None = None
    save: tuple[str, ...] | None = None
    budget_gib: float | None = Field(default=None, gt=0)
    budget_fraction: float | None = Field(default=None, gt=0, le=1)
    preserve_rng_state: bool = True

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(recompute="full" if self.mode == "full" and self.every == 1 else "selective")

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse operators that do not exist, and a list that would do nothing."""
        for name in ("policy", "save"):
            if getattr(self, name) is not None and self.mode != "selective":
                raise PluginError(f'{name} has no effect with mode = "{self.mode}"', hint='write mode = "selective"')
        if self.mode == "sqrt" and self.every != 1:
            raise PluginError('every has no effect with mode = "sqrt"', hint="leave it out")
        self._check_budget()
        if self.mode == "budget":  # units are measured in it
            context.claim("first_step", by=self)
        if self.mode in ("sqrt", "budget"):
            context.claim("depth", by=self)
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

    def _check_budget(self) -> None:
        given = [name for name in ("budget_gib", "budget_fraction") if getattr(self, name) is not None]
        if given and self.mode != "budget":
            raise PluginError(f'{given[0]} has no effect with mode = "{self.mode}"', hint='write mode = "budget"')
        if self.mode == "budget" and len(given) != 1:
            raise PluginError(
                'mode = "budget" needs one budget, and there are ' + (" and ".join(given) or "none"),
                hint="write budget_fraction = 0.5, or budget_gib",
            )

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        """Replace the forwards of the chosen blocks."""
        reasons = {
            "budget": 'mode = "budget" measures operators one by one, and the compiler makes one of them',
            "sqrt": 'mode = "sqrt" puts numbers in the place of what a block saves, which the compiler cannot trace',
        }
        conflicts = {"compile": reasons[self.mode]} if self.mode in reasons else {}
        if self.mode in ("selective", "budget"):  # with the others each half of the backward computes again
            conflicts["zero_bubble_pipeline"] = _ONCE
        return Transform(
            name="activation_checkpoint",
            phase=Phase.RECOMPUTE,
            select=self._select,
            apply=self._apply,
            conflicts=conflicts,
        )

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        """Report the bytes that blocks keep under a budget, of the rank that keeps most."""
        if self.mode != "budget":
            return []
        budgets: list[Budget] = context.state.get(self, [])
        kept = sum(budget.num_bytes for budget in budgets)
        return [Metric(name="activation_checkpoint_kept_bytes", value=kept, reduction="max")]

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        patterns = (context.blocks,) if self.units is None else self.units
        return [fqn for pattern in patterns for fqn in select_fqns(pattern, context.fqns)[:: self.every]]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        if self.mode == "sqrt":
            for run in segments.split_into_runs(fqns):
                blocks = {fqn: model.get_submodule(fqn) for fqn in run}
                segments.wrap(blocks, units=context.stash(Units), preserve_rng_state=self.preserve_rng_state)
            return list(fqns)
        if self.mode == "budget":
            return self._apply_budget(model, fqns, context, options)
        if self.mode == "selective":
            options["context_fn"] = self._selection(context)
        for fqn in fqns:
            block: Any = model.get_submodule(fqn)
            block.forward = _recomputed(fqn, block, options)
        return list(fqns)

    def _apply_budget(
        self, model: nn.Module, fqns: Sequence[str], context: RunContext, options: dict[str, Any]
    ) -> list[str]:
        collectives = [overload for name in COLLECTIVES for overload in _overloads(name)]
        collectives += torch_compat.custom_operators("attention", "collective")
        budget = Budget(fraction=self.budget_fraction, gib=self.budget_gib, collectives=collectives, context=context)
        context.state.setdefault(self, []).append(budget)
        for fqn in fqns:
            unit: Any = model.get_submodule(fqn)
            unit.forward = budget.wrap(fqn, unit, unit.forward, options)
        model.register_forward_hook(budget.decide)
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
        function = self._function(context)
        names = POLICIES[self.policy or "expensive"] if function is None and self.save is None else self.save or ()
        kept = [overload for name in names for overload in _overloads(name)]
        if self.save is None:
            kept += torch_compat.custom_operators("attention", "collective")
        if function is not None:
            return lambda: torch_compat.selective_contexts(
                _asking(lambda is_recompute, operator, *args, **kwargs: function(operator, *args, **kwargs))
            )
        if self.policy == "every_second_product":
            products = {overload for name in PRODUCTS for overload in _overloads(name)}
            # Counted from zero in every forward of a block.
            return lambda: torch_compat.selective_contexts(_asking(_every_second(set(kept), products)))
        return functools.partial(torch_compat.selective_contexts, kept)


def _asking(keeps: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's form of a policy that decides by phase, operator and arguments what is kept."""
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


def _recomputed(fqn: str, block: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Wrap a forward; a function rather than a partial, because torch.compile traces into functions only."""
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = block.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return checkpoint(forward, *args, **options, **kwargs)
        found = Found(fqn=fqn, block=block, arguments=(args, kwargs))
        within = {**options, "context_fn": found.contexts(options.get("context_fn"))}
        return checkpoint(found.marking(forward), *args, **within, **kwargs)

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
