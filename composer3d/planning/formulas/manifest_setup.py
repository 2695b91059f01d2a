"""Between manifests and layouts in numbers: what a manifest says, and what would have to be set for another layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer3d.manifest import Manifest
from composer3d.manifest.toml_writer import inline
from composer3d.planning.formulas.layout_numbers import Precision, Setup

__all__ = ["patch", "setup_of"]

_FLOAT8 = Precision(dtype="float8_e4m3fn")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_STATE_PARTS = {"8bit": 0.26, "4bit": 0.14, "fp8": 0.26}  # of AdamW's optimizer state


def setup_of(manifest: Manifest, degrees: Mapping[str, int]) -> Setup:
    """Return what a manifest says, in numbers.

    Args:
        manifest: Typed, with the runner's tables.
        degrees: By axis, resolved.
    """
    plugins = {plugin.name: plugin.instance for plugin in manifest.plugins}
    copies = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    microbatch = manifest.train.microbatch or 1
    pipeline, tensor = plugins.get("pipeline"), plugins.get("tensor_parallel")
    sharded = plugins.get("fsdp2")
    schedule = str(getattr(pipeline, "schedule", "1F1B"))
    stages = getattr(pipeline, "stages_per_rank", None) or (1 if schedule in ("1F1B", "GPipe") else 2)
    return Setup(
        seq_len=manifest.tables["data"].seq_len,
        global_batch=manifest.train.global_batch or microbatch * copies,
        microbatch=microbatch,
        dp_replicate=degrees.get("dp_replicate", 1),
        dp_shard=degrees.get("dp_shard", 1),
        cp=degrees.get("cp", 1),
        tp=degrees.get("tp", 1),
        pp=degrees.get("pp", 1),
        zero=getattr(sharded, "zero", 0) if sharded is not None else 0,
        schedule=schedule,
        stages_per_rank=stages if degrees.get("pp", 1) > 1 else 1,
        sequence_parallel=bool(getattr(tensor, "sequence_parallel", False)),
        recompute=_recompute(plugins.get("activation_checkpoint")),
        kernels="compiled" if "compile" in plugins else "eager",
        precision=_precision(plugins),
        offload="cpu_offload" in plugins,
    )


def _recompute(plugin: Any) -> Any:
    if plugin is None:
        return "none"
    return "full" if plugin.mode == "full" and plugin.every == 1 else "selective"


def _precision(plugins: Mapping[str, Any]) -> Precision:
    """Return the bytes a parameter costs: float32 weights and state, and what `mixed` and others change of it."""
    found = Precision(dtype="float32", compute_bytes=4, gather_bytes=4)
    mixed = plugins.get("mixed")
    if mixed is not None:
        size = _BYTES.get(mixed.param_dtype, 2)
        reduced = _BYTES.get(mixed.reduce_dtype, 4)
        found = Precision(dtype=mixed.param_dtype, compute_bytes=size, gather_bytes=size, reduce_bytes=reduced)
    if "float8" in plugins:
        gathered = 1 if getattr(plugins["float8"], "all_gather", False) else found.gather_bytes
        found = replace(found, dtype=_FLOAT8.dtype, gather_bytes=gathered)
    low = plugins.get("low_bit_optimizer")
    if low is not None:
        found = replace(found, state_bytes=8 * _STATE_PARTS.get(str(low.format), 0.26))
    return found


def patch(manifest: Manifest, own: Setup, setup: Setup) -> tuple[str, ...]:
    """Return what `--set` has to say for a manifest to become another layout; only what differs.

    Args:
        manifest: The given one.
        own: It in numbers.
        setup: What is wanted.
    """
    there = {plugin.name for plugin in manifest.plugins}
    stated = manifest.degrees
    changes = [
        f"mesh.{axis}={getattr(setup, axis)}"
        for axis in ("pp", "dp_replicate", "dp_shard", "tp")
        if stated.get(axis) != getattr(setup, axis) and (axis in stated or getattr(setup, axis) > 1)
        if not (stated.get(axis) is None and getattr(setup, axis) == 1)
    ]
    if setup.microbatch != own.microbatch:
        changes.append(f"train.microbatch={setup.microbatch}")
    if manifest.train.global_batch is None and setup.microbatch * setup.data_parallel != setup.global_batch:
        changes.append(f"train.global_batch={setup.global_batch}")
    changes += _sharding(there, own, setup)
    changes += _scheduling(there, own, setup)
    if setup.precision.dtype != own.precision.dtype:
        changes += ["precision.mixed={}"] if "mixed" not in there else []
        changes += ["precision.float8={}"] if setup.precision.dtype.startswith("float8") else []
    return tuple(changes)


def _sharding(there: set[str], own: Setup, setup: Setup) -> list[str]:
    changes = []
    if setup.zero:
        changes += ["sharding.ddp=false"] if "ddp" in there else []
        if "fsdp2" not in there or setup.zero != own.zero:
            changes.append(f"sharding.fsdp2.zero={setup.zero}")
    elif "ddp" not in there:
        changes += ["sharding.fsdp2=false"] if "fsdp2" in there else []
        changes.append("sharding.ddp={}")
    if setup.tp > 1:
        if "tensor_parallel" not in there or setup.sequence_parallel != own.sequence_parallel:
            changes.append(f"sharding.tensor_parallel.sequence_parallel={inline(setup.sequence_parallel)}")
    elif "tensor_parallel" in there:
        changes.append("sharding.tensor_parallel=false")
    if setup.offload and "cpu_offload" not in there:
        changes.append("sharding.cpu_offload={}")
    elif not setup.offload and "cpu_offload" in there:
        changes.append("sharding.cpu_offload=false")
    return changes


def _scheduling(there: set[str], own: Setup, setup: Setup) -> list[str]:
    changes = []
    if setup.pp > 1:
        if "pipeline" not in there or setup.schedule != own.schedule:
            changes.append(f"scheduling.pipeline.schedule={inline(setup.schedule)}")
        if setup.stages_per_rank > 1 and (own.pp == 1 or setup.stages_per_rank != own.stages_per_rank):
            changes.append(f"scheduling.pipeline.stages_per_rank={setup.stages_per_rank}")
    elif "pipeline" in there:
        changes.append("scheduling.pipeline=false")
    table = "scheduling.activation_checkpoint"
    if setup.recompute == own.recompute:
        return changes
    if setup.recompute == "none":
        return [*changes, f"{table}=false"]
    changes.append(f"{table}.mode={inline(setup.recompute)}")
    if setup.recompute == "selective":
        changes.append(f'{table}.policy="every_second_product"')
    return changes
