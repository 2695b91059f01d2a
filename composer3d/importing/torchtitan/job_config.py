"""Model, batch, optimizer, schedule and checkpoints of a torchtitan file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = ["FLAVOURS", "batch", "model", "optimizer", "saving", "schedule"]

# dim, blocks, heads, key heads, width of the feed-forward: torchtitan/models/llama3.
FLAVOURS: Mapping[str, tuple[int, int, int, int, int]] = {
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
_FACTORY, _TOKENS = "composer3d.models:llama", 128256
_ALL = 1_000_000  # checkpoints that are kept


def batch(translation: Translation) -> None:
    """Carry steps, batch sizes, the length of sequences and clipping."""
    t = translation
    _steps(t)
    local_key = "training.local_batch_size" if "training.local_batch_size" in t else "training.batch_size"
    local = t.integer(local_key, 8, least=1) or 8
    pipelined = "mesh.pp" in t.settings
    small = t.integer("parallelism.pipeline_parallel_microbatch_size", 1, least=1) or 1
    reason = None if local_key in t else "torchtitan's default"
    if pipelined:
        key = "parallelism.pipeline_parallel_microbatch_size"
        t.put("train.microbatch", small, key, reason=None if key in t else "torchtitan's default in a pipeline")
        t.judge(key, "carried", to="train.microbatch")
    else:
        t.put("train.microbatch", local, local_key, reason=reason)
    t.judge("parallelism.pipeline_parallel_microbatch_size", "meaningless", "no pipeline")
    _global(t, local, local_key, pipelined)
    t.judge(local_key, "carried", "samples of a rank", to="train.microbatch")
    length = t.integer("training.seq_len", 2048, least=1) or 2048
    reason = None if "training.seq_len" in t else "torchtitan's default"
    t.put("data.seq_len", length, "training.seq_len", reason=reason)
    t.judge("training.seq_len", "carried", to="data.seq_len")
    norm, key = t.number("training.max_norm", 1.0), "training.max_norm"
    if norm is not None and norm <= 0:
        t.wrong(key, "scales every gradient to 0: torchtitan clips to any norm", hint="write one above 0")
    elif norm is not None:
        t.put("train.grad_clip", float(norm), key, reason=None if key in t else "torchtitan's default")
        t.judge(key, "carried", to="train.grad_clip")
    note = "the loss is a mean over valid tokens here; torchtitan 0.1 took a mean of means"
    t.judge("training.batch_size", "ignored-there", note)


def _steps(t: Translation) -> None:
    steps = t.integer("training.steps", 10000, least=1)
    reason = None if "training.steps" in t else "torchtitan's default"
    t.put("train.steps", steps or 10000, "training.steps", reason=reason)
    t.judge("training.steps", "carried", to="train.steps")


def _global(t: Translation, local: int, local_key: str, pipelined: bool) -> None:
    key = "training.global_batch_size"
    total = t.integer(key, -1)
    if total is not None and total > 0:
        t.put("train.global_batch", total, key)
        t.judge(key, "carried", to="train.global_batch")
    elif pipelined:
        degree = _data_degree(t)
        if degree is None:
            note = f"the global batch is {local} x the data-parallel degree: give --world-size"
            t.refuse(local_key if local_key in t else t.stated_as("mesh.pp"), note)
        else:
            t.put("train.global_batch", local * degree, local_key, reason=f"{local} x {degree} data-parallel ranks")
    t.judge(key, "equal", "local batch x data-parallel degree is the default here too")


def _data_degree(t: Translation) -> int | None:
    """Return the data-parallel degree: of --world-size, or of the degrees that the file states."""
    degrees = {axis: t.settings[f"mesh.{axis}"].value for axis in ("pp", "tp", "cp") if f"mesh.{axis}" in t.settings}
    others = 1
    for value in degrees.values():
        others *= value
    if t.options.world_size is not None:
        return max(t.options.world_size // others, 1)
    is_replicated = path_of("@replicated") in t.settings
    shard = 1 if is_replicated else t.settings["mesh.dp_shard"].value if "mesh.dp_shard" in t.settings else -1
    replicate = t.settings["mesh.dp_replicate"].value if "mesh.dp_replicate" in t.settings else 1
    return None if -1 in (shard, replicate) else shard * replicate


def model(translation: Translation) -> None:
    """Carry a Llama by its flavour's numbers; another model is to be filled in."""
    t = translation
    name, flavour = t.text("model.name"), t.text("model.flavor")
    if name == "llama3" and flavour in FLAVOURS and t.options.model is None:
        dim, blocks, heads, key_heads, width = FLAVOURS[flavour]
        length = t.settings["data.seq_len"].value if "data.seq_len" in t.settings else 2048
        arguments = {"dim": dim, "num_layers": blocks, "num_heads": heads, "num_kv_heads": key_heads, "ffn_dim": width}
        arguments |= {"vocab_size": _TOKENS, "max_seq_len": length}
        t.put("model.use", _FACTORY, "model.name")
        t.put("model.args", arguments, "model.flavor")
        t.judge(
            "model.name",
            "changed",
            "the same Llama, with other initial weights: start from a checkpoint",
            to="model.use",
        )
        t.judge("model.flavor", "derived", "the flavour's numbers", to="model.args")
    note = "a model that is not here; name yours with --model"
    if t.options.model is not None:
        note = "--model is taken in its place"
    for key in ("model.name", "model.flavor"):
        t.judge(key, "missing", note)
    for key in ("model.hf_assets_path", "model.tokenizer_path", "model.tokenizer_name"):
        t.judge(key, "missing", "the tokenizer's folder: write data.tokenizer where the data is text")
    t.judge("model.print_after_conversion", "meaningless", "printing")
    t.judge("model.converters", "derived", "switches on the blocks that convert layers")
    t.judge_block("model", "missing", "an option of torchtitan's own models")


def optimizer(translation: Translation) -> None:
    """Carry the optimizer; torchtitan decays every parameter."""
    t = translation
    name = t.text("optimizer.name", "AdamW")
    if name not in ("AdamW", "Adam"):
        t.judge("optimizer.name", "refused", "torchtitan has AdamW and Adam")
        return
    adamw = name == "AdamW"
    reason = None if "optimizer.name" in t else "torchtitan's default"
    t.put("optimizer.use", "adamw" if adamw else "torch.optim:Adam", "optimizer.name", reason=reason)
    t.judge("optimizer.name", "carried", to="optimizer.use")
    for key, default in (("lr", 8e-4), ("weight_decay", 0.1)):
        _put_default(t, f"optimizer.{key}", f"optimizer.{key}", t.number(f"optimizer.{key}", default))
    _adam_numbers(t, is_adamw=adamw)
    decay = t.settings["optimizer.weight_decay"].value
    if decay:
        group = [{"match": ".", "weight_decay": decay}]
        t.put("optimizer.groups", group, reason="torchtitan decays norms and biases too")
    if t.flag("optimizer.early_step_in_backward"):
        note = "clipping needs the whole gradient: torchtitan refuses it too"
        if t.settings["train.grad_clip"].value == float("inf"):
            t.carry("optimizer.early_step_in_backward", "optimizer.in_backward", True)
        t.judge("optimizer.early_step_in_backward", "refused", note)
    for key in ("early_step_in_backward", "implementation", "fused"):
        t.judge(f"optimizer.{key}", "meaningless", "speed")


def _adam_numbers(t: Translation, *, is_adamw: bool) -> None:
    """Carry betas and eps: keys of AdamW, arguments of any other class."""
    betas = [float(t.number(f"optimizer.{key}", default) or 0) for key, default in (("beta1", 0.9), ("beta2", 0.95))]
    eps = float(t.number("optimizer.eps", 1e-8) or 0)
    stated = [f"optimizer.{key}" for key in ("beta1", "beta2") if f"optimizer.{key}" in t]
    if is_adamw:
        t.put("optimizer.betas", betas, *stated, reason=None if stated else "torchtitan's default")
        _put_default(t, "optimizer.eps", "optimizer.eps", eps)
    else:
        t.put("optimizer.args", {"betas": betas, "eps": eps}, *stated, "optimizer.eps", reason="arguments of the class")
    for key in (*stated, "optimizer.eps"):
        t.judge(key, "carried", to="optimizer.betas" if is_adamw else "optimizer.args")


def _put_default(t: Translation, key: str, to: str, value: Any) -> None:
    t.put(to, float(value or 0), key, reason=None if key in t else "torchtitan's default")
    t.judge(key, "carried", to=to)


def schedule(translation: Translation) -> None:
    """Carry warm-up and decay, whose formula is composer3d's own."""
    t, block = translation, "lr_scheduler"
    steps = t.settings["train.steps"].value
    old = "training.warmup_steps"
    key = f"{block}.warmup_steps" if f"{block}.warmup_steps" in t or old not in t else old
    warmup = min(t.integer(key, 200) or 0, steps)
    reason = None if key in t else "torchtitan's default"
    total = t.integer(f"{block}.total_steps")
    end = steps if total is None else total
    if end != steps:
        t.carry(f"{block}.total_steps", "lr_schedule.decay_end", end)
    t.judge(f"{block}.total_steps", "equal")
    kind = str(t.get(f"{block}.decay_type") or "linear").lower()
    floor = f"{block}.min_lr_factor"
    floor = f"{block}.lr_min" if floor not in t and f"{block}.lr_min" in t else floor
    lowest = float(t.number(floor, 0.0) or 0.0)
    ratio = t.number(f"{block}.decay_ratio")
    whole = max(end - warmup, 0)
    length = whole if ratio is None else min(round(end * ratio), whole)
    if kind not in ("linear", "cosine", "sqrt"):
        t.judge(f"{block}.decay_type", "changed", f"the rate falls by {kind} there, in a straight line here")
        kind = "linear"
    is_late = 0 < length < whole
    name = "constant" if length == 0 else "wsd" if is_late and kind == "linear" else kind
    t.put("lr_schedule.use", name, f"{block}.decay_type", f"{block}.decay_ratio", reason="torchtitan's formula")
    t.put("lr_schedule.warmup", warmup, key, reason=reason)
    if is_late:
        t.put("lr_schedule.decay", length, f"{block}.decay_ratio")
        t.judge(f"{block}.decay_ratio", "derived", f"{length} = {end} x {ratio}", to="lr_schedule.decay")
    if name != "constant":
        t.put("lr_schedule.min_ratio", lowest, floor, reason=None if floor in t else "torchtitan's default")
    t.judge(key, "carried", to="lr_schedule.warmup")
    t.judge(f"{block}.decay_ratio", "derived", "the whole run falls, or nothing", to="lr_schedule.use")
    if name == "constant":
        for unused in (f"{block}.decay_type", floor):
            t.judge(unused, "ignored-there", "no step falls")
    t.judge(f"{block}.decay_type", "carried", to="lr_schedule.use")
    t.judge(floor, "carried", to="lr_schedule.min_ratio")
    for other in (f"{block}.lr_min", old):
        t.judge(other, "ignored-there", "an older name of a key that is there too")


def saving(translation: Translation) -> None:
    """Carry checkpoints and validation where they are switched on."""
    t = translation
    switch = "checkpoint.enable" if "checkpoint.enable" in t else "checkpoint.enable_checkpoint"
    if t.flag(switch):
        if t.text("checkpoint.interval_type", "steps") == "seconds":  # of versions before 0.1
            for key in ("interval", "interval_type"):
                t.judge(f"checkpoint.{key}", "missing", "seconds between two: write checkpoint.every, in steps")
        else:
            every = t.integer("checkpoint.interval", 500, least=1) or 500
            t.state("checkpoint.interval", "checkpoint.every", every)
            t.judge("checkpoint.interval_type", "equal", "the interval is in steps")
        keep = t.integer("checkpoint.keep_latest_k", 10) or _ALL
        t.state("checkpoint.keep_latest_k", "checkpoint.keep", keep, "0 keeps all" if keep == _ALL else "")
        in_background = t.text("checkpoint.async_mode", "disabled") != "disabled"
        t.state("checkpoint.async_mode", "checkpoint.asynchronous", in_background)
        t.judge(switch, "carried", to="checkpoint.every")
    for key in ("enable", "enable_checkpoint", "interval", "interval_type", "keep_latest_k", "async_mode"):
        t.judge(f"checkpoint.{key}", "meaningless", "checkpoints are off there; here the last state is saved")
    if t.flag("validation.enable") or t.flag("validation.enabled"):
        t.put("evaluation.every", t.integer("validation.freq", 10, least=1) or 10, "validation.freq")
        t.judge("validation.freq", "carried", to="evaluation.every")
        batches = t.integer("validation.steps", -1) or -1
        if batches > 0:
            t.carry("validation.steps", "evaluation.batches", batches)
        t.judge("validation.steps", "changed", "all of the data there, evaluation.batches here")
        for key in ("enable", "enabled"):
            t.judge(f"validation.{key}", "carried", to="evaluation.every")
        t.judge_block("validation", "missing", "data of its own for validation; a part of the data is held out here")
    t.judge_block("validation", "meaningless", "off")
