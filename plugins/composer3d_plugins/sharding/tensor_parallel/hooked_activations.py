"""Hooks on modules whose activations are sharded by feature: they are given those of all ranks.

Shapes: F features, T degree of tp. A hook that is given y_BS(F/T) would take a rank's part for the whole. It is called
with y_BSF, which is the same on every rank, as what it makes of it is: the gradient of the gathered tensor is whole,
and a rank takes its shard of it. What it returns in place of y is sharded again, and what it returns in place of a
gradient. Tensors go through the gathered one, so that gradients of that, and hooks on them, are one device's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer3d import StepError, torch_compat
from composer3d.propagation import Placed, copy_mark, exchanged, repeatable, spec_of, strip
from composer3d.torch_compat import backward_hooks, hook_registrations
from composer3d_plugins.sharding.tensor_parallel.activation_layouts import Activations
from composer3d_plugins.sharding.tensor_parallel.module_activations import Dims, ModuleActivations
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING

if TYPE_CHECKING:
    from composer3d_plugins.sharding.tensor_parallel.plan_sources import Made

__all__ = ["HookedModule", "follow_modules"]

# Of the attribute of a shard with what it is a shard of, and with the number of writes to it by then.
WHOLE = "composer3d_whole_features"
# Styles of modules that are given DTensors, or return such, which their hooks would meet.
WRAPPED = (*EXPANDING, *CONTRACTING, "vocab", "head")


def follow_modules(model: nn.Module, made: Made, activations: Activations) -> None:
    """Let hooks of modules be given whole features, also those that are registered on all modules.

    Args:
        model: A part, to which the plan is applied.
        made: The plan.
        activations: Converts activations to and from DTensors.
    """
    pairs: list[tuple[nn.Module, HookedModule]] = []
    for fqn, module in model.named_modules():
        is_propagated = any(not other or f"{fqn}.".startswith(f"{other}.") for other in made.propagated)
        seen = None if is_propagated else made.activations.get(fqn)
        if is_propagated or seen is not None or (fqn in made.rules and made.rules[fqn].style in WRAPPED):
            pairs.append((module, HookedModule(fqn, activations=activations, seen=seen)))
            hook_registrations.follow_hooks(*pairs[-1])

    def look(*_: Any) -> None:
        if hook_registrations.follow_global_hooks():
            for module, follower in pairs:
                follower.registered(module)

    if pairs:
        model.register_forward_pre_hook(look)


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """Leaves of values as a hook is given them.

    Attributes:
        leaves: What torch has.
        dims: Along which they are sharded.
        wholes: What the hook is given in their place.
        versions: How often these have been written into.
    """

    leaves: Sequence[Any]
    dims: Dims
    wholes: Sequence[Any]
    versions: Sequence[int]

    def refuse_writes(self, hook: hook_registrations.FollowedHook) -> None:
        """Refuse writes into gathered activations, which code around the module may use.

        Raises:
            StepError: With what to write.
        """
        for whole, version, placed in zip(self.wholes, self.versions, self.dims, strict=True):
            if placed is not None and _version(whole) != version:
                raise StepError(
                    f"{_name(hook)} writes into an activation of which a rank has a part, and is given another tensor; "
                    "let a hook before the forward return its result"
                )


class HookedModule:
    """Calls the hooks of one module.

    Args:
        fqn: Its name, for messages.
        activations: Converts activations to and from DTensors.
        seen: What a dry run has seen of the module's activations; None where marks tell.

    Memory: what hooks are given, whole. Collectives: for each sharded activation that a hook is given an all-gather,
    and of its gradient another.
    """

    def __init__(self, fqn: str, *, activations: Activations, seen: ModuleActivations | None) -> None:
        self._fqn, self._activations, self._seen = fqn, activations, seen
        self._is_watched = False
        # Of the last call: of tensors among its positional arguments, and of what it returned.
        self._of_gradients: tuple[Dims, Dims] = ((), ())

    def registered(self, module: nn.Module, hook: hook_registrations.FollowedHook | None = None) -> None:
        """Watch the calls of the module from now on, if they are not yet."""
        if not self._is_watched:
            self._is_watched = True
            module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._end, with_kwargs=True)

    def call(self, module: nn.Module, hook: hook_registrations.FollowedHook, given: tuple[Any, ...]) -> Any:
        """Call a hook."""
        if hook.kind == "before":
            return self._called_before(module, hook, given)
        if hook.kind == "after":
            return self._called_after(module, hook, given)
        return self._called_with_gradients(module, hook, given)

    @repeatable
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note how arguments are sharded, and let them go through what hooks behind the forward are given."""
        with torch_compat.without_torch_functions():
            leaves, tree = torch_compat.tree_flatten([list(args), kwargs])
            dims = self._dims(leaves, "given")
            at = 0
            found: list[Placed | None] = []
            for value in args:
                found.append(dims[at] if isinstance(value, Tensor) else None)
                at += len(torch_compat.tree_leaves(value))
            self._of_gradients = tuple(found), self._of_gradients[1]
            if not any(dims) or not _are_hooks(module):
                return None
            shown = self._shown(leaves, dims)
            args, kwargs = torch_compat.tree_unflatten(self._shares(shown.wholes, shown), tree)
        return tuple(args), kwargs

    @repeatable
    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note how results are sharded."""
        with torch_compat.without_torch_functions():
            dims = self._dims(torch_compat.tree_leaves(output), "returned")
        self._of_gradients = self._of_gradients[0], dims

    def _called_before(self, module: nn.Module, hook: hook_registrations.FollowedHook, given: tuple[Any, ...]) -> Any:
        tree_given = [list(given[0]), *given[1:]]
        with torch_compat.without_torch_functions():
            leaves, tree = torch_compat.tree_flatten(tree_given)
            shown = self._shown(leaves, self._dims(leaves, "given", is_complete=hook.takes_names))
            args, *names = torch_compat.tree_unflatten(shown.wholes, tree)
        returned = hook.own_hook(module, tuple(args), *names)
        shown.refuse_writes(hook)
        if returned is None:
            returned = (tuple(args), *names)
        elif not names:
            returned = (returned if isinstance(returned, tuple) else (returned,),)
        elif not isinstance(returned, tuple) or len(returned) != 2:
            return returned  # torch refuses it
        with torch_compat.without_torch_functions():
            result = self._returned(hook, [list(returned[0]), *returned[1:]], shown)
        return (tuple(result[0]), result[1]) if names else tuple(result[0])

    def _called_after(self, module: nn.Module, hook: hook_registrations.FollowedHook, given: tuple[Any, ...]) -> Any:
        *arguments, output = given
        with torch_compat.without_torch_functions():
            leaves, tree = torch_compat.tree_flatten([list(arguments[0]), *arguments[1:]])
            before = self._shown(leaves, self._dims(leaves, "given", is_complete=hook.takes_names))
            args, *names = torch_compat.tree_unflatten(before.wholes, tree)
            results, form = torch_compat.tree_flatten(output)
            shown = self._shown(results, self._dims(results, "returned"))
            whole = torch_compat.tree_unflatten(shown.wholes, form)
        returned = hook.own_hook(module, tuple(args), *names, whole)
        before.refuse_writes(hook)
        with torch_compat.without_torch_functions():
            return self._returned(hook, whole if returned is None else returned, shown)

    def _called_with_gradients(
        self, module: nn.Module, hook: hook_registrations.FollowedHook, given: tuple[Any, ...]
    ) -> Any:
        of_inputs, of_outputs = self._of_gradients
        if hook.kind == "last gradients" and any((*of_inputs, *of_outputs)):
            raise StepError(
                f'{_name(hook)}: register_backward_hook on "{self._fqn}", which has a rank\'s features, is given the '
                "gradients of its last function; use register_full_backward_hook"
            )
        dims = [of_outputs] if hook.kind == "gradients before" else [of_inputs, of_outputs]
        shown = [self._shown(values, placed) for values, placed in zip(given, dims, strict=True)]
        returned = hook.own_hook(module, *(tuple(each.wholes) for each in shown))
        if returned is None:
            return None
        values = returned if isinstance(returned, tuple) else (returned,)
        result = self._returned(hook, values, shown[0])
        return tuple(result) if isinstance(returned, tuple) else result[0]

    def _dims(self, leaves: Sequence[Any], what: str, *, is_complete: bool = True) -> Dims:
        """Return the sharded dims of what the module is given or returns.

        Raises:
            StepError: Calls of the module differ.
        """
        seen: Dims | None = None
        if self._seen is not None:
            seen = self._seen.given if what == "given" else self._seen.returned
            if not self._seen.is_alike or (len(seen) != len(leaves) if is_complete else len(seen) < len(leaves)):
                raise StepError(
                    f'"{self._fqn}" has hooks, and is called in several ways, of which it is not known which features '
                    "of a rank they are given: write it as a module for each, or hook the module around it"
                )
        return tuple(self._dim(leaf, None if seen is None else seen[at]) for at, leaf in enumerate(leaves))

    def _dim(self, value: Any, seen: Placed | None) -> Placed | None:
        if _is_wrapped(value):
            (placement,) = value.placements
            if not placement.is_shard():
                return None
            return seen or Placed(dim=placement.dim, parts=(value.shape[placement.dim],))
        if not isinstance(value, Tensor):
            return None
        spec = spec_of(value)
        if spec is not None or seen is None:
            return None if spec is None or spec.is_sequence else spec.placed
        size = value.shape[seen.dim] * self._activations.mesh.size()
        if size != sum(seen.parts) and len(seen.parts) > 1:
            raise StepError(f'"{self._fqn}" has hooks, and is given {size} features in {len(seen.parts)} parts')
        return seen if size == sum(seen.parts) else Placed(dim=seen.dim, parts=(size,))

    def _shown(self, leaves: Sequence[Any], dims: Dims) -> _Shown:
        wholes = [self._whole(leaf, placed) for leaf, placed in zip(leaves, dims, strict=True)]
        return _Shown(leaves=leaves, dims=dims, wholes=wholes, versions=[_version(whole) for whole in wholes])

    def _whole(self, value: Any, placed: Placed | None) -> Any:
        if _is_wrapped(value):
            inner = backward_hooks.stood_for(value)
            if inner is not None and (placed is not None or inner.shape == value.shape):
                return self._whole(inner, placed)
            if placed is None or not value.placements[0].is_shard():
                return self._activations.unwrap(value, None)
            value = value.to_local()
        if not isinstance(value, Tensor):
            return value
        known = _known(value)
        if known is not None or placed is None:
            return value if known is None else known
        return exchanged(value, lambda x: self._gathered(strip(x), placed))

    def _returned(self, hook: hook_registrations.FollowedHook, returned: Any, shown: _Shown) -> Any:
        """Return what a hook returned, of which leaves that were gathered are shards again.

        Raises:
            StepError: They have other sizes, of which it is not known how they are sharded.
        """
        values, tree = torch_compat.tree_flatten(returned)
        if len(values) != len(shown.leaves):
            if any(shown.dims):
                text = f"{_name(hook)} returns {len(values)} values in place of {len(shown.leaves)}"
                raise StepError(text + self._of_rank())
            return returned
        for value, placed in zip(values, shown.dims, strict=True):
            if placed is None or (value is None and hook.kind in ("gradients", "gradients before")):
                continue
            shape = list(value.shape) if isinstance(value, Tensor) else []
            if shape[placed.dim : placed.dim + 1] != [sum(placed.parts)]:
                text = f"{_name(hook)} returns {shape or type(value).__name__} in place of a tensor with "
                raise StepError(f"{text}{sum(placed.parts)} features in dim {placed.dim}{self._of_rank()}")
        return torch_compat.tree_unflatten(self._shares(values, shown), tree)

    def _shares(self, values: Sequence[Any], shown: _Shown) -> list[Any]:
        """Return what the code, or torch, is given in place of leaves, of what a hook made of their wholes."""
        found = []
        for at, value in enumerate(values):
            is_same = value is shown.wholes[at] and _version(value) == shown.versions[at]
            found.append(self._share(value, shown.leaves[at], shown.dims[at], is_same=is_same))
        return found

    def _share(self, value: Any, like: Any, placed: Placed | None, *, is_same: bool) -> Any:
        from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

        is_wrapped = _is_wrapped(like)
        if not isinstance(value, Tensor) or not (is_wrapped or isinstance(like, Tensor)):
            return like if is_same else value
        if is_same:
            own = backward_hooks.stood_for(like) if is_wrapped else like
            if not value.requires_grad or (own is not None and (own is value or _known(own) is value)):
                return like
        if is_wrapped:
            if placed is None or not like.placements[0].is_shard():
                local = value
                placement: Placement = Replicate()
            else:
                local, placement = self._sharded(strip(value), placed), Shard(placed.dim)
            made = DTensor.from_local(strip(local), self._activations.mesh, [placement], run_check=False)
            return backward_hooks.stand_for(made, local)
        if placed is None:
            return value
        share = copy_mark(like, self._sharded(strip(value), placed))
        setattr(share, WHOLE, (value, _version(share)))
        return share

    def _of_rank(self) -> str:
        return f', of which a rank has a part behind "{self._fqn}"; let it return one of that size'

    def _gathered(self, share: Tensor, placed: Placed) -> Tensor:
        from torch.distributed.tensor import Shard

        degree, parts = self._activations.mesh.size(), placed.parts
        whole: Tensor = self._activations.unwrap(self._activations.wrap(share, Shard(placed.dim)), None)
        if len(parts) == 1:
            return whole
        sizes = [part // degree for part in parts]
        ranks = [of_rank.split(sizes, placed.dim) for of_rank in whole.chunk(degree, placed.dim)]
        return torch.cat([piece for pieces in zip(*ranks, strict=True) for piece in pieces], placed.dim)

    def _sharded(self, ordered: Tensor, placed: Placed) -> Tensor:
        from torch.distributed.tensor import Shard

        degree, parts = self._activations.mesh.size(), placed.parts
        if len(parts) > 1:
            pieces = [part.chunk(degree, placed.dim) for part in ordered.split(list(parts), placed.dim)]
            ordered = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank], placed.dim)
        share: Tensor = self._activations.unwrap(self._activations.wrap(ordered, None), Shard(placed.dim))
        return share


def _is_wrapped(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _known(share: Tensor) -> Tensor | None:
    """Return what a tensor is known to be a shard of, unless it was written into since."""
    whole, version = getattr(share, WHOLE, (None, -1))
    return whole if version == _version(share) else None


def _version(value: Any) -> int:
    """Return the number of writes to a tensor."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _are_hooks(module: nn.Module) -> bool:
    hooks = torch_compat.forward_hooks.tables_of_forwards([module])
    return torch_compat.forward_hooks.are_there(hooks) or hook_registrations.follow_global_hooks()


def _name(hook: hook_registrations.FollowedHook) -> str:
    own: Callable[..., Any] = hook.own_hook
    return f"the hook {getattr(own, '__qualname__', type(own).__name__).rpartition('<locals>.')[2]}"
