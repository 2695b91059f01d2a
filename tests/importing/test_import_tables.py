"""The tables of all systems: whole, and every target a key of a manifest."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import tomli
from support.documents import code, read, table
from support.imported import translated, verdicts_of
from support.source_schemas import AUTOMODEL, AXOLOTL, MEGATRON, NEOX

import composer3d.importing
from composer3d.cli.schema import schema_text
from composer3d.importing import Verdict, systems
from composer3d.importing.commented_manifest import write_manifest
from composer3d.importing.key_tables import load_key_table, plugin_words
from composer3d.manifest import inline

FOLDER = Path(composer3d.importing.__file__).parent


@pytest.fixture(scope="module")
def targets():
    """Every dotted key of a manifest."""
    schema = json.loads(schema_text())
    found = set()

    def walk(path, node):
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for key, inner in node.get("properties", {}).items():
            found.add(".".join((*path, key)))
            if len(path) < 2:
                walk((*path, key), inner)

    walk((), schema)
    return found


def test_words_are_tables_of_plugins(targets):
    assert set(plugin_words().values()) <= targets


@pytest.mark.parametrize("system", systems())
def test_targets_of_the_table_exist(system, targets):
    words = plugin_words()
    for key, entry in load_key_table(system).entries.items():
        if entry.to is not None:
            word, _, rest = entry.to.partition(".")
            to = f"{words[word[1:]]}.{rest}".rstrip(".") if word.startswith("@") else entry.to
            assert to in targets, key


def test_targets_of_the_rules_exist(targets):
    words, found = plugin_words(), set()
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                written = {"put": node.args[:1], "carry": node.args[1:2]}.get(node.func.attr, [])
                written += [word.value for word in node.keywords if word.arg == "to"]
                found |= {one.value for one in written if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    assert len(found) > 20
    for to in found:
        word, _, rest = to.partition(".")
        assert (f"{words[word[1:]]}.{rest}".rstrip(".") if to.startswith("@") else to) in targets, to


@pytest.mark.parametrize("system", systems())
def test_rules_of_the_table_are_those_of_its_module(system):
    from importlib import import_module

    rules = {entry.rule for entry in load_key_table(system).entries.values() if entry.rule}
    assert rules <= import_module(f"composer3d.importing.{system}").RULES.keys()


# Keys of the source's own schema, by block.
DEEPSPEED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
    " prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type steps_per_print"
    " seq_parallel_communication_data_type sparse_gradients wall_clock_breakdown memory_breakdown dump_state"
    " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather sequence_parallel_size"
    " dataloader_drop_last vocabulary_size graph_harvesting use_data_before_expert_parallelism"
    " managed_gradient_accumulation",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
    " auto_cast fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce"
    " allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint"
    " sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size"
    " stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold"
    " model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance"
    " stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save"
    " module_granularity_threshold use_all_reduce_for_fetch_params ignore_unused_parameters legacy_stage1"
    " round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights"
    " zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather"
    " memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings"
    " enable_sanity_checks allgather_sequential fast_init",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write"
    " fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "optimizer": "type legacy_fusion",
    "optimizer.params": "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad max_grad_norm",
    "scheduler": "type",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps cos_min_ratio"
    " warmup_min_ratio",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization"
    " number_checkpoints synchronize_checkpoint_boundary profile",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    "tensor_parallel": "autotp_size preset_model tp_overlap_comm dtype",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    "comms_logger": "enabled verbose prof_all prof_ops debug",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "csv_monitor": "enabled output_path job_name",
    "comet": "enabled project workspace api_key experiment_name experiment_key online mode samples_log_interval",
    "checkpoint": "tag_validation load_universal use_node_local_storage",
    "compile": "deepcompile passes free_activation offload_activation offload_opt_states double_buffer"
    " symmetric_memory enabled disable backend",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "elasticity": "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version",
    "data_efficiency": "enabled seed",
    "amp": "enabled opt_level",
    "progressive_layer_drop": "enabled theta gamma",
    "curriculum_learning": "enabled curriculum_type",
    "compression_training": "weight_quantization",
    "hybrid_engine": "enabled max_out_tokens",
    "autotuning": "enabled fast",
    "nebula": "enabled",
    "expert_parallel": "autoep_size",
}
ACCELERATE = {
    "": "compute_environment distributed_type mixed_precision use_cpu debug num_processes num_machines machine_rank"
    " main_process_ip main_process_port main_training_function rdzv_backend same_network gpu_ids downcast_bf16"
    " tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands enable_cpu_affinity"
    " dynamo_backend fp16 monitor_interval max_restarts ec2_instance_type iam_role_name image_uri profile region"
    " base_job_name py_version pytorch_version transformers_version sagemaker_inputs_file sagemaker_metrics_file",
    "dynamo_config": "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic"
    " dynamo_use_regional_compilation",
    "fsdp_config": "fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params"
    " fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch"
    " fsdp_forward_prefetch fsdp_state_dict_type fsdp_use_orig_params fsdp_sync_module_states"
    " fsdp_cpu_ram_efficient_loading fsdp_activation_checkpointing",
    "deepspeed_config": "zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device"
    " offload_param_device offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag zero3_save_16bit_model"
    " deepspeed_moe_layer_cls_names deepspeed_config_file deepspeed_multinode_launcher deepspeed_hostfile"
    " seq_parallel_communication_data_type",
    "parallelism_config": " ".join(
        f"parallelism_config_{name}"
        for name in "dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend"
        " sp_seq_length sp_seq_length_is_variable sp_attn_implementation".split()
    ),
    "megatron_lm_config": " ".join(
        f"megatron_lm_{name}"
        for name in "tp_degree pp_degree num_micro_batches sequence_parallelism recompute_activations"
        " use_distributed_optimizer gradient_clipping expert_model_parallel_size context_parallel_size".split()
    ),
    "fp8_config": "backend enable_fsdp_float8_all_gather pad_inner_dim margin interval amax_history_len"
    " amax_compute_algo fp8_format override_linear_precision use_autocast_during_eval use_mxfp8_block_scaling"
    " opt_level",
}
TORCHTITAN = {
    "job": "config_file dump_folder description print_config custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup"
    " enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor lr_min",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload"
    " dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug seed deterministic compile batch_size"
    " warmup_steps data_parallel_shard_degree tensor_parallel_degree",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward"
    " tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree"
    " pipeline_parallel_split_points module_fqns_per_model_part pipeline_parallel_first_stage_less_layers"
    " pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule"
    " pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size context_parallel_degree"
    " context_parallel_rotate_method expert_parallel_degree expert_tensor_parallel_degree",
    "checkpoint": "enable folder interval initial_load_path initial_load_model_only initial_load_in_hf"
    " last_save_model_only last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading"
    " enable_first_step_checkpoint create_seed_checkpoint load_only enable_checkpoint",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop"
    " memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend",
    "quantize.linear.float8": "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name"
    " filter_fqns emulate",
    "float8": "enable_fsdp_float8_all_gather filter_fqns",
    "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix",
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size"
    " semi_sync_method sync_steps",
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
    "debug": "seed deterministic deterministic_warn_only",
}
SCHEMAS = {
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "neox": NEOX,
    "axolotl": AXOLOTL,
    "automodel": AUTOMODEL,
}


def test_the_readme_names_every_system_and_verdict():
    text = read("composer3d/importing/README.md")
    rows = table(text, "`--from`", "files", "by default for")
    assert sorted(code(row[0])[0] for row in rows) == sorted(systems())
    assert all(code(row[2])[0] == load_key_table(code(row[0])[0]).target for row in rows)
    assert [code(row[0])[0] for row in table(text, "verdict", "meaning")] == [str(verdict) for verdict in Verdict]


@pytest.mark.parametrize("system", SCHEMAS)
def test_every_key_of_the_schema_is_in_the_table(system):
    known = load_key_table(system)
    keys = [f"{block}.{key}".lstrip(".") for block, keys in SCHEMAS[system].items() for key in keys.split()]
    assert [key for key in keys if known.entry_of(key) is None] == []


def test_every_argument_of_the_trainer_that_is_installed_is_in_the_table():
    transformers = pytest.importorskip("transformers")
    known = load_key_table("trainer")
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init]
    assert len(names) > 100
    assert [name for name in names if known.entry_of(name) is None] == []


VALUES = (True, False, 1, 3, "auto", "text", [], {}, None, 0.5)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("system", systems())
def test_any_value_at_any_key_ends_in_one_verdict(tmp_path, system, value):
    keys = [key for key in load_key_table(system).entries if not key.endswith("*")]
    blocks = {key.rpartition(".")[0] for key in keys}
    leaves = [key for key in keys if key not in blocks]
    if system == "torchtitan" and value is None:  # TOML has none
        return
    if system == "torchtitan":
        name, text = "run.toml", "".join(f"{key} = {inline(value)}\n" for key in leaves)
    else:
        name, text = "run.json", json.dumps(nested({key: value for key in leaves}))
    for target in ("compose", "run"):
        translation = translated(tmp_path, name, text, system=system, target=target)
        assert verdicts_of(translation).keys() == translation.tree.leaves.keys() != set()
        written = tomli.loads(write_manifest(translation))
        assert written["composer3d"] == 1


def nested(values):
    result = {}
    for key, value in values.items():
        inner = result
        *parents, last = key.split(".")
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return result
