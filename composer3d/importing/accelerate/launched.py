"""Devices, ranks, degrees and compilation of an Accelerate file."""

from __future__ import annotations

import math

from composer3d.importing.translation import Translation

__all__ = ["accumulate", "compiled", "degrees", "kind_of", "layout", "machines_of", "megatron", "world_of"]

_KINDS = ("NO", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
_DATA_PARALLEL = ("MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU")


def kind_of(t: Translation) -> str:
    """Return the distributed type; YAML reads a bare NO as false."""
    value = t.get("distributed_type", "NO")
    return "NO" if value is False or value is None else str(value).upper().removeprefix("DISTRIBUTEDTYPE.")


def machines_of(t: Translation) -> int:
    """Return the number of nodes."""
    value = t.get("num_machines")
    return value if isinstance(value, int) and value > 0 and not isinstance(value, bool) else 1


def world_of(t: Translation) -> int | None:
    """Return the number of ranks: --world-size, else num_processes."""
    value = t.get("num_processes")
    stated = value if isinstance(value, int) and value > 0 and not isinstance(value, bool) else None
    return t.options.world_size or stated


def layout(translation: Translation) -> None:
    """Carry the distributed type, the device and the number of ranks."""
    t, kind = translation, kind_of(translation)
    key, t.ranks = "distributed_type", world_of(translation)
    if kind in ("XLA", "TPU"):
        t.judge(key, "refused", "there is no XLA here")
    elif kind == "NO":
        t.judge(key, "equal", "no plugin of data parallelism: one rank")
    elif kind in _DATA_PARALLEL:
        t.put("@replicated.reducer", "bucketed", key)
        t.judge(key, "carried", "DistributedDataParallel", to="@replicated.reducer")
    elif kind == "MEGATRON_LM" and t.is_run:
        t.judge(key, "refused", "Accelerate's Megatron-LM needs model classes of its own, which are not carried over")
    elif kind not in _KINDS:
        t.wrong(key, "is no distributed type")
    t.judge(key, "derived", "the blocks of that type have the options")
    if kind == "MULTI_CPU" or t.flag("use_cpu") or t.flag("cpu"):
        t.put("run.device", "cpu", "use_cpu", "cpu", key)
        note = "Accelerate drops FSDP on CPUs and replicates; here the model is sharded" if kind == "FSDP" else ""
        for name in ("use_cpu", "cpu"):
            t.judge(name, "changed" if note else "carried", note, to="run.device")
    t.judge("use_cpu", "meaningless", "an accelerator is used if there is one")
    t.judge("cpu", "meaningless", "an accelerator is used if there is one")
    _environment(t)
    _ranks(t)


def _environment(t: Translation) -> None:
    environment = str(t.get("compute_environment", "LOCAL_MACHINE")).upper()
    is_far = "SAGEMAKER" in environment
    t.judge("compute_environment", "refused" if is_far else "meaningless", "a launcher of SageMaker" if is_far else "")
    t.judge("fp16", "ignored-there", "an old name of mixed_precision: fp16")


def _ranks(t: Translation) -> None:
    machines, world = machines_of(t), t.integer("num_processes", least=1)
    t.integer("num_machines", least=1)
    if world is not None and machines > 1 and world % machines == 0:
        t.put("mesh.gpus_per_node", world // machines, "num_processes", "num_machines")
        t.judge("num_machines", "derived", f"{world} / {machines} ranks a node", to="mesh.gpus_per_node")
    t.judge("num_machines", "meaningless", "one machine")
    per_node = (world or 1) // machines
    nodes = f"--nnodes {machines} " if machines > 1 else ""
    note = f"torchrun {nodes}--nproc-per-node {per_node}; the data-parallel degree is what the ranks leave"
    t.judge("num_processes", "meaningless", note)


def accumulate(t: Translation, key: str) -> None:
    """Carry a number of micro-batches a step: the loop accumulates as it does under Accelerate."""
    if t.get(key) == "auto":
        t.judge(key, "refused", "filled in by the loop: Accelerator(gradient_accumulation_steps=...)")
        return
    steps = t.integer(key, 1, least=1) or 1
    note = "means of micro-batches are averaged there; here every valid token weighs the same"
    if steps == 1:
        t.judge(key, "equal")
    elif t.is_run:
        t.put("train.accumulate", steps, key)
        t.judge(key, "carried", note, to="train.accumulate")
    else:
        t.loop.append(f"with run.accumulate({steps}):  # {key}, as accelerator.accumulate(model)")
        t.judge(key, "derived", f"the loop's own: run.accumulate({steps}); {note}")


def degrees(translation: Translation) -> None:
    """Carry the degrees of parallelism_config."""
    t, block = translation, "parallelism_config.parallelism_config_"
    for name, axis in (("dp_replicate", "dp_replicate"), ("dp_shard", "dp_shard"), ("tp", "tp"), ("cp", "cp")):
        key = f"{block}{name}_size"
        degree = t.integer(key, 1, least=1) or 1
        if degree > 1 and key in t:
            if axis == "dp_shard" and kind_of(t) in _DATA_PARALLEL:
                t.refuse(key, f"distributed_type {kind_of(t)} shards nothing; Accelerate shards with FSDP alone")
                continue
            t.put(f"mesh.{axis}", degree, key)
            t.judge(key, "carried", to=f"mesh.{axis}")
            if axis == "tp":
                t.put("@tensor.plan", "auto", reason="Accelerate takes transformers' tp_plan")
            if axis == "cp":
                method = "gather" if str(t.get(f"{block}cp_comm_strategy", "allgather")) == "allgather" else "ring"
                t.put("@sequence.method", method, f"{block}cp_comm_strategy", reason="Accelerate's exchange")
                t.judge(f"{block}cp_comm_strategy", "carried", to="@sequence.method")
        t.judge(key, "equal")
    sequence = f"{block}sp_size"
    degree = t.integer(sequence, 1, least=1) or 1
    if degree > 1:
        t.put("mesh.cp", degree, sequence)
        t.put("@sequence.method", "ulysses", sequence, reason="heads are exchanged")
        t.judge(sequence, "carried", to="mesh.cp")
    t.judge(sequence, "equal")
    _product(t, block)
    t.judge_block("parallelism_config", "meaningless", "how attention is exchanged is this plugin's method")


def _product(t: Translation, block: str) -> None:
    """Refuse degrees that Accelerate raises on: of two exchanges of sequences, or of another number of ranks."""
    names = [f"{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    sizes = {name: t.integer(f"{block}{name}", 1, least=1) or 1 for name in names if f"{block}{name}" in t}
    if min(sizes.get("cp_size", 1), sizes.get("sp_size", 1)) > 1:
        t.refuse(f"{block}sp_size", f"cp_size = {sizes['cp_size']} shards the sequence already: Accelerate raises")
    product, world = math.prod(sizes.values()), world_of(t)
    is_deepspeeds = sizes.get("sp_size", 1) > 1 and str(t.get(f"{block}sp_backend", "deepspeed")) == "deepspeed"
    if world is None or product in (1, world) or is_deepspeeds:  # DeepSpeed forms those groups itself
        return
    stated = " x ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)
    note = f"{stated} are {product} ranks, and the run has {world}: Accelerate raises"
    t.refuse("num_processes" if "num_processes" in t else f"{block}{next(iter(sizes))}", note)


def megatron(translation: Translation) -> None:
    """Carry the degrees of Megatron-LM; its block counts for that distributed type alone."""
    t, block = translation, "megatron_lm_config.megatron_lm_"
    if kind_of(t) != "MEGATRON_LM":
        note = "" if not t.has_block("megatron_lm_config") else f"distributed_type is {kind_of(t)}"
        t.judge_block("megatron_lm_config", "ignored-there", note)
        return
    for name, axis in (("tp_degree", "tp"), ("pp_degree", "pp"), ("context_parallel_size", "cp")):
        degree = t.integer(f"{block}{name}", 1, least=1) or 1
        if degree > 1:
            t.put(f"mesh.{axis}", degree, f"{block}{name}")
            t.judge(f"{block}{name}", "carried", to=f"mesh.{axis}")
        t.judge(f"{block}{name}", "equal")
    if "mesh.tp" in t.settings:
        t.put("@tensor.sequence_parallel", t.flag(f"{block}sequence_parallelism"), f"{block}sequence_parallelism")
        t.judge(f"{block}sequence_parallelism", "carried", to="@tensor.sequence_parallel")
    if "mesh.pp" in t.settings:
        t.put("@stages.schedule", "1F1B", reason="Megatron's schedule")
    if t.flag(f"{block}use_distributed_optimizer"):
        t.put("@sharded.zero", 1, f"{block}use_distributed_optimizer")
        t.judge(f"{block}use_distributed_optimizer", "carried", to="@sharded.zero")
    else:
        t.put("@replicated", None, f"{block}use_distributed_optimizer", reason="Megatron's data parallelism")
        t.judge(f"{block}use_distributed_optimizer", "carried", to="@replicated")
    _microbatches(t, f"{block}num_micro_batches")
    t.judge(f"{block}recompute_activations", "equal", "selective: attention keeps no scores here")
    clip = t.number(f"{block}gradient_clipping", 1.0)
    if clip is not None:
        t.put("train.grad_clip", float(clip) or float("inf"), f"{block}gradient_clipping", reason="Megatron's")
        t.judge(f"{block}gradient_clipping", "carried", to="train.grad_clip")
    t.judge_block("megatron_lm_config", "missing", "an option of Megatron-LM's")


def _microbatches(t: Translation, key: str) -> None:
    """Carry the number of micro-batches of a rank: of one sample each, where only the loop knows their size."""
    count, world = t.integer(key, 1, least=1) or 1, world_of(t)
    axes = [t.settings[path].value for path in ("mesh.tp", "mesh.pp", "mesh.cp") if path in t.settings]
    if count > 1 and world is not None and world % math.prod(axes) == 0:
        t.put("train.microbatch", 1, reason="samples of a micro-batch are the loop's: write them here")
        t.put("train.global_batch", count * world // math.prod(axes), key, "num_processes")
        t.judge(key, "derived", "of every data-parallel rank, of one sample each", to="train.global_batch")
    t.judge(
        key, "equal" if count == 1 else "missing", "write train.global_batch: micro-batches of all ranks, in samples"
    )


def compiled(translation: Translation) -> None:
    """Carry compilation; here blocks are compiled by themselves."""
    t, block = translation, "dynamo_config.dynamo_"
    key = f"{block}backend" if f"{block}backend" in t else "dynamo_backend"
    backend = str(t.get(key) or "NO").lower()
    if backend not in ("no", "false", "none"):
        t.put("@compiled.backend", backend, key)
        whole = f"{block}use_regional_compilation"
        note = (
            ""
            if t.flag(whole)
            else "the whole model is one graph there, blocks are graphs here: numbers may round otherwise"
        )
        t.judge(key, "changed" if note else "carried", note, to="@compiled.backend")
        t.judge(whole, "equal" if t.flag(whole) else "changed", note)
        full = t.flag(f"{block}use_fullgraph")
        reason = None if f"{block}use_fullgraph" in t else "Accelerate's default"
        t.put("@compiled.fullgraph", full, f"{block}use_fullgraph", reason=reason)
        t.judge(f"{block}use_fullgraph", "carried", to="@compiled.fullgraph")
        mode = t.get(f"{block}mode")
        if isinstance(mode, str) and mode != "default":
            t.carry(f"{block}mode", "@compiled.mode", mode)
        t.judge(f"{block}mode", "equal")
        if f"{block}use_dynamic" in t:
            t.carry(f"{block}use_dynamic", "@compiled.dynamic", t.flag(f"{block}use_dynamic"))
    for name in ("dynamo_backend", "dynamo_config"):
        t.judge_block(name, "meaningless", "nothing is compiled")
