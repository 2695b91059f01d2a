"""Keys of axolotl that transformers' Trainer does not have."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["adapters", "layout", "losses", "low_precision", "watched"]

_DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tensor_parallel_size": "tp"}
_BITS = {"int4": "int4", "int8": "int8"}


def layout(translation: Translation) -> None:
    """Carry the degrees, and the plugins of tensor and sequence parallelism."""
    t = translation
    for key, axis in _DEGREES.items():
        degree = t.integer(key, 1, least=1) or 1
        if degree > 1:
            t.carry(key, f"mesh.{axis}", degree)
        t.judge(key, "equal")
    if "mesh.tp" in t.settings:
        t.put("@tensor.plan", "auto", reason="transformers' tp_plan there, found from the model here")
    key = "context_parallel_size" if "context_parallel_size" in t else "sequence_parallel_degree"
    degree = t.integer(key, 1, least=1) or 1
    if degree > 1:
        t.carry(key, "mesh.cp", degree)
        t.put("@sequence.method", "ring", "ring_attn_func", reason="ring attention")
    for name in ("context_parallel_size", "sequence_parallel_degree"):
        t.judge(name, "equal")
    for name in ("ring_attn_func", "heads_k_stride"):
        t.judge(name, "meaningless", "how the ring is computed")
    if t.get("fsdp_version") is not None and not t.has_block("fsdp_config"):
        t.judge("fsdp_version", "ignored-there", "fsdp_config is not there")
    t.judge("fsdp_version", "equal", "both versions are this plugin")
    t.judge("fsdp_final_state_dict_type", "equal", "composer3d export writes whole weights")
    t.judge("fsdp_config.final_state_dict_type", "equal", "composer3d export writes whole weights")
    for name in ("mixed_precision_policy",):
        t.judge(f"fsdp_config.{name}", "missing", "a policy besides bf16; write [@mixed]")


def adapters(translation: Translation) -> None:
    """Carry LoRA and QLoRA; other adapters are other experiments."""
    t, kind = translation, translation.text("adapter").lower()
    if kind in ("lora", "qlora"):
        four = kind == "qlora" or t.flag("load_in_4bit")
        t.put("@adapters.quantize", "nf4" if four else "none", "adapter", "load_in_4bit")
        t.judge("adapter", "carried", to="@adapters.quantize")
        t.judge("load_in_4bit", "carried" if four else "equal", to="@adapters.quantize")
        for key, to in (("lora_r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            value = t.number(key)
            if value is not None:
                t.carry(key, f"@adapters.{to}", int(value) if to == "rank" else float(value))
        names = t.get("lora_target_modules")
        if isinstance(names, list) and names:
            t.carry("lora_target_modules", "@adapters.modules", [f"**.{name}" for name in names])
        t.judge("lora_target_linear", "equal" if t.flag("lora_target_linear") else "meaningless", "every linear layer")
        kept = "weights that are trained whole beside the adapters"
        t.judge("lora_modules_to_save", "missing" if t.get("lora_modules_to_save") else "meaningless", kept)
        t.judge("load_in_8bit", "missing" if t.flag("load_in_8bit") else "equal", "8-bit weights under adapters")
        for key in (
            "peft_use_dora",
            "peft_use_rslora",
            "peft_layers_to_transform",
            "loraplus_lr_ratio",
            "lora_model_dir",
        ):
            t.judge(key, "refused" if t.get(key) else "meaningless", "another kind of adapter")
    elif kind:
        t.judge("adapter", "refused", f"{kind} has no counterpart; lora and qlora have")
    t.judge("adapter", "equal", "all weights are trained")
    for key in ("load_in_4bit", "load_in_8bit"):
        t.judge(key, "missing" if t.flag(key) else "equal", "quantised weights without adapters")
    for key in t.tree.leaves:
        if key.startswith(("lora_", "peft", "loraplus_", "qlora_", "bnb_config_kwargs", "gptq", "loftq")):
            t.judge(
                key, "meaningless" if kind else "ignored-there", "of adapters: kernels, files, or adapter is not set"
            )
    if t.flag("relora"):
        t.judge("relora", "refused", "adapters that are merged and begun again")
    for key in t.tree.leaves:
        if key.startswith(("relora", "jagged_restart")):
            t.judge(
                key,
                "missing" if t.get("jagged_restart_steps") and key.startswith("jagged") else "meaningless",
                "restarts",
            )


def low_precision(translation: Translation) -> None:
    """Carry 8 bits, norms in float32, fake quantisation and offloaded activations."""
    t = translation
    if t.flag("fp8"):
        t.put("@float8.recipe", "tensorwise", "fp8")
        t.judge("fp8", "changed", "the layers that are left out differ", to="@float8.recipe")
        key = "fp8_enable_fsdp_float8_all_gather"
        t.carry(key, "@float8.all_gather", t.flag(key))
    if t.flag("fp32_norms"):
        t.carry("fp32_norms", "@mixed.norms", "float32_units")
    t.judge("fp32_norms", "equal")
    t.judge("fp32_norm_classes", "changed" if t.get("fp32_norm_classes") else "meaningless", "norms by class name")
    stated = _BITS.get(str(t.get("qat.weight_dtype", "int8")).lower())
    if t.has_block("qat") and stated is not None:
        t.put("@fake_quantised.weights", stated, "qat.weight_dtype", reason="axolotl's default: int8")
        t.judge("qat.weight_dtype", "carried", to="@fake_quantised.weights")
        size = t.integer("qat.group_size", 32, least=1) or 32
        t.state("qat.group_size", "@fake_quantised.group_size", size)
        t.judge(
            "qat.activation_dtype", "changed", "activations are int8, or as they are", to="@fake_quantised.activations"
        )
    t.judge_block("qat", "missing", "other fake quantisers")
    offloaded = t.get("activation_offloading")
    if offloaded not in (None, False):
        t.put("@activations", None, "activation_offloading")
        t.judge("activation_offloading", "carried", to="@activations")
    t.judge("activation_offloading", "meaningless", "off")
    if str(t.get("gradient_checkpointing")).lower() in ("offload", "offload_disk"):
        t.put("@recomputed.mode", "full", "gradient_checkpointing")
        t.put("@activations", None, "gradient_checkpointing")
        t.judge("gradient_checkpointing", "carried", to="@recomputed.mode")
    t.judge_block(
        "selective_checkpointing", "missing", "which operators are kept: write policy of activation_checkpoint"
    )
    t.judge("float32", "equal")


def losses(translation: Translation) -> None:
    """Refuse other losses and algorithms where they are switched on."""
    t = translation
    for block, note in (
        ("rl", "preferences are another loss"),
        ("trl", "reinforcement learning is another program"),
        ("ebft", "another loss"),
        ("reward_model", "a reward model is another program"),
        ("process_reward_model", "a reward model is another program"),
        ("lisa_n_layers", "LISA trains layers by turns"),
        ("use_eaft", "another loss"),
        ("curriculum_sampling", "another order of data"),
    ):
        for leaf in t.tree.below(block):
            t.judge(leaf.key, "refused" if leaf.value not in (None, False, [], {}) else "meaningless", note)
    for key in ("unfrozen_parameters",):
        t.judge(key, "missing" if t.get(key) else "equal", "what is trained: train.frozen names the others by pattern")
    for key in ("lr_groups", "embedding_lr", "embedding_lr_scale"):
        t.judge_block(key, "missing" if t.get(key) else "meaningless", "other rates: write optimizer.groups")
    _cosines(t)


def _cosines(t: Translation) -> None:
    """Carry axolotl's own forms of the cosine: a floor, where it is reached, and a quadratic warm-up."""
    lowest, ends, quadratic = "cosine_min_lr_ratio", "cosine_constant_lr_ratio", "lr_quadratic_warmup"
    if t.text("lr_scheduler_type", "cosine") != "cosine":
        for key in (lowest, ends, quadratic):
            t.judge(key, "ignored-there", "of the cosine alone")
    elif t.flag(quadratic):
        warmup = t.number("warmup_steps", 0) or t.number("warmup_ratio", 0)
        if warmup or ("warmup_steps" not in t and "warmup_ratio" not in t):
            t.carry(quadratic, "lr_schedule.warmup_shape", "quadratic")
        t.judge(quadratic, "equal", "there is no warm-up")
        for key in (lowest, ends):
            t.judge(key, "ignored-there", f"{quadratic} decides")
    floor, share = t.number(lowest), t.number(ends)
    if floor is not None and lowest not in t.verdicts:
        t.carry(lowest, "lr_schedule.min_ratio", float(floor))
    if floor and share and ends not in t.verdicts:
        t.carry(ends, "lr_schedule.decay_end", float(share))
    t.judge(ends, "ignored-there" if t.get(ends) else "meaningless", f"without {lowest}")
    for key in (lowest, quadratic):
        t.judge(key, "meaningless", "another shape of the schedule")
    t.judge("lr_div_factor", "missing" if t.get("lr_div_factor") else "meaningless", "one-cycle rates")


def watched(translation: Translation) -> None:
    """Carry wandb, TensorBoard and MLflow; distances in epochs are missing."""
    t = translation
    t.carry_text("wandb_project", "@wandb.project")
    if t.text("wandb_project"):
        t.carry_text("wandb_name", "@wandb.name")
        t.carry_text("wandb_entity", "@wandb.entity")
    t.switch("use_tensorboard", "@tensorboard")
    if t.flag("use_mlflow"):
        t.carry("use_mlflow", "@mlflow", None)
        for key, name in (("tracking_uri", "tracking_uri"), ("experiment_name", "experiment"), ("run_name", "name")):
            if t.text(f"mlflow_{key}"):
                t.carry(f"mlflow_{key}", f"@mlflow.{name}", t.text(f"mlflow_{key}"))
    for key in ("saves_per_epoch", "evals_per_epoch"):
        t.judge(
            key, "missing" if t.get(key) else "meaningless", "by epochs: write checkpoint.every or evaluation.every"
        )
    patience = t.integer("early_stopping_patience", least=1) if t.get("early_stopping_patience") else None
    if patience is not None and "evaluation.every" in t.settings:
        t.put("evaluation.best", "loss", "early_stopping_patience", reason="axolotl compares the loss")
        t.carry("early_stopping_patience", "evaluation.patience", patience)
    note = "an early end needs evaluations: write evaluation.every, best and patience"
    t.judge("early_stopping_patience", "missing" if patience else "meaningless", note)
    for key in t.tree.leaves:
        if key.startswith(("wandb_", "use_tensorboard", "use_wandb", "mlflow_", "use_mlflow")):
            t.judge(key, "meaningless", "off")
