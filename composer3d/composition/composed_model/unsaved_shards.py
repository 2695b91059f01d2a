"""State dicts of a rank's shards, which torch.save refuses to write: one rank's file would be incomplete."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from composer3d import torch_compat
from composer3d.errors import StepError

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch import nn

__all__ = ["OptimizerShards", "Shards", "refuse_saving", "refuse_saving_model", "state_of_rank"]


class Shards(OrderedDict[str, Any]):
    """Model state of this rank alone."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self._metadata = getattr(state, "_metadata", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        copied = Shards(_copied(OrderedDict(self), memo))
        copied._metadata = copy.deepcopy(self._metadata, memo)
        return copied

    def copy(self) -> Shards:
        """Return a shallow copy, as of any dict."""
        return Shards(self)

    __copy__ = copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise StepError(
            "torch.save of run.model.state_dict() would write the shards of this rank alone; on all ranks write "
            'run.save("checkpoints/100"), or state = run.full_state_dict(), which the first rank then saves'
        )


class OptimizerShards(dict[str, Any]):
    """Optimizer state of this rank alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerShards:
        return OptimizerShards(_copied(dict(self), memo))

    def __copy__(self) -> OptimizerShards:
        return OptimizerShards(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise StepError(
            "torch.save of optimizer.state_dict() would write the state of this rank's shards alone; on all ranks "
            'write run.save("checkpoints/100"), which holds the model, the optimizer and what run.attach(...) added, '
            'and run.load("checkpoints/100") in any layout'
        )


def _copied(state: Any, memo: dict[int, Any]) -> Any:
    """Return a copy in memory, of the same meshes: a copy of a mesh would be another one to torch."""
    import torch

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value, memo)

    return torch_compat.tree_map(copied, state)


def are_sharded(tensors: Iterable[Any]) -> bool:
    """Return whether any tensor is one whose other shards are on other ranks."""
    from torch.distributed.tensor import DTensor

    return any(
        isinstance(tensor, DTensor)
        and any(not p.is_replicate() and tensor.device_mesh.size(dim) > 1 for dim, p in enumerate(tensor.placements))
        for tensor in tensors
    )


def state_of_rank(state: Any) -> Any:
    """Return a model's state: what torch.save refuses where it holds shards, else plain tensors.

    A model of one device loads the latter.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    if are_sharded(state.values()):
        return Shards(state)
    for name, value in state.items():
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):  # which `keep_vars` asks for
            state[name] = value.to_local()
    return state


def refuse_saving_shards(parameters: Iterable[Any]) -> None:
    """Have torch.save refuse tensors that are sharded as parameters are: copies of them in a dict of the loop's own.

    Such a tensor is pickled with its mesh, which is theirs all. Whatever else pickles meshes, as the compiler's cache
    does, may.

    Args:
        parameters: Of the model.
    """
    for mesh in {id(p.device_mesh): p.device_mesh for p in parameters if are_sharded([p])}.values():
        # pickle looks at the instance, as copy does; a class of its own would make another mesh of it to torch.
        vars(mesh)["__reduce_ex__"] = functools.partial(_reduce_mesh, mesh)
        vars(mesh)["__deepcopy__"] = functools.partial(_same, mesh)  # process groups cannot be copied


def refuse_saving_model(model: nn.Module) -> None:
    """Have torch.save refuse a model, the units in it, and its parameters."""
    refuse_saving_shards(model.parameters())
    for module in model.modules():
        if module is model or hasattr(module, "reshard"):
            vars(module)["__reduce_ex__"] = functools.partial(_reduce_module, module)


def _same(mesh: Any, memo: object) -> Any:
    return mesh


def _is_torch_saving() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.serialization":
        frame = frame.f_back
    return frame is not None


def _reduce_mesh(mesh: Any, protocol: SupportsIndex) -> Any:
    if _is_torch_saving():
        raise StepError(
            "torch.save of a parameter, or of a tensor sharded like one, would write the shard of this rank alone; "
            "on all ranks write state = run.full_state_dict(), which the first rank then saves, or "
            'run.save("checkpoints/100")'
        )
    return _reduced(mesh, protocol)


def _reduce_module(module: Any, protocol: SupportsIndex) -> Any:
    if _is_torch_saving():
        raise StepError(
            "torch.save of a composed model would write the shards and hooks of this rank alone; on all ranks write "
            "state = run.full_state_dict(), which the first rank then saves and a model of one device loads, or "
            'run.save("checkpoints/100")'
        )
    return _reduced(module, protocol)


def _reduced(value: Any, protocol: SupportsIndex) -> Any:
    """Return what pickle and copy take of a value, as its class gives it."""
    cls: Any = type(value)
    how, arguments, state, *rest = cls.__reduce_ex__(value, protocol)
    return (how, arguments, {name: item for name, item in state.items() if name != "__reduce_ex__"}, *rest)


def refuse_saving(optimizer: torch.optim.Optimizer, *, of_stage: bool) -> None:
    """Have an optimizer return state that torch.save refuses, where other ranks hold the rest of it.

    Args:
        optimizer: Of a composition.
        of_stage: Whether its parameters are those of a pipeline's stages.
    """
    # Bare moments are sharded with their parameters, so that before the first step it is the same.
    if of_stage or are_sharded(parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.register_state_dict_post_hook(lambda _, state: OptimizerShards(state))
