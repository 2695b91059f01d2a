"""16-bit training of a DeepSpeed file: dtypes of weights, compute and reduction, and the loss scale."""

from __future__ import annotations

from composer3d.importing.automatic import resolve
from composer3d.importing.translation import Translation

__all__ = ["foreign_precision", "precision"]

_DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "torch.float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "torch.float32": "float32",
}
_OFF = "its block is not enabled"


def precision(translation: Translation) -> None:
    """Carry fp16 or bf16: compute in 16 bits on float32 weights, reduced in 16 bits unless the file says otherwise."""
    t = translation
    brain = "bfloat16" if t.has_block("bfloat16") and not t.has_block("bf16") else "bf16"
    half_on, brain_on = _enabled(t, "fp16", "fp16"), _enabled(t, brain, "bf16")
    autocast_on = t.flag("torch_autocast.enabled") if "torch_autocast.enabled" in t else False
    if half_on and brain_on:
        t.wrong(f"{brain}.enabled", "cannot stand beside fp16.enabled = true: DeepSpeed raises")
        t.judge("fp16.enabled", "refused", f"cannot stand beside {brain}.enabled = true: DeepSpeed raises")
        return
    dtype = "float16" if half_on else "bfloat16" if brain_on else None
    if dtype is not None:
        block = "fp16" if half_on else brain
        t.put("@mixed.param_dtype", dtype, f"{block}.enabled")
        t.put("@mixed.norms", "as_others", reason="DeepSpeed casts the whole model, norms too")
        t.judge(f"{block}.enabled", "carried", "weights stay float32 in the optimizer", to="@mixed.param_dtype")
        _reduction(t, dtype)
    elif autocast_on:
        _autocast(t)
    (_scaling if half_on else _unused)(t, "fp16")
    (_brain if brain_on else _unused)(t, brain)
    for block in ("bf16", "bfloat16", "torch_autocast"):
        _unused(t, block)
    _other_dtypes(t, dtype)


def _enabled(t: Translation, block: str, argument: str) -> bool:
    key = f"{block}.enabled"
    if t.get(key) == "auto":
        return bool(resolve(t, key, argument))
    return t.flag(key)


def _reduction(t: Translation, dtype: str) -> None:
    stated = t.get("communication_data_type")
    key = "communication_data_type"
    if stated is None:
        t.put(
            "@mixed.reduce_dtype", dtype, reason=f"DeepSpeed reduces in {dtype}; float32 is this key's better default"
        )
        t.judge(key, "equal")
        return
    known = _DTYPES.get(str(stated))
    if known is None:
        t.wrong(key, "is no dtype")
        return
    t.carry(key, "@mixed.reduce_dtype", known)


_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def _scaling(t: Translation, block: str) -> None:
    scale = t.number("fp16.loss_scale", 0) or 0
    if scale:
        t.carry("fp16.loss_scale", "@mixed.static_scale", float(scale))
        for name in _DYNAMIC:
            t.judge(f"fp16.{name}", "ignored-there", "the scale is static")
    else:
        t.judge("fp16.loss_scale", "equal", "the scale is dynamic")
        _dynamic(t)
    t.judge("fp16.auto_cast", "equal", "inputs of the model are cast")
    key = "fp16.fp16_master_weights_and_grads"
    if t.flag(key):
        t.judge(key, "refused", "float16 weights in the optimizer: no float32 copy keeps small updates")
    t.judge(key, "equal", "weights stay float32 in the optimizer")


def _dynamic(t: Translation) -> None:
    power = t.number("fp16.initial_scale_power", 16) or 0
    if abs(power) > 64:
        t.wrong("fp16.initial_scale_power", "is beyond float32")
        power = 16
    reason = None if "fp16.initial_scale_power" in t else "DeepSpeed's default, 2^16"
    t.put("@mixed.initial_scale", 2.0**power, "fp16.initial_scale_power", reason=reason)
    t.judge("fp16.initial_scale_power", "carried", f"2^{power:g}", to="@mixed.initial_scale")
    window = t.integer("fp16.loss_scale_window", 1000, least=1) or 1000
    reason = None if "fp16.loss_scale_window" in t else "DeepSpeed's default"
    t.put("@mixed.growth_interval", window, "fp16.loss_scale_window", reason=reason)
    t.judge("fp16.loss_scale_window", "carried", to="@mixed.growth_interval")
    patience = t.integer("fp16.hysteresis", 2, least=1) or 2
    if patience > 1:
        t.state("fp16.hysteresis", "@mixed.hysteresis", patience)
    t.judge("fp16.hysteresis", "equal", "the first overflow lowers the scale")
    if patience > 1 and t.flag("fp16.consecutive_hysteresis"):
        t.carry("fp16.consecutive_hysteresis", "@mixed.hysteresis_restored", "step")
    t.judge("fp16.consecutive_hysteresis", "equal")
    lowest = t.number("fp16.min_loss_scale", 1.0)
    if lowest is not None and lowest != int(lowest):
        t.wrong("fp16.min_loss_scale", "must be a whole number: DeepSpeed refuses any other")
        return
    if lowest:
        t.state("fp16.min_loss_scale", "@mixed.min_scale", float(min(lowest, 2.0**power)))
    t.judge("fp16.min_loss_scale", "changed", "no least scale there; the run stops below 2^-24 here")


def _brain(t: Translation, block: str) -> None:
    key = f"{block}.check_grad_overflow" if f"{block}.check_grad_overflow" in t else f"{block}.check_overflow"
    if t.flag(key, True):
        reason = None if key in t else "DeepSpeed's default since 0.19.3"
        t.put("stability.on_nonfinite", "skip", key, reason=reason)
        t.judge(
            key,
            "carried",
            "and stability.max_skips ends the run, which DeepSpeed goes on with",
            to="stability.on_nonfinite",
        )
    t.judge(key, "changed", "DeepSpeed steps with gradients that are not finite; here the run stops")
    t.judge(f"{block}.immediate_grad_update", "meaningless", "memory")
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if t.flag(f"{block}.{name}"):
            t.judge(f"{block}.{name}", "refused", "bfloat16 in the optimizer loses updates below 2^-8 of a weight")
        t.judge(f"{block}.{name}", "equal", "the optimizer keeps float32")


def _autocast(t: Translation) -> None:
    stated = str(t.get("torch_autocast.dtype", "bfloat16"))
    dtype = _DTYPES.get(stated)
    if dtype is None:
        t.wrong("torch_autocast.dtype", "is no dtype")
        return
    note = "autocast chooses a dtype for each operator; here weights are cast, and norms stay float32"
    t.put("@mixed.param_dtype", dtype, "torch_autocast.dtype", "torch_autocast.enabled")
    t.put("@mixed.norms", "float32", reason="autocast computes norms in float32")
    t.put("@mixed.reduce_dtype", "float32", reason="autocast keeps gradients in float32")
    t.judge("torch_autocast.enabled", "changed", note, to="@mixed.param_dtype")
    t.judge("torch_autocast.dtype", "carried", to="@mixed.param_dtype")
    t.judge("torch_autocast.lower_precision_safe_modules", "missing", "dtypes by module class")


def _unused(t: Translation, block: str) -> None:
    t.judge_block(block, "meaningless", _OFF)


def _other_dtypes(t: Translation, dtype: str | None) -> None:
    if dtype is None:
        t.judge("communication_data_type", "changed", "without 16-bit training reductions are float32 here")
    buffers = t.get("data_types.buffer_dtype")
    if buffers is not None and dtype is not None and str(buffers) in _DTYPES:
        t.carry("data_types.buffer_dtype", "@mixed.buffer_dtype", _DTYPES[str(buffers)])
    t.judge("data_types.buffer_dtype", "missing", "dtypes of buffers without mixed precision")
    stated = t.get("data_types.grad_accum_dtype")
    if _DTYPES.get(str(stated)) == "float32" or stated is None:
        t.judge("data_types.grad_accum_dtype", "equal", "gradients are accumulated in float32")
    t.judge("data_types.grad_accum_dtype", "changed", f"{stated} there, float32 here, which is exact")
    t.judge("data_types.param_dtype", "equal", "it has to agree with fp16 and bf16")


def foreign_precision(translation: Translation) -> None:
    """Refuse Apex and MS-AMP where they are switched on."""
    for block, reason in (("amp", "Apex patches operators"), ("msamp", "MS-AMP keeps 8-bit weights and moments")):
        if translation.get(f"{block}.enabled") is False or not translation.has_block(block):
            translation.judge_block(block, "meaningless", _OFF)
        translation.judge_block(block, "refused", f"{reason}: no counterpart; fp16, bf16 or [@float8] are near")
