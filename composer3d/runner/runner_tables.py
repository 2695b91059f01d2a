"""The tables of a manifest that the runner adds to the core's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from composer3d.errors import KeyFault
from composer3d.huggingface import Dtype, Weights
from composer3d.manifest import MOST_SAMPLES, Expression, SlowExpression, table
from composer3d.manifest import ModelTable as CoreModelTable
from composer3d.manifest import TrainTable as CoreTrainTable
from composer3d.runner.data import DataTable
from composer3d.runner.evaluating.evaluation_table import EvaluationTable
from composer3d.runner.launching.node_counts import node_counts
from composer3d.runner.launching.spot_notice import NoticeTable
from composer3d.runner.objective.loss_table import LossTable
from composer3d.runner.objective.lr_schedule_table import LRScheduleTable

__all__ = [
    "TABLES",
    "BatchRampTable",
    "CheckpointTable",
    "EMATable",
    "EvaluationTable",
    "LRScheduleTable",
    "ModelTable",
    "OptimizerGroupTable",
    "OptimizerTable",
    "RunTable",
    "StabilityTable",
    "TrainTable",
]


_LONGEST_EXPRESSION = 2000
LONGEST_S = 10_000_000.0  # 115 days: timers overflow beyond some hundred years


@table
class RunTable:
    """Output folder, device and supervision of a run.

    Args:
        output: Folder of metrics, checkpoints and the run's record; default `runs/` and the manifest's name.
        device: `auto` is the accelerator if the machine has one, else the CPU.
        deterministic: Only deterministic kernels, and an error where torch has none.
        matmul_precision: Of float32 matrix products on GPUs; `high` and `medium` let them use TF32 or bfloat16.
        gc_every: Steps between collections of Python's garbage, on all ranks at once; 0 leaves it to Python, which then
            stops single ranks at any time.
        log_every: Steps between lines of progress where there is no terminal.
        timeout_s: Seconds that a rank waits for the others, to join, to compose and in a collective; default torch's.
        debug: Check every collective on all ranks, and log what torch.distributed does; slow.
        max_restarts: How often ranks that crashed are started again, from the newest checkpoint.
        nodes: Numbers of nodes that the run may have: `4`, a range `"2:4"`, a list `[2, 4]`. Each has
            `mesh.gpus_per_node` ranks, by default 1. Ranks that are started again are those of the next smaller number;
            under torchrun, those of the nodes that are there.
        grace_s: Seconds that ranks have to save and stop after a SIGTERM.
        notice: A file or an address at which the cloud says that it takes this machine away: the run then saves and
            stops, as after SIGTERM. A table with `at` and options, or `at` alone.
    """

    output: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    gc_every: int = Field(default=50, ge=0)
    log_every: int = Field(default=10, ge=1)
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_S)
    debug: bool = False
    max_restarts: int = Field(default=0, ge=0)
    nodes: int | str | tuple[int, ...] | None = None
    grace_s: float = Field(default=30.0, ge=0, le=LONGEST_S)
    notice: str | NoticeTable | None = None

    @model_validator(mode="after")
    def _nodes_are_counts(self) -> RunTable:
        if self.nodes is not None:
            node_counts(self.nodes)
        if isinstance(self.notice, str):
            NoticeTable(at=self.notice)
        return self


@table
class ModelTable(CoreModelTable):
    """The model.

    Args:
        use: `module:callable` that returns an nn.Module; default `composer3d.models:llama`.
        hf: Instead of `use`: the folder of a Hugging Face causal language model, or its name in the local cache.
        args: Arguments of `use`, or overrides of the configuration of `hf`.
        build: `deferred` makes no weight before its place is known; `host` builds the whole model on every host, for a
            factory that reads data.
        weights: Of `hf`: `pretrained` (default) reads those in the folder, `init` draws them as the configuration says.
        dtype: Of the parameters of `hf`, default `float32`; `auto` is that of the configuration or of the weights.
        attn_implementation: Of `hf`: `sdpa`, `eager`, and what else transformers has.
        trust_remote_code: Of `hf`: run Python that lies in the folder.
    """

    use: str | None = Field(default=None, min_length=1)
    hf: str | None = Field(default=None, min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    build: Literal["deferred", "host"] = "deferred"
    weights: Weights | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    @property
    def reference(self) -> str:
        """Reference to the class, also where `use` is not stated."""
        return self.use or "composer3d.models:llama"

    @model_validator(mode="after")
    def _keys_belong_together(self) -> ModelTable:
        """Refuse keys that would be ignored."""
        if self.hf is not None and self.use is not None:
            raise KeyFault("use", "use and hf are two models; remove one of them")
        if self.hf is not None and self.build == "host":
            raise KeyFault("build", 'build = "host" is for use; weights of hf are read part by part')
        for key in ("weights", "dtype", "attn_implementation", "trust_remote_code"):
            if self.hf is None and getattr(self, key):
                raise KeyFault(key, f"{key} is for hf; remove it, or name a folder with hf")
        return self


@table
class BatchRampTable:
    """A global batch that grows to `global_batch`.

    Args:
        start: Sequences per optimizer step at first.
        step: Sequences that are added each time.
        every: Optimizer steps between two additions.
        samples: Instead of `every`: sequences after which the batch has grown to the whole, which are divided evenly
            among the sizes, as Megatron-LM's `--rampup-batch-size` does.
    """

    start: int = Field(ge=1, le=MOST_SAMPLES)
    step: int = Field(ge=1, le=MOST_SAMPLES)
    every: int | None = Field(default=None, ge=1)
    samples: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _grows_by_one(self) -> BatchRampTable:
        if (self.every is None) == (self.samples is None):
            raise ValueError("grows every so many steps, or within so many samples; state every or samples")
        return self


@table
class TrainTable(CoreTrainTable):
    """The training loop.

    Args:
        microbatch: Sequences per forward and data-parallel rank.
        steps: Optimizer steps of the whole run.
        grad_clip: Gradients are scaled down to this norm of the full model's gradient; `inf` only measures it.
        batch_ramp: Begin with a smaller global batch.
        frozen: FQN patterns of modules or parameters that are not trained.
        loss: `cross_entropy` of the model's logits; `mse`, `l1`, `smooth_l1`, `huber`, `binary_cross_entropy`; `model`,
            which the model computes itself; `module:callable`, called with the model's output and the targets; or a
            table with `use` and options.
        sync_buffers: Average floating-point buffers (batch-norm statistics) over data-parallel ranks before every
            evaluation and checkpoint.
    """

    microbatch: int | None = Field(default=1, ge=1, le=MOST_SAMPLES)
    steps: int = Field(ge=1)
    grad_clip: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    batch_ramp: BatchRampTable | None = None
    frozen: tuple[str, ...] = ()
    loss: str | LossTable = "cross_entropy"
    sync_buffers: bool = True

    @property
    def loss_table(self) -> LossTable:
        """The loss with its options."""
        return LossTable(use=self.loss) if isinstance(self.loss, str) else self.loss

    @model_validator(mode="after")
    def _loss_is_known(self) -> TrainTable:
        try:
            self.loss_table  # noqa: B018 - made for its objections
        except ValidationError as error:
            raise KeyFault("loss", str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
        return self

    @model_validator(mode="after")
    def _ramp_needs_an_end(self) -> TrainTable:
        if self.batch_ramp is not None and self.global_batch is None:
            raise KeyFault("batch_ramp", "batch_ramp grows to global_batch, which is not stated")
        if self.batch_ramp is not None and self.global_batch is not None and self.batch_ramp.start > self.global_batch:
            raise KeyFault(
                "batch_ramp", f"batch_ramp starts at {self.batch_ramp.start}, above global_batch = {self.global_batch}"
            )
        return self


@table
class OptimizerGroupTable:
    """Hyperparameters of some parameters.

    Args:
        match: A regular expression, searched in FQNs; the first group that matches takes the parameter.
        lr: Learning rate.
        weight_decay: Weight decay; stated here it holds for norms and biases too.
        args: Further hyperparameters of the optimizer's class.
    """

    match: str
    lr: float | None = Field(default=None, ge=0, le=1_000_000)
    weight_decay: float | None = Field(default=None, ge=0, le=1_000_000)
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _match_is_a_regular_expression(self) -> OptimizerGroupTable:
        _compile("match", self.match)
        return self


@table
class OptimizerTable:
    """The optimizer.

    Args:
        use: `adamw`, `sgd`, `muon` (of the matrices in blocks; the rest is AdamW's), or `module:Class` of any torch
            optimizer.
        lr: Learning rate, the highest that the schedule reaches.
        weight_decay: Of parameters with at least two dims; default 0.1 for adamw, else what the class has.
        betas: Of adamw and muon's AdamW, default [0.9, 0.95].
        eps: Of adamw and muon's AdamW, default 1e-8.
        momentum: Of sgd, default 0.9; of muon, default 0.95.
        nesterov: Of sgd and muon.
        matrices: Of muon: a regular expression of what it steps; default: the matrices in the model's blocks.
        args: Further arguments of the class.
        groups: Other hyperparameters for some parameters.
        no_decay: A regular expression of parameters without weight decay; default: those with fewer than two dims, that
            is norms and biases.
        in_backward: Step each parameter in the backward, as soon as its gradient is final, and free the gradient. For
            one micro-batch a step and rank, without clipping, skipped steps or a pipeline.
    """

    use: str = "adamw"
    lr: float = Field(default=3e-4, ge=0, le=1_000_000)
    weight_decay: float | None = Field(default=None, ge=0, le=1_000_000)
    betas: tuple[float, float] | None = None
    eps: float | None = Field(default=None, gt=0)
    momentum: float | None = Field(default=None, ge=0)
    nesterov: bool | None = None
    matrices: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    groups: tuple[OptimizerGroupTable, ...] = ()
    no_decay: str | None = None
    in_backward: bool = False

    @model_validator(mode="after")
    def _keys_belong_to_the_class(self) -> OptimizerTable:
        """Refuse keys that the class would not be given."""
        adam, momentum = ("adamw", "muon"), ("sgd", "muon")
        for key, owners in (("betas", adam), ("eps", adam), ("momentum", momentum), ("nesterov", momentum)):
            if getattr(self, key) is not None and self.use not in owners:
                raise KeyFault(
                    key, f'{key} is for use = "{owners[0]}"; write args = {{ {key} = ... }} for another class'
                )
        if self.matrices is not None:
            if self.use != "muon":
                raise KeyFault("matrices", 'matrices is for use = "muon"')
            _compile("matrices", self.matrices)
        if self.use not in ("adamw", "sgd", "muon") and ":" not in self.use:
            raise KeyFault("use", f'use = "{self.use}" is not adamw, sgd, muon or "module:Class"{_meant(self.use)}')
        if self.no_decay is not None:
            _compile("no_decay", self.no_decay)
        return self


@table
class CheckpointTable:
    """Checkpoints.

    Args:
        every: Steps between two; default: only at the end.
        keep: How many to keep.
        asynchronous: Write in a thread while training goes on.
        final: Save at the end of the run too.
        local_every: Steps between two copies of the state in the memory of the nodes: each rank's on its own and, where
            there are several, on the next one. A restart on as many ranks goes on from there, if that is later.
        local_folder: On every node, in a tmpfs or on a local disk; default `/dev/shm`.
    """

    every: int | None = Field(default=None, ge=1)
    local_every: int | None = Field(default=None, ge=1)
    local_folder: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _local_folder_needs_steps(self) -> CheckpointTable:
        if self.local_folder is not None and self.local_every is None:
            raise KeyFault(
                "local_folder",
                "local_folder is where local_every keeps states; write local_every = 10 too, or remove it",
            )
        return self

    keep: int = Field(default=3, ge=1)
    asynchronous: bool = True
    final: bool = True


@table
class StabilityTable:
    """Handling of steps whose loss or gradient is not finite, or far above those before it.

    Args:
        on_nonfinite: `stop` ends the run; `skip` leaves the weights as they are, on all ranks, and goes on.
        spike_factor: A loss above this multiple of the median of the last ones counts like a non-finite one; default:
            never.
        spike_window: How many losses the median is taken of.
        max_skips: The run stops when so many steps in a row were skipped.
    """

    on_nonfinite: Literal["stop", "skip"] = "stop"
    spike_factor: float | None = Field(default=None, gt=1)
    spike_window: int = Field(default=20, ge=3)
    max_skips: int = Field(default=10, ge=1)


@table
class EMATable:
    """An exponential moving average of the weights; off without a `decay`.

    Args:
        decay: What is left of the average after an update.
        every: Steps between two updates.
        evaluate: Evaluate with the averaged weights.
    """

    decay: float | None = Field(default=None, gt=0, lt=1)
    every: int = Field(default=1, ge=1)
    evaluate: bool = True


_TORCHS = {name.lower(): name for name in ("Adam", "RMSprop", "Adagrad", "Adafactor", "NAdam", "RAdam", "Adamax")}


def _meant(name: str) -> str:
    """Return a hint for an optimizer that is named as other systems name it."""
    last = name.rpartition(".")[2]
    ours = next((own for own in ("adamw", "sgd", "muon") if own in last.lower().split("_")), None)
    if ours is not None:
        return f'; write "{ours}"'
    if name.lower() in _TORCHS:
        return f'; write "torch.optim:{_TORCHS[name.lower()]}"'
    if last.isidentifier() and (name.startswith("torch.optim.") or (last == name and last[:1].isupper())):
        return f'; write "torch.optim:{last}"'
    return ""


def _compile(key: str, expression: str) -> None:
    if len(expression) > _LONGEST_EXPRESSION:
        raise KeyFault(key, f"{key} has {len(expression)} characters, and at most {_LONGEST_EXPRESSION} are read")
    try:
        Expression(expression)
    except SlowExpression as error:
        raise KeyFault(key, f'{key} = "{expression}" could take for ever: {error}') from None
    except ValueError as error:
        raise KeyFault(key, f'{key} = "{expression}" is not a regular expression: {error}') from None


TABLES: Mapping[str, type] = MappingProxyType(
    {
        "run": RunTable,
        "model": ModelTable,
        "data": DataTable,
        "train": TrainTable,
        "optimizer": OptimizerTable,
        "lr_schedule": LRScheduleTable,
        "ema": EMATable,
        "stability": StabilityTable,
        "checkpoint": CheckpointTable,
        "evaluation": EvaluationTable,
    }
)
