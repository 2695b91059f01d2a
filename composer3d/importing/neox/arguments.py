"""Keys of GPT-NeoX that DeepSpeed does not have."""

from __future__ import annotations

from composer3d.importing.deepspeed.low_precision import precision as of_blocks
from composer3d.importing.indexed_sets import held_out, indexed
from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = [
    "checkpoints",
    "clipping",
    "dtype",
    "indexed_sets",
    "layout",
    "optimizer",
    "precision",
    "rates",
    "recomputation",
    "steps",
    "watched",
]

_TITLE = "GPT-NeoX's default"
_PARAMS = "optimizer.params"


def layout(translation: Translation) -> None:
    """Carry the degrees; a pipeline of one stage is none."""
    t = translation
    stages, ranks = t.integer("pipe_parallel_size", 0) or 0, t.integer("model_parallel_size", 1) or 1
    if stages > 1:
        t.carry("pipe_parallel_size", "mesh.pp", stages)
        t.put("@stages.schedule", "1F1B", reason="DeepSpeed's schedule")
        note = "stages are balanced by composer3d's own split"
        t.judge("pipe_partition_method", "changed", note, to="@stages.split")
    t.judge("pipe_parallel_size", "equal", "no pipeline")
    t.judge("pipe_partition_method", "meaningless", "no pipeline")
    if ranks > 1:
        t.carry("model_parallel_size", "mesh.tp", ranks)
        is_on = t.flag("sequence_parallel")
        t.put("@tensor.sequence_parallel", is_on, "sequence_parallel", reason=None if is_on else _TITLE)
        t.put("@tensor.loss_parallel", True, reason="GPT-NeoX computes the loss on sharded logits")
        t.judge("sequence_parallel", "carried", to="@tensor.sequence_parallel")
    t.judge("model_parallel_size", "equal")
    t.judge("sequence_parallel", "meaningless", "no tensor parallelism")
    count = t.integer("moe_num_experts", 1) or 1
    for key in t.tree.leaves:
        if key.startswith("moe_"):
            t.judge(key, "missing" if count > 1 else "meaningless", "experts are the model's own: name it with --model")


def dtype(translation: Translation) -> None:
    """Carry `precision`, which stands beside the blocks fp16 and bf16."""
    t = translation
    stated = "bfloat16" if t.get("fp16.type") == "bfloat16" else t.get("precision")
    is_half = t.flag("fp16.enabled") if "fp16.enabled" in t else stated == "fp16"
    source = "fp16.type" if "fp16.type" in t else "precision"
    if stated == "bfloat16" and not t.flag("bf16.enabled"):
        t.put("@mixed.param_dtype", "bfloat16", source)
        t.put("@mixed.norms", "as_others", reason="DeepSpeed casts the whole model, norms too")
        t.put("@mixed.reduce_dtype", "bfloat16", reason="DeepSpeed reduces in bfloat16; float32 is better")
        t.judge_block("fp16", "ignored-there", "the type is bfloat16")
    elif is_half and "fp16.enabled" not in t:
        t.put("@mixed.param_dtype", "float16", "precision")
    t.judge("precision", "carried" if stated in ("bfloat16", "fp16") else "equal", to="@mixed.param_dtype")
    for key in ("fp16.type", "fp16.fp16"):
        t.judge(key, "derived", "says what enabled says")
    if t.flag("fp32_allreduce"):
        t.carry("fp32_allreduce", "@mixed.reduce_dtype", "float32")
    t.judge("fp32_allreduce", "equal")


def precision(translation: Translation) -> None:
    """Carry the blocks fp16 and bf16 by DeepSpeed's rule, unless `precision` or a type has said bfloat16."""
    t, prefix = translation, path_of("@mixed")
    said = {path: setting for path, setting in t.settings.items() if path.startswith(prefix)}
    of_blocks(t)
    if said:
        for path in [path for path in t.settings if path.startswith(prefix)]:
            del t.settings[path]
        t.settings.update(said)


def optimizer(translation: Translation) -> None:
    """Carry Adam; GPT-NeoX decays neither biases nor norms, by a key of its own."""
    t, kind = translation, translation.text("optimizer.type", "Adam").lower()
    if kind in ("adam", "cpu_adam", "cpu_torch_adam"):
        t.put("optimizer.use", "adamw", "optimizer.type", reason=None if "optimizer.type" in t else _TITLE)
        t.judge("optimizer.type", "carried", "FusedAdam decays as AdamW does", to="optimizer.use")
        betas = t.get(f"{_PARAMS}.betas", [0.9, 0.999])
        good = isinstance(betas, list) and len(betas) == 2 and all(isinstance(one, int | float) for one in betas)
        if good:
            key = f"{_PARAMS}.betas"
            t.put("optimizer.betas", [float(one) for one in betas], key, reason=None if key in t else _TITLE)
            t.judge(key, "carried", to="optimizer.betas")
        elif f"{_PARAMS}.betas" in t:
            t.wrong(f"{_PARAMS}.betas", "must be two numbers")
        t.state(f"{_PARAMS}.eps", "optimizer.eps", float(t.number(f"{_PARAMS}.eps", 1e-8) or 0.0))
    elif kind == "sgd":
        t.carry("optimizer.type", "optimizer.use", "sgd")
        key = f"{_PARAMS}.momentum"
        t.state(key, "optimizer.momentum", float(t.number(key, 0.0) or 0.0))
    else:
        note = f'{kind} by name; a class of yours: optimizer.use = "module:Class"'
        t.judge("optimizer.type", "refused", note)
    rate = f"{_PARAMS}.lr" if f"{_PARAMS}.lr" in t else "lr"
    t.state(rate, "optimizer.lr", float(t.number(rate, 1e-3) or 0.0))
    t.state("weight_decay", "optimizer.weight_decay", float(t.number("weight_decay", 0.1) or 0.0))
    t.judge(f"{_PARAMS}.weight_decay", "ignored-there", "weight_decay at the top decides")
    t.judge("lr", "derived", "optimizer.params.lr")
    t.judge("optimizer_type", "derived", "optimizer.type")
    t.judge("use_bnb_optimizer", "missing" if t.flag("use_bnb_optimizer") else "equal", "8-bit moments by bitsandbytes")


def clipping(translation: Translation) -> None:
    """Carry the clipping norm, which GPT-NeoX passes to DeepSpeed: 1 where nothing is said."""
    norm = translation.number("gradient_clipping", 1.0) or 0.0
    translation.state("gradient_clipping", "train.grad_clip", float(norm) if norm > 0 else float("inf"))


def steps(translation: Translation) -> None:
    """Carry the steps, the length of sequences, dropout and the seed."""
    t = translation
    if (count := t.integer("train_iters", least=1)) is not None:
        t.carry("train_iters", "train.steps", count)
    t.judge("train_iters", "meaningless", "none")
    t.judge("train_epochs", "missing" if t.get("train_epochs") else "meaningless", "epochs: write train.steps")
    if (length := t.integer("seq_length", least=1)) is not None:
        t.carry("seq_length", "data.seq_len", length)
    t.judge("seq_length", "meaningless", "none")
    t.state("seed", "train.seed", int(t.number("seed", 1234) or 0))
    t.judge("clip_grad", "ignored-there", "gradient_clipping decides")
    t.judge("z_loss", "refused" if t.number("z_loss", 0) else "equal", "another loss; train.loss takes module:callable")


def rates(translation: Translation) -> None:
    """Carry the warm-up, which begins at 0, and the nearest fall. Source: megatron/learning_rates.py of GPT-NeoX."""
    t = translation
    total = t.settings["train.steps"].value if "train.steps" in t.settings else None
    name = t.text("lr_decay_style", "linear")
    if name not in ("linear", "cosine", "constant"):
        t.judge("lr_decay_style", "refused", f'{name} has no counterpart; write lr_schedule.use = "module:callable"')
        name = "constant"
    t.put("lr_schedule.use", name, "lr_decay_style", reason=None if "lr_decay_style" in t else _TITLE)
    share = t.number("warmup", 0.01) or 0.0
    length = t.integer("lr_decay_iters") or total
    warmup = int(share * length) if isinstance(length, int) else float(share)
    t.put(
        "lr_schedule.warmup", warmup, "warmup", reason=f"{share} of the decay{'' if 'warmup' in t else ', the default'}"
    )
    t.judge("warmup", "derived", f"{warmup} steps", to="lr_schedule.warmup")
    if warmup:
        t.put("lr_schedule.warmup_start", 0.0, reason=f"{_TITLE}: the first step has no rate")
    lowest, highest = t.number("min_lr", 0.0) or 0.0, t.settings["optimizer.lr"].value
    if name != "constant":
        ratio = min(lowest / highest, 1.0) if highest else 0.0
        t.put("lr_schedule.min_ratio", ratio, "min_lr", reason=None if "min_lr" in t else _TITLE)
        linear = name == "linear" and lowest > 0
        note = "the line goes to 0 and stops at min_lr there, to min_lr here" if linear else "min_lr / lr"
        t.judge("min_lr", "changed" if linear else "derived", note, to="lr_schedule.min_ratio")
    t.judge("min_lr", "ignored-there", "no decay")
    falls = warmup and name != "constant"
    note = "the fall of all decay iterations begins after the warm-up there, and ends with them here" if falls else ""
    t.judge("lr_decay_style", "changed" if falls else "carried", note, to="lr_schedule.use")
    ends = t.integer("lr_decay_iters")
    if ends is not None and total is not None and ends != total and name != "constant":
        t.put("lr_schedule.decay_end", ends, "lr_decay_iters")
        falls_whole = f"the rate stays from {ends - warmup} on there, which a fall to {ends} here comes near to"
        changed = isinstance(warmup, int) and warmup > 0
        t.judge(
            "lr_decay_iters", "changed" if changed else "carried", falls_whole * changed, to="lr_schedule.decay_end"
        )
    t.judge("lr_decay_iters", "equal")
    t.judge("lr_decay_fraction", "changed" if t.get("lr_decay_fraction") not in (None, 1, 1.0) else "equal")


def recomputation(translation: Translation) -> None:
    """Carry recomputation of blocks."""
    t = translation
    if t.flag("checkpoint_activations"):
        t.carry("checkpoint_activations", "@recomputed.mode", "full")
        count = t.integer("checkpoint_num_layers", 1) or 1
        note = f"memory: runs of {count} blocks are recomputed as one there" if count > 1 else "numbers are equal"
        t.judge("checkpoint_num_layers", "changed" if count > 1 else "equal", note)
        in_host = t.flag("checkpoint_in_cpu")
        if in_host:
            t.carry("checkpoint_in_cpu", "@activations", None)
        note = "inputs of blocks sharded over tp; sequence_parallel has it"
        t.judge("partition_activations", "missing" if t.flag("partition_activations") else "meaningless", note)
    for key in (
        "checkpoint_activations",
        "checkpoint_num_layers",
        "checkpoint_in_cpu",
        "partition_activations",
        "deepspeed_activation_checkpointing",
        "contiguous_checkpointing",
        "synchronize_each_layer",
        "profile_backward",
    ):
        t.judge(key, "meaningless", "off, or how it is done")


def checkpoints(translation: Translation) -> None:
    """Carry the distances of checkpoints and evaluations."""
    t = translation
    factor, scale = t.number("checkpoint_factor"), t.text("checkpoint_scale", "linear")
    if factor and factor >= 1 and scale == "linear":
        t.carry("checkpoint_factor", "checkpoint.every", int(factor))
        kept = t.integer("keep_last_n_checkpoints")
        t.put("checkpoint.keep", kept or 1_000_000, "keep_last_n_checkpoints", reason=None if kept else "all are kept")
        t.judge("keep_last_n_checkpoints", "carried", to="checkpoint.keep")
    t.judge(
        "checkpoint_factor", "missing" if factor else "meaningless", "a fraction of the run, or a logarithmic distance"
    )
    t.judge("checkpoint_scale", "equal" if scale == "linear" else "missing", "logarithmic distances of checkpoints")
    t.judge("keep_last_n_checkpoints", "meaningless", "no checkpoints between")
    t.judge(
        "extra_save_iters", "missing" if t.get("extra_save_iters") else "meaningless", "single steps that are saved"
    )
    t.judge("save", "derived" if t.get("save") else "meaningless", "checkpoints are in the run's folder: run.output")
    t.judge("load", "missing" if t.get("load") else "meaningless", "checkpoints of GPT-NeoX")
    for key, to, default in (("eval_interval", "evaluation.every", 1000), ("eval_iters", "evaluation.batches", 100)):
        t.state(key, to, int(t.number(key, default) or default))


def indexed_sets(translation: Translation) -> None:
    """Carry indexed data sets and their blend; other sets for evaluation, and weights by documents, are missing."""
    t = translation
    key = "train_data_paths" if t.get("train_data_paths") else "data_path"
    found, weights = t.get(key), t.get("train_data_weights")
    prefixes = [str(each) for each in found] if isinstance(found, list) else [str(found)] if found else []
    if t.options.data is not None:
        t.judge(key, "derived", "--data names the data")
    elif prefixes:
        is_weighted = isinstance(weights, list) and len(weights) == len(prefixes) and not t.flag(_BY_DOCUMENTS)
        shares = [float(weight) for weight in weights] if is_weighted and weights else [1.0] * len(prefixes)
        indexed(t, key, prefixes, shares, of_weights="train_data_weights" if is_weighted else None)
        if key == "data_path":
            held_out(t, "split", "969,30,1")
        else:
            t.put("data.evaluation_fraction", 0.0, reason="train_data_paths are trained on as a whole")
    for name in ("data_path", "train_data_paths"):
        t.judge(name, "ignored-there" if t.get(name) else "meaningless", f"{key} decides")
    t.judge("split", "ignored-there" if t.get("split") else "meaningless", "it divides data_path alone")
    t.judge(_BY_DOCUMENTS, "missing" if t.flag(_BY_DOCUMENTS) else "equal", "weights from counts of documents")
    t.judge("weighted_sampler_alpha", "meaningless", f"of {_BY_DOCUMENTS}")
    t.judge("train_data_weights", "missing" if weights else "meaningless", "there is a weight for each path")
    t.judge("data_impl", "equal" if t.text("data_impl", "mmap") in ("mmap", "infer") else "missing", "indexed data")
    for name in ("valid_data_paths", "test_data_paths", "valid_data_weights", "test_data_weights"):
        t.judge(name, "missing" if t.get(name) else "meaningless", "evaluation on sets of its own")


_BY_DOCUMENTS = "weight_by_num_documents"


def watched(translation: Translation) -> None:
    """Carry log lines, TensorBoard, wandb and profiles."""
    t = translation
    t.state("log_interval", "run.log_every", int(t.number("log_interval", 100) or 100))
    if t.text("tensorboard_dir"):
        t.carry("tensorboard_dir", "@tensorboard", None, "in the run's folder, unless folder says another")
    if t.flag("use_wandb"):
        t.put("@wandb.project", t.text("wandb_project") or "neox", "use_wandb", "wandb_project")
        t.carry_text("wandb_run_name", "@wandb.name")
        for key in ("use_wandb", "wandb_project"):
            t.judge(key, "carried", to="@wandb.project")
        for key, name in (("wandb_team", "entity"), ("wandb_group", "group")):
            if t.text(key):
                t.carry(key, f"@wandb.{name}", t.text(key))
        t.judge("wandb_host", "missing" if t.get("wandb_host") else "meaningless", "WANDB_BASE_URL in the environment")
    begins, ends = t.integer("profile_step_start", 10) or 0, t.integer("profile_step_stop", 12) or 0
    if t.flag("profile") and ends > begins:
        t.put("@profiler.wait", max(begins - 1, 0), "profile_step_start")
        t.put("@profiler.active", ends - begins, "profile_step_start", "profile_step_stop")
        for key in ("profile", "profile_step_start", "profile_step_stop"):
            t.judge(key, "derived", "steps before, and steps in the profile", to="@profiler.active")
    if t.flag("memory_profiling"):
        t.carry("memory_profiling", "@snapshots", None)
    for key in t.tree.leaves:
        if key.startswith(("tensorboard_dir", "use_wandb", "wandb_", "profile", "memory_profiling")):
            t.judge(key, "meaningless", "off, or where it is written")
