"""Run context for hooks: degrees and coordinates from the start, the mesh, parts and step later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from composer3d.errors import StepError, TransformError
from composer3d.forward_example import checked_example
from composer3d.initialisation.parameter_order import StoredOrders
from composer3d.interfaces import Dtypes, Example, LossFunction, Microbatches, ParameterMesh, Part, Recorder, Split
from composer3d.mesh import Layout, MeshViews, Role
from composer3d.mesh.batch_pieces import equal_reader
from composer3d.observation import spans
from composer3d.patterns import called, select, sharing_nothing
from composer3d.registry import Claim, Claims, Registered

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.initialisation import Slab
    from composer3d.manifest import Manifest
    from composer3d.observation.flight_recorder import Flight
    from composer3d.step.random_numbers.random_streams import Streams

__all__ = ["Purpose", "RunContext"]

Purpose = Literal["run", "check", "plan", "verify"]

Stash = TypeVar("Stash")


class _PluginsAsked(Protocol):
    """The part of `composer3d.hooks.Hooks` that a context asks on behalf of transforms."""

    plugins: tuple[Registered, ...]

    def dtypes(self, context: RunContext, fqn: str) -> Dtypes | None: ...
    def offload_policy(self, context: RunContext, fqn: str) -> Any | None: ...
    def parameter_mesh(self, context: RunContext, fqn: str) -> ParameterMesh | None: ...


class RunContext:
    """The run as hooks see it.

    Attributes:
        purpose: `run`, `check`, `plan` or `verify`; outside `run` no plugin opens a file, port or socket.
        manifest: Typed tables; a plugin reads its own from its fields.
        device: Of the parameters.
        run_device: Of the run's parameters: in a plan they lie on the CPU, whatever device is planned.
        layout: Axes, degrees and coordinates of any rank.
        owners: The plugin that owns an axis, by axis.
        fqns: Names of all modules of the whole model, before any split.
        uncalled: Those of them that have no forward: lists and dicts.
        parameter_fqns: Names of all parameters of the whole model, tied ones under each of their names.
        parameter_forms: Each of them once, on meta, by its first name.
        ties: Groups of FQNs that are one tensor in the whole model.
        state: State of plugins, by plugin instance.
        split: The answer to `composer3d_split`, if a plugin gave one.
        applied_part: The part that a transform is being applied to.
        flight: Flight recorder of this rank; None in a world of one.
        own_units: Modules selected before DATA that data-parallel plugins take as units of their own.
        loss_fn: The loss function as `compose` was given it; None where the model returns its loss.
    """

    def __init__(
        self,
        *,
        purpose: Purpose,
        manifest: Manifest,
        device: torch.device,
        rank: int,
        layout: Layout,
        owners: Mapping[str, Registered],
        hooks: _PluginsAsked,
        blocks: str | None,
    ) -> None:
        self.purpose = purpose
        self.manifest = manifest
        self.device = self.run_device = device
        self.rank = rank
        self.world_size = layout.world_size
        self.layout = layout
        self.owners = owners
        self.fqns: tuple[str, ...] = ()
        self.uncalled: frozenset[str] = frozenset()
        self.parameter_fqns: tuple[str, ...] = ()
        self.parameter_forms: Mapping[str, Tensor] = {}
        self.ties: tuple[tuple[str, ...], ...] = ()
        self.own_units: tuple[str, ...] = ()
        self.state: dict[Any, Any] = {}
        self.loss_fn: LossFunction | None = None
        self.parts: tuple[Part, ...] = ()
        self.split: Split | None = None
        self.applied_part: Part | None = None
        self._example: Example | Callable[[], Example | None] | None = None
        self.coordinates = layout.coordinates(rank)
        self._stashes: dict[type, Any] = {}
        self._parameter_meshes: dict[str, ParameterMesh | None] = {}
        self._views: MeshViews | None = None
        self._hooks = hooks
        self._blocks = blocks
        self._mesh: DeviceMesh | None = None
        self.has_recorders = False
        self._spans = spans.Opener()
        self.flight: Flight | None = None
        self._asked: set[str] = set()
        self._claims = Claims()
        self._streams: Streams | None = None
        self._microbatches: Microbatches | None = None

    @property
    def degrees(self) -> Mapping[str, int]:
        """The degree of every axis."""
        return self.layout.degrees

    @property
    def example(self) -> Example | None:
        """`(args, kwargs)` of a forward, if there is one, for plugins that need shapes; made at the first access."""
        if callable(self._example):
            self._example = checked_example(self._example())
        return self._example

    def set_example(self, example: Example | Callable[[], Example | None] | None) -> None:
        """Set the example, or a function that makes it; called by the core before any hook."""
        self._example = checked_example(example)

    @property
    def plugins(self) -> tuple[Registered, ...]:
        """The plugins of the run."""
        return self._hooks.plugins

    def claim(self, what: Claim, *, by: Any, each_alone: bool = False) -> None:
        """Declare in `composer3d_configure` a plugin's effect on steps, so that `check` finds incompatible plugins.

        Args:
            what: "optimizer": it makes the optimizer. "grad_scaler": it scales the loss. "gradients": it reads or
                changes gradients between the backward and the optimizer. "moved_gradients": it moves them elsewhere
                before they are reduced. "stepped_units": it lets the optimizer step some units before the rest.
                "first_step": its first step differs from the others, which a plan traces.
                "depth": its effect on a block depends on the number of blocks: a plan traces all of them.
                "samples": it places batches, and leaves some of their samples to other ranks.
                "all_gather": it replaces the all-gather of units. "reduce_scatter": the same of the reduce-scatter.
                "sequence_projections": it replaces linear layers that exchange a sharded sequence.
            by: The plugin.
            each_alone: Its optimizer can step every parameter by itself, as soon as its gradient is final.

        Raises:
            PluginError: Another plugin does what only one may.
        """
        self._claims.add(what, next(each for each in self._hooks.plugins if each.instance is by), each_alone=each_alone)

    def claimants(self, what: Claim, *, each_alone: bool = False) -> list[str]:
        """Return the names of the plugins that claimed something; without those that do it for each_alone, if given."""
        return self._claims.names(what, each_alone=each_alone)

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks that read different samples of one global batch."""
        return self.layout.degree(Role.BATCH)

    @property
    def num_readers(self) -> int:
        """Number of ranks that read samples of their own: the data-parallel ones of all independent models."""
        return self.layout.degree(Role.BATCH, Role.INDEPENDENT)

    @property
    def reader(self) -> int:
        """Index of this rank among those that read samples of their own, where all read as many."""
        return equal_reader(self)

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among those that read different samples."""
        return self.layout.index(self.rank, Role.BATCH)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their first FQNs in the whole model, each tensor of the model once."""
        first = {fqn: group[0] for group in self.ties for fqn in group}
        seen: set[str] = set()
        for part in self.parts:
            for name, parameter in part.module.named_parameters():
                fqn = first.get(name, name)
                if fqn not in seen:
                    seen.add(fqn)
                    yield fqn, parameter

    def planned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same with those of blocks that a plan leaves out, each the parameter of a block that is like it.

        What a plugin counts for a plan's notes it counts over these.
        """
        held = dict(self.named_parameters())
        yield from held.items()
        for part in self.parts:
            for name, module in part.module.named_modules():
                like: str = getattr(module, "composer3d_like", "")
                for fqn, parameter in held.items():
                    if like and fqn.startswith(f"{like}."):
                        yield name + fqn[len(like) :], parameter

    def copies(self) -> frozenset[int]:
        """Return `id` of this rank's parameters that an earlier stage counts in the gradient norm."""
        copied = (
            parameter
            for part in self.parts
            if part.copies
            for name, parameter in part.module.named_parameters()
            if name in part.copies
        )
        return frozenset(map(id, copied))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all dense axes, those of degree 1 included."""
        if self._mesh is None:
            raise StepError("the mesh exists only inside a transform's apply and later; use context.degrees before")
        return self._mesh

    @property
    def views(self) -> MeshViews:
        """Views of the mesh with other dims than its axes."""
        if self._views is None:
            raise StepError("the mesh exists only inside a transform's apply and later; use context.degrees before")
        return self._views

    def set_mesh(self, mesh: DeviceMesh, views: MeshViews) -> None:
        """Set the mesh; the composition calls it once."""
        self._mesh, self._views = mesh, views

    def data_axes(self, *owned: str) -> tuple[str, ...]:
        """Return the axes over which a data-parallel plugin averages gradients: its own, and those of sequences."""
        return (*owned, *self.layout.names(Role.SEQUENCE))

    def data_mesh(self, fqn: str | None, *, replicas: str | None = None, shards: str | None = None) -> DeviceMesh:
        """Return the mesh over which a data-parallel plugin averages the gradient of a parameter, and shards it.

        Ranks that have other positions of the same samples are among them, innermost. Where `parameter_mesh` has an
        answer, it is made of that mesh's dims without those of experts.

        Args:
            fqn: The parameter's; None for those that have no mesh of their own.
            replicas: The plugin's axis along which parameters are replicated.
            shards: Its axis along which they are sharded.

        Returns:
            One dim; two, replicas and shards, where both axes are given and there are several replicas. This rank alone
            where no axis is given.
        """
        found = None if fqn is None else self.parameter_mesh(fqn)
        return self.views.data(None if found is None else found.mesh, replicas=replicas, shards=shards)

    def expert_mesh(self, axis: str = "ep") -> DeviceMesh:
        """Return the view (dp_replicate, efsdp, axis) of the mesh, in which an axis of experts is a dim of its own."""
        return self.views.carved(axis)

    def stash(self, kind: type[Stash]) -> Stash:
        """Return the run's one instance of a class, made at the first access: how plugins hand values on, typed."""
        if kind not in self._stashes:
            self._stashes[kind] = kind()
        found: Stash = self._stashes[kind]
        return found

    def freeze(
        self,
        *,
        opener: spans.Opener,
        flight: Flight | None,
        microbatches: Microbatches,
        streams: Streams,
    ) -> None:
        """Set the functions that steps need; the composition calls it once."""
        self.has_recorders = bool(opener.recorders)
        self.flight = flight
        self._spans = opener if flight is None else opener.beside(first=(flight,))
        self._microbatches, self._streams = microbatches, streams

    @property
    def microbatches(self) -> Microbatches:
        """The beginning and end of micro-batches, for schedules, which run them themselves."""
        assert self._microbatches is not None, "the composition sets it"
        return self._microbatches

    @property
    def streams(self) -> Streams:
        """The random streams, for plugins that draw another tensor on each of the ranks that share a sample."""
        assert self._streams is not None, "the composition sets it"
        return self._streams

    def watch(self, recorder: Recorder) -> None:
        """Add a recorder to those of plugins, for code that runs a composition in order to observe it."""
        self._spans = self._spans.beside(last=(recorder,))

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Act as another rank's context inside; changes made there are discarded afterwards."""
        before = dict(vars(self))
        self.state = {key: copy.copy(value) for key, value in self.state.items()}
        self._stashes = {kind: _copied(stash) for kind, stash in self._stashes.items()}
        self._asked = set(self._asked)
        self.rank, self.coordinates = rank, self.layout.coordinates(rank)
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)

    def was_asked(self, query: str) -> bool:
        """Return whether any transform asked a query of the context."""
        return query in self._asked

    @property
    def has_blocks(self) -> bool:
        """Whether the repeated blocks are known."""
        return self._blocks is not None

    @property
    def blocks(self) -> str:
        """The pattern of the repeated blocks."""
        if self._blocks is None:
            raise TransformError(
                "the model has no single list of equal blocks; name the repeated blocks, "
                'for example [model] blocks = "layers.*"'
            )
        return self._blocks

    def units(self, patterns: Sequence[str] | None) -> list[str]:
        """Return the FQNs of the modules that data parallelism handles as one, the root ("") last.

        Args:
            patterns: Of the units inside the root; None takes the blocks, or the root alone where there are none. Of
                what nobody calls, a ModuleDict or a list, the entries are units. So are the modules in `own_units`.

        Raises:
            PatternError: A pattern matches nothing.
            TransformError: Stated units share a parameter.
        """
        chosen = patterns if patterns is not None else () if self._blocks is None else (self._blocks,)
        found = called(self.fqns, self.uncalled, [fqn for pattern in chosen for fqn in select(pattern, self.fqns)])
        units = [fqn for fqn in dict.fromkeys([*found, *self.own_units]) if fqn]
        return [*sharing_nothing(units, self.ties, stated=patterns is not None), ""]

    def dtypes(self, fqn: str) -> Dtypes:
        """Ask for the dtypes of the unit with this name; only the last stage's root has the model's outputs to cast."""
        self._asked.add("composer3d_dtypes")
        found = self._hooks.dtypes(self, fqn) or Dtypes()
        is_inner = self.applied_part is not None and not self.applied_part.is_last
        return replace(found, output=None) if is_inner and not fqn else found

    def offload_policy(self, fqn: str) -> Any | None:
        """Ask for torch's `OffloadPolicy` of the unit with this name."""
        self._asked.add("composer3d_offload_policy")
        return self._hooks.offload_policy(self, fqn)

    def parameter_mesh(self, fqn: str) -> ParameterMesh | None:
        """Ask, once, where a parameter lives that is not on the data-parallel mesh."""
        self._asked.add("composer3d_parameter_mesh")
        if fqn not in self._parameter_meshes:
            self._parameter_meshes[fqn] = self._hooks.parameter_mesh(self, fqn)
        return self._parameter_meshes[fqn]

    def names_of(self, fqn: str) -> tuple[str, ...]:
        """Return all FQNs of a parameter, given one of them: several where it is tied."""
        return next((group for group in self.ties if fqn in group), (fqn,))

    @overload
    def in_stored_order(self, fqn: str, full: Tensor) -> Tensor: ...
    @overload
    def in_stored_order(self, fqn: str, full: Slab) -> Slab: ...
    def in_stored_order(self, fqn: str, full: Tensor | Slab) -> Tensor | Slab:
        """Return a full tensor of this parameter in the order in which it is stored; see `StoredOrders`."""
        order = self.stash(StoredOrders).by_name.get(fqn)
        return full if order is None else order.stored(full)

    def in_model_order(self, fqn: str, full: Tensor) -> Tensor:
        """Return the full tensor of this parameter, its gradient or its state in the model's order."""
        order = self.stash(StoredOrders).by_name.get(fqn)
        return full if order is None else order.model(full)

    @property
    def output(self) -> Path:
        """The run's folder, which `[run] output` names; plugins write below it, and make it where it is not there."""
        return self.manifest.output

    def span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager[None]:
        """Open a span on every recorder."""
        return self._spans.opened(name, attributes)


def _copied(stash: Any) -> Any:
    """Return a stash that may change without the one that was given."""
    if not is_dataclass(stash) or isinstance(stash, type):
        return copy.copy(stash)
    return replace(stash, **{field.name: copy.copy(getattr(stash, field.name)) for field in fields(stash)})
