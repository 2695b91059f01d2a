"""FSDP and DeepSpeed as an Accelerate file configures them."""

from __future__ import annotations

from composer3d.importing.accelerate.launched import accumulate, kind_of, machines_of, world_of
from composer3d.importing.fully_sharded import fully_sharded
from composer3d.importing.translation import Translation

__all__ = ["deepspeed", "sharded"]


def sharded(translation: Translation) -> None:
    """Carry fsdp_config, which counts for that distributed type alone."""
    t = translation
    if kind_of(t) == "FSDP":
        fully_sharded(
            t,
            lambda name: f"fsdp_config.fsdp_{name}",
            machines=machines_of(t),
            world=world_of(t),
            wraps="NO_WRAP",
        )
        t.judge("fsdp_config", "equal", "all defaults")
    t.judge_block("fsdp_config", "ignored-there", f"distributed_type is {kind_of(t)}")


def deepspeed(translation: Translation) -> None:
    """Carry deepspeed_config, or name the file that has the options."""
    t, block = translation, "deepspeed_config"
    if kind_of(t) != "DEEPSPEED":
        t.judge_block(block, "ignored-there", f"distributed_type is {kind_of(t)}")
        return
    file = t.get(f"{block}.deepspeed_config_file")
    if file not in (None, "", "none"):
        t.judge(
            f"{block}.deepspeed_config_file", "refused", f"the options stand in that file: composer3d import {file}"
        )
    key = f"{block}.zero_stage"
    stage = t.integer(key, 2)
    if stage not in (0, 1, 2, 3):
        t.wrong(key, "is no ZeRO stage")
        return
    reason = None if key in t else "Accelerate's default"
    if stage:
        t.put("@sharded.zero", stage, key, reason=reason)
    else:
        t.put("@replicated", None, key)
    t.judge(key, "carried", to="@sharded.zero" if stage else "@replicated")
    _offloaded(t, block, stage)
    accumulate(t, f"{block}.gradient_accumulation_steps")
    _clipping(t, f"{block}.gradient_clipping")
    t.judge(f"{block}.zero3_init_flag", "equal", "weights are made in their place")
    t.judge(f"{block}.zero3_save_16bit_model", "equal", "composer3d export")
    t.judge(f"{block}.deepspeed_moe_layer_cls_names", "equal", "a block is gathered whole, its experts with it")
    for name in ("enable_msamp", "msamp_opt_level"):
        t.judge(f"{block}.{name}", "refused" if t.flag(f"{block}.enable_msamp") else "meaningless", "MS-AMP")
    t.judge(f"{block}.seq_parallel_communication_data_type", "missing", "heads are exchanged in their own dtype")
    t.judge_block(block, "meaningless", "the launcher's")


def _offloaded(t: Translation, block: str, stage: int) -> None:
    state_key, parameter_key = f"{block}.offload_optimizer_device", f"{block}.offload_param_device"
    state, parameters = str(t.get(state_key) or "none").lower(), str(t.get(parameter_key) or "none").lower()
    if stage < 3 and parameters != "none":
        t.judge(parameter_key, "ignored-there", f"parameters are offloaded at stage 3 alone, and this is stage {stage}")
        parameters = "none"
    if parameters == "nvme":
        t.judge(parameter_key, "refused", "parameters on a disk (ZeRO-Infinity); allowed, they are in host memory")
    if parameters != "none":
        mode = "parameters" if state == "none" else "all"
        t.put("@host.mode", mode, parameter_key, state_key)
        t.judge(parameter_key, "carried", to="@host.mode")
        t.judge(state_key, "carried" if state != "none" else "equal", to="@host.mode" if state != "none" else None)
    elif state == "cpu":
        t.put("@host.mode", "optimizer", state_key)
        note = (
            "memory: the device steps the state piece by piece; gradients stay on it, which DeepSpeed keeps on the host"
        )
        t.judge(state_key, "changed", note, to="@host.mode")
    elif state == "nvme":
        path = f"{block}.offload_optimizer_nvme_path"
        t.put("@disk.folder", str(t.get(path) or "."), path, state_key)
        t.judge(state_key, "carried", to="@disk.folder")
        t.judge(path, "carried", to="@disk.folder")
    for name in ("offload_optimizer_device", "offload_param_device"):
        t.judge(f"{block}.{name}", "equal", "nothing is offloaded")
    for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        t.judge(f"{block}.{name}", "meaningless", "nothing is on a disk")


def _clipping(t: Translation, key: str) -> None:
    if t.get(key) in (None, "auto", "none"):
        t.put("train.grad_clip", 1.0, key, reason='Accelerate makes 1.0 of "auto", which is its default')
        t.judge(key, "carried", 'Accelerate makes 1.0 of "auto"', to="train.grad_clip")
        return
    norm = t.number(key)
    if norm is not None:
        t.put("train.grad_clip", float(norm) if norm > 0 else float("inf"), key)
        t.judge(key, "carried", to="train.grad_clip")
