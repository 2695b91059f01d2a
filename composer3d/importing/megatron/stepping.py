"""Dtypes and optimizer of a Megatron-LM run."""

from __future__ import annotations

from composer3d.errors import Problem
from composer3d.importing.translation import Translation

__all__ = ["optimizer", "precision"]

_CHANGING_DECAY = "a weight decay that changes in the run"

_TITLE = "Megatron-LM's default"
_REFUSED = ("lion", "dist_muon", "soap", "adopt", "dion")


def precision(translation: Translation) -> None:
    """Carry 16 bits, which are reduced in float32 under bf16, and 8 bits of one recipe."""
    t = translation
    key = "bf16" if t.flag("bf16") else "fp16"
    if t.flag("bf16") and t.flag("fp16"):
        t.wrong("fp16", "cannot stand beside bf16: Megatron-LM raises", hint="leave one of them out")
    is_on = t.flag(key)
    if is_on:
        t.carry(key, "@mixed.param_dtype", "bfloat16" if key == "bf16" else "float16")
        _reduction(t, key)
    if is_on and key == "fp16":
        _scaling(t)
    for name in ("bf16", "fp16"):
        t.judge(name, "equal", "float32")
    t.judge("params_dtype", "derived", "of bf16 and fp16")
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        t.judge(name, "meaningless", "fp16 is off")
    for name in ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"):
        t.judge(name, "meaningless", "float32, or another flag decides")
    _eight_bits(t)


def _reduction(t: Translation, key: str) -> None:
    if key == "bf16" and t.flag("grad_reduce_in_bf16"):
        t.carry("grad_reduce_in_bf16", "@mixed.reduce_dtype", "bfloat16")
    elif key == "bf16" or t.flag("accumulate_allreduce_grads_in_fp32"):
        t.put("@mixed.reduce_dtype", "float32", "accumulate_allreduce_grads_in_fp32", reason="Megatron-LM's under bf16")
        t.judge("accumulate_allreduce_grads_in_fp32", "carried", to="@mixed.reduce_dtype")
    else:
        t.put("@mixed.reduce_dtype", "float16", reason=_TITLE)


def _scaling(t: Translation) -> None:
    static = t.number("loss_scale")
    if static:
        t.carry("loss_scale", "@mixed.static_scale", float(static))
        for name in ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"):
            t.judge(name, "ignored-there", "the scale is static")
    else:
        first = float(t.number("initial_loss_scale", 2.0**32) or 2.0**32)
        t.state("initial_loss_scale", "@mixed.initial_scale", first)
        t.state("loss_scale_window", "@mixed.growth_interval", int(t.number("loss_scale_window", 1000) or 1000))
        patience = t.integer("hysteresis", 2, least=1) or 2
        if patience > 1:
            t.state("hysteresis", "@mixed.hysteresis", patience)
        t.judge("hysteresis", "equal", "the first overflow lowers the scale")
        lowest = min(float(t.number("min_loss_scale", 1.0) or 1.0), first)
        t.put("@mixed.min_scale", lowest, "min_loss_scale", reason=_TITLE)
        t.judge("min_loss_scale", "changed", "overflows at that scale are skipped for ever there, and end the run here")
    t.put("stability.on_nonfinite", "skip", reason="steps whose gradients overflow are skipped")


def _eight_bits(t: Translation) -> None:
    old = next((name for name in ("fp8_e4m3", "fp8_hybrid") if t.flag(name)), None)
    key = "fp8_format" if t.get("fp8_format") else "fp8" if t.get("fp8") else old
    recipe = t.text("fp8_recipe", "delayed") if key else "none"
    if key is not None:
        near = {"tensorwise": "@float8.recipe", "mxfp8": "@mxfp8.recipe"}.get(recipe)
        if near is None:
            note = f"{recipe} scaling{' is the default, and' if 'fp8_recipe' not in t else ''} has no counterpart"
            t.judge(key, "refused", f"{note}; allowed, [@float8] scales by the current tensor")
            near, name = "@float8.recipe", "tensorwise"
        else:
            name = recipe
        t.put(near, name, key, "fp8_recipe")
        t.judge(key, "changed", "the layers that are left out differ", to=near)
        t.judge("fp8_recipe", "carried" if name == recipe else "changed", to=near)
        if near == "@float8.recipe":
            t.carry("fp8_param_gather", "@float8.all_gather", t.flag("fp8_param_gather"))
        note = "write the first and last blocks in exclude"
        t.judge("first_last_layers_bf16", "missing" if t.flag("first_last_layers_bf16") else "equal", note)
    for name in ("fp8", "fp8_format", "fp8_e4m3", "fp8_hybrid", "fp8_recipe", "fp8_param_gather"):
        t.judge(name, "meaningless", "off")
    for name in ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        t.judge(name, "meaningless", "of first-last-layers-bf16")


def optimizer(translation: Translation) -> None:
    """Carry the optimizer with Megatron-LM's defaults: weight decay 0.01 of all but biases and norms."""
    t = translation
    name = t.text("optimizer", "adam").lower()
    if name in _REFUSED or name not in ("adam", "sgd", "muon"):
        t.judge("optimizer", "refused", f'{name} by name; a class of yours: optimizer.use = "module:Class"')
        name = "adam"
    use = {"adam": "adamw", "sgd": "sgd", "muon": "muon"}[name]
    t.put("optimizer.use", use, "optimizer", reason=None if "optimizer" in t else "Megatron-LM's default: AdamW")
    note = "which matrices it steps, and the scale of its updates, are chosen otherwise" if use == "muon" else ""
    t.judge("optimizer", "changed" if note else "carried", note or "decays as AdamW does", to="optimizer.use")
    rate = t.number("lr")
    if rate is not None:
        t.carry("lr", "optimizer.lr", float(rate))
    elif "lr" not in t.unknown:
        message = "there is no --lr, of which Megatron-LM has no default: optimizer.lr is composer3d's"
        hint = "-- --lr RATE behind the file"
        t.problems.append(Problem(message=message, file=t.tree.file, severity="warning", hint=hint))
    t.state("weight_decay", "optimizer.weight_decay", float(t.number("weight_decay", 0.01) or 0.0))
    if use == "adamw":
        betas = [float(t.number(key, at) or 0.0) for key, at in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
        stated = [key for key in ("adam_beta1", "adam_beta2") if key in t]
        t.put("optimizer.betas", betas, *stated, reason=None if stated else _TITLE)
        for key in stated:
            t.judge(key, "carried", to="optimizer.betas")
        t.state("adam_eps", "optimizer.eps", float(t.number("adam_eps", 1e-8) or 0.0))
    else:
        key = "sgd_momentum" if use == "sgd" else "muon_momentum"
        t.state(key, "optimizer.momentum", float(t.number(key, 0.9 if use == "sgd" else 0.95) or 0.0))
        if use == "muon":
            t.carry("muon_nesterov", "optimizer.nesterov", t.flag("muon_nesterov"))
    t.judge("lr", "meaningless", "no rate")
    for key in t.tree.leaves:
        if key.startswith(("muon_", "lion_", "adam_", "sgd_")):
            t.judge(
                key, "missing" if use == "muon" and key.startswith("muon_") else "ignored-there", "of another optimizer"
            )
    _groups(t)
    _state(t)


def _groups(t: Translation) -> None:
    for key in ("decoupled_lr", "decoupled_min_lr"):
        note = "another rate of embedding and head: write it in optimizer.groups, which have one min_ratio"
        t.judge(key, "missing" if t.get(key) is not None else "meaningless", note)
    decay = t.settings["optimizer.weight_decay"].value
    ends, style = ("start_weight_decay", "end_weight_decay"), t.get("weight_decay_incr_style", "constant")
    changes = style != "constant" or any(t.number(key) not in (None, decay) for key in ends)
    for key in ends:
        t.judge(key, "missing" if changes else "meaningless", _CHANGING_DECAY if changes else "as weight-decay")
    t.judge("weight_decay_incr_style", "missing" if changes else "equal", _CHANGING_DECAY)
    t.judge(
        "apply_wd_to_qk_layernorm", "missing" if t.flag("apply_wd_to_qk_layernorm") else "equal", "a group of its own"
    )
    stated = t.get("no_weight_decay_cond_type")
    t.judge(
        "no_weight_decay_cond_type", "missing" if stated else "meaningless", "what does not decay: optimizer.no_decay"
    )


def _state(t: Translation) -> None:
    if t.flag("use_precision_aware_optimizer"):
        small = [key for key in ("exp_avg_dtype", "exp_avg_sq_dtype") if str(t.get(key, "fp32")).lower() != "fp32"]
        if any("8" in str(t.get(key)) for key in small):
            t.put("@small_state.format", "fp8", *small)
            for key in small:
                t.judge(key, "changed", "8-bit moments in blocks here", to="@small_state.format")
        for key in small:
            t.judge(key, "changed", "moments are float32 here, and take twice the memory")
        for key in ("main_grads_dtype", "main_params_dtype"):
            t.judge(
                key, "equal" if str(t.get(key, "fp32")).lower() == "fp32" else "missing", "float32 in the optimizer"
            )
        t.judge("use_precision_aware_optimizer", "changed" if small else "equal", "dtypes of the optimizer's state")
    for key in (
        "use_precision_aware_optimizer",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "main_grads_dtype",
        "main_params_dtype",
    ):
        t.judge(key, "meaningless", "off, or float32")
