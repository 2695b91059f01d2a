"""Sequence parallelism of a derived plan: the blocks on a sharded sequence, and where it is sharded or gathered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from composer3d.propagation import VALUES, Call, Flow, PropagationError, Traced, device_of, kind_of
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from composer3d_plugins.sharding.tensor_parallel.module_roles import Roles
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING, Rule, Rules, Style

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["along_sequence", "sharded_blocks", "with_boundaries", "without_sequence"]

log = logging.getLogger(__name__)

BOUNDARIES: Mapping[tuple[bool, bool], Style] = {
    (True, False): "split",
    (False, True): "gather",
    (True, True): "split_gather",
}


def along_sequence(
    block: nn.Module,
    rules: Rules,
    *,
    call: Call,
    degree: int,
    roles: Callable[[Rules], Roles],
    where: str,
    read: Collection[str],
) -> Rules:
    """Return a block's rules for activations x_B(S/T)D, sharded along the sequence.

    torch's attention modules are sharded along their heads if they are given the sequence as they expect it, else they
    stay whole and are given all of it.

    Args:
        block: One of its form.
        rules: Its own, by the FQNs in it.
        call: What it is called with.
        degree: Ranks along tp.
        roles: Tells from rules what its linear layers are.
        where: FQN, for messages.
        read: Modules whose parameters code outside of them reads.

    Raises:
        PropagationError: Something in the block needs what cannot be gathered.
    """

    def propagated(rules: Rules, call: Call) -> Rules:
        dry_run = BlockDryRun(block=block, degree=degree, roles=roles(rules))
        dry_run.propagate(call, where)
        return _rules_of(dry_run, rules, read)

    whole = {name: _whole(rule) for name, rule in rules.items()}
    # Experts that pick their tokens can be given the full sequence; which code does so shows with values alone.
    first: PropagationError | None = None
    for chosen in (rules, whole):
        try:
            return propagated(chosen, call)
        except PropagationError as error:
            first = first or error
    assert first is not None, "both ways have failed"
    if VALUES not in str(first):
        raise first
    try:
        return propagated(rules, call.with_values(device_of(block)))
    except PropagationError:
        raise first from None


def _whole(rule: Rule) -> Rule:
    return Rule(style="replicate") if rule.style == "attention" else rule


def _rules_of(dry_run: BlockDryRun, rules: Rules, read: Collection[str]) -> Rules:
    """Return the rules with those of modules that work on x_B(S/T)D element by element.

    What mixes the sequence, or has its weights computed or read elsewhere, is propagated function by function.
    """
    unsharded = dry_run.unsharded - dry_run.along
    result = {
        name: replace(rule, is_sharded=False)
        if name in unsharded and rule.style in (*EXPANDING, *CONTRACTING)
        else rule
        for name, rule in rules.items()
    }
    dims = {name: _dim_of(dry_run.block.get_submodule(name), seen) for name, seen in dry_run.whole.items()}
    return result | {
        name: Rule(style="sequence", dim=dim)
        for name, dim in dims.items()
        if dim is not None and name not in {*dry_run.contracting, *dry_run.moving, *read}
        if _matters(dry_run.block.get_submodule(name))
    }


def _dim_of(module: nn.Module, seen: Collection[int | None]) -> int | None:
    """Return the dim along which all inputs of a module are sharded; None where calls differ, or its inputs are whole.

    A projection takes any dim but the last, which it contracts.
    """
    first = next(iter(seen))
    alike = len(seen) == 1 or (None not in seen and kind_of(module) in ("linear", "transposed"))
    return first if alike else None


def _matters(module: Any) -> bool:
    """Return whether a module has to know that its input is sharded: it has parameters, or draws numbers."""
    if next(module.children(), None) is not None or module._forward_pre_hooks:
        return False
    return next(module.parameters(), None) is not None or isinstance(getattr(module, "p", None), float)


def sharded_blocks(model: nn.Module, able: Collection[str], traced: Traced) -> frozenset[str]:
    """Return the blocks that work on a sharded sequence: of those that are able, all but those of shared modules.

    A module's style tells where its inputs are sharded and its gradients partial sums, so that none is for sharded
    sequences and for full ones, as a norm of a block that the model's own code calls after the last one.

    Args:
        model: The whole model.
        able: Blocks that can.
    """
    held = {
        fqn: {module for module in model.get_submodule(fqn).modules() if _matters(module)}
        for group in traced.forms.values()
        for fqn in group
    }
    sharded = set(able)
    while True:
        whole = traced.outer.union(*(held[fqn] for fqn in held.keys() - sharded))
        found = {fqn for fqn in sharded if not held[fqn] & whole}
        if found == sharded:
            return frozenset(sharded)
        for fqn in sharded - found:
            log.info('tensor_parallel leaves the sequence whole in "%s": other code calls modules of it', fqn)
        sharded = found


def without_sequence(rules: Rules) -> Rules:
    """Return the rules of a block where its activations stay whole."""
    return {name: replace(rule, is_sharded=False) for name, rule in rules.items()}


def with_boundaries(rules: Rules, *, flow: Flow, sharded: Collection[str]) -> Rules:
    """Return rules with those of where the sequence is sharded and gathered.

    Args:
        rules: Of all modules.
        flow: What was seen of activations between blocks.
        sharded: The blocks that work on a sharded sequence.
    """
    split, gather = flow.boundaries(sharded)
    edges = {fqn: Rule(style=BOUNDARIES[fqn in split, fqn in gather]) for fqn in split | gather}
    return {**rules, **edges}
