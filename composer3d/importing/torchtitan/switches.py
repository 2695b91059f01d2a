"""Recomputation, compilation, 8 bits and monitors of a torchtitan file."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["compiled", "eight_bits", "recomputation", "watching"]


def recomputation(translation: Translation) -> None:
    """Carry activation checkpointing; torchtitan's default recomputes every second block."""
    t, key, option = translation, "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode = t.text(key, "selective")
    choice = str(t.get(option, "2"))
    reason = None if key in t else "torchtitan's default"
    if mode == "full":
        t.put("@recomputed.mode", "full", key)
        t.judge(key, "carried", to="@recomputed.mode")
    elif mode == "selective" and choice == "op":
        t.put("@recomputed.mode", "selective", key, reason=reason)
        t.put("@recomputed.policy", "every_second_product", option)
        t.judge(key, "carried", to="@recomputed.mode")
        t.judge(option, "carried", to="@recomputed.policy")
    elif mode == "selective" and choice.isdigit() and int(choice) > 0:
        t.put("@recomputed.mode", "full", key, option, reason=reason)
        t.put("@recomputed.every", int(choice), option, reason=None if option in t else "torchtitan's default")
        t.judge(key, "carried", "every so many blocks in full", to="@recomputed.mode")
        t.judge(option, "carried", to="@recomputed.every")
    elif mode == "memory_budget":
        t.put("@recomputed.mode", "budget", key)
        budget = "activation_checkpoint.memory_budget"
        t.state(budget, "@recomputed.budget_fraction", t.number(budget, 0.5))
        t.judge(key, "changed", "the compiler's partitioner chooses there; numbers are equal", to="@recomputed.mode")
    elif mode != "none":
        t.wrong(key if mode != "selective" or option not in t else option, "is no choice of what to recompute")
    if "activation_checkpoint.preserve_rng_state" in t and mode != "none":
        key = "activation_checkpoint.preserve_rng_state"
        t.carry(key, "@recomputed.preserve_rng_state", t.flag(key))
    t.judge_block("activation_checkpoint", "meaningless", "of another mode, or off")


def compiled(translation: Translation) -> None:
    """Carry compilation of blocks, which both do one by one."""
    t, parts = translation, translation.get("compile.components", ["model", "loss"])
    old, new = t.flag("training.compile"), t.flag("compile.enable")
    if old or (new and isinstance(parts, list) and "model" in parts):
        key = "training.compile" if old else "compile.enable"
        t.put("@compiled.backend", t.text("compile.backend", "inductor"), key, "compile.backend")
        for name in (key, "compile.backend"):
            t.judge(name, "carried", "block by block", to="@compiled.backend")
    if new:
        has_loss = isinstance(parts, list) and "loss" in parts
        note = "the loss is not compiled here: rounding differs" if has_loss else ""
        t.judge("compile.components", "changed" if has_loss else "carried", note)
        t.judge("compile.enable", "derived", "of compile.components")
    for name in ("compile", "training.compile"):
        t.judge_block(name, "meaningless", "off")


def eight_bits(translation: Translation) -> None:
    """Carry float8 and mxfp8, which count only where model.converters names them."""
    t = translation
    converters = t.get("model.converters", [])
    converters = converters if isinstance(converters, list) else [converters]
    has_converters = "model.converters" in t
    for block in ("float8", "quantize.linear.float8"):
        names = ("float8", "quantize.linear.float8")
        old = t.flag(f"{block}.enable_float8_linear")
        if t.has_block(block) and (old or any(name in converters for name in names)):
            _float8(t, block)
        reason = "model.converters does not name it" if has_converters else "there is no model.converters"
        t.judge_block(block, "ignored-there", reason)
    for block in ("mx", "quantize.linear.mx"):
        if t.has_block(block) and any(name in converters for name in ("mx", "quantize.linear.mx")):
            recipe = t.text(f"{block}.recipe_name", "mxfp8_cublas")
            t.put("@mxfp8.recipe", "mxfp8", f"{block}.recipe_name", reason="cuBLAS' recipe")
            note = "" if recipe == "mxfp8_cublas" else f"{recipe} there, mxfp8 here"
            t.judge(f"{block}.recipe_name", "changed" if note else "carried", note, to="@mxfp8.recipe")
            _excluded(t, f"{block}.filter_fqns", "@mxfp8.exclude")
        t.judge_block(block, "ignored-there", "model.converters does not name it")


def _float8(t: Translation, block: str) -> None:
    recipe = str(t.get(f"{block}.recipe_name") or "tensorwise")
    t.state(f"{block}.recipe_name", "@float8.recipe", recipe)
    t.judge(f"{block}.enable_float8_linear", "carried", to="@float8.recipe")
    gathered = f"{block}.enable_fsdp_float8_all_gather"
    if t.flag(gathered) and recipe == "tensorwise":
        t.carry(gathered, "@float8.all_gather", True)
    t.judge(gathered, "equal")
    if t.flag(f"{block}.emulate"):
        t.carry(f"{block}.emulate", "@float8.emulate", True)
    t.judge(f"{block}.emulate", "equal")
    _excluded(t, f"{block}.filter_fqns", "@float8.exclude")
    for name in ("moe_fqns", "moe_fqns_prototype"):
        t.judge(f"{block}.{name}", "missing" if t.get(f"{block}.{name}") else "equal", "experts in 8 bits by name")
    t.judge_block(block, "meaningless", "scales are computed for all layers at once")


def _excluded(t: Translation, key: str, to: str) -> None:
    names = t.get(key)
    names = names.split(",") if isinstance(names, str) else names
    names = [str(name) for name in names] if isinstance(names, list) else []
    if "auto_filter_small_kn" in names:
        t.put("@float8.auto", True, key)
        names.remove("auto_filter_small_kn")
    if names:
        note = "FQNs that contain a text there; patterns here"
        t.carry(key, to, [f"*{name}*" for name in names], note)
    t.judge(key, "derived" if "auto_filter_small_kn" in str(t.get(key)) else "equal", "what gains nothing is left out")


def watching(translation: Translation) -> None:
    """Carry profilers, monitors and timeouts that are switched on."""
    t = translation
    if t.flag("profiling.enable_profiling"):
        every = t.integer("profiling.profile_freq", 10, least=1) or 10
        active = t.integer("profiling.profiler_active", 1, least=1) or 1
        warm = t.integer("profiling.profiler_warmup", 3, least=0) or 0
        wait = max(every - warm - active, 0)
        t.put("@profiler.wait", wait, "profiling.profile_freq", reason="freq - warmup - active")
        t.put("@profiler.warmup", warm, "profiling.profiler_warmup")
        t.put("@profiler.active", active, "profiling.profiler_active")
        t.put("@profiler.repeat", 0, reason="torchtitan goes on to the end")
        t.judge("profiling.enable_profiling", "carried", to="@profiler.active")
        t.judge("profiling.profile_freq", "derived", f"{every} = wait + warmup + active", to="@profiler.wait")
        t.judge("profiling.profiler_active", "carried", to="@profiler.active")
        t.judge("profiling.profiler_warmup", "carried", to="@profiler.warmup")
        t.judge("profiling.save_traces_folder", "equal", "profiles in the run's folder")
    t.switch("profiling.enable_memory_snapshot", "@snapshots")
    if t.flag("profiling.enable_memory_snapshot"):
        t.judge("profiling.save_memory_snapshot_folder", "equal", "memory in the run's folder")
    t.judge_block("profiling", "meaningless", "off")
    t.switch("metrics.enable_tensorboard", "@tensorboard")
    t.switch("metrics.enable_wandb", "@wandb")
    t.judge_block("metrics", "meaningless", "off, or a folder of the run's")
    timeout = t.number("comm.train_timeout_seconds")
    if timeout:
        t.carry("comm.train_timeout_seconds", "run.timeout_s", float(timeout))
    t.judge_block("comm", "meaningless", "joining waits as long")
