"""Monitors, compilation, elasticity and other training algorithms of a DeepSpeed file."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["compiled", "elasticity", "other_algorithms", "watching"]

_OFF = "its block is not enabled"


def watching(translation: Translation) -> None:
    """Carry timers, profilers and monitors that are switched on."""
    t = translation
    t.switch("wall_clock_breakdown", "@throughput", "times of phases are in [@spans]")
    t.judge("wall_clock_breakdown", "meaningless", "off")
    if t.flag("flops_profiler.enabled"):
        step = t.integer("flops_profiler.profile_step", 1) or 1
        t.put("@throughput.count_step", max(step, 1), "flops_profiler.profile_step", "flops_profiler.enabled")
        t.judge("flops_profiler.enabled", "carried", to="@throughput.count_step")
        t.judge("flops_profiler.profile_step", "carried", to="@throughput.count_step")
        t.judge_block("flops_profiler", "missing", "a table of FLOPs by module")
    if t.flag("comms_logger.enabled"):
        t.put("@spans.detail", "microbatch", "comms_logger.enabled")
        t.judge("comms_logger.enabled", "carried", "every collective is a span", to="@spans.detail")
        t.judge_block("comms_logger", "meaningless", "which operations are printed")
    if t.flag("tensorboard.enabled"):
        folder = "/".join(filter(None, (t.text("tensorboard.output_path"), t.text("tensorboard.job_name"))))
        t.put("@tensorboard.folder", folder or "tensorboard", "tensorboard.output_path", "tensorboard.job_name")
        t.judge_block("tensorboard", "carried", to="@tensorboard.folder")
    if t.flag("wandb.enabled"):
        t.put("@wandb.project", t.text("wandb.project") or "deepspeed", "wandb.project", "wandb.enabled")
        t.judge("wandb.enabled", "carried", to="@wandb.project")
        t.judge("wandb.project", "carried", to="@wandb.project")
        for key, name in (("team", "entity"), ("group", "group")):
            if t.text(f"wandb.{key}"):
                t.carry(f"wandb.{key}", f"@wandb.{name}", t.text(f"wandb.{key}"))
    if t.flag("csv_monitor.enabled"):
        folder = "/".join(filter(None, (t.text("csv_monitor.output_path"), t.text("csv_monitor.job_name"))))
        t.put("@rows.file", f"{folder or 'csv'}/metrics.csv", "csv_monitor.output_path", "csv_monitor.job_name")
        t.judge_block("csv_monitor", "carried", "one file, a column a metric; a file a metric there", to="@rows.file")
    if t.flag("comet.enabled"):
        t.judge_block("comet", "missing", "Comet; a key in a file is not copied")
    for block in ("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"):
        t.judge_block(block, "meaningless", _OFF)


def compiled(translation: Translation) -> None:
    """Carry compilation: here blocks are compiled by themselves."""
    t = translation
    deep = t.flag("compile.deepcompile")
    if deep or (t.flag("compile.enabled") and not t.flag("compile.disable")):
        key = "compile.deepcompile" if deep else "compile.enabled"
        backend = t.text("compile.backend", "inductor")
        t.put("@compiled.backend", backend, key, "compile.backend")
        t.put("@compiled.fullgraph", False, reason="torch.compile's default, under DeepSpeed too")
        note = "DeepSpeed's passes over ZeRO's collectives there, " if deep else ""
        t.judge(
            key,
            "changed",
            f"{note}blocks are compiled one by one here; numbers differ by rounding",
            to="@compiled.backend",
        )
        t.judge("compile.backend", "carried", to="@compiled.backend")
        if t.flag("compile.offload_activation"):
            t.judge("compile.offload_activation", "missing", "activations in host memory beside compiled blocks")
    for key in ("enabled", "disable", "deepcompile", "backend", "offload_activation", "free_activation", "kwargs"):
        t.judge(f"compile.{key}", "meaningless", "off, or memory")


def elasticity(translation: Translation) -> None:
    """Refuse a batch that depends on how many ranks there are; leave a block that is off."""
    t = translation
    if not t.flag("elasticity.enabled"):
        t.judge_block("elasticity", "meaningless", _OFF)
    t.judge("elasticity.enabled", "refused", "the batch depends on the number of ranks; state train_batch_size")
    t.judge_block("elasticity", "missing", "batches that fit many world sizes")


def other_algorithms(translation: Translation) -> None:
    """Refuse what trains otherwise where it is switched on."""
    t = translation
    reasons = {
        "data_efficiency": "another order of data, or dropped tokens",
        "curriculum_learning": "sequence lengths that grow",
        "compression_training": "quantised, pruned or distilled weights",
        "quantize_training": "quantised weights (MoQ)",
        "weight_quantization": "fake quantisers of another kind than [@fake_quantised]",
        "eigenvalue": "belongs to MoQ",
        "progressive_layer_drop": "layers are left out at random",
    }
    for block, reason in reasons.items():
        if t.get(f"{block}.enabled") is False or _all_off(t, block):
            t.judge_block(block, "meaningless", _OFF)
        t.judge_block(block, "refused", reason)


def _all_off(t: Translation, block: str) -> bool:
    switches = [leaf for leaf in t.tree.below(block) if leaf.path[-1] in ("enabled", "quantize_enabled")]
    return bool(switches) and not any(leaf.value for leaf in switches)
