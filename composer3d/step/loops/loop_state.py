"""State of a loop that ranks must have in common: hyperparameters, modes, frozen parameters, replicas.

All of it is two integers a rank, part of the all-reduce that opens a step; only where they differ is anything else
exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from composer3d.mesh import Layout, Role
from composer3d.step.loops.gradient_writes import GradientWrites, ShardWrites, sums_of
from composer3d.step.loops.optimizer_writes import OptimizerWrites
from composer3d.step.sharded_tensors.run_meshes import sharded_parameters
from composer3d.step.sharded_tensors.written_values import WrittenValues, is_compared

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.step.loops.parameter_hooks import ParameterHooks

__all__ = ["EVERY", "Compared", "Decided", "LoopState", "compared_axes", "same_pieces", "same_stage"]

# What numbers are made of: all that a loop decides; replicas' parameters; those that tensor axes leave whole; and those
# that stay whole where others are sharded, as a parameter without dims under FSDP2.
Compared: TypeAlias = Literal["state", "replicas", "shared", "whole"]
_WEIGHTS: tuple[Compared, ...] = ("replicas", "shared", "whole")
EVERY = 50  # steps between two digests of replicated parameters, each of which reads all of them
_BITS = (1 << 62) - 1
_THIRD_BITS = 20
_THIRD = (1 << _THIRD_BITS) - 1
_SAMPLE = 8


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Decisions of one rank's loop.

    Args:
        state: A number that ranks of the same stage have in common.
        weights: Three of 20 bits: of all parameters, which replicas have in common; of those that tensor axes leave
            whole, which ranks along them have in common; and of those that stay whole beside sharded ones.
        described: Returns the components of a number, by name.
    """

    state: int = 0
    weights: int = 0
    described: Callable[[Compared], Mapping[str, Any]] = lambda compared: {}

    @staticmethod
    def thirds(weights: int) -> dict[Compared, int]:
        """Return the three numbers of weights."""
        return {which: weights >> place * _THIRD_BITS & _THIRD for place, which in enumerate(_WEIGHTS)}


class LoopState:
    """Digests that differ where ranks' loops decided differently.

    Attributes:
        clip_norm: Norm to which gradients were last clipped.
        writes: Of the loop, into optimizer state.
        gradients: Of the loop, its writes into gradients.
        hooks: Of parameters, of the loop.
        num_read: Number of batches that the loop was given by `run.loader`: a rank that skips one is a batch ahead.

    Args:
        context: With mesh and parts.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.clip_norm, self.num_read, self._num_stepped = 0.0, 0, 0
        self._modules: list[nn.Module] | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._common: dict[str, nn.Parameter] = {}  # without those of experts that other ranks do not have
        self._lists: set[str] = set()  # FQNs of what holds such experts
        self._sample: list[nn.Parameter] = []
        self._plain: list[nn.Parameter] = []
        self._version, self._is_written, self._has_experts = 0, False, False
        self.writes, self._shards = OptimizerWrites(context.named_parameters), ShardWrites()
        self._sharded: dict[str, nn.Parameter] = {}
        self._names: dict[Compared, list[str]] = {}
        self.hooks: ParameterHooks | None = None
        self.gradients = GradientWrites(lambda: self._common.items(), compares=is_compared(context))

    def decided(self, step: int, optimizer: torch.optim.Optimizer | None) -> Decided:
        """Return the decisions of this rank's loop before a step."""
        self._find()
        written, self._is_written = self._context.stash(WrittenValues).take(), self._version != self._versions()
        return Decided(
            state=self.number(optimizer) ^ written,
            weights=self.weights(step),
            described=lambda compared: self.described(optimizer, compared),
        )

    def forget_writes(self) -> None:
        """Take what was written since the last step as not the loop's: a checkpoint that was loaded."""
        self.writes.forget()
        self._shards.forget()

    def replicated(self) -> Decided:
        """Return the digests of this rank's parameters outside of steps."""
        return Decided(weights=self.weights(), described=lambda compared: self.described(None, compared))

    def stepped(self, optimizer: torch.optim.Optimizer | None, *, following: int) -> None:
        """Treat the current values of plain parameters, and of the optimizer's state, as results of the optimizer.

        Args:
            optimizer: Once there is one.
            following: Number of the next step.
        """
        self._num_stepped += 1
        if self._modules is not None:
            self._version = self._versions()
            self.gradients.stepped()
            # Replicas have their values compared themselves.
            looks = _compares_values(following) and not replica_axes(self._context)
            self._shards.stepped(self._sharded, looks=looks)
            if not self._has_experts:  # of which a rank has its own, and as many states as it has called
                self.writes.stepped(optimizer)

    def _versions(self) -> int:
        """Return a number that grows with writes into plain parameters; those through `.data` are not counted."""
        return sum([parameter._version for parameter in self._plain])

    def number(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Return a digest of the state that ranks of one stage must have in common, 62 bits; never 0."""
        self._find()
        assert self._modules is not None, "found above"
        groups = () if optimizer is None else tuple(_numbers(group) for group in optimizer.param_groups)
        modes = tuple([module.training for module in self._modules])
        frozen = tuple([not parameter.requires_grad for parameter in self._common.values()])
        left, steps = self._has_gradients(), self._steps(optimizer)
        hooked = () if self.hooks is None or self._has_experts else self.hooks.number()
        # Numbers alone: the hashes of texts, and of None, are another process's own.
        numbers = (
            self.clip_norm,
            self.num_read,
            self._num_stepped,
            groups,
            modes,
            frozen,
            left,
            steps,
            self.writes.number(),
            self.gradients.number(),
            self._shards.number(),
            hooked,
        )
        return (hash(numbers) & _BITS) or 1

    def weights(self, step: int = 0) -> int:
        """Return digests of this rank's parameters in steps that compare them, and after writes; 0 in the others.

        Compared are every `EVERY`-th step, and the steps 0 to 4, 8, 16 and so on, so that a fault shows early.
        """
        if not _compares_values(step) and not self._is_written:
            return 0
        self._find()
        sums = sums_of({fqn: self._parameters[fqn] for fqn in {*chain(*self._names.values())}})
        return sum(
            _digest([sums[fqn] for fqn in names if fqn in sums]) << place * _THIRD_BITS
            for place, names in enumerate(self._names.values())
        )

    def described(self, optimizer: torch.optim.Optimizer | None, compared: Compared) -> dict[str, Any]:
        """Return all components of a number as JSON, by names that users know.

        Args:
            optimizer: Once there is one.
            compared: Which number.
        """
        self._find()
        if compared != "state":
            sums = sums_of({fqn: self._parameters[fqn] for fqn in self._names[compared]})
            return {f'parameter "{fqn}"': value for fqn, value in sums.items()}
        found: dict[str, Any] = {}
        for index, group in enumerate(() if optimizer is None else optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found[f'"{key}" of the optimizer\'s group {index}'] = _plain(value)
        found["steps that the optimizer's state counts"] = self._steps(optimizer)
        found["calls of optimizer.step"] = self._num_stepped  # SGD's state counts none
        found["max_norm of run.clip_grad_norm_"] = self.clip_norm
        found["batches that run.loader has given the loop"] = self.num_read
        found |= self.writes.described() | self.gradients.described() | self._shards.described()
        found |= {f'"{name}".training': module.training for name, module in self._named_modules()}
        for fqn, parameter in self._common.items():
            found[f'"{fqn}".requires_grad'] = parameter.requires_grad
        found |= self._context.stash(WrittenValues).described()
        if self.hooks is not None and not self._has_experts:
            found |= self.hooks.described()
        return found | {"gradients before the step's first backward": "some" if self._has_gradients() else "none"}

    def _steps(self, optimizer: torch.optim.Optimizer | None) -> float:
        """Return how many steps the state of the first parameter counts; 0 where it counts none, or has experts."""
        import torch

        # Experts are stepped on ranks that called them. Of gathered units the optimizer alone has the shards.
        if optimizer is None or self._has_experts:
            return 0.0
        stepped = (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
        first = next(stepped, None)
        steps = optimizer.state[first].get("step", 0) if first is not None and first in optimizer.state else 0
        if isinstance(steps, torch.Tensor):
            return float(steps) if steps.device.type == "cpu" and steps.numel() == 1 else 0.0
        return float(steps) if isinstance(steps, int | float) else 0.0

    def _has_gradients(self) -> bool:
        """Return whether some parameters have a gradient; which ones may depend on a rank's samples."""
        return any([parameter.grad is not None for parameter in self._sample])

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that ranks of one stage have in common, with their FQNs."""
        inside = tuple(f"{fqn}." for fqn in self._lists)
        for part in self._context.parts:
            yield from ((fqn, module) for fqn, module in part.module.named_modules() if not fqn.startswith(inside))

    def _find(self) -> None:
        if self._modules is None:
            # A loop may be in its forward, in which units have others, gathered, in their place.
            sharded = sharded_parameters(self._context)
            named = self._context.named_parameters()
            self._parameters = {fqn: cast("nn.Parameter", sharded.get(fqn, each)) for fqn, each in named}
            everything = list(self._parameters.values())
            meshes = {fqn: self._context.parameter_mesh(fqn) for fqn in self._parameters}
            within = {fqn: mesh.within for fqn, mesh in meshes.items() if mesh is not None and mesh.within is not None}
            self._common = {fqn: each for fqn, each in self._parameters.items() if fqn not in within}
            self._lists = {*within.values()}
            self._modules = [module for _, module in self._named_modules()]
            self.gradients.own = frozenset({id(each) for each in everything} - {*map(id, self._common.values())})
            if is_compared(self._context):
                self._sharded = {fqn: self._common[fqn] for fqn in self._common if fqn in sharded}
            self._plain = [parameter for fqn, parameter in self._parameters.items() if fqn not in sharded]
            self._version = self._versions()
            self._has_experts = any(mesh is not None for mesh in meshes.values())
            # zero_grad forgets all or none, and this is looked at in every step.
            self._sample = everything[:: max(1, len(everything) // _SAMPLE)]
            axes = compared_axes(self._context)
            self._names = {
                which: [
                    fqn
                    for fqn, parameter in self._parameters.items()
                    if axes[which]
                    and (which == "replicas" or _is_whole_along(self._context, fqn, parameter, axes[which]))
                ]
                for which in _WEIGHTS
            }


def _compares_values(step: int) -> bool:
    return not step % EVERY or not step & (step - 1) or step == 3


def replica_axes(context: RunContext) -> tuple[str, ...]:
    """Return the axes along which ranks hold the same parameters: no plugin shards one over them."""
    from torch.distributed.tensor import DTensor

    layout = context.layout
    axes = [axis for axis in layout.names(Role.BATCH, Role.SEQUENCE) if context.degrees[axis] > 1]
    sharded: set[str] = set()
    for fqn, parameter in context.named_parameters() if axes else ():
        own = context.parameter_mesh(fqn)
        if own is not None:
            sharded.update(set(own.mesh.mesh_dim_names or ()).intersection(layout.names(Role.EXPERT)))
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            sharded |= {name for name, p in zip(names, parameter.placements, strict=False) if not p.is_replicate()}
    divided = {axis for name in sharded for axis in layout.axes_of(name)}
    return tuple(axis for axis in axes if axis not in divided)


def shared_axes(context: RunContext) -> tuple[str, ...]:
    """Return the tensor axes, along which ranks have the same of every parameter that is not sharded over them.

    Nothing is reduced there: each rank computes the same. On accelerators that is so to the last bit only where kernels
    add up in one order, so that ranks are compared there with `torch.use_deterministic_algorithms` alone.
    """
    import torch

    if context.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        return ()
    return tuple(axis for axis in context.layout.names(Role.TENSOR) if context.degrees[axis] > 1)


def compared_axes(context: RunContext) -> dict[Compared, tuple[str, ...]]:
    """Return the axes along which ranks have the same of all parameters, or of some; none where that is nothing."""
    replicas, shared = replica_axes(context), shared_axes(context)
    data = (axis for axis in context.layout.names(Role.BATCH, Role.SEQUENCE) if context.degrees[axis] > 1)
    whole = tuple(axis for axis in data if axis not in replicas)
    is_any = bool(whole) and any(_is_whole_along(context, fqn, p, whole) for fqn, p in context.named_parameters())
    return {"replicas": replicas, "shared": shared, "whole": whole if is_any else ()}


def _is_whole_along(context: RunContext, fqn: str, parameter: Any, axes: Sequence[str]) -> bool:
    """Return whether ranks along these axes hold the same piece of a parameter."""
    from torch.distributed.tensor import DTensor

    if context.parameter_mesh(fqn) is not None:
        return False
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    sharded = [name for name, p in zip(names, parameter.placements, strict=False) if not p.is_replicate()]
    return not any(axis in axes for name in sharded for axis in context.layout.axes_of(name))


def _digest(sums: Sequence[int]) -> int:
    total = sum((index + 1) * value for index, value in enumerate(sums))
    return (total ^ total >> _THIRD_BITS ^ total >> 2 * _THIRD_BITS) & _THIRD


def same_stage(layout: Layout, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return groups of positions of ranks with the same stage: they hold shards of the same parameters."""
    return layout.alike(ranks, [axis.name for axis in layout.dense_axes if axis.role is Role.STAGE])


def same_pieces(layout: Layout, ranks: Sequence[int], replicas: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return groups of positions of ranks with the same shards, given the axes of replicas."""
    return layout.alike(ranks, [axis.name for axis in layout.dense_axes if axis.name not in replicas])


def _numbers(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([_hashable(value) for key, value in group.items() if key != "params"])


def _hashable(value: Any) -> Any:
    kind = type(value)  # this runs in every step: the frequent ones first
    if kind is float or kind is bool or kind is int:
        return value
    if value is None or kind is str:
        return 0
    if kind is tuple or kind is list:
        return tuple([_hashable(item) for item in value])
    plain = _plain(value)
    return plain if isinstance(plain, float) else 0


def _plain(value: Any) -> Any:
    """Return a hyperparameter in JSON; a tensor on an accelerator is not waited for."""
    import torch

    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else None
