"""Batch, model, optimizer, schedule and files of a NeMo Automodel recipe."""

from __future__ import annotations

from composer3d.importing.instruction_data import carry_file, carry_template
from composer3d.importing.megatron.annealing import annealed
from composer3d.importing.translation import Translation

__all__ = ["adapters", "batch", "model", "optimizer", "schedule", "watched"]

_TITLE = "Automodel's default"
_STEP = "step_scheduler"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def batch(translation: Translation) -> None:
    """Carry batch sizes, steps, clipping and the seed; the loss is a mean over valid tokens there too."""
    t = translation
    micro, total = f"{_STEP}.local_batch_size", f"{_STEP}.global_batch_size"
    small = next((key for key in t.tree.leaves if key.endswith("pp_microbatch_size")), None)
    if "mesh.pp" in t.settings:
        size = t.integer(small or "", 1, least=1) or 1
        t.put("train.microbatch", size, small or "", reason=None if small else _TITLE)
        t.judge(small or "", "carried", to="train.microbatch")
        t.judge(micro, "derived", "micro-batches of a pipeline are smaller")
    elif (size := t.integer(micro, 1, least=1) or 1) and micro in t:
        t.carry(micro, "train.microbatch", size)
    t.judge(small or "", "meaningless", "no pipeline")
    if (batch_size := t.integer(total, least=1)) is not None:
        t.carry(total, "train.global_batch", batch_size)
    if (steps := t.integer(f"{_STEP}.max_steps", least=1)) is not None:
        t.carry(f"{_STEP}.max_steps", "train.steps", steps)
        t.judge(f"{_STEP}.num_epochs", "changed", "the smaller of max_steps and the epochs there, max_steps here")
    t.judge(f"{_STEP}.max_steps", "meaningless", "epochs decide")
    t.judge(f"{_STEP}.num_epochs", "missing", "epochs: write train.steps = epochs x samples / global batch")
    norm = "clip_grad_norm.max_norm" if "clip_grad_norm.max_norm" in t else "max_grad_norm"
    limit = t.number(norm, 1.0) or 0.0
    t.put("train.grad_clip", float(limit) if limit > 0 else float("inf"), norm, reason=None if norm in t else _TITLE)
    t.judge(norm, "carried", to="train.grad_clip")
    seed = "seed" if "seed" in t else "rng.seed"
    t.put("train.seed", t.integer(seed, 42) or 0, seed, reason=None if seed in t else _TITLE)
    t.judge(seed, "carried", to="train.seed")
    t.judge_block("rng", "equal", "every rank has its own numbers")


def model(translation: Translation) -> None:
    """Carry the name of a Hugging Face model, and the dtype of its weights."""
    t = translation
    keys = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    key = next((key for key in keys if t.text(key)), keys[0])
    scratch = str(t.get("model._target_", "")).endswith("from_config")
    if t.options.model is None and t.text(key):
        t.carry(key, "model.hf", t.text(key))
        if scratch:
            t.put("model.weights", "init", "model._target_", reason="its configuration alone")
        stated = str(t.get("model.torch_dtype", "auto")).removeprefix("torch.")
        dtype = _DTYPES.get(stated, stated)
        if dtype in ("auto", "bfloat16", "float16", "float32"):
            t.put("model.dtype", dtype, "model.torch_dtype", reason=None if "model.torch_dtype" in t else _TITLE)
            note = "weights in the optimizer have it too" if dtype in ("bfloat16", "float16") else ""
            t.judge("model.torch_dtype", "carried", note, to="model.dtype")
        elif "model.torch_dtype" in t:
            t.wrong("model.torch_dtype", "is no dtype")
    taken = t.options.model is not None
    for one in keys:
        t.judge(one, "derived" if taken else "meaningless", "--model is taken in its place" if taken else "none")
    if t.flag("model.trust_remote_code"):
        note = "Python of the model's folder runs only where model.trust_remote_code says"
        t.judge("model.trust_remote_code", "missing", note)
    known = t.get("model.attn_implementation")
    if isinstance(known, str) and not taken and "model.hf" in t.settings:
        t.carry("model.attn_implementation", "model.attn_implementation", known)
    for name in ("_target_", "torch_dtype", "attn_implementation", "trust_remote_code"):
        t.judge(f"model.{name}", "derived", "how the model is built")
    for block in ("model.backend", "model.use_liger_kernel", "model.use_sdpa_patching"):
        t.judge_block(block, "meaningless", "kernels")
    for leaf in t.tree.below("model"):
        t.judge(leaf.key, "missing" if leaf.value not in (None, False) else "meaningless", "an argument of the model's")


def optimizer(translation: Translation) -> None:
    """Carry the optimizer of a `_target_`; every parameter decays."""
    t = translation
    name = t.text("optimizer._target_", "torch.optim.AdamW")
    short = name.rpartition(".")[2].lower()
    decoupled = short == "adamw" or (short == "fusedadam" and t.flag("optimizer.adam_w_mode", True))
    if decoupled:
        use = "adamw"
    elif name.startswith("torch.optim."):
        use = {"sgd": "sgd"}.get(short, f"torch.optim:{name.rpartition('.')[2]}")
    else:
        use = "adamw"
        t.judge("optimizer._target_", "refused", f'{name}; a class of yours: optimizer.use = "module:Class"')
    t.put("optimizer.use", use, "optimizer._target_", reason=None if "optimizer._target_" in t else _TITLE)
    t.judge("optimizer._target_", "carried", "" if decoupled else "weight decay as an L2 penalty", to="optimizer.use")
    extra: dict[str, object] = {}
    for key, default in (("lr", 1e-3), ("weight_decay", 0.01 if decoupled else 0.0)):
        t.state(f"optimizer.{key}", f"optimizer.{key}", float(t.number(f"optimizer.{key}", default) or 0.0))
    betas = t.get("optimizer.betas", [0.9, 0.999])
    if not (isinstance(betas, list) and len(betas) == 2 and all(isinstance(one, int | float) for one in betas)):
        t.wrong("optimizer.betas", "must be two numbers")
        betas = [0.9, 0.999]
    numbers = {"betas": [float(one) for one in betas], "eps": float(t.number("optimizer.eps", 1e-8) or 0.0)}
    if "adam" in short:
        for key, value in numbers.items():
            if decoupled:
                t.put(f"optimizer.{key}", value, f"optimizer.{key}", reason=None if f"optimizer.{key}" in t else _TITLE)
            else:
                extra[key] = value
            t.judge(f"optimizer.{key}", "carried", to=f"optimizer.{key}" if decoupled else "optimizer.args")
    elif use == "sgd":
        t.state("optimizer.momentum", "optimizer.momentum", float(t.number("optimizer.momentum", 0.0) or 0.0))
    if extra:
        t.put("optimizer.args", extra, reason="arguments of the class")
    decay = t.settings["optimizer.weight_decay"].value
    if decay:
        t.put("optimizer.groups", [{"match": ".", "weight_decay": decay}], reason="norms and biases decay too")
    t.judge("optimizer.adam_w_mode", "derived", "chooses between AdamW and L2", to="optimizer.use")
    for name in ("foreach", "fused", "bias_correction"):
        t.judge(f"optimizer.{name}", "meaningless", "speed")
    t.judge_block("optimizer", "missing", "an argument that this optimizer is not given here")


def _rising(t: Translation, steps: int | None) -> None:
    """Carry the warm-up: a tenth of the steps, from a tenth of the rate, where nothing is said."""
    block, highest = "lr_scheduler", t.settings["optimizer.lr"].value
    key, first = f"{block}.lr_warmup_steps", f"{block}.init_lr"
    warmup = t.integer(key, min(1000, steps // 10) if steps else None)
    if warmup is None:
        t.judge(first, "changed", "the length of the warm-up is not known")
        return
    t.put("lr_schedule.warmup", warmup, key, reason=None if key in t else f"{_TITLE}: a tenth of the steps")
    t.judge(key, "carried", to="lr_schedule.warmup")
    if warmup:
        start = (t.number(first, 0.1 * highest) or 0.0) / highest if highest else 0.0
        t.put("lr_schedule.warmup_start", min(start, 1.0), first, reason="init_lr / lr, a tenth by default")
        t.judge(first, "derived", "init_lr / lr", to="lr_schedule.warmup_start")
    t.judge(first, "meaningless", "no warm-up")


def schedule(translation: Translation) -> None:
    """Carry the schedule, whose warm-up begins at a tenth of the rate by default."""
    t, block = translation, "lr_scheduler"
    if not t.has_block(block):
        t.put("lr_schedule.use", "constant", reason="Automodel's default: no schedule")
        return
    key, steps = f"{block}.lr_decay_style", t.integer(f"{_STEP}.max_steps")
    name = t.text(key, "cosine")
    style = t.text(f"{block}.lr_wsd_decay_style", "exponential")
    decay = t.integer(f"{block}.wsd_decay_steps", least=1)
    kind = name if name in ("cosine", "linear", "constant") else None
    if name == "WSD" and decay is not None and (kind := annealed(style)) is not None:
        t.carry(f"{block}.wsd_decay_steps", "lr_schedule.decay", decay)
        t.judge(f"{block}.lr_wsd_decay_style", "carried", to="lr_schedule.use")
    if kind is None:
        t.judge(key, "refused", f'{name} has no counterpart; write lr_schedule.use = "module:callable"')
        kind = "constant"
    t.put("lr_schedule.use", kind, key, reason=None if key in t else _TITLE)
    _rising(t, steps)
    highest = t.settings["optimizer.lr"].value
    lowest = t.number(f"{block}.min_lr", 0.01 * highest) or 0.0
    if kind != "constant":
        low, ends = f"{block}.min_lr", f"{block}.lr_decay_steps"
        t.put("lr_schedule.min_ratio", min(lowest / highest, 1.0) if highest else 0.0, low, reason="min_lr / lr")
        t.judge(low, "derived", "min_lr / lr", to="lr_schedule.min_ratio")
        if t.get(ends) is not None and t.integer(ends) != steps:
            t.carry(ends, "lr_schedule.decay_end", t.integer(ends))
        t.judge(ends, "equal", "the whole run")
    t.judge(key, "carried", to="lr_schedule.use")
    for name in ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"):
        t.judge(f"{block}.{name}", "meaningless", "of resuming")
    t.judge_block(block, "missing", "another shape of the schedule, or a weight decay that changes")


def adapters(translation: Translation) -> None:
    """Carry LoRA, on 4-bit weights where they are quantised."""
    t = translation
    if t.has_block("peft"):
        four = t.flag("quantization.load_in_4bit")
        t.put("@adapters.quantize", "nf4" if four else "none", "quantization.load_in_4bit", "peft._target_")
        for key, to, default in (("dim", "rank", 8), ("alpha", "alpha", 32), ("dropout", "dropout", 0.0)):
            value = t.number(f"peft.{key}", default) or 0
            t.state(f"peft.{key}", f"@adapters.{to}", int(value) if to == "rank" else float(value))
        for key, to in (("target_modules", "modules"), ("exclude_modules", "keep")):
            names = t.get(f"peft.{key}")
            if isinstance(names, list) and names and to == "modules":
                t.carry(f"peft.{key}", "@adapters.modules", [f"**.{str(name).lstrip('*.')}" for name in names])
        t.judge("peft.match_all_linear", "equal", "every linear layer")
        t.judge("peft._target_", "carried", to="@adapters.rank")
        t.judge("peft.use_dora", "refused" if t.flag("peft.use_dora") else "equal", "another kind of adapter")
        t.judge("peft.exclude_modules", "missing" if t.get("peft.exclude_modules") else "equal", "write modules")
        for key in ("use_triton", "use_memory_efficient_lora", "dropout_position", "lora_dtype", "moe_rank_scaling"):
            t.judge(f"peft.{key}", "meaningless", "kernels, or of experts")
        t.judge("quantization.load_in_4bit", "carried" if four else "equal", to="@adapters.quantize")
        t.judge("quantization.load_in_8bit", "missing" if t.flag("quantization.load_in_8bit") else "equal")
        t.judge_block("quantization", "changed" if four else "meaningless", "blocks and dtypes of bitsandbytes")
    t.judge_block("peft", "missing", "an option of LoRA")
    t.judge_block("quantization", "missing", "quantised weights without adapters")


def watched(translation: Translation) -> None:
    """Carry the distances of checkpoints, evaluations and log lines, and what is watched."""
    t = translation
    saved = t.flag("checkpoint.enabled", True)
    if saved and (every := t.integer(f"{_STEP}.ckpt_every_steps")):
        t.carry(f"{_STEP}.ckpt_every_steps", "checkpoint.every", every)
        kept = t.integer("checkpoint.max_recent_checkpoints")
        t.put(
            "checkpoint.keep",
            kept or 1_000_000,
            "checkpoint.max_recent_checkpoints",
            reason="all are kept" if not kept else None,
        )
        t.put("checkpoint.asynchronous", t.flag("checkpoint.is_async"), "checkpoint.is_async", reason=_TITLE)
    for key, to in (("enabled", "every"), ("max_recent_checkpoints", "keep"), ("is_async", "asynchronous")):
        t.judge(f"checkpoint.{key}", "carried" if saved else "meaningless", to=f"checkpoint.{to}")
    t.judge(f"{_STEP}.ckpt_every_steps", "meaningless", "no checkpoints")
    t.judge_block("checkpoint", "meaningless", "formats of files; composer3d export writes safetensors")
    if every := t.integer(f"{_STEP}.val_every_steps"):
        t.carry(f"{_STEP}.val_every_steps", "evaluation.every", every)
    t.judge(f"{_STEP}.val_every_steps", "meaningless", "none")
    if every := t.integer(f"{_STEP}.log_remote_every_steps"):
        t.carry(f"{_STEP}.log_remote_every_steps", "run.log_every", every)
    t.judge(f"{_STEP}.log_remote_every_steps", "meaningless", "none")
    if every := t.integer(f"{_STEP}.gc_every_steps"):
        t.carry(f"{_STEP}.gc_every_steps", "run.gc_every", every)
    t.judge(f"{_STEP}.gc_every_steps", "meaningless", "none")
    t.judge(f"{_STEP}.save_checkpoint_every_epoch", "missing", "checkpoints by epochs")
    t.judge_block(_STEP, "meaningless", "printing, or of resuming")
    if minutes := t.number("dist_env.timeout_minutes"):
        t.put("run.timeout_s", float(minutes) * 60, "dist_env.timeout_minutes")
        t.judge("dist_env.timeout_minutes", "carried", "60 s each", to="run.timeout_s")
    t.judge_block("dist_env", "meaningless", "of launching")
    _monitored(t)
    workers = t.integer("dataloader.num_workers")
    if workers is not None:
        t.carry("dataloader.num_workers", "data.workers", workers)
    if "dataloader.shuffle" in t:
        t.carry("dataloader.shuffle", "data.order", "shuffle" if t.flag("dataloader.shuffle") else "sequential")
    t.judge("dataloader._target_", "meaningless", "which loader reads")
    t.judge("dataloader.drop_last", "equal", "global batches are whole")
    t.judge_block("dataloader", "missing", "how samples are collated: data.padding, data.pad_multiple")
    _chats(t)


def _chats(t: Translation) -> None:
    """Carry a data set of chats and its packing; other data sets are Python of the recipe's own."""
    size = t.integer("packed_sequence.packed_sequence_size", 0) or 0
    key = "packed_sequence.packed_sequence_size"
    is_chat = t.text("dataset._target_").endswith(".ChatDataset")
    path = next(
        (name for name in ("path_or_dataset_id", "path_or_dataset") if f"dataset.{name}" in t), "path_or_dataset_id"
    )
    if is_chat:
        if not carry_file(t, f"dataset.{path}", [t.text(f"dataset.{path}")]):
            t.put("data.use", "FILL_IN:data", reason="to be saved as JSON lines")
        t.judge("dataset._target_", "carried", "chats", to="data.chat.trained")
        t.put("data.chat.trained", "assistant", reason="ChatDataset masks the others")
        carry_template(t, "dataset.chat_template")
        t.put("data.chat.too_long", "truncate", reason="ChatDataset truncates to seq_length")
        if not size:
            t.put("data.padding", "longest", reason="a row is a chat")
    if size:
        t.carry(key, "data.seq_len", size)
        if is_chat:
            t.put("data.chat.packing", True, key)
    t.judge_block("packed_sequence", "equal" if is_chat or not size else "missing", "packing with masks of documents")
    for leaf in t.tree.below("dataset"):
        t.judge(
            leaf.key,
            "missing" if leaf.value else "meaningless",
            "an argument of a data set of Automodel's; name data with --data",
        )


_PATH = "path_or_dataset_id"
_MONITORS = {
    "wandb": {"project": "project", "name": "name", "entity": "entity"},
    "mlflow": {"experiment_name": "experiment", "run_name": "name", "tracking_uri": "tracking_uri"},
}


def _monitored(t: Translation) -> None:
    """Carry wandb and MLflow, where their project or any of their keys is stated."""
    for block, names in _MONITORS.items():
        if block == "mlflow" or t.text("wandb.project"):
            for key, name in names.items():
                if t.text(f"{block}.{key}"):
                    t.carry(f"{block}.{key}", f"@{block}.{name}", t.text(f"{block}.{key}"))
        t.judge_block(block, "meaningless", "off, or where it is written")
