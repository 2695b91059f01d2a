"""Layout of a run in numbers: degrees, choices and bytes a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Compression", "Precision", "Recompute", "Setup", "in_flight", "layers_of", "state_bytes"]

Recompute = Literal["none", "selective", "full"]
Compression = Literal["none", "gradients", "weights", "both"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes that a parameter costs, by what they are for.

    Args:
        dtype: Of matrix products, without `torch.`.
        param_bytes: Of the sharded parameter that the optimizer steps.
        compute_bytes: While they compute: gathered parameters, and activations.
        grad_bytes: Of the gradient that is kept until the optimizer steps.
        reduce_bytes: Of what is reduced.
        state_bytes: Of the optimizer's moments.
        master_bytes: Of a master weight in full precision, and of temporaries of the optimizer.
        gather_bytes: Of a parameter while it is gathered.
    """

    dtype: str = "bfloat16"
    param_bytes: float = 4
    compute_bytes: float = 2
    grad_bytes: float = 4
    reduce_bytes: float = 4
    state_bytes: float = 8
    master_bytes: float = 0
    gather_bytes: float = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Degrees and choices.

    Args:
        seq_len: Tokens of a sequence.
        global_batch: Sequences of an optimizer step over the whole world.
        microbatch: Sequences of a forward and data-parallel rank.
        dp_replicate: Replicas, of which each is sharded.
        dp_shard: Ranks over which parameters or optimizer state are sharded.
        cp: Ranks over which a sequence is sharded.
        tp: Ranks over which matrices are sharded.
        pp: Ranks over which the layers are divided.
        ep: Ranks over which experts are sharded, taken from dp_shard x cp, or from these x tp.
        zero: What dp_shard divides: 1 the optimizer's state, 2 gradients too, 3 parameters too; 0 nothing.
        schedule: Of the pipeline, as torch names it.
        stages_per_rank: Of the pipeline.
        sequence_parallel: Whether norms and residuals are sharded over tp along the sequence.
        recompute: Activations that the backward recomputes.
        attention: `flash` keeps no scores, `math` all of them.
        kernels: `eager` runs pointwise operators one by one, `fused` norms and activations in one each, `compiled` all
            that lies between matrix products.
        loss: How the loss runs where it is not as the kernels are: `compiled loss` from logits as they are.
        precision: Bytes a parameter.
        shards_weights: Whether full-precision weights and gradients between steps are sharded at every stage, as in
            FSDP2; below stage 3 gathered parameters are kept only while micro-batches run.
        offload: Whether the optimizer's state lies in host memory.
        compression: What data parallelism sends compressed; closed forms do not know of it, plans do.
        async_tp: Whether reductions of a layer's input gradients run beside the gradients of its weights.
        overlap: Whether gradients are reduced beside the backward where nothing forbids it.
        async_messages: Whether a stage computes on while it sends.
        extra_bytes: Buffers of the framework, such as buckets.
    """

    seq_len: int
    global_batch: int
    microbatch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 3
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    attention: Literal["flash", "math"] = "flash"
    kernels: Literal["eager", "fused", "compiled"] = "eager"
    loss: Literal["", "compiled loss"] = ""
    precision: Precision = field(default_factory=Precision)
    shards_weights: bool = True
    offload: bool = False
    compression: Compression = "none"
    async_tp: bool = False
    overlap: bool = True
    async_messages: bool = True
    extra_bytes: int = 0

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_parallel(self) -> int:
        """Ranks that each have their own sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step and rank; a rest is not counted."""
        return max(1, self.global_batch // (self.microbatch * self.data_parallel))

    @property
    def tokens(self) -> int:
        """Tokens that one rank computes in a micro-batch."""
        return self.microbatch * self.seq_len // self.cp

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_rank if self.pp > 1 else 1

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Return the ranks of rank 0's group along an axis; `pp` from outside, then replicas, shards, cp, tp."""
        strides = {"tp": 1, "cp": self.tp, "dp_shard": self.tp * self.cp}
        strides["dp_replicate"] = strides["dp_shard"] * self.dp_shard
        strides["pp"] = strides["dp_replicate"] * self.dp_replicate
        degree: int = getattr(self, axis)
        return tuple(range(0, degree * strides[axis], strides[axis]))


def layers_of(num_layers: int, setup: Setup) -> tuple[int, ...]:
    """Return the number of layers of every stage: as even as they divide, the first ones more."""
    each, rest = divmod(num_layers, setup.num_stages)
    return tuple(each + (stage < rest) for stage in range(setup.num_stages))


def in_flight(setup: Setup, pp_rank: int) -> float:
    """Return the micro-batches whose activations a pipeline rank holds at most, each as all of the rank's stages."""
    count, degree, stages = setup.num_microbatches, setup.pp, setup.stages_per_rank
    if degree == 1:
        return 1.0
    if setup.schedule == "GPipe":
        return float(count)
    if setup.schedule in ("ZBVZeroBubble", "DualPipeV"):
        return float(min(count, degree))
    if stages > 1:
        return min(float(count), ((stages - 1) * degree + 2 * (degree - pp_rank) - 1) / stages)
    return float(min(count, degree - pp_rank))


def state_bytes(num_parameters: float, degree: int, zero: int, precision: Precision) -> Mapping[str, float]:
    """Return the bytes of parameters, gradients and optimizer state of one rank.

    Args:
        num_parameters: Before data-parallel sharding.
        degree: Ranks over which the states are sharded.
        zero: ZeRO stage; 0 shards nothing.
        precision: Bytes a parameter.
    """
    return {
        "parameters": num_parameters * precision.param_bytes / (degree if zero >= 3 else 1),
        "gradients": num_parameters * precision.grad_bytes / (degree if zero >= 2 else 1),
        "optimizer": num_parameters * (precision.state_bytes + precision.master_bytes) / (degree if zero >= 1 else 1),
    }
