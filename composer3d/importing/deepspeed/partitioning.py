"""ZeRO, offloading and model parallelism of a DeepSpeed file."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["layout", "offload", "zero"]

_ZERO = "zero_optimization"


def stage_of(translation: Translation) -> int:
    """Return the ZeRO stage; before version 0.2 the block was true or false."""
    if f"{_ZERO}" in translation and isinstance(translation.get(_ZERO), bool):
        return int(translation.get(_ZERO))
    stage = translation.integer(f"{_ZERO}.stage", 0)
    return 0 if stage is None else stage


def zero(translation: Translation) -> None:
    """Carry the stage: 0 replicates, 1 to 3 shard."""
    t, stage = translation, stage_of(translation)
    if _ZERO in t and not isinstance(t.get(_ZERO), bool):
        return t.wrong(_ZERO, "is no table: DeepSpeed reads keys inside of it", hint='write {"stage": 3}, say')
    key = _ZERO if _ZERO in t else f"{_ZERO}.stage"
    if stage not in (0, 1, 2, 3):
        t.wrong(key, "is no ZeRO stage", hint="write 0, 1, 2 or 3")
        return
    if stage:
        t.put("@sharded.zero", stage, key)
        t.judge(key, "carried", to="@sharded.zero")
    else:
        reason = None if key in t else "DeepSpeed's default: no ZeRO"
        t.put("@replicated", None, key, reason=reason)
        t.judge(key, "carried", "stage 0 replicates the model", to="@replicated")
    _groups(t, stage)
    _quantised(t, stage)


def _groups(t: Translation, stage: int) -> None:
    secondary = t.integer(f"{_ZERO}.zero_hpz_partition_size", 1) or 1
    if secondary > 1 and stage == 3:
        note = "a copy of the weights is kept after the forward among so many ranks"
        t.carry(f"{_ZERO}.zero_hpz_partition_size", "@sharded.reshard_after_forward", secondary, note)
    t.judge(f"{_ZERO}.zero_hpz_partition_size", "ignored-there" if secondary > 1 else "equal", "it belongs to stage 3")
    key = f"{_ZERO}.mics_shard_size"
    size = t.integer(key, -1) or -1
    if size > 0 and stage == 3:
        t.carry(key, "mesh.dp_shard", size, "MiCS shards in groups of so many ranks and replicates between them")
        t.put("mesh.dp_replicate", -1, key, reason="the groups")
    t.judge(key, "ignored-there" if size > 0 else "equal", "it belongs to stage 3")


def _quantised(t: Translation, stage: int) -> None:
    """Carry ZeRO++'s quantised collectives: codecs of another rounding and block size."""
    for name, what, codec in (("weights", "weights", "int8"), ("gradients", "gradients", "int4")):
        key = f"{_ZERO}.zero_quantized_{name}"
        if t.flag(key) and stage == 3:
            note = f"ZeRO++'s kernels there, {codec} in blocks of 256 here: numbers differ by the rounding"
            t.carry(key, f"@coded.{what}", codec, note, verdict="changed")
        t.judge(key, "ignored-there" if t.flag(key) else "meaningless", "it belongs to stage 3")
    key = f"{_ZERO}.zero_quantized_nontrainable_weights"
    t.judge(key, "missing" if t.flag(key) else "meaningless", "codecs of frozen weights alone")
    t.judge(f"{_ZERO}.zeropp_loco_param", "missing", "errors of quantised gradients are not fed back")


def offload(translation: Translation) -> None:
    """Carry what is kept in host memory or on a disk."""
    t, stage = translation, stage_of(translation)
    state, parameters = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
    state_at = str(t.get(f"{state}.device", "cpu" if t.flag(f"{_ZERO}.cpu_offload") else "none")).lower()
    old = t.flag(f"{_ZERO}.cpu_offload_params") or t.flag(f"{_ZERO}.cpu_offload_param")
    parameters_at = str(t.get(f"{parameters}.device", "cpu" if old else "none")).lower()
    for key, place in ((f"{state}.device", state_at), (f"{parameters}.device", parameters_at)):
        if place not in ("none", "cpu", "nvme") and key in t:
            t.wrong(key, "is no device", hint='write "none", "cpu" or "nvme"')
            return
    if stage < 3 and parameters_at != "none":
        for key in (parameters, f"{_ZERO}.cpu_offload_params", f"{_ZERO}.cpu_offload_param"):
            t.judge_block(key, "ignored-there", f"parameters are offloaded at stage 3 alone, and this is stage {stage}")
        parameters_at = "none"
    if stage == 0 and state_at != "none":
        t.judge_block(state, "ignored-there", "stage 0 offloads nothing")
        t.judge(f"{_ZERO}.cpu_offload", "ignored-there", "stage 0 offloads nothing")
        state_at = "none"
    _parameters(t, parameters, parameters_at, state_at)
    _state(t, state, parameters_at, state_at)
    for key in (state, parameters, f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_params", f"{_ZERO}.cpu_offload_param"):
        t.judge_block(key, "meaningless", "nothing is offloaded there")


def _parameters(t: Translation, block: str, parameters_at: str, state_at: str) -> None:
    key = f"{block}.device"
    if parameters_at == "nvme":
        t.judge(key, "refused", "parameters on a disk (ZeRO-Infinity); allowed, they are kept in host memory")
        t.judge(f"{block}.nvme_path", "missing", "parameters on a disk")
    t.judge(f"{block}.max_in_cpu", "meaningless", "memory")
    if parameters_at == "none":
        return
    mode = "parameters" if state_at == "none" else "all"
    t.put("@host.mode", mode, key, f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.cpu_offload_params")
    for name in (key, f"{_ZERO}.cpu_offload_params", f"{_ZERO}.cpu_offload_param"):
        t.judge(name, "carried", to="@host.mode")


def _state(t: Translation, block: str, parameters_at: str, state_at: str) -> None:
    key, old = f"{block}.device", f"{_ZERO}.cpu_offload"
    if state_at == "none":
        return
    if parameters_at != "none":
        note = "parameters, gradients and state are in host memory, and the host steps"
        if state_at == "nvme":
            note = "with parameters in host memory the state is there too, not on the disk"
        t.judge(key, "changed" if state_at == "nvme" else "carried", note, to="@host.mode")
        t.judge(f"{block}.nvme_path", "missing", note)
    elif state_at == "cpu":
        note = (
            "the state is in host memory and the device steps; DeepSpeed keeps gradients there too, and the CPU steps"
        )
        t.put("@host.mode", "optimizer", key, old)
        t.judge(key, "changed", f"memory: {note}", to="@host.mode")
        t.judge(old, "changed", f"memory: {note}", to="@host.mode")
    else:
        t.put("@disk.folder", str(t.get(f"{block}.nvme_path") or "."), f"{block}.nvme_path", key)
        t.judge(key, "carried", to="@disk.folder")
        t.judge(f"{block}.nvme_path", "carried", to="@disk.folder")
    ratio = t.number(f"{block}.ratio", 1.0)
    note = "a share of the parameters; cpu_offload.parameters chooses by pattern, and here all are offloaded"
    t.judge(f"{block}.ratio", "equal" if ratio == 1 else "changed", "" if ratio == 1 else f"memory: {note}")
    t.judge(f"{block}.nvme_path", "meaningless", "nothing is on a disk")


def layout(translation: Translation) -> None:
    """Carry the degrees of pipelines, tensor, sequence and expert parallelism."""
    t = translation
    _pipeline(t)
    _tensor(t)
    degree = t.integer("sequence_parallel_size", 1, least=1) or 1
    if degree > 1:
        t.put("mesh.cp", degree, "sequence_parallel_size")
        t.put("@sequence.method", "ulysses", reason="DeepSpeed exchanges heads (Ulysses)")
        t.judge("sequence_parallel_size", "carried", to="mesh.cp")
    t.judge("sequence_parallel_size", "equal")
    size = t.integer("expert_parallel.autoep_size", t.integer("expert_parallel.size", 1), least=1) or 1
    if t.has_block("expert_parallel") and size > 1:
        t.put("mesh.ep", size, "expert_parallel.autoep_size", "expert_parallel.size")
        t.put("@experts", None, reason="experts are shared by mesh.ep ranks")
        for name in ("autoep_size", "size"):
            t.judge(f"expert_parallel.{name}", "carried", to="mesh.ep")
    t.judge_block("expert_parallel", "missing", "options of DeepSpeed's AutoEP; composer3d finds the experts itself")


def _pipeline(t: Translation) -> None:
    stages = t.get("pipeline.stages")
    if stages not in (None, "auto") and (number := t.integer("pipeline.stages", least=1)) and number > 1:
        t.put("mesh.pp", number, "pipeline.stages")
        t.put("@stages.schedule", "1F1B", reason="DeepSpeed's schedule")
        t.judge("pipeline.stages", "carried", to="mesh.pp")
        t.judge("pipeline.partition", "changed", "stages are balanced by composer3d's own split", to="@stages.split")
        interval = t.integer("pipeline.activation_checkpoint_interval", 0)
        if interval:
            t.put("@recomputed.mode", "full", "pipeline.activation_checkpoint_interval")
            note = "numbers are equal" if interval == 1 else f"runs of {interval} layers are recomputed as one there"
            verdict = "carried" if interval == 1 else "changed"
            t.judge("pipeline.activation_checkpoint_interval", verdict, note, to="@recomputed.mode")
    t.judge("pipeline.stages", "meaningless", "one stage")
    t.judge("pipeline.seed_layers", "refused" if t.flag("pipeline.seed_layers") else "equal", "seeds of single layers")
    t.judge_block("pipeline", "meaningless", "one stage, or memory")


def _tensor(t: Translation) -> None:
    key = "tensor_parallel.autotp_size" if "tensor_parallel.autotp_size" in t else "tensor_parallel.tp.tp_size"
    degree = t.integer(key, 1, least=0) or 1
    if degree > 1:
        t.put("mesh.tp", degree, key)
        t.put("@tensor.plan", "auto", reason="AutoTP finds the layers, and so does this plan")
        t.judge(key, "carried", to="mesh.tp")
        note = "layers by regular expressions of weights; write their modules in plan of [@tensor]"
        t.judge_block("tensor_parallel.partition_config", "missing", note)
    t.judge("tensor_parallel.tp_overlap_comm", "meaningless", "speed")
    t.judge_block("tensor_parallel", "meaningless", "one rank, or how layers are found")
