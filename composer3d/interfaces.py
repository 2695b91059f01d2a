"""The values that hooks are given and give: parts, batches, losses, dtypes, recorders, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Action",
    "Batch",
    "DataDependent",
    "Dtypes",
    "Example",
    "ExportForm",
    "Decisions",
    "Exports",
    "GradScaler",
    "LayoutOffer",
    "LayoutTraits",
    "Loss",
    "LossFunction",
    "Metric",
    "Microbatches",
    "ParameterMesh",
    "Part",
    "PlannedShards",
    "Recorder",
    "Schedule",
    "Split",
    "Stateful",
    "Unit",
    "Units",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A stage of the model on this rank; without a pipeline the only one, the whole model.

    Args:
        module: Keeps the FQNs of the whole model.
        index: The stage's position, 0 to num_stages - 1.
        num_stages: Stages of the whole pipeline, over all ranks.
        copies: Names of parameters that an earlier stage holds too. That one counts them in the gradient norm; where it
            is on the same rank, it also is the one that the optimizer steps.
        called_elsewhere: FQNs of modules that other stages call too; the split decides what they draw at random.
        firsts: Of them that have several names, the first in the whole model, by the stage's own.
    """

    module: nn.Module
    index: int = 0
    num_stages: int = 1
    copies: frozenset[str] = frozenset()
    called_elsewhere: frozenset[str] = frozenset()
    firsts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether it takes the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the model's outputs."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """The answer to `composer3d_split`.

    Args:
        parts: This rank's stages.
        keep_unsharded: Data-parallel plugins must not reshard after the forward: the schedule (a zero-bubble one) reads
            parameters from the first forward to the last backward of a step.
    """

    parts: tuple[Part, ...]
    keep_unsharded: bool = False


class Action(NamedTuple):
    """One action of a pipeline rank.

    Args:
        stage: Index of the stage.
        kind: Forward, whole backward, or its two halves: the gradients of inputs, and of weights.
        microbatch: Index of the micro-batch.
    """

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A module whose parameters a plugin gathers and reduces as one.

    Args:
        written_class: The module's class before the plugin put one of its own in its place.
        gather: Gathers its parameters, where that would be too late in a backward.
        set_all_gather: Takes another all-gather in place of the plugin's, with `allocate` and `__call__` as torch's.
        set_reduce_scatter: The same of the reduce-scatter. For spans `travelling(output, input, group)` of it returns
            the collective that it issues, and its bytes.
        register_buffers: Takes buffers of its collectives from the process group, registered with the network; sums are
            divided afterwards. Not beside another all-gather or reduce-scatter.
    """

    written_class: type
    gather: Callable[[], Any]
    set_all_gather: Callable[[Any], None]
    set_reduce_scatter: Callable[[Any], None]
    register_buffers: Callable[[], None]


@dataclass(kw_only=True, eq=False)
class Units:
    """Stash of the units that data-parallel plugins make: `context.stash(Units)`.

    Attributes:
        by_module: In the order in which they were made, inner ones first.
    """

    by_module: dict[nn.Module, Unit] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class PlannedShards:
    """Stash of weights of linear layers that are going to be sharded, before CONVERT: `context.stash(PlannedShards)`.

    Attributes:
        by_parameter: By FQN, the sharded tensor dim and the lengths of the runs of rows along it that a rank holds.
    """

    by_parameter: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Arguments of one call of `forward_backward`, on this data-parallel rank.

    Args:
        args: Positional arguments of the model; tensors x_B... are split into micro-batches along dim 0.
        kwargs: Keyword arguments of the model, split likewise.
        target: Second argument of the loss; a tensor, or a nested container of tensors.
        is_own_forward: Whether the loop calls the model itself, and reads its output: a plugin that shards the batch
            then returns outputs whole.
        copy: This rank's index among ranks that compute the same loss of the same targets, and their number. The first
            reports it; the gradients of all of them add up.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    is_own_forward: bool = False
    copy: tuple[int, int] = (0, 1)


@dataclass(frozen=True, eq=False)
class Loss:
    """Result of a `loss_fn` that states its normalisation.

    Args:
        sum: Scalar, summed over the valid tokens (or samples) of this micro-batch.
        count: The number of valid tokens (or samples) in `sum`.
        auxiliary: Scalar that joins the objective as its mean over all micro-batches of the global batch, for example a
            router's balance loss, weighted by `count`; it is not part of the loss that is returned.
    """

    sum: Tensor
    count: Tensor | int | float
    auxiliary: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Dtypes of one module's unit; None keeps what is there.

    Args:
        param: Of parameters in forward and backward.
        reduce: Of gradients in reductions.
        output: Of the unit's floating-point outputs.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterMesh:
    """Mesh and shard dim of a parameter that is not on the data-parallel mesh.

    Data-parallel plugins reduce its gradient over the dims of the mesh that are no axes of experts, shard it along the
    innermost of these, and take the mean as over the data axes of any other parameter. Where its gradient is summed
    over fewer ranks than those have, the plugin divides it, in the backward of what reads the parameter.

    Args:
        mesh: A view of the root mesh, as `context.expert_mesh` returns it.
        shard_dim: Dim along which data-parallel plugins shard its module's parameters that have it; others along dim 0.
        is_rowwise: Whether the module that has it does the same with every row, as a block that multiplies does not.
        within: FQN of the list of experts that it is in, of which ranks along the axis have others; None for slices.
        held: Rows of a buffer that this rank's experts have, of which ranks along the axis have others; None of others.
    """

    mesh: DeviceMesh
    shard_dim: int = 0
    is_rowwise: bool = True
    within: str | None = None
    held: slice | None = None


# Takes a parameter's original value and a reader of checkpoint tensors by FQN; returns the exported value.
Merge = Callable[["Tensor", Callable[[str], "Tensor"]], "Tensor"]
ExportForm = Callable[[Mapping[str, "Tensor"]], tuple[dict[str, "Tensor"], dict[str, str]]]


@dataclass(kw_only=True, eq=False)
class Exports:
    """Stash of what a plugin changes of exported weights: `context.stash(Exports)`.

    Attributes:
        merges: By FQN of a frozen parameter that checkpoints leave out, as a run starts from its original value again:
            returns its value in a model that `composer3d export --merge` writes.
        form: Returns the tensors that `composer3d export --quantise` writes, and their metadata.
        config: Returns entries of their config.json.
    """

    merges: dict[str, Merge] = field(default_factory=dict)
    form: ExportForm | None = None
    config: Callable[[], Mapping[str, Any]] | None = None


@dataclass(kw_only=True, eq=False)
class Decisions:
    """Stash of what plugins decided by the sizes of a run, which a plan reports: `context.stash(Decisions)`.

    Attributes:
        notes: A sentence for each decision, with the figures that it was made by.
    """

    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class DataDependent:
    """Stash of what a plugin's messages depend on beside shapes: `context.stash(DataDependent)`.

    Attributes:
        axes: Those over which ranks send as many bytes as the values of the batch decide. The number of collectives
            does not depend on values, and neither does the sum of their bytes over all ranks.
        routing_skew: Rows that a plan's rank is sent over the mean of all ranks.
        used: Modules that are run in every step whatever the batch, by whether the model's code has called them: what
            it has called on no rank has no gradient, as on one device.
        stacked: FQNs of stacked weights of experts, sharded along their first dim; known before there is a mesh.
    """

    axes: set[str] = field(default_factory=set)
    routing_skew: float = 1.0
    used: dict[nn.Module, bool] = field(default_factory=dict)
    stacked: frozenset[str] = frozenset()


class Recorder(Protocol):
    """Spans, opened by the core and by plugins; called from several threads, in microseconds."""

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Open a span and return a token for it."""

    def end(self, token: Any) -> None:
        """Close the span."""


class Schedule(Protocol):
    """Order in which stages run micro-batches; the answer to `composer3d_schedule`."""

    def train(self, microbatches: Sequence[Batch]) -> None:
        """Run forward and backward of every micro-batch; gradients accumulate in the parameters."""

    def evaluate(self, microbatches: Sequence[Batch]) -> None:
        """Run the forward of every micro-batch without gradients, and the loss where the last stage is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatches:
    """Functions that a schedule calls around a micro-batch: `context.microbatches`.

    Args:
        begin: Called with the index, whether it is the last one of its batch, and the stage, as several stages on one
            rank draw their own random numbers: runs the actions at BEFORE_MICROBATCH.
        resume: Called with the index and the stage: returns to a micro-batch's random stream, for a backward after
            other micro-batches; runs no actions.
        end: Runs the actions at AFTER_MICROBATCH.
    """

    begin: Callable[[int, bool, int], None]
    resume: Callable[[int, int], None]
    end: Callable[[], None]


class GradScaler(Protocol):
    """Loss scaling for narrow exponents; the decision of all ranks is agreed by the core."""

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss before its backward."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide this rank's gradients; return whether one of them was not finite."""

    def update(self, skipped: bool) -> None:
        """Adapt the scale after a step that was, or was not, skipped on all ranks because some rank found overflow."""


class Stateful(Protocol):
    """Something that is saved and loaded with the checkpoint: tensors, and values that JSON holds.

    One that a run can do without, as it finds its values again by itself, has an attribute `is_dispensable` that is
    true: where a checkpoint does not hold it, it starts from scratch, and a run without it ignores it.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the state."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that `composer3d_measure` returns.

    Args:
        name: The same on every rank.
        value: This rank's.
        reduction: Of the ranks' values to one; `rank0` takes the first rank's.
    """

    name: str
    value: float
    reduction: Literal["sum", "max", "mean", "rank0"] = "mean"


@dataclass(frozen=True, kw_only=True)
class LayoutTraits:
    """A plugin's part in a layout; the answer to `composer3d_layout`. None is no opinion.

    Args:
        zero: ZeRO stage over `dp_shard`: 1 shards optimizer state, 2 gradients too, 3 parameters too; 0 nothing.
        schedule: Pipeline schedule, as torch names it.
        stages_per_rank: Stages of the pipeline on each rank.
        sequence_parallel: Whether activations between blocks are sharded over `tp` along the sequence.
        recompute: Activations that the backward recomputes.
        is_compiled: Whether pointwise operators between matrix products are fused by a compiler.
        offloads_state: Whether optimizer state lies in host memory.
        compute_dtype: Of parameters and activations while they compute, without `torch.`.
        product_dtype: Of matrix products, where it is another one.
        gather_bytes: Bytes a parameter while it is gathered; of several answers the least.
        reduce_dtype: Of gradients while they are reduced.
        state_bytes: Bytes a parameter of optimizer state.
        compression: What data parallelism sends in fewer bits than its dtype has: gradients, gathered weights, or both.
    """

    zero: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    sequence_parallel: bool | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    is_compiled: bool | None = None
    offloads_state: bool | None = None
    compute_dtype: str | None = None
    product_dtype: str | None = None
    gather_bytes: float | None = None
    reduce_dtype: str | None = None
    state_bytes: float | None = None
    compression: Literal["none", "gradients", "weights", "both"] | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutOffer:
    """Layouts that a plugin can make, for `suggest`, which asks the classes of all installed plugins.

    Args:
        table: Given the traits of a layout and its degrees by axis, returns the keys of the plugin's table that make
            it; None where the layout has no use for the plugin.
        choices: Values that it can give a trait, by name. Of `schedule` each is a name with numbers of stages a rank.
    """

    table: Callable[[LayoutTraits, Mapping[str, int]], Mapping[str, Any] | None]
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


LossFunction = Callable[[Any, Any], Any]
Example = tuple[tuple[Any, ...], Mapping[str, Any]]  # args and kwargs of a forward
