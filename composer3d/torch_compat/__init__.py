"""Every private or version-dependent torch name that composer3d and its plugins use, each with its reason and a test.

torch 2.11 to 2.15. A name that disappears fails in tests/core/test_torch_compat.py, and nowhere else.
"""

from __future__ import annotations

from composer3d.torch_compat.layouts import (
    ShardOf,
    clear_sharding_caches,
    flatten,
    fsdp_groups,
    replicate_buckets,
    replicate_units,
    shard_of,
    silence_redistribution,
    with_local,
)
from composer3d.torch_compat.messages import watch_operator_collectives, watching_messages
from composer3d.torch_compat.modes import (
    dispatch_mode,
    import_torchao,
    in_backward,
    run_backward,
    without_torch_functions,
)
from composer3d.torch_compat.pipelines import custom_pipeline_schedule, pipeline_orders, pipeline_schedule
from composer3d.torch_compat.processes import (
    CHECKPOINT_METADATA_GLOBALS,
    all_gather_single,
    default_store,
    fake_store,
    flight_records,
    group_name,
    lazy_modules,
    local_agent,
    process_group,
    set_group_timeout,
)
from composer3d.torch_compat.tensors import (
    allocate,
    dump_memory_history,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    has_argument,
    is_wrapper_subclass,
    neg_view,
    num_flops,
    record_memory_history,
    storage_key,
    tree_leaves,
    tree_map,
    unviewed,
    written_tensors,
)

__all__ = [
    "record_memory_history",
    "dump_memory_history",
    "CHECKPOINT_METADATA_GLOBALS",
    "ShardOf",
    "all_gather_single",
    "allocate",
    "clear_sharding_caches",
    "custom_pipeline_schedule",
    "default_store",
    "dispatch_mode",
    "fake_store",
    "flatten",
    "flight_records",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "fsdp_groups",
    "group_name",
    "has_argument",
    "import_torchao",
    "in_backward",
    "is_wrapper_subclass",
    "lazy_modules",
    "local_agent",
    "neg_view",
    "num_flops",
    "pipeline_orders",
    "pipeline_schedule",
    "process_group",
    "replicate_buckets",
    "replicate_units",
    "run_backward",
    "set_group_timeout",
    "shard_of",
    "silence_redistribution",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "unviewed",
    "watch_operator_collectives",
    "watching_messages",
    "with_local",
    "without_torch_functions",
    "written_tensors",
]
