"""Refusals of `composer3d check` that are right: each with its row of plugins/README.md's table of refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EXCLUDED", "PERMITTED"]


@dataclass(frozen=True, kw_only=True)
class Permitted:
    """A refusal that is right.

    Args:
        row: How its row in plugins/README.md's table of refusals begins.
        message: A regular expression that the message matches.
    """

    row: str
    message: str


PERMITTED: tuple[Permitted, ...] = (
    Permitted(row="`fsdp2` and `ddp` in one manifest", message=r'both own the axis "dp_replicate"'),
    Permitted(
        row="`fsdp2`: `reshard_after_forward` with `zero` below 3", message=r"reshard_after_forward is zero = \d's"
    ),
    Permitted(
        row='`ddp`: `reducer = "bucketed"` with `pp` or `tp` above 1',
        message=r'reducer = "bucketed" does not work with (pp|tp|ep) = \d+: ',
    ),
    Permitted(row="`ddp`: options of the other reducer", message=r'\w+ has no effect with reducer = "\w+"'),
    Permitted(
        row='`ddp`: `reducer = "bucketed"` with another `reduce_dtype` than float32',
        message=r"the buckets reduce gradients in the dtype of the weights",
    ),
    Permitted(
        row='two of `cpu_offload` (`mode = "optimizer"` or `"parameters"`)',
        message=r"both make the optimizer, and a run",
    ),
    Permitted(row="`float8` where no layer is left to convert", message=r"no layer is left to convert"),
    Permitted(
        row="`float8`: `all_gather` with a scale a row",
        message=r"all_gather = true(:| needs)|auto = true has no thresholds|emulate = false, and this device",
    ),
    Permitted(row="`torch_profiler`: ranks that the world does not have", message=r"nvtx needs CUDA"),
    Permitted(row="`mixed` where no plugin asks for dtypes", message=r"gives dtypes, but no plugin"),
    Permitted(
        row="`mixed`: options of the loss scale without float16",
        message=r"(growth_interval|hysteresis(_restored)?|buffer_dtype|norm_modules) has no effect"
        r'|(norms|param_dtype) = "float32" has no effect',
    ),
    Permitted(
        row="`pipeline`: fewer micro-batches or blocks than the schedule needs",
        message=r"needs at least as many micro-batches as stages|needs a multiple of \d+",
    ),
    Permitted(
        row='`activation_checkpoint`: `mode = "selective"` or `"budget"` with zero-bubble schedules',
        message=r"selective checkpoints keep can be used once",
    ),
    Permitted(
        row="`pipeline`: another number of stages a rank than the schedule has",
        message=r"has (one stage|two stages|several stages) a rank, not \d+",
    ),
    Permitted(
        row="`pipeline`: zero-bubble schedules with `compile`", message=r"cannot cut a compiled backward|compiled"
    ),
    Permitted(
        row="`pipeline`: zero-bubble schedules with `fsdp2` and",
        message=r"parameters that the second half|resharding|reshard_(root|after_forward).*(zero.bubble|Zero)"
        r"|zero_bubble_pipeline\W+reshard_",
    ),
    Permitted(
        row="`fsdp2`: `delay_all_reduce` with `zero` below 3, or without replicas",
        message=r"delay_all_reduce has no effect",
    ),
    Permitted(
        row="`prometheus`, `tensorboard`, `wandb`, `mlflow` where their library is not installed",
        message=r"(wandb|mlflow|prometheus_client|tensorboard) is not installed",
    ),
    Permitted(
        row="two of `float8`, `mxfp8`, `int8`, `qat` and `qlora` in one manifest",
        message=r"both replace what the same (linear )?layers compute",
    ),
    Permitted(
        row='`qlora` with `float8`; `keep` or `scale_block` with `quantize = "none"`',
        message=r"scale_block has no effect",
    ),
    Permitted(row="`int8` with all three products switched off", message=r"so nothing is multiplied in int"),
    Permitted(
        row="`activation_checkpoint`: options of another mode",
        message=r'has no effect with mode = "|mode = "budget" needs one budget',
    ),
    Permitted(
        row="`activation_checkpoint`: `sqrt` or `budget` with `compile`",
        message=r'"activation_checkpoint" cannot be combined with "compile"|below what the blocks. inputs take',
    ),
    Permitted(
        row="`activation_offload` with `compile`", message=r'"activation_offload" cannot be combined with "compile"'
    ),
    Permitted(row="two answers to one query", message=r"both answer composer3d_\w+"),
    Permitted(
        row="`cpu_offload`: `parameters` or `all` where no data-parallel plugin",
        message=r'mode = "\w+" needs a data-parallel plugin',
    ),
    Permitted(
        row='`ddp`: `reducer = "bucketed"` with parameters or gradients in host memory',
        message=r"gathers no parameters for their use|reduces gradients where they lie",
    ),
    Permitted(
        row='`process_groups`: `reduce_scatter = "native"` alone on GPUs',
        message=r'reduce_scatter = "native" is what runs without this table|both replace the reduce-scatter',
    ),
    Permitted(
        row="`process_groups`: options of NCCL on an axis that is on gloo",
        message=r"one rank communicates with nobody|nothing is reduce-scattered in this run",
    ),
    Permitted(
        row="`async_tensor_parallel` where nobody shards over `tp`",
        message=r"whose exchanges are what overlaps|no rank exchanges anything|no linear layer gathers or sums a sequ"
        r"|that exchange the sequence: nothing overlaps|are converted by \w+, whose products are no plain ones"
        r'|method = "micro_pipelined": ',
    ),
    Permitted(
        row="`compression` without `gradients` and `weights`",
        message=r'neither gradients nor weights are to be|rounding = "stochastic" is for integers'
        r"|(rank|ratio) has no effect without|block has no effect with gradients"
        r"|(error_feedback is|axes are) of gradients"
        r"|whose exchanges are what is compressed|no rank sends anything that could be compressed",
    ),
    Permitted(
        row="`compression`: error feedback, or PowerSGD, over `dp_shard`",
        message=r'error feedback over \w+: |gradients = "powersgd" over \w+: ',
    ),
    Permitted(
        row="`compression`: error feedback with a plugin that scales the loss",
        message=r"error feedback adds what a step has left over",
    ),
    Permitted(
        row="`compression` with `weights` and `float8` with `all_gather = true`", message=r"both replace the all-gather"
    ),
    Permitted(
        row="`local_sgd`: options of an outer optimizer",
        message=r'\w+ has no effect with method = "|mix has no effect without overlap|post_local is average after'
        r"|there is one island, and nobody",
    ),
    Permitted(
        row="`local_sgd`: `overlap` that reaches the next fragment",
        message=r"has no room for \d+ fragments|islands first meet after|fragments = \d+, and the model has",
    ),
    Permitted(
        row="`local_sgd`: `samples` for another number of islands",
        message=r"samples = \[.*\] (is for|gives all islands)",
    ),
    Permitted(
        row="`context_parallel`: a length that does not divide",
        message=r'context_parallel cannot shard .* others = "refuse" gathers nothing',
    ),
    Permitted(row="`replicas` with one group", message=r"replica = 1: there is one group"),
    Permitted(row="`replicas` with `cpu_offload`", message=r"gradients are moved elsewhere by "),
    Permitted(row="`expert_parallel`: no experts found", message=r"carved out of the ranks that share a batch"),
    Permitted(
        row="`ep` that divides neither",
        message=r"which it is carved out of; write|it is carved out of the one or the other",
    ),
)
# What is different from one device because it was asked to be; said in benchmarks/README.md.
EXCLUDED: tuple[Mapping[str, str], ...] = (
    {"scheduling.activation_checkpoint.preserve_rng_state": "false", "model.dropout": "0.1"},
)
