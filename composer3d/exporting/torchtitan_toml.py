"""torchtitan's TOML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from composer3d.exporting.meaning import Meaning
from composer3d.exporting.writers import Writer, WrittenFile
from composer3d.importing import Verdict
from composer3d.importing.torchtitan import FLAVOURS
from composer3d.manifest import FILL_IN, dump

__all__ = ["WRITER"]

_WARMUP, _LOWEST, _WSD = 0.05, 0.1, 0.2  # what a schedule has by default
_FALLS = ("linear", "cosine", "sqrt")
_ALL = 1_000_000  # checkpoints that are kept
_NOTES = {
    "model": "torchtitan has models by name and flavour: write model.name and model.flavor",
    "data": "torchtitan has data sets by name: write training.dataset",
    "optimizer": "torchtitan has AdamW and Adam",
    "optimizer.groups": "torchtitan decays norms and biases too",
    "optimizer.no_decay": "torchtitan decays norms and biases too",
    "train.accumulate": "torchtitan states the global batch: give --world-size N",
    "train.loss": "a train spec of your own: torchtitan has the loss in its models",
    "@tensor.sequence_parallel": "torchtitan shards the sequence beside tp",
    "@tensor.plan": "torchtitan's plan is that of its model",
    "@sharded.zero": 'torchtitan gathers parameters in the backward again ("always") or not ("never")',
    "@mixed.reduce_dtype": "torchtitan reduces in float32",
    "@sharded": "torchtitan shards wherever there are data-parallel ranks without replicas",
    "checkpoint.keep": "torchtitan keeps at least 2, or 0, which is all",
}


def write(meaning: Meaning, file: WrittenFile) -> None:
    """Fill in the file."""
    if meaning.is_run:
        _model(meaning, file)
        _optimizer(meaning, file)
        _schedule(meaning, file)
        _saving(meaning, file)
    else:
        file.unsaid |= {"optimizer", "lr_schedule"}
        file.warnings.append(
            "model, data, steps, optimizer and schedule are a loop's: write them, or torchtitan has its own"
        )
    _training(meaning, file)
    _parallelism(meaning, file)
    _recomputation(meaning, file)
    is_compiled = meaning.has("@compiled")
    file.put("compile", enable=is_compiled, components=["model"] if is_compiled else None)
    if is_compiled:
        file.put("compile", backend=meaning.get("@compiled.backend"))
    _eight_bits(meaning, file)
    _watching(meaning, file)


def _model(meaning: Meaning, file: WrittenFile) -> None:
    arguments = meaning.get("model.args", {})
    names = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
    sizes = tuple(arguments.get(name) for name in names)
    flavour = next((name for name, found in FLAVOURS.items() if found == sizes), None)
    if flavour is None:
        file.put("model", name=f"{FILL_IN}:model", flavor=f"{FILL_IN}:model")
    else:
        file.put("model", name="llama3", flavor=flavour)
    file.put("training", dataset=f"{FILL_IN}:data")
    file.warnings.append(f'what is "{FILL_IN}:..." in the file is to be filled in: torchtitan refuses such names')


def _optimizer(meaning: Meaning, file: WrittenFile) -> None:
    is_adam = meaning.get("optimizer.use") == "torch.optim:Adam"
    given = meaning.get("optimizer.args", {}) if is_adam else {}
    betas = given.get("betas") or meaning.get("optimizer.betas") or (None, None)
    numbers = {key: meaning.get(f"optimizer.{key}", given.get(key)) for key in ("lr", "eps", "weight_decay")}
    numbers["eps"] = given.get("eps", numbers["eps"])
    file.put("optimizer", name="Adam" if is_adam else "AdamW", beta1=betas[0], beta2=betas[1], **numbers)
    if meaning.get("optimizer.in_backward"):
        file.put("optimizer", early_step_in_backward=True)


def _steps_of(value: int | float, steps: int) -> int:
    return min(int(value * steps) if isinstance(value, float) else value, steps)


def _schedule(meaning: Meaning, file: WrittenFile) -> None:
    table, steps = meaning.manifest.tables["lr_schedule"], int(meaning.get("train.steps"))
    is_constant = table.kind == "constant"
    stated = (0 if is_constant else _WARMUP) if table.warmup is None else table.warmup
    end = steps if table.decay_end is None else table.decay_end
    end = int(end * steps) if isinstance(end, float) else end
    decay = _WSD if table.decay is None and table.kind == "wsd" else table.decay
    ratio = 0.0 if is_constant else None if decay is None else _steps_of(decay, steps) / end
    file.put(
        "lr_scheduler",
        warmup_steps=_steps_of(stated, steps),
        total_steps=None if end == steps else end,
        decay_ratio=ratio,
        decay_type=None if is_constant else table.kind if table.kind in _FALLS else "linear",
        min_lr_factor=None if is_constant else _LOWEST if table.min_ratio is None else table.min_ratio,
    )


def _saving(meaning: Meaning, file: WrittenFile) -> None:
    every = meaning.get("checkpoint.every")
    file.put("checkpoint", enable=every is not None)
    if every is None:
        file.warnings.append("checkpoints are off in the file: the last state is not saved without [checkpoint] enable")
    else:
        keep = meaning.get("checkpoint.keep")
        mode = "async" if meaning.get("checkpoint.asynchronous") else "disabled"
        file.put("checkpoint", interval=every, keep_latest_k=0 if keep >= _ALL else keep, async_mode=mode)
    if meaning.get("evaluation.every") is not None:
        batches = meaning.get("evaluation.batches")
        file.put("validation", enable=True, freq=meaning.get("evaluation.every"), steps=batches)


def _training(meaning: Meaning, file: WrittenFile) -> None:
    micro, total = meaning.get("train.microbatch", 1), meaning.get("train.global_batch")
    if not meaning.states("train.global_batch") and meaning.get("train.accumulate", 1) == 1:
        total = None  # what the ranks make of the local batch
    local = micro
    if (meaning.axis("pp") or 1) > 1:
        file.put("parallelism", pipeline_parallel_microbatch_size=micro)
        local = micro if total is None or meaning.degree is None else total // meaning.degree
    file.put("training", local_batch_size=local, global_batch_size=total)
    clip = meaning.get("train.grad_clip", 1.0)
    file.put("training", max_norm=0.0 if math.isinf(clip) else clip)
    if meaning.is_run:
        file.put("training", steps=meaning.get("train.steps"), seq_len=meaning.get("data.seq_len"))
    for key, source in (("seed", "train.seed"), ("deterministic", "run.deterministic")):  # of [training] before 0.2
        file.put("debug", **{key: meaning.get(source) if meaning.states(source) else None})
    dtype = meaning.get("@mixed.param_dtype", "float32") if meaning.has("@mixed") else "float32"
    if dtype not in ("bfloat16", "float32"):
        file.warnings.append(f"torchtitan has no loss scale, and computes in bfloat16 or float32, not {dtype}")
        dtype = "bfloat16"
    file.put("training", mixed_precision_param=dtype, mixed_precision_reduce="float32")
    if meaning.has("@host") and meaning.get("@host.mode") == "all":
        file.put("training", enable_cpu_offload=True)


def _parallelism(meaning: Meaning, file: WrittenFile) -> None:
    is_sharded, replicas = meaning.has("@sharded"), meaning.axis("dp_replicate")
    shards = meaning.axis("dp_shard") if meaning.states("mesh.dp_shard") else None
    if replicas is None:
        file.warnings.append("the file has no data_parallel_replicate_degree: say how many ranks with --world-size N")
    always = "always" if meaning.get("@sharded.zero", 3) == 3 else "never"
    method = meaning.get("@sequence.method") if meaning.has("@sequence") else None
    is_tensor = (meaning.axis("tp") or 1) > 1
    keys = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards if is_sharded else 1,
        "fsdp_reshard_after_forward": always if is_sharded else None,
        "tensor_parallel_degree": meaning.axis("tp"),
        "disable_loss_parallel": not meaning.get("@tensor.loss_parallel", False) if is_tensor else None,
        "pipeline_parallel_degree": meaning.axis("pp"),
        "pipeline_parallel_schedule": meaning.get("@stages.schedule") if meaning.has("@stages") else None,
        "context_parallel_degree": meaning.axis("cp"),
        "context_parallel_rotate_method": None if method is None else "alltoall" if method == "ring" else "allgather",
        "expert_parallel_degree": meaning.axis("ep"),
    }
    file.put("parallelism", **keys)


def _recomputation(meaning: Meaning, file: WrittenFile) -> None:
    mode = meaning.get("@recomputed.mode") if meaning.has("@recomputed") else None
    every = meaning.get("@recomputed.every", 1)
    keys: dict[str, Any]
    if mode is None:
        keys = {"mode": "none"}
    elif mode == "full":
        keys = {"mode": "full"} if every == 1 else {"mode": "selective", "selective_ac_option": str(every)}
    elif mode == "selective":
        keys = {"mode": "selective", "selective_ac_option": "op"}
    else:
        keys = {"mode": "memory_budget", "memory_budget": meaning.get("@recomputed.budget_fraction")}
    if meaning.states("@recomputed.preserve_rng_state"):
        keys["preserve_rng_state"] = meaning.get("@recomputed.preserve_rng_state")
    file.put("", activation_checkpoint=keys)


def _eight_bits(meaning: Meaning, file: WrittenFile) -> None:
    converters = []
    for word, name in (("@float8", "quantize.linear.float8"), ("@mxfp8", "quantize.linear.mx")):
        if not meaning.has(word):
            continue
        converters.append(name)
        excluded = [pattern.strip("*") for pattern in meaning.get(f"{word}.exclude", [])]
        if word == "@float8":
            excluded += ["auto_filter_small_kn"] if meaning.get("@float8.auto") else []
            gathered, emulated = bool(meaning.get("@float8.all_gather")), bool(meaning.get("@float8.emulate"))
            recipe = meaning.get("@float8.recipe")
            file.put(name, recipe_name=recipe, enable_fsdp_float8_all_gather=gathered, emulate=emulated)
        else:
            file.put(name, recipe_name="mxfp8_cublas")
        file.put(name, filter_fqns=excluded or None)
    file.put("model", converters=converters or None)


def _watching(meaning: Meaning, file: WrittenFile) -> None:
    if meaning.has("@profiler"):
        wait, warm, active = (meaning.get(f"@profiler.{key}") for key in ("wait", "warmup", "active"))
        file.put("profiling", enable_profiling=True, profile_freq=wait + warm + active)
        file.put("profiling", profiler_warmup=warm, profiler_active=active)
    if meaning.has("@snapshots"):
        file.put("profiling", enable_memory_snapshot=True)
    for word, name in (("@tensorboard", "tensorboard"), ("@wandb", "wandb")):
        if meaning.has(word):
            file.put("metrics", **{f"enable_{name}": True})
    timeout = meaning.get("run.timeout_s")
    file.put("comm", train_timeout_seconds=None if timeout is None else round(timeout))


def _text(tables: Mapping[str, Any]) -> str:
    return dump(tables)


WRITER = Writer(
    write=write,
    format=_text,
    reread=_text,
    form="toml",
    notes=_NOTES,
    verdicts={"optimizer.use": Verdict.REFUSED},
)
