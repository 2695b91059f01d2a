"""The tables of all systems: whole, and every target a key of a manifest."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support.documents import code, read, table
from support.imported import translated, verdicts_of

import composer3d.importing
from composer3d.cli.schema import schema_text
from composer3d.importing import Verdict, systems
from composer3d.importing.key_tables import load_key_table, plugin_words

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
SCHEMAS = {"deepspeed": DEEPSPEED}


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


VALUES = (True, False, 1, 3, "auto", "text", [], {}, None, 0.5)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_value_at_any_key_ends_in_one_verdict(tmp_path, value):
    content = {}
    for block, keys in DEEPSPEED.items():
        inner = content
        for part in filter(None, block.split(".")):
            inner = inner.setdefault(part, {})
            inner = inner if isinstance(inner, dict) else {}
        inner.update({key: value for key in keys.split() if not isinstance(inner.get(key), dict)})
    for target in ("compose", "run"):
        translation = translated(tmp_path, "ds.json", json.dumps(content), target=target)
        assert verdicts_of(translation).keys() == translation.tree.leaves.keys()
