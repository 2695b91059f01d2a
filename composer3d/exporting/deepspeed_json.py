"""DeepSpeed's JSON."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

from composer3d.exporting.meaning import Meaning
from composer3d.exporting.writers import Writer, WrittenFile
from composer3d.importing import Verdict

__all__ = ["WRITER"]

_SHORT = MappingProxyType({"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"})
_OPTIMIZERS = MappingProxyType({"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"})
_SCHEDULES = MappingProxyType({"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"})
_NOTES = {
    "model": "the file names no model: the program gives one to deepspeed.initialize",
    "data": "the file names no data: the program gives them to deepspeed.initialize",
    "run": "of the program, or of the launcher",
    "train.seed": "the program's: torch.manual_seed",
    "train.steps": "the program's loop; only a schedule that falls has total_num_steps",
    "train.loss": "the program's loss",
    "evaluation": "of the program",
    "checkpoint": "the program calls engine.save_checkpoint",
    "ema": "averages of weights are the program's",
    "optimizer": "an optimizer by a name that DeepSpeed does not have: give it to deepspeed.initialize",
    "lr_schedule": "a schedule that DeepSpeed does not have: step one in the loop",
    "optimizer.groups": "DeepSpeed decays norms and biases too: give parameter groups to deepspeed.initialize",
    "optimizer.no_decay": "DeepSpeed decays norms and biases too: give parameter groups to deepspeed.initialize",
    "@recomputed": "the block activation_checkpointing acts only in models that call deepspeed.checkpointing",
    "@activations": "deepspeed.checkpointing's cpu_checkpointing acts only in models that call it",
    "@compiled": "the program calls engine.compile(backend=...)",
    "mesh.gpus_per_node": "of the launcher: --num_gpus",
}


def write(meaning: Meaning, file: WrittenFile) -> None:
    """Fill in the file."""
    _batch(meaning, file)
    _zero(meaning, file)
    _layout(meaning, file)
    _precision(meaning, file)
    if meaning.is_run:
        _optimizer(meaning, file)
        if "lr_schedule" not in file.unsaid:
            _schedule(meaning, file)
    _watching(meaning, file)


def _batch(meaning: Meaning, file: WrittenFile) -> None:
    micro = meaning.get("train.microbatch")
    total = meaning.get("train.global_batch") if micro is None or meaning.states("train.global_batch") else None
    steps = None if micro is None or total is not None else meaning.get("train.accumulate", 1)
    file.put("", train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)
    if micro is None and total is None:
        file.warnings.append(
            "write train_micro_batch_size_per_gpu: the batch is the loop's, and the manifest is silent"
        )
    clip = meaning.get("train.grad_clip", math.inf)
    file.put("", gradient_clipping=0.0 if math.isinf(clip) else clip)
    if not meaning.is_run:
        file.warnings.append("gradient_clipping is 0: write the norm to which the loop clips, which the engine does")


def _zero(meaning: Meaning, file: WrittenFile) -> None:
    block, stated = "zero_optimization", int(meaning.get("@sharded.zero", 0)) if meaning.has("@sharded") else 0
    stage = min(stated, _most_shared(meaning))
    if stage < stated:
        beside = "pipeline.stages" if (meaning.axis("pp") or 1) > 1 else "autotp_size"
        file.warnings.append(
            f"DeepSpeed refuses stage {stated} beside {beside}: it is {stage}, which takes more memory"
        )
    file.put(block, stage=stage)
    secondary = meaning.get("@sharded.reshard_after_forward")
    if stage == 3 and isinstance(secondary, int) and not isinstance(secondary, bool):
        file.put(block, zero_hpz_partition_size=secondary)
    shards, replicas = meaning.axis("dp_shard"), meaning.axis("dp_replicate")
    if stage == 3 and (replicas is None or replicas > 1) and shards is not None and shards > 1:
        file.put(block, mics_shard_size=shards)
    mode = meaning.get("@host.mode") if meaning.has("@host") else None
    if mode in ("optimizer", "all"):
        file.put(f"{block}.offload_optimizer", device="cpu")
    if mode in ("parameters", "all"):
        file.put(f"{block}.offload_param", device="cpu")
    if meaning.has("@disk"):
        file.put(f"{block}.offload_optimizer", device="nvme", nvme_path=meaning.get("@disk.folder"))
    for name, what in (("weights", "weights"), ("gradients", "gradients")):
        if meaning.has("@coded") and meaning.get(f"@coded.{what}") is not None and stage == 3:
            file.put(block, **{f"zero_quantized_{name}": True})


def _most_shared(meaning: Meaning) -> int:
    """Return the highest ZeRO stage that DeepSpeed has beside a pipeline, or its tensor parallelism."""
    if (meaning.axis("pp") or 1) > 1:
        return 1
    return 2 if (meaning.axis("tp") or 1) > 1 else 3


def _layout(meaning: Meaning, file: WrittenFile) -> None:
    if (stages := meaning.axis("pp") or 1) > 1:
        file.put("pipeline", stages=stages)
        file.warnings.append("pipeline.stages counts in a model that is a deepspeed.pipe.PipelineModule")
    if (ranks := meaning.axis("tp") or 1) > 1:
        file.put("", tensor_parallel={"autotp_size": ranks})
    if (ranks := meaning.axis("cp") or 1) > 1:
        file.put("", sequence_parallel_size=ranks)
    if (ranks := meaning.axis("ep") or 1) > 1:
        file.put("", expert_parallel={"autoep_size": ranks})


def _precision(meaning: Meaning, file: WrittenFile) -> None:
    dtype = meaning.get("@mixed.param_dtype") if meaning.has("@mixed") else None
    if dtype not in ("bfloat16", "float16"):
        return
    if dtype == "bfloat16":
        skips = meaning.get("stability.on_nonfinite", "stop") == "skip"
        file.put("bf16", enabled=True, check_grad_overflow=skips)
    else:
        static = meaning.get("@mixed.static_scale")
        file.put("fp16", enabled=True, loss_scale=static or 0)
        if static is None:
            file.put(
                "fp16",
                initial_scale_power=_exponent(meaning.get("@mixed.initial_scale"), file),
                loss_scale_window=meaning.get("@mixed.growth_interval"),
                hysteresis=meaning.get("@mixed.hysteresis"),
                consecutive_hysteresis=meaning.get("@mixed.hysteresis_restored") == "step",
                min_loss_scale=_whole(meaning.get("@mixed.min_scale"), file),
            )
    file.put("", communication_data_type=_SHORT[meaning.get("@mixed.reduce_dtype", "float32")])
    buffers = meaning.get("@mixed.buffer_dtype")
    file.put("data_types", grad_accum_dtype="fp32", buffer_dtype=_SHORT.get(str(buffers)))


def _exponent(scale: float, file: WrittenFile) -> int:
    power = math.log2(scale)
    if power != round(power):
        file.warnings.append(f"DeepSpeed's first loss scale is a power of 2: {2.0 ** round(power):g}, not {scale:g}")
    return round(power)


def _whole(scale: float, file: WrittenFile) -> int:
    whole = max(round(scale), 1)
    if whole != scale:
        file.warnings.append(f"DeepSpeed's least loss scale is a whole number: {whole}, not {scale:g}")
    return whole


def _optimizer(meaning: Meaning, file: WrittenFile) -> None:
    use = str(meaning.get("optimizer.use"))
    module, _, name = use.partition(":")
    kind = _OPTIMIZERS.get(use) or (name if module == "torch.optim" else None)
    if kind is None:
        file.warnings.append(f"the file names no optimizer: give {use} to deepspeed.initialize")
        file.unsaid |= {"optimizer", "lr_schedule"}
        return
    file.put("optimizer", type=kind)
    names = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov")
    params = {key: meaning.get(f"optimizer.{key}") for key in names} | meaning.get("optimizer.args", {})
    if use == "muon":
        params |= {"betas": None, "eps": None, "nesterov": None}
    if kind == "Adam":
        params["adam_w_mode"] = False
    file.put("optimizer.params", **params)


def _schedule(meaning: Meaning, file: WrittenFile) -> None:
    """Write the schedule of DeepSpeed that has this form; its first rates are a step behind."""
    table, steps = meaning.manifest.tables["lr_schedule"], int(meaning.get("train.steps"))
    name = _SCHEDULES.get(table.kind)
    stated = 0.05 if table.warmup is None and name != "WarmupLR" else table.warmup or 0
    warmup = int(stated * steps) if isinstance(stated, float) else int(stated)
    if name is None or (name == "WarmupLR" and not warmup):
        if name is None:
            file.warnings.append(f'DeepSpeed has no schedule "{table.kind}": step one in the loop')
            file.unsaid.add("lr_schedule")
        return
    lr, shape = meaning.get("optimizer.lr"), "log" if table.warmup_shape == "log" else "linear"
    start = table.warmup_start or 0.0
    lowest = 0.1 if table.min_ratio is None else table.min_ratio
    if table.warmup_start is None and shape == "linear" and warmup >= 4:  # (step + 1) / warmup, from the second step on
        start, warmup = 2 / warmup, warmup - 2
        if name == "WarmupDecayLR":  # which falls to the rate that it rose from
            start = lowest
    file.put("scheduler", type=name)
    params: dict[str, Any] = {"warmup_max_lr": lr, "warmup_num_steps": max(warmup, 2), "warmup_type": shape}
    if name == "WarmupCosineLR":
        params |= {"total_num_steps": steps, "warmup_min_ratio": start, "cos_min_ratio": lowest}
        if start:
            file.warnings.append(
                "DeepSpeed's WarmupCosineLR has no rate in the first step, whatever warmup_min_ratio is"
            )
        del params["warmup_max_lr"]
    elif name == "WarmupDecayLR":
        params |= {"total_num_steps": steps, "warmup_min_lr": start * lr}
    else:
        params |= {"warmup_min_lr": start * lr}
    file.put("scheduler.params", **params)


def _watching(meaning: Meaning, file: WrittenFile) -> None:
    if meaning.has("@throughput"):
        file.put("", wall_clock_breakdown=True)
        if meaning.states("@throughput.count_step"):
            file.put("flops_profiler", enabled=True, profile_step=meaning.get("@throughput.count_step"))
    if meaning.has("@spans") and meaning.get("@spans.detail") == "microbatch":
        file.put("comms_logger", enabled=True)
    if meaning.has("@tensorboard"):
        file.put("tensorboard", enabled=True, output_path=meaning.get("@tensorboard.folder", "tensorboard"))
    if meaning.has("@wandb"):
        names = {"project": "project", "team": "entity", "group": "group"}
        file.put("wandb", enabled=True, **{key: meaning.get(f"@wandb.{name}") for key, name in names.items()})


def _text(tables: Any) -> str:
    return json.dumps(tables, indent=2) + "\n"


WRITER = Writer(
    write=write,
    format=_text,
    reread=_text,
    form="json",
    notes=_NOTES,
    verdicts={"train.sync_buffers": Verdict.MISSING},
)
