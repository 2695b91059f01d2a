"""Accelerate's YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from composer3d.exporting.meaning import Meaning
from composer3d.exporting.writers import Writer, WrittenFile

__all__ = ["WRITER"]

_SHORT = MappingProxyType({"bfloat16": "bf16", "float16": "fp16"})
_PROGRAM = "the program's own: Accelerate's file has no such key"
_NOTES = {
    "model": _PROGRAM,
    "data": _PROGRAM,
    "optimizer": _PROGRAM,
    "lr_schedule": _PROGRAM,
    "evaluation": _PROGRAM,
    "ema": _PROGRAM,
    "stability": _PROGRAM,
    "checkpoint": "the program calls accelerator.save_state",
    "run": "of the program, or of the launcher",
    "train": _PROGRAM,
    "train.microbatch": "the batch_size of the program's DataLoader",
    "train.global_batch": "the program's: batch_size x Accelerator(gradient_accumulation_steps=...) x ranks",
    "train.accumulate": "the program's: Accelerator(gradient_accumulation_steps=...)",
    "train.grad_clip": "the program's: accelerator.clip_grad_norm_",
    "train.seed": "the program's: accelerate.utils.set_seed",
    "@sharded.zero": "FSDP gathers parameters in the forward (3) or keeps them (2); ZeRO 1 is DeepSpeed's",
    "@mixed.reduce_dtype": "Accelerate reduces in the dtype of the computation under FSDP",
    "@host.mode": "FSDP offloads all or nothing",
    "@stages": "the program's: pipelines are in no file of Accelerate's",
    "mesh.pp": "the program's: pipelines are in no file of Accelerate's",
    "mesh.ep": "the program's: experts are shared in no file of Accelerate's",
    "profiling": "the program's: Accelerator(log_with=...) and ProfileKwargs",
}


def write(meaning: Meaning, file: WrittenFile) -> None:
    """Fill in the file."""
    is_sharded = meaning.has("@sharded")
    on_cpu = meaning.get("run.device") == "cpu"
    is_parallel = is_sharded or meaning.has("@replicated") or (meaning.world or 1) > 1
    replicated = "MULTI_CPU" if on_cpu else "MULTI_GPU"
    file.put("", compute_environment="LOCAL_MACHINE")
    file.put("", distributed_type="FSDP" if is_sharded else replicated if is_parallel else "NO")
    _ranks(meaning, file)
    if on_cpu:
        file.put("", use_cpu=True)
        if is_sharded:
            file.warnings.append("on CPUs Accelerate drops FSDP and replicates the model")
    _precision(meaning, file)
    if is_sharded:
        _sharded(meaning, file)
    _degrees(meaning, file)
    _compiled(meaning, file)
    file.unsaid |= {"optimizer", "lr_schedule", "train"}
    if meaning.is_run:
        file.warnings.append(_of_the_program(meaning))


def _of_the_program(meaning: Meaning) -> str:
    """Return the numbers that a program has to state itself, defaults too."""
    keys = ("use", "lr", "betas", "eps", "momentum", "weight_decay")
    numbers = {f"optimizer.{key}": meaning.get(f"optimizer.{key}") for key in keys}
    numbers |= {f"train.{key}": meaning.get(f"train.{key}") for key in ("microbatch", "accumulate", "grad_clip")}
    shown = ", ".join(f"{key} = {value}" for key, value in numbers.items() if value is not None)
    return f"the program states what the file cannot: {shown}"


def _ranks(meaning: Meaning, file: WrittenFile) -> None:
    if meaning.world is None:
        file.warnings.append("the file has no num_processes: say how many ranks with --world-size N")
        return
    # Those of a pipeline are in no degree of the file, which have to multiply to its number of ranks.
    stages = meaning.axis("pp") or 1
    world = meaning.world // stages
    per_node = meaning.get("mesh.gpus_per_node", world)
    file.put("", num_processes=world, num_machines=max(world // per_node, 1))
    if stages > 1:
        file.warnings.append(f"num_processes is {world}, that of one stage of {stages}: Accelerate has no pipeline")


def _precision(meaning: Meaning, file: WrittenFile) -> None:
    dtype = meaning.get("@mixed.param_dtype") if meaning.has("@mixed") else None
    if meaning.has("@float8") and meaning.get("@float8.recipe") == "tensorwise":
        file.put("", mixed_precision="fp8")
        gathered = bool(meaning.get("@float8.all_gather"))
        file.put("fp8_config", backend="AO", enable_fsdp_float8_all_gather=gathered)
        return
    file.put("", mixed_precision=_SHORT.get(str(dtype), "no"))


def _sharded(meaning: Meaning, file: WrittenFile) -> None:
    is_whole = meaning.get("@sharded.units") == []
    classes, least = meaning.get("@sharded.unit_classes"), meaning.get("@sharded.unit_numel")
    recomputes = meaning.has("@recomputed") and meaning.get("@recomputed.mode") == "full"
    recomputes = recomputes and meaning.get("@recomputed.every", 1) == 1
    keys = {
        "version": 2,
        "reshard_after_forward": meaning.get("@sharded.zero") == 3,
        "offload_params": meaning.has("@host") and meaning.get("@host.mode") == "all",
        "auto_wrap_policy": "NO_WRAP" if is_whole else "SIZE_BASED_WRAP" if least else "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ",".join(classes) if classes else None,
        "min_num_params": least,
        "forward_prefetch": bool(meaning.get("@sharded.forward_prefetch")) or None,
        "activation_checkpointing": recomputes,
        "activation_checkpointing_offload": True if recomputes and meaning.has("@activations") else None,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    file.put("fsdp_config", **{f"fsdp_{key}": value for key, value in keys.items()})


def _degrees(meaning: Meaning, file: WrittenFile) -> None:
    """Write degrees where more than one axis shares the work; of a single one the number of ranks says it."""
    names = {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard", "tp": "tp", "cp": "cp"}
    method = meaning.get("@sequence.method") if meaning.has("@sequence") else None
    if method == "ulysses":
        names["cp"] = "sp"
    degrees = {name: meaning.axis(axis) for axis, name in names.items()}
    shared = [name for name, degree in degrees.items() if degree is None or degree > 1]
    if len(shared) < 2 and shared not in (["tp"], ["cp"], ["sp"]):
        return
    prefix = "parallelism_config_"
    file.put("parallelism_config", **{f"{prefix}{name}_size": degree for name, degree in degrees.items()})
    if degrees.get("cp", 1) != 1:
        exchange = "alltoall" if method == "ring" else "allgather"
        file.put("parallelism_config", **{f"{prefix}cp_comm_strategy": exchange})


def _compiled(meaning: Meaning, file: WrittenFile) -> None:
    if not meaning.has("@compiled"):
        return
    keys = {
        "backend": str(meaning.get("@compiled.backend")).upper(),
        "mode": meaning.get("@compiled.mode"),
        "use_fullgraph": bool(meaning.get("@compiled.fullgraph")),
        "use_dynamic": meaning.get("@compiled.dynamic"),
        "use_regional_compilation": True,
    }
    file.put("dynamo_config", **{f"dynamo_{key}": value for key, value in keys.items()})


def _text(tables: Mapping[str, Any]) -> str:
    """Return YAML, whose values are JSON's: a bare no would be false."""
    return "".join(f"{line}\n" for line in _lines(tables, ""))


def _lines(tables: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"


WRITER = Writer(write=write, format=_text, reread=json.dumps, form="json", notes=_NOTES, verdicts={})
