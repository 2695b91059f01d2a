"""Degrees, sharding and pipeline of a Megatron-LM run."""

from __future__ import annotations

from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = ["forget_split", "layout", "world_of"]

_TENSOR, _STAGES = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_CONTEXT, _EXPERTS = "context_parallel_size", "expert_model_parallel_size"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_BALANCED = "stages are balanced by composer3d's own split"
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_METHODS = {"p2p": "ring", "all_gather": "gather", "a2a": "ulysses", "a2a+p2p": "usp"}


def world_of(translation: Translation) -> int | None:
    """Return the number of ranks: --world-size, the log's, or what the launcher starts."""
    t = translation
    if t.options.world_size is not None:
        return t.options.world_size
    stated = t.get("world_size")
    if isinstance(stated, int):
        return stated
    ranks, nodes = t.get("nproc_per_node", t.get("num_gpus")), t.get("nnodes", t.get("num_nodes", 1))
    return ranks * nodes if isinstance(ranks, int) and isinstance(nodes, int) else None


def layout(translation: Translation) -> None:
    """Carry the mesh and the plugin of every axis."""
    t = translation
    degrees = {
        axis: _degree(t, key, axis)
        for key, axis in ((_STAGES, "pp"), (_CONTEXT, "cp"), (_TENSOR, "tp"), (_EXPERTS, "ep"))
    }
    t.judge("model_parallel_size", "refused", f"an old name of {_TENSOR.replace('_', '-')}")
    t.judge("transformer_pipeline_model_parallel_size", "derived", f"as {_STAGES}")
    world, others = world_of(t), degrees["pp"] * degrees["cp"] * degrees["tp"]
    t.ranks = world
    ranks = None if world is None else max(world // others, 1)
    _launcher(t, world)
    _tensor(t, degrees["tp"])
    _context(t, degrees["cp"])
    _experts(t, degrees["ep"])
    _data_parallel(t, ranks, shares_experts=degrees["ep"] > 1)
    _pipeline(t, degrees["pp"])
    key = "use_tp_pp_dp_mapping"
    t.judge(key, "changed" if t.flag(key) else "equal", "the order of ranks; here pp is outermost and tp innermost")


def _degree(t: Translation, key: str, axis: str) -> int:
    degree = t.integer(key, 1, least=1) or 1
    if degree > 1:
        t.carry(key, f"mesh.{axis}", degree)
    t.judge(key, "equal")
    return degree


def _launcher(t: Translation, world: int | None) -> None:
    note = "the launcher's" if world is None else f"{world} ranks: composer3d run --nproc-per-node, or torchrun"
    for key in ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "world_size", "data_parallel_size"):
        t.judge(key, "derived", note)


def _data_parallel(t: Translation, ranks: int | None, *, shares_experts: bool) -> None:
    stage, source = 0, None
    if t.flag("use_torch_fsdp2"):
        kept = t.flag("torch_fsdp2_no_reshard_after_forward") or not t.flag("torch_fsdp2_reshard_after_forward", True)
        stage, source = 2 if kept else 3, "use_torch_fsdp2"
    elif t.flag("use_megatron_fsdp"):
        name = t.text("data_parallel_sharding_strategy", "no_shard")
        if name not in _STRATEGIES:
            t.wrong("data_parallel_sharding_strategy", "is no strategy", hint=f"one of: {', '.join(_STRATEGIES)}")
        stage, source = _STRATEGIES.get(name, 0), "data_parallel_sharding_strategy"
    elif t.flag("use_distributed_optimizer"):
        stage, source = 1, "use_distributed_optimizer"
    if stage:
        t.put("@sharded.zero", stage, source or "")
    elif shares_experts:  # which are carved out of ranks that shard
        stage = 1
        t.put(
            "@sharded.zero", stage, reason="experts are shared over dp_shard, over which optimizer state is sharded too"
        )
    else:
        t.put("@replicated", None, reason="Megatron-LM's default: replicas of the whole model")
    target = "@sharded.zero" if stage else "@replicated"
    for key in ("use_torch_fsdp2", "use_megatron_fsdp", "use_distributed_optimizer"):
        note = "" if key == source else "another flag says what is sharded"
        t.judge(key, "carried" if t.flag(key) and stage else "equal", note, to=target)
    t.judge("data_parallel_sharding_strategy", "carried" if source else "meaningless", to=target)
    for key in ("torch_fsdp2_no_reshard_after_forward", "torch_fsdp2_reshard_after_forward"):
        t.judge(key, "derived" if source == "use_torch_fsdp2" else "meaningless", "chooses between stages 2 and 3")
    key = "num_distributed_optimizer_instances"
    count = t.integer(key, 1, least=1) or 1
    if count > 1 and stage:
        t.put("mesh.dp_replicate", count, key)
        t.put("mesh.dp_shard", -1 if ranks is None else max(ranks // count, 1), key, reason="ranks of one instance")
        t.judge(key, "carried", to="mesh.dp_replicate")
    t.judge(key, "equal")
    t.judge("outer_dp_sharding_strategy", "missing" if t.get("outer_dp_sharding_strategy") == "optim" else "equal")


def _tensor(t: Translation, degree: int) -> None:
    key = "sequence_parallel"
    is_on = t.flag(key)
    if degree > 1:
        t.put("@tensor.sequence_parallel", is_on, key, reason=None if key in t else "Megatron-LM's default")
        t.put("@tensor.loss_parallel", True, reason="Megatron-LM computes the loss on sharded logits")
        t.judge(key, "carried", to="@tensor.sequence_parallel")
    t.judge(key, "ignored-there" if is_on else "equal", "no tensor parallelism: Megatron-LM switches it off")


def _context(t: Translation, degree: int) -> None:
    key = "cp_comm_type"
    stated = t.get(key, "p2p")
    stated = stated[0] if isinstance(stated, list) and stated else stated
    if degree > 1:
        method = _METHODS.get(str(stated))
        if method is None:
            t.wrong(key, "is no exchange", hint=f"one of: {', '.join(_METHODS)}")
            method = "ring"
        t.put("@sequence.method", method, key, reason=None if key in t else "Megatron-LM's default: p2p")
        t.judge(key, "carried", to="@sequence.method")
        sizes = t.get("hierarchical_context_parallel_sizes")
        sizes = sizes.split() if isinstance(sizes, str) else sizes
        if method == "usp" and isinstance(sizes, list) and sizes and str(sizes[0]).isdigit():
            t.carry("hierarchical_context_parallel_sizes", "@sequence.inner_degree", int(sizes[0]))
    for name in (key, "hierarchical_context_parallel_sizes"):
        t.judge(name, "meaningless", "no context parallelism, or its default")


def _experts(t: Translation, degree: int) -> None:
    if degree > 1:
        t.put("@experts", None, reason="experts are shared by mesh.ep ranks")
    key = "expert_tensor_parallel_size"
    stated = t.integer(key)
    tensor = t.integer(_TENSOR, 1) or 1
    differs = stated is not None and stated != 1 and degree > 1
    note = "experts are not sharded by tensor parallelism"
    t.judge(key, "missing" if differs else "equal" if stated in (None, 1, tensor) else "changed", note)


def _pipeline(t: Translation, degree: int) -> None:
    names = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size",
    )
    if degree > 1:
        stages, source = _virtual_stages(t, degree, names)
        t.put("@stages.schedule", "1F1B" if stages == 1 else "Interleaved1F1B", source or _STAGES)
        if stages > 1:
            t.put("@stages.stages_per_rank", stages, source or "")
            t.judge(source or "", "derived", f"{stages} stages on a rank", to="@stages.stages_per_rank")
        _uneven(t, degree)
    for key in (*names, "microbatch_group_size_per_vp_stage"):
        t.judge(key, "meaningless", "no further stages on a rank, or how many micro-batches are grouped")
    for key in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        t.judge(key, "meaningless", "no pipeline, or equal stages")


def _virtual_stages(t: Translation, degree: int, names: tuple[str, str, str]) -> tuple[int, str | None]:
    layers = t.integer("num_layers") or 0
    each = t.integer(names[0]) or 0
    if each and layers:
        return max(layers // (degree * each), 1), names[0]
    for name in names[1:]:
        if (count := t.integer(name) or 0) > 1:
            return count, name
    return 1, None


def forget_split(t: Translation) -> None:
    """Take back the blocks that begin stages of different length: their names are composer3d's own models'."""
    if t.settings.pop(path_of("@stages.split"), None) is not None:
        for key in _ENDS:
            t.verdicts.pop(key, None)
            t.judge(key, "changed", _BALANCED, to="@stages.split")


def _uneven(t: Translation, degree: int) -> None:
    """Carry stages of different length as the blocks that begin them."""
    layers, keys = t.integer("num_layers") or 0, _ENDS
    first, last = (t.integer(key) or 0 for key in keys)
    if (first or last) and layers:
        ends = (1 if first else 0) + (1 if last else 0)
        inner = (layers - first - last) // max(degree - ends, 1)
        counts = [*([first] if first else []), *[inner] * (degree - ends), *([last] if last else [])]
        begins = [sum(counts[:index]) for index in range(1, degree)]
        if t.is_run and sum(counts) == layers:
            t.put("@stages.split", [f"layers.{begin}" for begin in begins], *keys)
            for key in keys:
                t.judge(key, "derived", "the blocks that begin the stages, of composer3d's Llama", to="@stages.split")
    for key in (*keys, "pipeline_model_parallel_layout"):
        t.judge(key, "changed" if t.get(key) not in (None, False) else "meaningless", _BALANCED, to="@stages.split")
    for key in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        t.judge(key, "equal" if t.flag(key) else "meaningless", "embedding and head count in the split")
