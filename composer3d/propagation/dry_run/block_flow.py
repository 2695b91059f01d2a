"""Activation flow between blocks: the edges along which activations may stay sharded along the sequence.

A model may have several lists of blocks, as an encoder with a decoder does, call a block twice, or compute something of
its own between two blocks. Wherever a block's output goes anywhere else than to the next block, it is all-gathered
there, and sharded again before the block that takes what was computed from it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.context import RunContext
from composer3d.errors import TransformError
from composer3d.patterns import select as select_fqns
from composer3d.propagation.dry_run.held_objects import reached_from, tensors_of
from composer3d.propagation.functions.function_dims import SIZES, name_of
from composer3d.propagation.module_calls import activation_of, first_of
from composer3d.propagation.module_kinds import kind_of

__all__ = ["Flow", "blocks_beside", "blocks_of"]

# Questions whose answers are other ones for a share, and hooks that are given its gradient, also on its node.
ASKED = SIZES | {"register_hook", "retain_grad", "grad_fn"}


def blocks_of(model: nn.Module, context: RunContext, *, several: bool) -> list[str]:
    """Return the repeated blocks; none where they are not known.

    Args:
        model: The whole model.
        several: Whether to take the blocks of all outermost lists where there is no single list of equal blocks;
            otherwise there are none then.
    """
    try:
        chosen = select_fqns(context.blocks, context.fqns)
    except TransformError:
        return _listed(model) if several else []
    # Dictionaries of modules, whose entries the model's own code calls.
    found = [fqn for fqn in chosen if type(model.get_submodule(fqn)).forward is not nn.Module.forward]
    if context.manifest.model.blocks:
        return found
    # A list of equal blocks, and perhaps another one of a single block.
    held = _modules_of(model, found)
    return [*found, *(fqn for fqn in _listed(model) if held.isdisjoint(_modules_of(model, [fqn])))]


def _modules_of(model: nn.Module, fqns: Sequence[str]) -> set[nn.Module]:
    """Return modules and all that they hold: what several blocks share is inside of each, under any name."""
    return {inner for fqn in fqns for inner in model.get_submodule(fqn).modules()}


def _listed(model: nn.Module) -> list[str]:
    found: dict[nn.Module, str] = {}  # one that several blocks share by its first name alone
    lists: list[str] = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        if any(not other or fqn.startswith(f"{other}.") for other in lists):
            continue
        held = [name for name, child in module.named_children() if _is_block(child)]
        if held:
            lists.append(fqn)
            for name in held:
                found.setdefault(module.get_submodule(name), ".".join(filter(None, (fqn, name))))
    return list(found.values())


def blocks_beside(model: nn.Module) -> list[str]:
    """Return the blocks that are attributes of the model itself, each by its first name."""
    return [name for name, child in model.named_children() if _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    """Return whether a module of a list contains linear layers and is none; a list of modules is never called."""
    if type(module).forward is nn.Module.forward:
        return False
    inside = [inner for inner in module.modules() if inner is not module]
    return any(kind_of(inner) in ("linear", "transposed") for inner in inside)


class Flow:
    """Records the uses of the activation that each block returns.

    Attributes:
        calls: FQNs of the blocks in the order of their calls.
        edges: Pairs of calls: the second takes what the first returned.
        used: Calls whose activation goes elsewhere too.
        leaves: Whether what blocks took or made is reached from the model after its forward.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.edges: set[tuple[int, int]] = set()
        self.used: set[int] = set()
        self.leaves = False
        # By identity, kept so that it is not another tensor's.
        self._given: dict[int, tuple[int, Tensor]] = {}
        self._inside: list[int] = []
        self._taken: set[int] = set()
        # What blocks made, by identity, with the block; and the shapes of it that code outside of them used.
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._kept: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    @property
    def is_inside(self) -> bool:
        """Whether a block is at work."""
        return bool(self._inside)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the activations that a function took, and what blocks have made and kept."""
        if self._inside and self.calls[self._inside[-1]]:  # the root has no code outside of it
            made = (leaf for leaf in torch_compat.tree_leaves(result) if isinstance(leaf, Tensor))
            self._made |= {id(leaf): (weakref.ref(leaf), self.calls[self._inside[-1]]) for leaf in made}
        elif self._made:
            self._use_kept([list(args), dict(kwargs)])
        if self._given:
            leaves = torch_compat.tree_leaves([list(args), dict(kwargs)])
            used = {self._given[id(leaf)][0] for leaf in leaves if id(leaf) in self._given} - self._taken
            # Of other questions, such as its dtype, the answer is the same for a share.
            if used and (name_of(func) in ASKED or _has_tensors(result)):
                self.used |= used

    def _use_kept(self, value: Any) -> None:
        for leaf in torch_compat.tree_leaves(value):
            made, fqn = self._made.get(id(leaf), (None, ""))
            if isinstance(leaf, Tensor) and made is not None and made() is leaf:
                self._kept[fqn].add(tuple(leaf.shape))

    def kept_of(self, fqns: Collection[str]) -> frozenset[tuple[int, ...]]:
        """Return the shapes of tensors that blocks made and did not return, and that code outside of all blocks used.

        A hook that appends to a list, or an attribute that the model's own code reads, keeps such a tensor.
        """
        return frozenset[tuple[int, ...]]().union(*(self._kept.get(fqn, ()) for fqn in fqns))

    def look_at_left(self, model: nn.Module) -> None:
        """Notice what blocks leave in attributes, lists and objects for code that runs after the model's forward."""
        with torch_compat.without_torch_functions():
            left = [each for _, _, value in reached_from(model) for each in tensors_of(value)]
            self.leaves = any(each.grad_fn is not None or self._is_of_block(each) for each in left)
            # Activations between blocks that the model's own code keeps are whole, as what it computes of them.
            self.used |= {self._given[id(each)][0] for each in left if id(each) in self._given}

    def _is_of_block(self, tensor: Tensor) -> bool:
        made, _ = self._made.get(id(tensor), (None, ""))
        return (made is not None and made() is tensor) or id(tensor) in self._given

    @contextlib.contextmanager
    def inside(self, fqn: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Enter a block with its arguments."""
        call, taken = len(self.calls), self._taken
        self.calls.append(fqn)
        with torch_compat.without_torch_functions():
            key = activation_of(args, kwargs)
            leaves = torch_compat.tree_leaves([list(args), dict(kwargs)])
        activation = args[key] if isinstance(key, int) else kwargs.get(key or "")
        for leaf in leaves:
            source = self._given.get(id(leaf), (None, None))[0]
            if source is not None and leaf is activation:
                self.edges.add((source, call))
                self._taken = taken | {source}
            elif source is not None:
                self.used.add(source)
        self._inside.append(call)
        try:
            yield
        finally:
            self._inside.pop()
            self._taken = taken

    def given(self, output: Any) -> Any:
        """Return what the block at work returns as tensors of their own, so that each call's can be told apart."""
        with torch_compat.without_torch_functions():
            result = torch_compat.tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) else x, output)
        first = first_of(result)
        if isinstance(first, Tensor):
            self._given[id(first)] = (self._inside[-1], first)
        return result

    def end(self, output: Any) -> None:
        """Record what the model returned."""
        self._use_kept(output)
        leaves = torch_compat.tree_leaves(output)
        self.used |= {self._given[id(leaf)][0] for leaf in leaves if id(leaf) in self._given}
        self._given.clear()
        self._made.clear()

    def boundaries(self, sharded: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the blocks before which activations are sharded, and those after which they are gathered.

        Args:
            sharded: The blocks that can work on a sharded sequence.
        """
        split: set[str] = set()
        gather: set[str] = set()
        while True:
            edges = {
                (one, other)
                for one, other in self.edges
                if one not in self.used and not {self.calls[one], self.calls[other]} - set(sharded)
                if self.calls[one] not in gather and self.calls[other] not in split
            }
            entered, left = {other for _, other in edges}, {one for one, _ in edges}
            broken = {one for one, _ in self.edges - edges}
            before = len(split), len(gather)
            # One module has one way in and one way out, however often it is called.
            split |= {fqn for call, fqn in enumerate(self.calls) if fqn in sharded and call not in entered}
            gather |= {
                fqn for call, fqn in enumerate(self.calls) if fqn in sharded and (call not in left or call in broken)
            }
            if before == (len(split), len(gather)):
                return split, gather


def _has_tensors(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch_compat.tree_leaves(result))
