"""Checkpoints, evaluation, logs and profiles of a Megatron-LM run."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["saving"]

_LOAD = "begins anew without it: composer3d import CHECKPOINT --to FOLDER, then run --resume"


def saving(translation: Translation) -> None:
    """Carry the distances of checkpoints and evaluations, and what is watched."""
    t = translation
    if every := t.integer("save_interval"):
        t.carry("save_interval", "checkpoint.every", every)
        t.put("checkpoint.keep", 1_000_000, reason="Megatron-LM keeps all")
        t.put("checkpoint.asynchronous", t.flag("async_save"), "async_save", reason="Megatron-LM's")
        t.judge("async_save", "carried", to="checkpoint.asynchronous")
    for key in ("save_interval", "async_save"):
        t.judge(key, "meaningless", "no checkpoints between")
    t.judge("save", "derived" if t.get("save") else "meaningless", "checkpoints are in the run's folder: run.output")
    t.judge("load", "changed" if t.get("load") else "meaningless", _LOAD)
    batches = t.integer("eval_iters", 100)
    if (every := t.integer("eval_interval")) and batches:
        t.carry("eval_interval", "evaluation.every", every)
        t.state("eval_iters", "evaluation.batches", batches)
    for key in ("eval_interval", "eval_iters"):
        t.judge(key, "meaningless", "no evaluation")
    t.judge("skip_train", "refused" if t.flag("skip_train") else "meaningless", "evaluation alone")
    _stability(t)
    minutes = t.number("distributed_timeout_minutes")
    if minutes:
        t.put("run.timeout_s", float(minutes) * 60, "distributed_timeout_minutes")
        t.judge("distributed_timeout_minutes", "carried", "60 s each", to="run.timeout_s")
    t.judge("distributed_timeout_minutes", "meaningless", "none")
    interval = t.integer("manual_gc_interval", 0) or 0
    if t.flag("manual_gc") and interval > 0:
        t.carry("manual_gc_interval", "run.gc_every", interval)
    t.judge("manual_gc_interval", "meaningless", "off")
    _profiles(t)


def _stability(t: Translation) -> None:
    unchecked = t.flag("no_check_for_nan_in_loss_and_grad") or not t.flag("check_for_nan_in_loss_and_grad", True)
    if "stability.on_nonfinite" not in t.settings and not unchecked:
        t.put("stability.on_nonfinite", "stop", "check_for_nan_in_loss_and_grad", reason="Megatron-LM's default")
    note = "Megatron-LM steps with gradients that are not finite; here the run stops" if unchecked else ""
    for key in ("no_check_for_nan_in_loss_and_grad", "check_for_nan_in_loss_and_grad"):
        t.judge(key, "changed" if unchecked else "carried", note, to="stability.on_nonfinite")
    key = "check_for_spiky_loss"
    if t.flag(key):
        t.put("stability.spike_factor", 10.0, key)
        t.judge(
            key,
            "changed",
            "ten times the largest loss so far there, the window's median here",
            to="stability.spike_factor",
        )
    t.judge(key, "meaningless", "off")


def _profiles(t: Translation) -> None:
    t.switch("log_throughput", "@throughput")
    if t.text("tensorboard_dir"):
        t.put("@tensorboard", None, "tensorboard_dir")
        t.judge("tensorboard_dir", "carried", "in the run's folder, unless folder says another", to="@tensorboard")
    t.carry_text("wandb_project", "@wandb.project")
    if t.text("wandb_project"):
        t.carry_text("wandb_exp_name", "@wandb.name")
        t.carry_text("wandb_entity", "@wandb.entity")
    is_on = t.flag("profile") or t.flag("use_nsys_profiler") or t.flag("use_pytorch_profiler")
    begins, ends = t.integer("profile_step_start", 10) or 0, t.integer("profile_step_end", 12) or 0
    if is_on and ends > begins:
        t.put("@profiler.wait", max(begins - 1, 0), "profile_step_start")
        t.put("@profiler.active", ends - begins, "profile_step_start", "profile_step_end")
        for key in ("profile_step_start", "profile_step_end"):
            t.judge(key, "derived", "steps before, and steps in the profile", to="@profiler.active")
        for key in ("profile", "use_nsys_profiler", "use_pytorch_profiler"):
            t.judge(key, "carried", "torch's profiler", to="@profiler.active")
    t.switch("record_memory_history", "@snapshots")
    t.switch("otel_enabled", "@spans")
    for key in (
        "log_throughput",
        "tensorboard_dir",
        "wandb_project",
        "wandb_exp_name",
        "wandb_entity",
        "profile",
        "use_nsys_profiler",
        "use_pytorch_profiler",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "record_memory_history",
        "memory_snapshot_path",
        "otel_enabled",
    ):
        t.judge(key, "meaningless", "off, or where it is written")
