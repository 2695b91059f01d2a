"""Mixed precision of an Accelerate file: autocast, FSDP's policy, DeepSpeed's engine, fp8."""

from __future__ import annotations

from composer3d.importing.accelerate.launched import kind_of
from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = ["precision"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def precision(translation: Translation) -> None:
    """Carry mixed precision, which means something else under each distributed type."""
    t, key = translation, "mixed_precision"
    stated = t.get(key)
    kind = "no" if stated in (None, False) else str(stated).lower()
    if kind == "fp8":
        _eight_bits(t)
    elif kind in _DTYPES:
        _sixteen_bits(t, key, _DTYPES[kind])
    elif kind != "no":
        t.wrong(key, "is no precision", hint='write "no", "fp16", "bf16" or "fp8"')
    t.judge(key, "equal", "float32 throughout, or what the model was loaded in")
    t.judge_block("fp8_config", "ignored-there", "mixed_precision is not fp8")


def _sixteen_bits(t: Translation, key: str, dtype: str) -> None:
    t.put("@mixed.param_dtype", dtype, key)
    kind = kind_of(t)
    if kind == "FSDP":
        t.put("@mixed.reduce_dtype", dtype, key, reason="FSDP reduces in it under Accelerate; float32 is better")
        t.put("@mixed.output_dtype", "float32", reason="Accelerate converts the outputs")
        t.judge(key, "carried", f"weights float32, compute and reduction {dtype}", to="@mixed.param_dtype")
    elif kind == "DEEPSPEED":
        t.put("@mixed.reduce_dtype", dtype, key, reason="DeepSpeed reduces in it; float32 is better")
        t.put("@mixed.norms", "as_others", reason="DeepSpeed casts the whole model, norms too")
        if dtype == "float16":
            for name, value in (("growth_interval", 1000), ("hysteresis", 2), ("min_scale", 1.0)):
                t.put(f"@mixed.{name}", value, reason="DeepSpeed's default")
        t.judge(key, "carried", f"weights float32, compute and reduction {dtype}", to="@mixed.param_dtype")
    else:
        t.put("@mixed.norms", "float32", reason="autocast computes norms in float32")
        t.put("@mixed.output_dtype", "float32", reason="Accelerate converts the outputs")
        note = "autocast chooses a dtype for each operator, softmax and losses float32; here weights are cast"
        t.judge(key, "changed", note, to="@mixed.param_dtype")


def _eight_bits(t: Translation) -> None:
    backend = str(t.get("fp8_config.backend") or "AO").upper()
    block = "fp8_config"
    if backend == "AO":
        t.put("@float8.recipe", "tensorwise", "mixed_precision", f"{block}.backend")
        gathered = t.flag(f"{block}.enable_fsdp_float8_all_gather", True)
        reason = None if f"{block}.enable_fsdp_float8_all_gather" in t else "Accelerate's default"
        if kind_of(t) == "FSDP":
            t.put("@float8.all_gather", gathered, f"{block}.enable_fsdp_float8_all_gather", reason=reason)
            t.judge(f"{block}.enable_fsdp_float8_all_gather", "carried", to="@float8.all_gather")
        note = "Accelerate leaves out the first and the last linear layer: write their names in exclude"
        t.judge("mixed_precision", "changed", note, to="@float8.recipe")
        t.judge(f"{block}.backend", "carried", to="@float8.recipe")
        if t.flag(f"{block}.pad_inner_dim"):
            t.judge(f"{block}.pad_inner_dim", "changed", "layers whose dims are no multiples of 16 are left out here")
        t.judge_block(block, "meaningless", "of another backend")
        return
    reason = "MS-AMP keeps 8-bit weights and moments"
    if backend == "TE":
        reason = "TransformerEngine's delayed scaling is another recipe; allowed, products are in float8 tensorwise"
        t.put("@float8.recipe", "tensorwise", f"{block}.backend")
        if t.flag(f"{block}.use_mxfp8_block_scaling"):
            del t.settings[path_of("@float8.recipe")]
            t.put("@mxfp8", None, f"{block}.use_mxfp8_block_scaling")
            t.judge(f"{block}.use_mxfp8_block_scaling", "carried", to="@mxfp8")
            t.judge("mixed_precision", "changed", "torchao's kernels there and here are others", to="@mxfp8")
            t.judge(f"{block}.backend", "changed", "torchao in place of TransformerEngine", to="@mxfp8")
            t.judge_block(block, "missing", "an option of TransformerEngine's")
    t.judge(f"{block}.backend", "refused", reason)
    t.judge("mixed_precision", "derived", "by fp8_config.backend")
    t.judge_block(block, "missing", "an option of that backend's")
