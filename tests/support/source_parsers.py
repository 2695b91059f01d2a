"""What DeepSpeed, Accelerate and torchtitan read from their own files: run by a Python that has them.

Takes a system and a file; prints values of composer3d's manifest, as JSON, as the system's own parser resolves them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path


def deepspeed(file):
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(file)
    fp16, values = found.float16_config, {}
    if fp16.enabled:
        values |= {
            "precision.mixed.initial_scale": float(fp16.loss_scale or 2**fp16.initial_scale_power),
            "precision.mixed.growth_interval": None if fp16.loss_scale else fp16.loss_scale_window,
            "precision.mixed.hysteresis": None if fp16.loss_scale else fp16.hysteresis,
        }
    dtype = "float16" if fp16.enabled else "bfloat16" if found.bfloat16_config.enabled else None
    reduced = str(found.communication_data_type).removeprefix("torch.") if found.communication_data_type else dtype
    parameters = found.optimizer_params or {}
    return values | {
        "train.microbatch": found.train_micro_batch_size_per_gpu,
        "train.global_batch": found.train_batch_size,
        "train.grad_clip": found.gradient_clipping or float("inf"),
        "sharding.fsdp2.zero": found.zero_optimization_stage or None,
        "precision.mixed.param_dtype": dtype,
        "precision.mixed.reduce_dtype": reduced,
        "run.log_every": found.steps_per_print,
        **{f"optimizer.{key}": value for key, value in parameters.items()},
    }


def accelerate(file):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(file)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(found.mixed_precision))
    options, mesh = found.fsdp_config, found.parallelism_config
    # A bare NO is a boolean of YAML, which it keeps.
    kind = getattr(found.distributed_type, "value", None)
    return {
        "precision.mixed.param_dtype": dtype,
        "sharding.fsdp2.zero": (3 if options.get("fsdp_reshard_after_forward", True) else 2)
        if kind == "FSDP"
        else None,
        "mesh.dp_replicate": mesh.get("parallelism_config_dp_replicate_size") if mesh else None,
        "mesh.tp": mesh.get("parallelism_config_tp_size") if mesh else None,
        "mesh.gpus_per_node": found.num_processes // found.num_machines if found.num_machines > 1 else None,
    }


def torchtitan(file):
    # The package imports its kernels, which need triton; the parser alone is taken.
    package = types.ModuleType("torchtitan")
    package.__path__ = list(importlib.util.find_spec("torchtitan").submodule_search_locations)
    sys.modules["torchtitan"] = package
    from torchtitan.config import ConfigManager

    found = ConfigManager().parse_args(["--job.config_file", file])
    training, parallel, rates = found.training, found.parallelism, found.lr_scheduler
    return {
        "train.microbatch": training.local_batch_size,
        "train.global_batch": None if training.global_batch_size == -1 else training.global_batch_size,
        "data.seq_len": training.seq_len,
        "train.steps": training.steps,
        "train.grad_clip": training.max_norm,
        "optimizer.lr": found.optimizer.lr,
        "optimizer.betas": [found.optimizer.beta1, found.optimizer.beta2],
        "optimizer.eps": found.optimizer.eps,
        "optimizer.weight_decay": found.optimizer.weight_decay,
        "lr_schedule.warmup": rates.warmup_steps,
        "lr_schedule.min_ratio": rates.min_lr_factor,
        "mesh.tp": None if parallel.tensor_parallel_degree == 1 else parallel.tensor_parallel_degree,
        "mesh.pp": None if parallel.pipeline_parallel_degree == 1 else parallel.pipeline_parallel_degree,
        "precision.mixed.param_dtype": training.mixed_precision_param,
        "precision.mixed.reduce_dtype": training.mixed_precision_reduce,
    }


if __name__ == "__main__":
    resolved = {"deepspeed": deepspeed, "accelerate": accelerate, "torchtitan": torchtitan}[sys.argv[1]](sys.argv[2])
    Path(sys.argv[3]).write_text(json.dumps(resolved))
