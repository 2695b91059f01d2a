"""Hooks that a loop registers on a model's modules, of sequences that are padded: no dry run has seen what they do.

What a model's own code does, its hooks included, is known before: sequences are padded where it sees no padding. A hook
that comes later is called in a propagation of its own, in which there are tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.gradient_hooks import GradientHooks, Mode, hook_name
from composer3d.propagation.sequences.padded_sequences import with_padding
from composer3d.propagation.sequences.sequence_operands import SequenceOperands
from composer3d.propagation.shards import ShardSpec, mark, spec_of
from composer3d.torch_compat import forward_hooks

__all__ = ["LateHooks"]

# Of the attribute of a hook that is called so.
SHOWN = "composer3d_shown_tokens"


class LateHooks:
    """Calls forward hooks that come after the dry run with tokens alone.

    Args:
        degree: Ranks along the axis.
        rules: Of the plugin that shards the sequence.
        hooks: Knows what is padded, and the propagation at work.
        outside: Makes the propagation in which a hook runs.

    Memory: of padded sequences what hooks compute with, whole. Collectives: its all-gathers.
    """

    def __init__(
        self,
        degree: int,
        *,
        rules: SequenceRules,
        hooks: GradientHooks,
        outside: Mode,
    ) -> None:
        self._degree, self._rules, self._hooks, self._outside = degree, rules, hooks, outside
        self._tables: list[Any] = []
        self._known: dict[int, Any] = {}  # held, so that no other hook has the identity of one
        self._newest = -1

    def know(self, model: nn.Module) -> None:
        """Take the hooks that are there for those of the model's own."""
        self._tables = forward_hooks.tables_of_forwards(model.modules())
        self._known = {id(hook): hook for table in forward_hooks.tables_of(model.modules()) for hook in table.values()}

    def with_hooks(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward of the whole model that calls its hooks itself."""
        return forward_hooks.with_hooks(model, forward, around=self.around)

    def look(self) -> None:
        """Let hooks that have come since be called so, if the batch at work is padded."""
        if not self._hooks.padded():
            return
        newest = forward_hooks.newest(self._tables)
        if newest != self._newest:
            self._newest = newest
            forward_hooks.replace_hooks(self._tables, self.around)

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a hook: itself, where it is the model's own."""
        if id(hook) in self._known or hasattr(hook, SHOWN):
            return hook

        @functools.wraps(hook, updated=())
        def shown(module: nn.Module, *given: Any) -> Any:
            mode = self._hooks.at_work()
            padded = {} if mode is None or mode.pauses else self._hooks.padded()
            if mode is None or not padded:
                return hook(module, *given)
            with mode.apart(), self._outside(padded, hook=f"the hook {hook_name(hook)}"):
                returned = hook(module, *given)
            with torch_compat.without_torch_functions():
                leaves = [leaf for leaf in torch_compat.tree_leaves(given) if isinstance(leaf, Tensor)]
                specs = [spec for leaf in leaves if (spec := spec_of(leaf, mode.axis)) is not None]
                return torch_compat.tree_map(functools.partial(self._share, specs, padded), returned)

        setattr(shown, SHOWN, True)
        return shown

    def _share(self, specs: Sequence[ShardSpec], padded: Mapping[int, int], value: Any) -> Any:
        """Return this rank's shard, with padding, of what a hook returns in place of one."""
        if not isinstance(value, Tensor):
            return value
        for spec in specs:
            dim, num = spec.placed.dim, sum(padded.get(length, length) for length in spec.placed.parts)
            if spec_of(value, spec.axis) is None and value.ndim == spec.shadow.ndim and value.shape[dim] == num:
                whole = with_padding(value, spec, padded)
                share = SequenceOperands(self._degree, None, self._rules).indexed(whole, dim, spec.placed.parts)
                return mark(share, placed=spec.placed, degree=self._degree, sources=spec.sources, axis=spec.axis)
        return value
