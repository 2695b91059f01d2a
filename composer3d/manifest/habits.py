"""Keys of other systems, and the manifest's own for the same thing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from composer3d.errors import PluginError, Problem
from composer3d.registry import Catalogue, info_of

__all__ = ["explained"]

_BATCH = "train.microbatch is sequences per forward and rank, train.global_batch those of a step over all ranks"
_RANKS = (
    "the degrees of mesh multiply to the number of ranks, and an axis that is -1 takes those that are left; composer3d "
    "run MANIFEST --nproc-per-node N, or torchrun, starts them"
)
_WORDS = {
    "write optimizer.lr": "lr learning_rate",
    "write optimizer.weight_decay": "weight_decay",
    "write optimizer.betas": "betas adam_beta1 adam_beta2 beta1 beta2",
    "write optimizer.eps": "adam_epsilon adam_eps",
    "write optimizer.use": "optim optimizer_type",
    "write lr_schedule.warmup": "warmup warmup_steps warmup_ratio warmup_iters lr_warmup_iters lr_warmup_steps "
    "num_warmup_steps lr_warmup_fraction",
    "write lr_schedule.use": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "write lr_schedule.decay_end": "lr_decay_iters lr_decay_steps",
    "write lr_schedule.min_ratio, a fraction of optimizer.lr": "min_lr",
    _BATCH: "batch_size train_batch_size",
    "write train.microbatch": "micro_batch_size micro_batch per_device_train_batch_size train_micro_batch_size_per_gpu "
    "per_gpu_train_batch_size local_batch_size device_batch_size",
    "write train.global_batch": "global_batch_size",
    "write train.accumulate": "accumulate",
    "write train.accumulate: micro-batches a step on each rank; or train.global_batch, sequences of all ranks": (
        "num_microbatches accumulation_steps gradient_accumulation_steps accumulate_grad_batches grad_accum_steps "
        "gradient_accumulation"
    ),
    "train.steps counts optimizer steps, and nothing counts epochs": "epochs num_epochs num_train_epochs max_epochs",
    "write train.steps": "max_steps num_steps steps train_iters max_iters num_training_steps total_steps train_steps",
    "write train.grad_clip": "clip_grad max_grad_norm gradient_clipping gradient_clip_val gradient_clip "
    "gradient_clip_norm max_norm",
    "write train.seed": "seed",
    "write train.loss": "loss loss_fn criterion",
    "write run.output": "output_dir out_dir save_dir default_root_dir",
    "write checkpoint.every": "save_steps save_every save_interval save_strategy checkpoint_interval",
    "write checkpoint.keep": "save_total_limit save_top_k keep_last",
    "composer3d run resumes from the newest checkpoint of run.output; --resume PATH names another": "resume "
    "resume_from_checkpoint resume_from ckpt_path",
    "write evaluation.every": "eval_steps eval_every eval_interval eval_strategy evaluation_strategy val_interval "
    "val_check_interval",
    "write run.log_every": "log_every logging_steps log_interval steps_per_print log_every_n_steps",
    "write run.device": "device accelerator no_cuda use_cpu",
    "write run.matmul_precision": "tf32 allow_tf32",
    _RANKS: "devices gpus num_gpus n_gpus nproc_per_node world_size num_processes nnodes num_nodes num_machines",
    "dtypes are plugins of the family precision: composer3d plugins lists them": "dtype torch_dtype bf16 fp16 amp "
    "mixed_precision float16 bfloat16 half autocast params_dtype",
    "adapters are plugins of the family precision: composer3d plugins lists them": "lora peft peft_config adapter",
    "how a model is divided stands in mesh and in tables of plugins of the family sharding: composer3d plugins lists "
    "them": "strategy parallelism parallel distributed distributed_type fsdp_config",
    "what is recomputed is a plugin of the family scheduling: composer3d plugins lists them": "gradient_checkpointing "
    "activation_checkpointing recompute recompute_granularity use_gradient_checkpointing",
    "compilation is a plugin of the family scheduling: composer3d plugins lists them": "torch_compile use_compile",
    "loggers are plugins of the family profiling: composer3d plugins lists them": "report_to logging logger loggers",
    "backends are plugins of the family communication: composer3d plugins lists them": "backend ddp_backend "
    "distributed_backend",
    "composer3d import FILE writes a manifest from that system's file": "deepspeed zero_optimization fsdp_plugin "
    "deepspeed_config",
    "write mesh.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size tp_degree",
    "write mesh.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp_size pp_degree "
    "pipeline_parallel stages num_stages",
    "write mesh.cp": "context_parallel_size context_parallel_degree cp_size cp_degree",
    "write mesh.ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size ep_degree",
    "write mesh.dp_shard (parameters sharded) or mesh.dp_replicate (parameters replicated)": "dp data_parallel_size "
    "dp_size",
    "write mesh.dp_shard": "data_parallel_shard_degree fsdp_size dp_shard_size",
    "write mesh.dp_replicate": "data_parallel_replicate_degree",
    "write data.seq_len": "block_size context_length max_length max_seq_len seq_length max_seq_length sequence_length "
    "cutoff_len",
    "write data.use": "dataset dataset_name dataset_path train_file data_path data_dir train_data",
    "write data.workers": "num_workers dataloader_num_workers",
    "write data.order": "shuffle",
    "write data.tokenizer": "tokenizer tokenizer_name tokenizer_path",
    "write model.hf": "model_name_or_path name_or_path pretrained pretrained_model_name_or_path model_name model_id "
    "base_model hf_model",
}
_ANYWHERE = {word: hint for hint, words in _WORDS.items() for word in words.split()}
_ARGUMENTS = frozenset(
    "num_layers n_layer n_layers num_hidden_layers hidden_size hidden_dim n_embd d_model dim num_heads n_head n_heads "
    "num_attention_heads ffn_hidden_size intermediate_size dropout vocab_size max_position_embeddings".split()
)
# Of plugins, which the core does not name: the option that says what a word of others means.
_OPTIONS = {
    "zero": "zero_stage zero1 zero2 zero3 stage sharding_strategy full_shard deepspeed",
    "param_dtype": "bf16 fp16 amp bfloat16 float16 autocast half",
    "units": "auto_wrap_policy wrap_policy transformer_layer_cls_to_wrap",
    "sequence_parallel": "sp",
    "backend": "torch_compile inductor",
}
_OPTION_OF = {word: option for option, words in _OPTIONS.items() for word in words.split()}
_IN_TABLE = {
    "mesh": {
        "dp": "write dp_shard (parameters sharded) or dp_replicate (parameters replicated)",
        "data": "write dp_shard or dp_replicate",
        "data_parallel": "write dp_shard or dp_replicate",
        "fsdp": "write dp_shard",
        "mp": "write tp",
        "model": "write tp",
        "tensor": "write tp",
        "pipeline": "write pp",
        "pipeline_parallel": "write pp",
        "sp": "write cp; sequence parallelism beside tensor parallelism is an option of that plugin",
        "context": "write cp",
        "expert": "write ep",
        "world_size": "the degrees multiply to it; an axis that is -1 takes the ranks that are left",
    },
    "optimizer": {"learning_rate": "write lr", "name": "write use", "type": "write use", "beta1": "write betas"},
    "model": {"name": "write use", "path": "write use", "class": "write use", "type": "write use"},
    "data": {"path": "write use", "name": "write use", "file": "write use", "files": "write use"},
    "lr_schedule": {
        "type": "write use",
        "T_max": "write decay_end",
    },
    "checkpoint": {"interval": "write every", "steps": "write every", "dir": "checkpoints lie in run.output"},
    "run": {"name": "write output", "dir": "write output", "precision": _ANYWHERE["dtype"]},
    "train": {"precision": _ANYWHERE["dtype"]},
    "optimizer.groups": {
        "params": "write match",
        "name": "write match",
        "names": "write match",
        "pattern": "write match",
    },
}
_VALUES = {("run", "device", "gpu"): 'write "cuda"', ("run", "device", "nvidia"): 'write "cuda"'}


def explained(problem: Problem, *, value: object, tables: Collection[str]) -> Problem:
    """Return a problem of an unknown key or table with a better hint, if the intended name is recognised.

    Args:
        problem: Of a manifest.
        value: Value in the manifest.
        tables: Names of all top-level tables.
    """
    said, name = problem.message, (problem.table or "").rpartition(".")[2].strip('"')
    if said.startswith("unknown table "):
        return _hinted(problem, _plugin_hint(name) or _ANYWHERE.get(name) or _argument_hint(name) or _option_hint(name))
    if "must be a table of plugins" in said and isinstance(value, str):
        written = _plugin_hint(value) or _option_hint(value.partition("-")[0])
        return _hinted(problem, written and f"{written}; {problem.hint}")
    if said.startswith("no plugin ") and not (problem.hint or "").startswith(("write ", "it is a key")):
        return _hinted(problem, _option_hint(name))
    habit = _VALUES.get((problem.table or "", problem.key or "", value)) if isinstance(value, str) else None
    if habit is not None:
        return replace(problem, hint=habit)
    if not said.startswith("unknown key ") or problem.key is None:
        return problem
    key, table = problem.key, problem.table or ""
    if key in tables and isinstance(value, dict):
        return replace(problem, hint=_dotted_hint(key, table, value))
    hint = _IN_TABLE.get(table.partition("[")[0], {}).get(key) or _axis_hint(key, table) or _ANYWHERE.get(key)
    if table == "model" and (hint is None or not hint.startswith("write model.")):
        hint = f"arguments of the model stand in model.args: write model.args.{key}" if hint is None else hint
    hint = hint or _option_hint(key, within=table) or _plugin_hint(key) or _argument_hint(key)
    if hint is None or hint == f"write {table}.{key}":  # the word is right; tables of a run are not a loop's
        return problem
    if problem.hint == f'did you mean "{hint.removeprefix(f"write {table}.")}"?':
        return problem
    shortened = f"write {hint.removeprefix(f'write {table}.')}" if hint.startswith(f"write {table}.") else hint
    return replace(problem, hint=shortened)


def _hinted(problem: Problem, hint: str | None) -> Problem:
    return replace(problem, hint=hint) if hint else problem


def _argument_hint(word: str) -> str | None:
    return f"arguments of the model stand in model.args: write model.args.{word}" if word in _ARGUMENTS else None


def _plugin_hint(word: str) -> str | None:
    """Return what to write for the name of a plugin, or a word near one, where no plugin's table can stand."""
    found = {name: info.family for name, _, info in Catalogue.installed().classes()}
    near = word if word in found else f"{word}2"  # of a second version, as torch calls it
    return f"write [{found[near]}.{near}]" if near in found else None


def _option_hint(word: str, *, within: str = "") -> str | None:
    """Return which option of which plugin says what a word of others does."""
    option = _OPTION_OF.get(word, word)
    hint = Catalogue.installed().option_hint(option)
    return f"write {option}" if hint is not None and f"[{within}]" in hint else hint


def _axis_hint(key: str, table: str) -> str | None:
    """Return what to write for an axis whose plugin is missing, or for a plugin's name among the axes."""
    catalogue = Catalogue.installed()
    if table != "mesh":
        return None
    for name, _, owner in catalogue.classes():
        if key in owner.owns:
            return f"it is the axis of [{owner.family}.{name}]; write that table too"
    if key not in catalogue.names():
        return None
    try:
        info = info_of(catalogue.load(key))
    except PluginError:
        return None
    return f"write {info.owns[0]}" if info is not None and info.owns else None


def _dotted_hint(key: str, table: str, value: dict[str, object]) -> str:
    inner = next(iter(value), "...")
    return (
        f"below the header [{table}] a line {key}.{inner} belongs to it; write it above the first header, or under "
        f"[{key}]"
    )
