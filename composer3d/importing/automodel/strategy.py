"""Degrees, sharding, dtypes and compilation of a NeMo Automodel recipe."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["compiled", "degrees_of", "eight_bits", "layout"]

_AXES = {"pp_size": "pp", "dp_replicate_size": "dp_replicate", "cp_size": "cp", "tp_size": "tp", "ep_size": "ep"}
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_BLOCK = "distributed"
_DTYPES = ("bfloat16", "float32", "float16")


def _key(t: Translation, name: str) -> str:
    """Return where a name stands: in the block, or in a strategy's own block inside of it."""
    return next((key for key in t.tree.leaves if key == f"{_BLOCK}.{name}"), f"{_BLOCK}.strategy.{name}")


def degrees_of(translation: Translation) -> dict[str, int]:
    """Return the degree of every axis but dp_shard; what is none, or no number, is 1."""
    return {axis: _degree(translation, _key(translation, name)) for name, axis in _AXES.items()}


def _degree(t: Translation, key: str) -> int:
    value = t.get(key)
    return 1 if value is None or str(value).lower() == "none" else t.integer(key, 1, least=1) or 1


def layout(translation: Translation) -> None:
    """Carry the mesh, the strategy and the pipeline."""
    t, degrees = translation, degrees_of(translation)
    for name, axis in _AXES.items():
        if degrees[axis] > 1:
            t.carry(_key(t, name), f"mesh.{axis}", degrees[axis])
        t.judge(_key(t, name), "equal")
    key = _key(t, "dp_size")
    total = None if str(t.get(key)).lower() == "none" else t.integer(key)
    if total:
        t.put("mesh.dp_shard", max(total // degrees["dp_replicate"], 1), key)
        t.judge(key, "carried", to="mesh.dp_shard")
    t.judge(key, "equal", "what the other degrees leave")
    _strategy(t, degrees["pp"])
    _tensor(t, degrees)
    _pipeline(t, degrees["pp"])


def _strategy(t: Translation, stages: int) -> None:
    key = f"{_BLOCK}.strategy" if f"{_BLOCK}.strategy" in t else f"{_BLOCK}._target_"
    name = str(t.get(key, "fsdp2")).lower()
    if "ddp" in name and "fsdp" not in name:
        t.put("@replicated.reducer", "bucketed", key)
        t.judge(key, "carried", to="@replicated.reducer")
    else:
        source, zero = _stage(t, name, stages)
        t.put("@sharded.zero", zero, source, key, reason=None if source in t else "Automodel's default")
        t.judge(key, "carried", to="@sharded.zero")
        t.judge(source, "carried", to="@sharded.zero")
        _dtypes(t)
    for one in ("strategy", "_target_"):
        t.judge(f"{_BLOCK}.{one}", "derived", "says which strategy")
    for one in ("zero_dp_strategy", "reshard_after_forward"):
        t.judge(_key(t, one), "meaningless", "not of this strategy")
    key = _key(t, "activation_checkpointing")
    mode = str(t.get(key)).lower()
    if mode in ("true", "full", "selective"):
        t.put("@recomputed.mode", "selective" if mode == "selective" else "full", key)
        t.judge(
            key,
            "changed" if mode == "selective" else "carried",
            "memory: which operators are kept",
            to="@recomputed.mode",
        )
    t.judge(key, "equal", "off")
    for one in ("offload_policy", "autocast_dtype", "multimodal", "tp_plan"):
        t.judge_block(
            _key(t, one), "missing" if t.has_block(_key(t, one)) else "meaningless", "an option of FSDP2Config"
        )


def _stage(t: Translation, name: str, stages: int) -> tuple[str, int]:
    if "megatron" in name:
        key = _key(t, "zero_dp_strategy")
        return key, min(max(t.integer(key, 3) or 3, 1), 3)
    key = _key(t, "reshard_after_forward")
    return key, 3 if t.flag(key, stages == 1) else 2


def _dtypes(t: Translation) -> None:
    for name, default in (("param_dtype", "bfloat16"), ("reduce_dtype", "float32"), ("output_dtype", "bfloat16")):
        key = _key(t, f"mp_policy.{name}")
        value = str(t.get(key, default)).removeprefix("torch.")
        value = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.get(value, value)
        if value not in _DTYPES:
            t.wrong(key, "is no dtype")
            continue
        t.put(f"@mixed.{name}", value, key, reason=None if key in t else "Automodel's default")
        t.judge(key, "carried", to=f"@mixed.{name}")
    t.judge_block(_key(t, "mp_policy"), "equal", "inputs are cast")


def _tensor(t: Translation, degrees: dict[str, int]) -> None:
    key = _key(t, "sequence_parallel")
    if degrees["tp"] > 1:
        t.put("@tensor.sequence_parallel", t.flag(key), key, reason=None if key in t else "Automodel's default")
        t.judge(key, "carried", to="@tensor.sequence_parallel")
    t.judge(key, "ignored-there" if t.flag(key) else "equal", "no tensor parallelism")
    if degrees["cp"] > 1:
        t.put("@sequence.method", "ring", reason="torch's context parallelism")
    if degrees["ep"] > 1:
        t.put("@experts", None, reason="experts are shared by mesh.ep ranks")
    t.judge_block(f"{_BLOCK}.moe", "meaningless", "how experts are sharded, or recomputed")


def _pipeline(t: Translation, stages: int) -> None:
    block = f"{_BLOCK}.pipeline" if t.has_block(f"{_BLOCK}.pipeline") else "autopipeline"
    if stages > 1:
        key = f"{block}.pp_schedule"
        name = _SCHEDULES.get(str(t.get(key, "1f1b")).lower().replace("_", ""))
        if name is None:
            t.wrong(key, "is no schedule", hint=f"one of: {', '.join(_SCHEDULES.values())}")
        t.put("@stages.schedule", name or "1F1B", key, reason=None if key in t else "Automodel's default")
        t.judge(key, "carried", to="@stages.schedule")
        note = "stages of so many layers there; write stages_per_rank, or split"
        t.judge(f"{block}.layers_per_stage", "changed" if t.get(f"{block}.layers_per_stage") else "meaningless", note)
        parts = t.get(f"{block}.module_fqns_per_model_part")
        if isinstance(parts, list) and parts and all(isinstance(part, list) and part for part in parts):
            split = [str(part[0]) for part in parts[1:]]
            t.carry(f"{block}.module_fqns_per_model_part", "@stages.split", split, "the first module of each stage")
    for name in ("distributed.pipeline", "autopipeline"):
        for leaf in t.tree.below(name):
            if leaf.path[-1] != "pp_microbatch_size":
                t.judge(leaf.key, "meaningless", "how stages are cut out, or no pipeline")


def eight_bits(translation: Translation) -> None:
    """Carry torchao's 8 bits."""
    t = translation
    if t.flag("fp8.enabled"):
        t.put("@float8.recipe", str(t.get("fp8.recipe_name") or "tensorwise"), "fp8.recipe_name", "fp8.enabled")
        for key in ("fp8.enabled", "fp8.recipe_name"):
            t.judge(key, "carried", to="@float8.recipe")
        key = "fp8.enable_fsdp_float8_all_gather"
        t.carry(key, "@float8.all_gather", t.flag(key))
        names = t.get("fp8.filter_fqns")
        if isinstance(names, list) and names:
            t.carry(
                "fp8.filter_fqns", "@float8.exclude", [f"**{name}**" for name in map(str, names)], "names that hold it"
            )
        if t.flag("fp8.emulate"):
            t.carry("fp8.emulate", "@float8.emulate", True)
        t.judge("fp8.filter_fqns", "equal", "none")
        t.judge("fp8.emulate", "equal")
    t.judge_block("fp8", "meaningless", "off, or speed")


def compiled(translation: Translation) -> None:
    """Carry the compiler."""
    t = translation
    key = "compile.enabled" if t.flag("compile.enabled") else _key(t, "enable_compile")
    if t.flag(key):
        t.put("@compiled.backend", str(t.get("compile.backend") or "inductor"), key, "compile.backend")
        t.put("@compiled.fullgraph", t.flag("compile.fullgraph"), "compile.fullgraph", reason="Automodel's default")
        note = "blocks are graphs here, the model there: rounding"
        t.judge(key, "changed" if key == "compile.enabled" else "carried", note, to="@compiled.backend")
        t.judge("compile.backend", "carried", to="@compiled.backend")
        t.judge("compile.fullgraph", "carried", to="@compiled.fullgraph")
        mode = t.get("compile.mode")
        if mode not in (None, "default"):
            t.carry("compile.mode", "@compiled.mode", str(mode))
        if t.flag("compile.dynamic"):
            t.carry("compile.dynamic", "@compiled.dynamic", True)
    t.judge_block("compile", "meaningless", "off, or its default")
    t.judge(_key(t, "enable_compile"), "meaningless", "off")
