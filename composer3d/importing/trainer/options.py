"""Sharding, precision, recomputation, files and adapters of the Trainer."""

from __future__ import annotations

from composer3d.importing.fully_sharded import fully_sharded
from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = ["precision", "saving", "sharded", "switches"]


def _words(t: Translation) -> list[str]:
    """Return the words of `fsdp`, which is a list, a text with blanks, or a boolean."""
    value = t.get("fsdp")
    if isinstance(value, bool):
        return ["full_shard"] if value else []
    items = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return [str(item) for item in items]


def _is_sharded(t: Translation) -> bool:
    return bool(_words(t)) or ("fsdp" not in t and t.has_block("fsdp_config"))


def sharded(translation: Translation) -> None:
    """Carry FSDP's words and options, or DistributedDataParallel's."""
    t = translation
    if any(t.flag(f"fsdp_config.{name}") for name in ("xla", "xla_fsdp_v2")):
        t.judge_block("fsdp_config.xla", "refused", "there is no XLA here")
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        t.judge_block(f"fsdp_config.{name}", "meaningless", "of XLA")
    words = _words(t)
    if _is_sharded(t):
        names = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in t.tree.leaves if key.startswith("fsdp_")}
        least = names.get("min_num_params", "fsdp_config.min_num_params")
        is_by_size = any("auto_wrap" in word for word in words) and bool(t.integer(least, 0))
        fully_sharded(
            t,
            lambda name: names.get(name, f"fsdp_config.{name}"),
            machines=1,
            world=t.options.world_size,
            wraps="SIZE_BASED_WRAP" if is_by_size else "TRANSFORMER_BASED_WRAP",
        )
        is_second = t.get(names.get("version", "fsdp_config.version")) in (2, "2")
        zero = 2 if any("shard_grad_op" in word or "zero2" in word for word in words) else 3
        if "no_shard" in words:
            t.settings.pop(path_of("@sharded.zero"), None)
            t.put("@replicated", None, "fsdp")
        elif words and not is_second:  # else reshard_after_forward decides, which is carried
            t.put("@sharded.zero", zero, "fsdp")
        if "offload" in words:
            t.put("@host.mode", "all", "fsdp")
        to = "@replicated" if "no_shard" in words else "@sharded.zero"
        hybrid = any("hybrid" in word for word in words)
        note = "write mesh.dp_shard = ranks of a node, and dp_replicate = nodes" if hybrid else ""
        if is_second and zero == 2 and not hybrid:
            note = "it switches version 2 of FSDP on, in which reshard_after_forward decides"
        t.judge("fsdp", "changed" if hybrid else "carried", note, to=to)
    else:
        t.put("@replicated.reducer", "bucketed", reason="the Trainer's default: DistributedDataParallel")
        for key, to in (
            ("find_unused_parameters", "find_unused_parameters"),
            ("broadcast_buffers", "broadcast_buffers"),
        ):
            if t.get(f"ddp_{key}") is not None:
                t.put(f"@replicated.{to}", t.flag(f"ddp_{key}"), f"ddp_{key}")
                t.judge(f"ddp_{key}", "carried", to=f"@replicated.{to}")
        if t.number("ddp_bucket_cap_mb"):
            t.carry("ddp_bucket_cap_mb", "@replicated.bucket_mib", t.number("ddp_bucket_cap_mb"))
        t.judge("fsdp", "equal", "off")
    for block in ("fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        t.judge_block(block, "ignored-there", "fsdp is not switched on, or its block has it")
    for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph"):
        t.judge(f"ddp_{name}", "ignored-there" if _is_sharded(t) else "meaningless", "of DistributedDataParallel")


def precision(translation: Translation) -> None:
    """Carry 16 bits: FSDP's policy where it is on, else autocast."""
    t = translation
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if t.flag(other) and str(t.get(one)).lower() in ("true", "1"):
            t.wrong(other, f"cannot stand beside {one} = true: the Trainer raises", hint=f"leave {one} or {other} out")
    key = "bf16" if str(t.get("bf16")).lower() in ("true", "auto", "1") else "fp16"
    dtype = "bfloat16" if key == "bf16" else "float16"
    if key == "bf16" or t.flag("fp16"):
        t.put("@mixed.param_dtype", dtype, key)
        t.put("@mixed.output_dtype", "float32", reason="Accelerate converts the outputs")
        if _is_sharded(t):
            t.put("@mixed.reduce_dtype", dtype, reason="FSDP reduces in it under the Trainer; float32 is better")
            t.judge(key, "carried", to="@mixed.param_dtype")
        else:
            t.put("@mixed.norms", "float32", reason="autocast computes norms in float32")
        t.judge(
            key, "changed", "autocast chooses a dtype for each operator; here weights are cast", to="@mixed.param_dtype"
        )
    if t.flag("tf32"):
        t.carry("tf32", "run.matmul_precision", "high")
    for name in (
        "bf16",
        "fp16",
        "tf32",
        "fp16_opt_level",
        "half_precision_backend",
        "bf16_full_eval",
        "fp16_full_eval",
    ):
        t.judge(name, "meaningless", "off, or of evaluation")


def _recomputation(t: Translation) -> None:
    """Carry activation checkpointing, whose old name counts where the new one is not there."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    key = new if t.get(new) is not None else old
    options = f"{new}_kwargs" if t.has_block(f"{new}_kwargs") else f"{old}_kwargs"
    if t.flag(key):
        t.carry(key, "@recomputed.mode", "full")
        every = t.integer(f"{options}.every_n_layers", 1, least=1) or 1
        if every > 1:
            t.carry(f"{options}.every_n_layers", "@recomputed.every", every)
        if t.flag(f"{options}.offload"):
            t.carry(f"{options}.offload", "@activations", None)
    for name in (new, old):
        t.judge(name, "meaningless" if name == key else "ignored-there", "off" if name == key else f"{new} decides")
        t.judge_block(f"{name}_kwargs", "meaningless", "off, or how it is done")


def _compilation(t: Translation) -> None:
    """Carry compilation, which a backend or a mode switches on as well."""
    switch, backend, mode = "torch_compile", "torch_compile_backend", "torch_compile_mode"
    if t.flag(switch) or t.get(backend) or t.get(mode):
        t.put("@compiled.backend", t.text(backend, "inductor").lower(), switch, backend)
        t.put("@compiled.fullgraph", False, reason="the Trainer's default")
        t.judge(switch, "changed", "blocks are graphs here, the model there: rounding", to="@compiled.backend")
        t.judge(backend, "carried", to="@compiled.backend")
        t.carry_text(mode, "@compiled.mode")
    for name in (switch, backend, mode):
        t.judge(name, "meaningless", "off")


def switches(translation: Translation) -> None:
    """Carry recomputation, compilation, the model and adapters."""
    t = translation
    _recomputation(t)
    _compilation(t)
    if t.options.model is None and t.text("model_name_or_path"):
        t.carry("model_name_or_path", "model.hf", t.text("model_name_or_path"))
    t.judge("model_name_or_path", "derived", "--model is taken in its place")
    t.judge(
        "trust_remote_code", "meaningless", "Python of the model's folder runs only where model.trust_remote_code says"
    )
    if str(t.get("finetuning_type")).lower() == "lora":
        t.put("@adapters.quantize", "none", "finetuning_type")
        rank = t.integer("lora_rank", 8, least=1) or 8
        t.state("lora_rank", "@adapters.rank", rank)
        t.put("@adapters.alpha", float(t.number("lora_alpha", 2 * rank) or rank), "lora_alpha", reason="twice the rank")
        t.judge("lora_alpha", "carried", to="@adapters.alpha")
        t.judge("lora_dropout", "missing" if t.number("lora_dropout", 0) else "equal", "dropout of adapters by name")
        t.judge("lora_target", "missing", "modules of adapters: write them in modules")
        t.judge("finetuning_type", "carried", to="@adapters.rank")
    t.judge("finetuning_type", "equal" if t.get("finetuning_type") == "full" else "refused", "of LLaMA-Factory")
    kind = str(t.get("stage") or "pt").lower()
    t.judge(
        "stage",
        "equal" if kind == "pt" else "missing" if kind == "sft" else "refused",
        "instruction data, or another loss",
    )
    if t.flag("use_muon"):
        t.judge("use_muon", "refused", 'write optimizer.use = "muon"; the split of matrices differs')
    if t.flag("fp8"):
        t.put("@float8.recipe", "tensorwise", "fp8")
        t.judge("fp8", "changed", "the layers that are left out differ", to="@float8.recipe")
        t.carry("fp8_enable_fsdp_float8_all_gather", "@float8.all_gather", t.flag("fp8_enable_fsdp_float8_all_gather"))
    for name in ("use_muon", "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "flash_attn", "lora_rank"):
        t.judge(name, "meaningless", "off, or a kernel")
    for name in ("lora_alpha", "lora_dropout", "lora_target"):
        t.judge(name, "ignored-there", "finetuning_type is not lora")


def _best(t: Translation) -> None:
    """Carry the comparison of evaluations; figures that a script computes are not known here."""
    others = ("metric_for_best_model", "greater_is_better")
    key, figure = "load_best_model_at_end", t.text("metric_for_best_model", "loss").removeprefix("eval_")
    if not t.flag(key):
        for name in (key, *others):
            t.judge(name, "meaningless", "evaluations are not compared")
    elif figure != "loss" or "evaluation.every" not in t.settings:
        for name in (key, *others):
            t.judge(name, "missing", "name the figure in evaluation.metrics, and write evaluation.every and best")
    else:
        t.put("evaluation.best", "loss", key, "metric_for_best_model")
        note = "the best checkpoint is kept and named; the run's own end is not replaced by it"
        t.judge(key, "changed", note, to="evaluation.best")
        t.judge("metric_for_best_model", "carried", to="evaluation.best")
        if "greater_is_better" in t:
            t.put("evaluation.goal", "highest" if t.flag("greater_is_better") else "lowest", "greater_is_better")
        t.judge("greater_is_better", "carried", to="evaluation.goal")


def saving(translation: Translation) -> None:
    """Carry the distances of checkpoints, evaluations and log lines."""
    t = translation
    every = t.number("logging_steps", 500) or 500
    if every >= 1:
        t.state("logging_steps", "run.log_every", int(every))
    t.judge("logging_steps", "changed", "a fraction of the run there")
    by_epoch = t.table.name == "axolotl" and "save_steps" not in t  # which saves after every epoch then
    if str(t.get("save_strategy", "epoch" if by_epoch else "steps")).lower() == "steps" and not t.get(
        "saves_per_epoch"
    ):
        saved = t.number("save_steps", 500) or 500
        if saved >= 1:
            t.state("save_steps", "checkpoint.every", int(saved))
            limit = t.integer("save_total_limit")
            t.put("checkpoint.keep", limit or 1_000_000, "save_total_limit", reason=None if limit else "all are kept")
            t.judge("save_total_limit", "carried", to="checkpoint.keep")
            t.judge("save_strategy", "carried", to="checkpoint.every")
    strategy = "eval_strategy" if "eval_strategy" in t else "evaluation_strategy"
    if str(t.get(strategy, "no")).lower() == "steps":
        steps = t.number("eval_steps", t.number("logging_steps", 500)) or 500
        if steps >= 1:
            t.put("evaluation.every", int(steps), "eval_steps", strategy)
            t.judge("eval_steps", "carried", to="evaluation.every")
            t.judge(strategy, "carried", to="evaluation.every")
    _best(t)
    named = t.get("report_to")
    watchers = [str(item) for item in named] if isinstance(named, list) else [str(named)]
    if "wandb" in watchers:
        t.put("@wandb.name", t.text("run_name") or "run", "run_name", "report_to")
        t.judge("run_name", "carried", to="@wandb.name")
    if "tensorboard" in watchers:
        t.put("@tensorboard", None, "report_to")
    if "mlflow" in watchers:
        t.put("@mlflow", None, "report_to", reason="where and under which name: MLFLOW_* in the environment, as there")
    others = set(watchers) - {"wandb", "tensorboard", "mlflow", "none", "None"}
    if others:
        is_all = others == {"all"}
        note = "all that are installed there, none here: name those that are wanted" if is_all else "other monitors"
        t.judge("report_to", "changed" if is_all else "missing", note)
    carried = next((f"@{name}" for name in watchers if name in ("wandb", "tensorboard", "mlflow")), None)
    t.judge("report_to", "carried" if carried else "equal", to=carried)
    for name in (
        "save_steps",
        "save_total_limit",
        "save_strategy",
        "eval_steps",
        "eval_strategy",
        "evaluation_strategy",
    ):
        t.judge(name, "meaningless" if t.get(name) in (None, "no") else "missing", "by epochs or fractions of the run")
    t.judge("run_name", "meaningless", "a name")
