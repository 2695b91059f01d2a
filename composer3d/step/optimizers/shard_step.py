"""Steps of torch's elementwise optimizers on this rank's shards.

On the host an operator on DTensors costs several times what one on plain tensors does, and Adam has seven a parameter.
An optimizer that steps each element by itself is given the shards instead, which is the same arithmetic; outside of its
step groups and state hold DTensors, as checkpoints, schedulers and loops expect them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import held_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["on_shards", "steps_each_element"]

# Of torch's own, those that step each element by itself.
_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD", "SparseAdam"}
)


def steps_each_element(cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class is one of torch's optimizers that step each element by itself; a subclass is none."""
    return cls.__module__.startswith("torch.optim") and cls.__name__ in _ELEMENTWISE


def on_shards(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the step of an elementwise optimizer, run on the shards of parameters, gradients and state.

    Where one of these is placed otherwise than its parameter, the step is left to DTensor.

    Args:
        step: Without hooks, which find groups and state as they are.
    """

    @functools.wraps(step)
    def stepped(optimizer: torch.optim.Optimizer) -> Any:
        shards = _shards(optimizer)
        if not shards:
            return step(optimizer)
        put_back = _replace(optimizer, shards)
        try:
            return step(optimizer)
        finally:
            put_back()

    return stepped


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shard:
    """The shard of a parameter, and its gradient's.

    Args:
        whole: The parameter.
        local: A view of its shard.
        state: What there is of its state, with shards in place of DTensors.
    """

    whole: Any
    local: Tensor
    state: dict[str, Any]

    def changed(self, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what a step has made or replaced in its state; the rest was written in place."""
        import torch
        from torch.distributed.tensor import DTensor

        whole = self.whole
        for name, value in state.items():
            if value is self.state.get(name):
                continue
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == self.local.shape:
                sizes: Any = {"shape": whole.shape, "stride": whole.stride()}
                value = DTensor.from_local(value, whole.device_mesh, whole.placements, run_check=False, **sizes)
            yield name, value


def _shards(optimizer: torch.optim.Optimizer) -> list[_Shard]:
    """Return the shards of all DTensors with a gradient; none where the step of some cannot be that of its shard."""
    from torch.distributed.tensor import DTensor

    found = []
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return []
        for whole in group["params"]:
            if not isinstance(whole, DTensor) or whole.grad is None:
                continue
            state = optimizer.state.get(whole, {})
            # Of a parameter without dims, its state and a count of steps cannot be told apart.
            if not whole.dim() or not _are_like(whole, (whole.grad, *state.values())):
                return []
            local = held_tensor(whole).detach()  # `to_local` would make a node of a graph
            local.grad = held_tensor(whole.grad)
            found.append(_Shard(whole=whole, local=local, state={name: held_tensor(v) for name, v in state.items()}))
    return found


def _are_like(whole: Any, values: Iterable[Any]) -> bool:
    """Return whether a gradient and states are placed as their parameter, or are numbers."""
    import torch
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements
    for value in values:
        if not isinstance(value, DTensor):
            if isinstance(value, torch.Tensor) and value.dim():
                return False
        elif not (value.device_mesh is mesh or value.device_mesh == mesh) or value.placements != placements:
            return False
    return True


def _replace(optimizer: torch.optim.Optimizer, shards: list[_Shard]) -> Callable[[], None]:
    """Put shards into groups and state; return what puts the parameters back, with what the step made."""
    import torch

    local_of_whole = {shard.whole: shard.local for shard in shards}
    groups = [(group, group["params"], group.get("foreach", False)) for group in optimizer.param_groups]
    whole_state, state = optimizer.state, defaultdict[Any, Any](dict)
    for group, parameters, foreach in groups:
        group["params"] = [local_of_whole.get(parameter, parameter) for parameter in parameters]
        state |= {p: whole_state[p] for p in parameters if p in whole_state and p not in local_of_whole}
        if foreach is None and not group.get("fused"):  # torch's choice for DTensors: the least memory
            group["foreach"] = False
    state |= {shard.local: dict(shard.state) for shard in shards if shard.whole in whole_state}
    optimizer.state = state

    def put_back() -> None:
        optimizer.state = whole_state
        for group, parameters, foreach in groups:
            group["params"] = parameters
            if foreach is None:
                group["foreach"] = None
        for shard in shards:
            own = state.pop(shard.local, None)
            if own is not None:
                whole_state[shard.whole].update(shard.changed(own))
        whole_state.update(state)
        # A graph that needs an old value has to notice that it is gone.
        torch.autograd.graph.increment_version([shard.whole for shard in shards])

    return put_back
