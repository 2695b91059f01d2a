"""The system that a file belongs to, told by its form and by the keys that only one system has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from composer3d.errors import Problem
from composer3d.importing.argument_log import has_block_of_arguments
from composer3d.importing.key_tables import load_key_table
from composer3d.importing.leaves import SourceTree, UnreadableSource
from composer3d.importing.source_file import parse

__all__ = ["form_of", "keys_of_deepspeed", "recognise"]

_FORMS = {".json": "json", ".hjson": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
_FLAG = re.compile(r"--[A-Za-z]")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")

# Keys at the top of a file of which one is enough: no other system has them.
_MARKS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "megatron": frozenset({"MODEL_ARGS", "language_model"}),
        "automodel": frozenset({"step_scheduler", "dist_env", "packed_sequence"}),
        "axolotl": frozenset({"base_model", "sample_packing", "sequence_len", "chat_template_jinja"}),
        "neox": frozenset(
            "pipe_parallel_size model_parallel_size attention_config pos_emb gpt_j_residual no_weight_tying"
            " output_layer_parallelism checkpoint_factor rotary_pct scaled_upper_triang_masked_softmax_fusion".split()
        ),
    }
)

# Keys of NeMo 1's training files and of its launcher's, of which these together are no other system's.
_NEMO = (frozenset({"exp_manager", "model"}), frozenset({"exp_manager", "trainer"}))

# Keys of GPT-NeoX that mark YAML alone, where it shares many with DeepSpeed; a JSON file of a model has some, too.
_NEOX_YAML = frozenset(
    "num_layers hidden_size num_attention_heads max_position_embeddings lr_decay_style lr_decay_iters"
    " lr_decay_fraction train_iters train_epochs pipe_partition_method checkpoint_activations keep_last_n_checkpoints"
    " extra_save_iters make_vocab_size_divisible_by fp32_allreduce train_data_paths valid_data_paths test_data_paths"
    " deepspeed_activation_checkpointing synchronize_each_layer".split()
)
# Keys at the top of a file that are a system's own; the system with most of them is taken.
_OWN_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "deepspeed": frozenset(
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
            " zero_optimization fp16 bf16 bfloat16 optimizer scheduler steps_per_print wall_clock_breakdown"
            " prescale_gradients communication_data_type zero_allow_untested_optimizer activation_checkpointing"
            " flops_profiler tensorboard csv_monitor aio elasticity sparse_attention amp data_types comms_logger"
            " tensor_parallel pipeline checkpoint compile torch_autocast".split()
        ),
        "accelerate": frozenset(
            "compute_environment distributed_type mixed_precision num_processes num_machines machine_rank use_cpu"
            " fsdp_config deepspeed_config megatron_lm_config main_training_function rdzv_backend same_network"
            " downcast_bf16 dynamo_config parallelism_config fp8_config".split()
        ),
        "trainer": frozenset(
            "learning_rate per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps bf16 fp16"
            " output_dir logging_steps save_steps lr_scheduler_type warmup_ratio warmup_steps weight_decay optim fsdp"
            " fsdp_config report_to model_name_or_path gradient_checkpointing".split()
        ),
        "fsdp": frozenset(
            "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap fsdp_min_num_params min_num_params xla"
            " backward_prefetch fsdp_backward_prefetch forward_prefetch fsdp_forward_prefetch limit_all_gathers"
            " fsdp_use_orig_params use_orig_params fsdp_state_dict_type fsdp_offload_params sync_module_states"
            " activation_checkpointing fsdp_auto_wrap_policy fsdp_sharding_strategy cpu_ram_efficient_loading".split()
        ),
        "torchtitan": frozenset(
            "job model training parallelism optimizer lr_scheduler checkpoint activation_checkpoint profiling metrics"
            " float8 comm experimental validation quantize compile fault_tolerance debug memory_estimation mx".split()
        ),
    }
)
_BY_FORM = {
    "json": ("deepspeed", "accelerate", "trainer", "fsdp"),
    # DeepSpeed's keys in YAML are of a part of GPT-NeoX's file, or of none: DeepSpeed reads JSON.
    "yaml": ("deepspeed", "accelerate", "trainer"),
    "toml": ("torchtitan",),
}
_BY_LINES = ("flags", "script", "log")


def form_of(path: Path, text: str) -> str:
    """Return the form of a text, by the file's ending, else by its lines.

    It is `json`, `yaml` or `toml`, `log` for the arguments that Megatron-LM prints, `script` for shell, or `flags` for
    a command line.
    """
    form = _FORMS.get(path.suffix.lower())
    if form is not None:
        return form
    if has_block_of_arguments(text):
        return "log"
    start = text.lstrip()
    if path.suffix.lower() in _SCRIPTS or start.startswith("#!"):
        return "script"
    if start.startswith("--"):
        return "flags"
    if start[:1] == "{":
        return "json"
    if _starts_a_program(text):
        return "script"
    return "toml" if any(line.strip().startswith("[") for line in text.splitlines()) else "yaml"


def _starts_a_program(text: str) -> bool:
    """Return whether the first line that says anything is a command with flags, and no key of a table."""
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    words = next((line for line in lines if line and not line.startswith("#")), "").split()
    is_key = not words or words[0].endswith(":") or "=" in words[1:2] or words[0].startswith(("-", "["))
    return not is_key and any(_FLAG.match(word) for word in words[1:])


def _of_flags(tree: SourceTree) -> str:
    """Return the system whose flags a command line has: most of them, else Megatron-LM."""
    known = {name: load_key_table(name) for name in ("megatron", "trainer")}
    return max(known, key=lambda name: sum(known[name].entry_of(key) is not None for key in tree.leaves))


def recognise(path: Path, text: str, *, values: Mapping[str, str] | None = None) -> tuple[str | None, SourceTree]:
    """Return the system of a file, or None where its keys do not tell it, and its leaves.

    Args:
        path: Of the file.
        text: In it.
        values: Of a script's variables, as the user gives them.

    Raises:
        UnreadableSource: It cannot be parsed in its form, is a manifest already, or one of NeMo 1.
    """
    form = form_of(path, text)
    tree = parse(text, str(path), form=form, values=values)
    if form in _BY_LINES:
        return ("megatron" if form == "log" else _of_flags(tree)), tree
    tops = {leaf.path[0] for leaf in tree.leaves.values()}
    if "composer3d" in tops:
        message = "is a manifest of composer3d already, which check reads and `export --to SYSTEM` writes for others"
        raise UnreadableSource(Problem(message=message, file=str(path)))
    if form == "yaml" and any(marks <= tops for marks in _NEMO):
        message = "is a file of NeMo 1, by its exp_manager, which is not translated"
        hint = (
            "write its numbers as Megatron-LM's flags behind --, or import the block of arguments that its log prints"
        )
        raise UnreadableSource(Problem(message=message, file=str(path), hint=hint))
    for name, marks in _MARKS.items():
        if marks & {top.replace("-", "_") if name == "neox" else top for top in tops}:
            return name, tree
    if form == "yaml" and _NEOX_YAML & {top.replace("-", "_") for top in tops}:
        return "neox", tree
    counts = {name: len(tops & _OWN_KEYS[name]) for name in _BY_FORM[form]}
    best = max(counts, key=lambda name: counts[name], default=None)
    is_told = best is not None and counts[best] and (form, best) != ("yaml", "deepspeed")
    return (best if is_told else None), tree


def keys_of_deepspeed(tree: SourceTree) -> list[str]:
    """Return keys at the top of a file that DeepSpeed's JSON and GPT-NeoX's YAML have in common, the first three."""
    tops = dict.fromkeys(leaf.path[0] for leaf in tree.leaves.values())
    return [top for top in tops if top in _OWN_KEYS["deepspeed"]][:3]
