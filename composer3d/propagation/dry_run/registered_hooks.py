"""Hooks that a block's code registers on gradients, of tensors or on nodes of the graph, in a dry run of the block.

A hook on a tensor that is whole is given its whole gradient, and so is one before a node whose result is whole. One
behind a node is given the gradients of what went into it, in the node's own order: those are one device's where the
function has run as it is, on whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.function_dims import name_of
from composer3d.propagation.shards import KeptShardError, PropagationError, ShardSpec, spec_of
from composer3d.torch_compat import backward_hooks

__all__ = ["RegisteredHooks"]

ON = "register it on the tensor, as in t.register_hook, or before the node, as in t.grad_fn.register_prehook"


class RegisteredHooks(TorchFunctionMode):
    """Refuses hooks that would be given a rank's features or positions.

    A context inside of a propagation's; `settle` looks at nodes when the code has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watch = backward_hooks.WatchedRegistrations(self._hooked, self._retained, self._of_node)
        self._nodes: dict[int, tuple[Any, ShardSpec | None]] = {}  # that code has asked tensors for
        self._plain: dict[int, Any] = {}  # of functions of whole tensors
        self._registered: dict[int, tuple[Any, str]] = {}

    def __enter__(self) -> RegisteredHooks:
        """Watch registrations."""
        self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Leave them."""
        super().__exit__(*raised)
        self._watch.__exit__()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note nodes."""
        result = func(*args, **(kwargs or {}))
        with torch_compat.without_torch_functions():
            if name_of(func) == "grad_fn":
                if result is not None:
                    self._nodes[id(result)] = (result, spec_of(args[0]))
            elif all(spec_of(leaf) is None for leaf in torch_compat.tree_leaves([list(args), kwargs, result])):
                nodes = [leaf.grad_fn for leaf in torch_compat.tree_leaves(result) if isinstance(leaf, Tensor)]
                self._plain.update((id(node), node) for node in nodes if node is not None)
        return result

    def settle(self) -> None:
        """Refuse hooks on nodes of which it is not certain that one device gives them the same.

        Raises:
            KeptShardError: Of a tensor that is sharded.
            PropagationError: Behind a node of a function that does not run as it is, or on one reached in another way.
        """
        if not self._registered:
            return
        found: set[int] = set()
        for node, spec in self._nodes.values():
            ahead, behind = (
                [id(hook) for hook in hooks if id(hook) in self._registered]
                for hooks in backward_hooks.node_hooks(node)
            )
            found.update(ahead, behind)
            if spec is not None and (ahead or behind):
                place = self._registered[(ahead + behind)[0]][1]
                raise KeptShardError(f"a hook is on the node of a tensor that is sharded{place}", sources=spec.sources)
            if behind and id(node) not in self._plain:
                place = self._registered[behind[0]][1]
                raise PropagationError(f"a hook is behind a node of the graph that is another one over tp{place}; {ON}")
        for key, (_, place) in self._registered.items():
            if key not in found:
                raise PropagationError(f"a hook is on a node of the graph that no tensor was asked for{place}; {ON}")

    def _hooked(self, tensor: Tensor, hook: Any) -> Any:
        if backward_hooks.is_users(hook):
            self._refuse(tensor, "a hook is")
        return hook

    def _retained(self, tensor: Tensor) -> None:
        self._refuse(tensor, "code retains the gradient")

    def _refuse(self, tensor: Tensor, what: str) -> None:
        with torch_compat.without_torch_functions():
            spec = spec_of(tensor)
        if spec is not None:
            on = "on" if what.endswith("is") else "of"
            raise KeptShardError(f"{what} {on} a tensor that is sharded{beside()}", sources=spec.sources)

    def _of_node(self, hook: Any) -> Any:
        if not backward_hooks.is_users(hook):
            return hook

        def registered(*gradients: Any) -> Any:
            return hook(*gradients)

        self._registered[id(registered)] = (registered, beside())
        return registered
