"""Graphs of parameters of FSDP2's units that no hook gathers for a backward; FSDP2's records are private."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer3d.torch_compat.fsdp_units.unit_hooks import ModuleFunctions
from composer3d.torch_compat.modes import hidden_from

__all__ = ["FreedParameter", "MarkedOutputs", "freed_parameters", "shard_versions"]

_MARK = "composer3d_unit_output"
_State: Any = object  # FSDP2's, whose module is not imported here


@dataclass(frozen=True, kw_only=True)
class FreedParameter:
    """A parameter whose gathered copy is freed, and in a graph.

    Args:
        fqn: Its name.
        group: FSDP2's, of its unit.
        is_current: Whether gathering it again gives the values that the last forward has seen.
    """

    fqn: str
    group: Any
    is_current: bool


class MarkedOutputs(_State):
    """A state that marks the nodes before which a hook gathers its unit: those of its outputs.

    A gradient that arrives there is refused if the unit's shards have been written since the forward: its hook would
    gather other values than the graph was made with, silently, where one device has torch's error.

    Attributes:
        units: The record that hears of the end of a forward, and of what was written since.
        watched: The groups of the unit.
    """

    units: Any
    watched: Sequence[Any]

    def _register_pre_backward_hook(self, output: Any) -> Any:
        import torch

        if torch._C._are_functorch_transforms_active():  # FSDP2 makes nodes of outputs then, which modes are to see
            return self._marked(output)
        with hidden_from(ModuleFunctions):
            return self._marked(output)

    def _marked(self, output: Any) -> Any:
        import torch

        seen = [shard_versions(group) for group in self.watched]

        def written(grad: Any) -> None:  # no partial: by its module a hook is told from those of a model
            self._look_for_writes(seen)

        for each in _tensors(output) if torch.is_grad_enabled() else ():
            if each.requires_grad:
                each.register_hook(written)  # before FSDP2's own, which gathers
        output = super()._register_pre_backward_hook(output)
        for each in _tensors(output):
            if each.grad_fn is not None:
                each.grad_fn.metadata[_MARK] = True
        if self._state_ctx.iter_forward_root is self:
            self.units.ended()
        return output

    def _look_for_writes(self, seen: Sequence[Sequence[tuple[int, int]]]) -> None:
        for group, versions in zip(self.watched, seen, strict=True):
            if versions == (now := shard_versions(group)):
                continue
            writable = [each for each in group.fsdp_params if not each.sharded_param.is_inference()]
            for parameter, before, after in zip(writable, versions, now, strict=True):
                if before != after:
                    self.units.outdated(parameter._param_fqn)


def shard_versions(group: Any) -> list[tuple[int, int]]:
    """Return what changes when a shard of a unit is written."""
    found = []
    for parameter in group.fsdp_params:
        shard = parameter.sharded_param
        if not shard.is_inference():
            found.append((shard._version, _local(shard)._version))
    return found


def freed_parameters(groups: Iterable[Any], nodes: Iterable[Any]) -> list[FreedParameter]:
    """Return parameters that a graph reaches, or has saved, past the outputs of all units, and that are freed by now.

    Such are penalties computed from gathered parameters, outside of a unit's outputs or before their hooks run, and
    activations inside a unit that a hook of the loop's has kept. A node reads what it has saved, freed or not.

    Args:
        groups: Of all units.
        nodes: From which a backward begins.
    """
    import torch

    leaves, memory = set[int](), set[int]()
    seen, pending = set[Any](), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in node.metadata:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        for saved in _saved(node):
            if (storage := _freed_storage(saved)) is not None:
                memory.add(storage._cdata)
        pending += [operand for operand, _ in node.next_functions]
    found = []
    for group in groups if leaves or memory else ():
        if group.is_unsharded:
            continue
        is_current = group.gathered_versions == shard_versions(group)
        for each in group.fsdp_params:
            kept = [tensor for tensor in each.all_gather_outputs if isinstance(tensor, torch.Tensor)]
            is_saved = any(tensor.untyped_storage()._cdata in memory for tensor in kept)
            if is_saved or id(getattr(each, "_unsharded_param", None)) in leaves:
                found.append(FreedParameter(fqn=each._param_fqn, group=group, is_current=is_current))
    return found


def _saved(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node has saved, as they are kept: hooks that would restore them do not run."""
    cls: Any = type(node)
    for name in _names_of_saved(cls):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed by a backward, which the engine reports
            continue
        for each in raw if isinstance(raw, Sequence) else (raw,):
            data = getattr(each, "data", None)
            if data is not None:
                yield data


@functools.cache
def _names_of_saved(cls: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))


def _freed_storage(saved: Any) -> Any:
    import torch

    if not isinstance(saved, torch.Tensor):
        return None
    local = _local(saved)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided or not local.numel():
        return None
    try:
        storage = local.untyped_storage()
    except NotImplementedError:  # a wrapper of torch.func's transforms, whose backward is one of their own
        return None
    return storage if storage.size() == 0 else None


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
