"""Degrees, sharding and dtypes of a torchtitan file."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["layout"]

_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}


def layout(translation: Translation) -> None:
    """Carry the mesh and the plugin of every axis."""
    t = translation
    degrees = {axis: _degree(t, axis, name) for axis, name in _DEGREES.items()}
    _data_parallel(t, degrees)
    _tensor(t, degrees["tp"])
    _pipeline(t, degrees["pp"])
    _context_and_experts(t, degrees)
    _dtypes(t)
    for block in ("parallelism", "experimental"):
        key = f"{block}.enable_compiled_autograd"
        t.judge(key, "missing" if t.flag(key) else "equal", "compiled backwards")


def _home(t: Translation, name: str) -> str:
    """Return the key of a name that moved between versions."""
    blocks = ("parallelism", "training", "experimental")
    return next((f"{block}.{name}" for block in blocks if f"{block}.{name}" in t), f"parallelism.{name}")


def _degree(t: Translation, axis: str, name: str) -> int:
    key = _home(t, name)
    if axis == "dp_shard" and key not in t and "training.data_parallel_degree" in t:
        key = "training.data_parallel_degree"
    default = -1 if axis == "dp_shard" else 1
    degree = t.integer(key, default) or default
    if degree == -1 and axis in ("dp_shard", "dp_replicate"):
        if key in t:
            t.put(f"mesh.{axis}", -1, key)
            t.judge(key, "carried", "the ranks that are left", to=f"mesh.{axis}")
        return -1
    if degree < 1:
        t.wrong(key, "is no degree")
        return 1
    if degree > 1:
        t.put(f"mesh.{axis}", degree, key)
        t.judge(key, "carried", to=f"mesh.{axis}")
    t.judge(key, "equal", "the default here too" if axis != "dp_shard" else "no shards")
    return degree


def _data_parallel(t: Translation, degrees: dict[str, int]) -> None:
    key = "parallelism.fsdp_reshard_after_forward"
    policy = t.text(key, "default")
    if degrees["dp_shard"] == 1 and degrees["dp_replicate"] != 1:
        t.put("@replicated", None, _home(t, _DEGREES["dp_replicate"]), reason="replicas without shards")
        t.judge(key, "meaningless", "nothing is sharded")
        return
    zero = 2 if policy == "never" or (policy == "default" and degrees["pp"] > 1) else 3
    if policy not in ("default", "always", "never"):
        t.wrong(key, "is no policy", hint='write "default", "always" or "never"')
        return
    reason = None if key in t else "torchtitan's default"
    t.put("@sharded.zero", zero, key, reason=reason)
    t.judge(key, "carried", to="@sharded.zero")
    if t.flag("training.enable_cpu_offload"):
        t.carry("training.enable_cpu_offload", "@host.mode", "all")
    t.judge("training.enable_cpu_offload", "equal")


def _tensor(t: Translation, degree: int) -> None:
    switch = _home(t, "disable_loss_parallel")
    if degree > 1:
        t.put("@tensor.plan", "auto", reason="torchtitan's plan is that of its model")
        t.put("@tensor.sequence_parallel", True, reason="torchtitan shards the sequence beside tp")
        old = "training.enable_loss_parallel"
        on = t.flag(old) if old in t else not t.flag(switch)
        reason = None if switch in t or old in t else "torchtitan's default"
        t.put("@tensor.loss_parallel", on, switch, old, reason=reason)
        t.judge(switch, "carried", to="@tensor.loss_parallel")
        t.judge(old, "carried", to="@tensor.loss_parallel")
    for block in ("parallelism", "training"):
        for name in ("disable_loss_parallel", "enable_loss_parallel"):
            t.judge(f"{block}.{name}", "meaningless", "no tensor parallelism")
    for block in ("parallelism", "experimental"):
        t.judge(f"{block}.enable_async_tensor_parallel", "meaningless", "speed")


def _pipeline(t: Translation, degree: int) -> None:
    names = [
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_split_points",
        "pipeline_parallel_microbatches",
    ]
    if degree > 1:
        key = _home(t, "pipeline_parallel_schedule")
        csv = t.text("parallelism.pipeline_parallel_schedule_csv")
        if csv:
            t.carry("parallelism.pipeline_parallel_schedule_csv", "@stages.schedule", csv)
        else:
            name = t.text(key, "1F1B").replace("interleaved", "Interleaved").replace("1f1b", "1F1B")
            reason = None if key in t else "torchtitan's default"
            t.put("@stages.schedule", "GPipe" if name.lower() == "gpipe" else name, key, reason=reason)
        t.judge(key, "carried", to="@stages.schedule")
        _splits(t)
        note = "stages are balanced by composer3d's own split"
        for name in names[2:5]:
            t.judge(_home(t, name), "changed", note, to="@stages.split")
        t.judge("experimental.pipeline_parallel_microbatches", "missing", "write train.microbatch and global_batch")
    for name in names:
        t.judge(_home(t, name), "meaningless", "no pipeline")
    t.judge("parallelism.module_fqns_per_model_part", "meaningless", "no pipeline")


def _splits(t: Translation) -> None:
    """Carry the stages' first modules, which is what a split lists."""
    key = "parallelism.module_fqns_per_model_part"
    parts = t.get(key)
    if isinstance(parts, list) and parts and all(isinstance(part, list) and part for part in parts):
        t.carry(key, "@stages.split", [str(part[0]) for part in parts[1:]], "the first module of each stage")
    key = _home(t, "pipeline_parallel_split_points")
    points = t.get(key)
    points = points.split(",") if isinstance(points, str) and points else points
    if isinstance(points, list) and points:
        t.carry(key, "@stages.split", [str(point).strip() for point in points])


def _context_and_experts(t: Translation, degrees: dict[str, int]) -> None:
    key = _home(t, "context_parallel_rotate_method")
    if degrees["cp"] > 1:
        method = {"allgather": "gather", "alltoall": "ring"}.get(t.text(key, "allgather"), "gather")
        t.put("@sequence.method", method, key, reason=None if key in t else "torchtitan's default")
        t.judge(key, "carried", to="@sequence.method")
        t.judge("parallelism.context_parallel_load_balancer", "equal", "shards are balanced")
    t.judge(key, "meaningless", "no context parallelism")
    t.judge("parallelism.context_parallel_load_balancer", "meaningless", "no context parallelism")
    if degrees["ep"] > 1:
        t.put("@experts", None, reason="experts are shared by mesh.ep ranks")
    tensor = "parallelism.expert_tensor_parallel_degree"
    note = "experts sharded by tensor parallelism too"
    t.judge(tensor, "missing" if (t.integer(tensor, 1) or 1) > 1 else "equal", note)
    for name in ("expert_parallel_a2a_impl", "expert_parallel_comm_backend"):
        t.judge(f"parallelism.{name}", "meaningless", "speed")


def _dtypes(t: Translation) -> None:
    for name, default in (("param", "bfloat16"), ("reduce", "float32")):
        key = f"training.mixed_precision_{name}"
        value = t.text(key, default)
        if value not in ("bfloat16", "float32", "float16"):
            t.wrong(key, "is no dtype")
        elif name == "param":
            t.state(key, "@mixed.param_dtype", value)
        else:
            t.state(key, "@mixed.reduce_dtype", value)
    whole = t.text("training.dtype", "float32")
    t.judge("training.dtype", "equal" if whole == "float32" else "missing", "weights in 16 bits in the optimizer")
