"""Run context for hooks: degrees and coordinates from the start, the mesh, parts and step later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from composer3d.errors import PluginError, StepError, TransformError
from composer3d.initialisation.parameter_order import Order
from composer3d.interfaces import Dtypes, Example, ParameterMesh, Part, Recorder, Split
from composer3d.mesh import Layout, Role
from composer3d.observation import spans
from composer3d.patterns import select, sharing_nothing

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.initialisation import Slab
    from composer3d.manifest import Manifest
    from composer3d.observation.flight_recorder import Flight
    from composer3d.registry import Registered
    from composer3d.step.random_streams import Streams

__all__ = ["ExportForm", "Purpose", "RunContext"]

Purpose = Literal["run", "check", "plan", "verify"]

# Effects of a plugin on a step; only one plugin may have each of the first two.
Claim = Literal["optimizer", "grad_scaler", "gradients", "moved_gradients", "first_step", "depth"]

# Takes a parameter's original value and a reader of checkpoint tensors by FQN; returns the exported value.
ExportForm = Callable[[Mapping[str, "Tensor"]], tuple[dict[str, "Tensor"], dict[str, str]]]
Merge = Callable[["Tensor", Callable[[str], "Tensor"]], "Tensor"]


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
        layout: Axes, degrees and coordinates of any rank.
        owners: The plugin that owns an axis, by axis.
        fqns: Names of all modules of the whole model, before any split.
        parameter_fqns: Names of all parameters of the whole model, tied ones under each of their names.
        ties: Groups of FQNs that are one tensor in the whole model.
        state: State of plugins, by plugin instance.
        split: The answer to `composer3d_split`, if a plugin gave one.
        applied_part: The part that a transform is being applied to.
        orders: Stored order of reordered parameters, by FQN; see `reorder`.
        cuts: Sharded dim and lengths of a rank's runs along it, of parameters that tp shards, by FQN, once planned.
        flight: Flight recorder of this rank; None in a world of one.
        left_out: Export functions of parameters that checkpoints do not hold, by FQN; see `leave_out`.
        export_form: What `composer3d export --quantise` makes of tensors, and metadata; export_config: config.json's.
        own_units: Modules selected before DATA that data-parallel plugins take as units of their own.
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
        self.device = device
        self.rank = rank
        self.world_size = layout.world_size
        self.layout = layout
        self.owners = owners
        self.fqns: tuple[str, ...] = ()
        self.parameter_fqns: tuple[str, ...] = ()
        self.ties: tuple[tuple[str, ...], ...] = ()
        self.own_units: tuple[str, ...] = ()
        self.state: dict[Any, Any] = {}
        self.parts: tuple[Part, ...] = ()
        self.split: Split | None = None
        self.applied_part: Part | None = None
        self._example: Example | Callable[[], Example | None] | None = None
        self.coordinates = layout.coordinates(rank)
        self.orders: dict[str, Order] = {}
        self.cuts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.left_out: dict[str, Merge] = {}
        self.export_form: ExportForm | None = None
        self.export_config: Callable[[], Mapping[str, Any]] | None = None
        self._hooks = hooks
        self._blocks = blocks
        self._mesh: DeviceMesh | None = None
        self.has_recorders = False
        self._recorders: tuple[Recorder, ...] = ()
        self.flight: Flight | None = None
        self._asked: set[str] = set()
        self._claims: dict[str, list[tuple[Any, bool]]] = {}
        self.streams: Streams | None = None
        self._microbatch: tuple[Callable[..., None], Callable[[], None], Callable[[int, int], None]] | None = None

    @property
    def degrees(self) -> Mapping[str, int]:
        """The degree of every axis."""
        return self.layout.degrees

    @property
    def example(self) -> Example | None:
        """`(args, kwargs)` of a forward, if there is one, for plugins that need shapes; made at the first access."""
        if callable(self._example):
            self._example = self._example()
        return self._example

    def set_example(self, example: Example | Callable[[], Example | None] | None) -> None:
        """Set the example, or a function that makes it; called by the core before any hook."""
        self._example = example

    @property
    def plugins(self) -> tuple[Registered, ...]:
        """The plugins of the run."""
        return self._hooks.plugins

    def claim(self, what: Claim, *, by: Any, each_alone: bool = False) -> None:
        """Declare in `composer3d_configure` a plugin's effect on steps, so that `check` finds incompatible plugins.

        Args:
            what: "optimizer": it makes the optimizer. "grad_scaler": it scales the loss. "gradients": it reads or
                changes gradients between the backward and the optimizer. "moved_gradients": it moves them elsewhere
                before they are reduced. "first_step": its first step differs from the others, which a plan traces.
                "depth": its effect on a block depends on the number of blocks: a plan traces all of them.
            by: The plugin.
            each_alone: Its optimizer can step every parameter by itself, as soon as its gradient is final.

        Raises:
            PluginError: Another plugin makes the optimizer, or scales the loss.
        """
        claims = self._claims.setdefault(what, [])
        if claims and what in ("optimizer", "grad_scaler") and claims[0][0] is not by:
            verb = "make the optimizer" if what == "optimizer" else "scale the loss"
            raise PluginError(
                f"{self._name(claims[0][0])} and {self._name(by)} both {verb}, and a run has one; remove one of them"
            )
        claims.append((by, each_alone))

    def claimants(self, what: Claim, *, each_alone: bool = False) -> list[str]:
        """Return the names of the plugins that claimed something; without those that do it for each_alone, if given."""
        return [self._name(plugin) for plugin, alone in self._claims.get(what, ()) if not (each_alone and alone)]

    def _name(self, plugin: Any) -> str:
        return next(str(registered) for registered in self._hooks.plugins if registered.instance is plugin)

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
        """Index of this rank among those that read samples of their own."""
        return self.layout.index(self.rank, Role.BATCH, Role.INDEPENDENT)

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

    def set_mesh(self, mesh: DeviceMesh) -> None:
        """Set the mesh; the composition calls it once."""
        self._mesh = mesh

    def freeze(
        self,
        *,
        recorders: tuple[Recorder, ...],
        flight: Flight | None,
        microbatch: tuple[Callable[..., None], Callable[[], None], Callable[[int, int], None]],
        streams: Streams,
    ) -> None:
        """Set the functions that steps need; the composition calls it once."""
        self.has_recorders = bool(recorders)
        self.flight = flight
        self._recorders = recorders if flight is None else (flight, *recorders)
        self._microbatch, self.streams = microbatch, streams

    def watch(self, recorder: Recorder) -> None:
        """Add a recorder to those of plugins, for code that runs a composition in order to observe it."""
        self._recorders = (*self._recorders, recorder)

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Act as another rank's context inside; changes made there are discarded afterwards."""
        before = dict(vars(self))
        self.state = {key: copy.copy(value) for key, value in self.state.items()}
        self.orders, self._asked = dict(self.orders), set(self._asked)
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
            patterns: Of the units inside the root; None takes the blocks, or the root alone where there are none. The
                modules in `own_units` are units as well.

        Raises:
            PatternError: A pattern matches nothing.
            TransformError: Stated units share a parameter.
        """
        chosen = patterns if patterns is not None else () if self._blocks is None else (self._blocks,)
        found = [fqn for pattern in chosen for fqn in select(pattern, self.fqns)]
        units = [fqn for fqn in dict.fromkeys([*found, *self.own_units]) if fqn]
        return [*sharing_nothing(units, self.ties, stated=patterns is not None), ""]

    def select(self, model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
        """Return the modules of `model` that match.

        Raises:
            PatternError: Nothing in the *whole* model matches; a stage that holds none is not an error.
        """
        names = {fqn for fqn, _ in model.named_modules()}
        found = select(pattern, self.fqns)
        return [(fqn, model.get_submodule(fqn)) for fqn in found if fqn in names]

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
        """Ask where a parameter lives that is not on the data-parallel mesh."""
        self._asked.add("composer3d_parameter_mesh")
        return self._hooks.parameter_mesh(self, fqn)

    def reorder(self, fqn: str, *, dim: int, runs: Sequence[tuple[int, int]]) -> None:
        """Declare that a parameter, its gradient and its state are stored in another order than the model's.

        Args:
            fqn: Any name of the parameter, also of a tied one.
            dim: The tensor dim that is reordered.
            runs: (start, length) in the model's order, in the stored order.
        """
        group = next((group for group in self.ties if fqn in group), (fqn,))
        self.orders |= dict.fromkeys(group, Order(dim, runs))

    @overload
    def in_stored_order(self, fqn: str, full: Tensor) -> Tensor: ...
    @overload
    def in_stored_order(self, fqn: str, full: Slab) -> Slab: ...
    def in_stored_order(self, fqn: str, full: Tensor | Slab) -> Tensor | Slab:
        """Return a full tensor of this parameter in the stored order."""
        order = self.orders.get(fqn)
        return full if order is None else order.stored(full)

    def in_model_order(self, fqn: str, full: Tensor) -> Tensor:
        """Return the full tensor of this parameter, its gradient or its state in the model's order."""
        order = self.orders.get(fqn)
        return full if order is None else order.model(full)

    def sharded_random(
        self, site: int, *, dim: int | None = None, parts: Sequence[int] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Draw inside from the stream that differs between ranks along tp; outside they draw alike.

        Args:
            site: Tells the places of one micro-batch apart.
            dim: Sharded dim of the drawn tensor, of which ranks then draw their shards of one device's numbers.
            parts: Whole sizes of the tensors that are concatenated in that dim, each sharded over all ranks.
        """
        assert self.streams is not None, "the composition sets it"
        return self.streams.sharded(site, dim=dim, parts=parts)

    @property
    def output(self) -> Path:
        """The run's folder, which `[run] output` names; plugins write below it, and make it where it is not there."""
        return self.manifest.output

    def leave_out(self, fqn: str, merge: Merge) -> None:
        """Exclude a frozen parameter from checkpoints: a run starts from its original value again.

        Args:
            merge: Returns its value in a model that `composer3d export --merge` writes.
        """
        self.left_out[fqn] = merge

    def place(self, target: Tensor, full: Tensor) -> None:
        """Write a full tensor, in the stored order, into a parameter of any placements; see `initialisation.place`.

        Args:
            target: A parameter or buffer with memory.
            full: The whole tensor, equal on all ranks.
        """
        from composer3d.initialisation import place

        place(target, full)

    def span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager[None]:
        """Open a span on every recorder."""
        return spans.opened(self._recorders, name, attributes)

    def begin_microbatch(self, index: int, is_last: bool, stage: int = 0) -> None:
        """Run the actions at BEFORE_MICROBATCH; schedules call it where they run micro-batches themselves.

        Args:
            is_last: Whether it is the last one of its batch.
            stage: Stage, since several stages on one rank draw their own random numbers.
        """
        assert self._microbatch is not None, "the composition sets it"
        self._microbatch[0](index, is_last, stage)

    def resume_microbatch(self, index: int, stage: int = 0) -> None:
        """Return to a micro-batch's random stream, for a backward after other micro-batches; runs no actions."""
        assert self._microbatch is not None, "the composition sets it"
        self._microbatch[2](index, stage)

    def end_microbatch(self) -> None:
        """Run the actions at AFTER_MICROBATCH."""
        assert self._microbatch is not None, "the composition sets it"
        self._microbatch[1]()
