"""FSDP's options as Accelerate and transformers name them."""

from __future__ import annotations

from collections.abc import Callable

from composer3d.importing.key_tables import path_of
from composer3d.importing.translation import Translation

__all__ = ["fully_sharded", "names_of"]

_STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
    "_HYBRID_SHARD_ZERO2": 2,
}
_NUMBERED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_EQUAL = {
    "version": "both versions are this plugin",
    "state_dict_type": "checkpoints are sharded and of any layout; composer3d export writes whole weights",
    "use_orig_params": "parameters keep their names",
    "sync_module_states": "every layout starts from the same weights",
    "cpu_ram_efficient_loading": "weights are loaded into their place",
    "limit_all_gathers": "FSDP2 limits them itself",
    "backward_prefetch": "FSDP2 gathers ahead itself",
}
# As Accelerate reads them.
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
_LEAST_NUMEL = 100_000_000  # of torch's size_based_auto_wrap_policy


def fully_sharded(
    t: Translation,
    key_of: Callable[[str], str],
    *,
    machines: int,
    world: int | None,
    wraps: str = "TRANSFORMER_BASED_WRAP",
) -> None:
    """Carry the options of FSDP.

    Args:
        t: Of the file.
        key_of: The file's key for an option's name.
        machines: Nodes of the run, over which hybrid strategies replicate.
        world: Ranks of the run; None where that is not known.
        wraps: Which policy says what is a unit, where the file does not.
    """
    _strategy(t, key_of, machines, world)
    key = key_of("offload_params")
    if t.flag(key):
        t.put("@host.mode", "all", key)
        t.judge(
            key, "carried", "parameters, gradients and state are in host memory, and the host steps", to="@host.mode"
        )
    t.judge(key, "equal")
    key = key_of("forward_prefetch")
    if t.flag(key):
        t.put("@sharded.forward_prefetch", 1, key)
        t.judge(key, "carried", to="@sharded.forward_prefetch")
    t.judge(key, "equal")
    _recomputation(t, key_of)
    _units(t, key_of, wraps)
    for name, note in _EQUAL.items():
        t.judge(key_of(name), "equal", note)
    t.judge(key_of("cpu_offload_pin_memory"), "meaningless", "speed")
    t.judge(key_of("mixed_precision_policy"), "missing", "a policy besides mixed_precision; write [@mixed]")
    t.judge(key_of("ignored_modules"), "missing", "modules that stay replicated are patterns in the key ignored")


def _strategy(t: Translation, key_of: Callable[[str], str], machines: int, world: int | None) -> None:
    key, resharded = key_of("sharding_strategy"), key_of("reshard_after_forward")
    is_second = t.get(key_of("version")) in (2, "2")
    stated = t.get(resharded if is_second or key not in t else key, True if is_second else "FULL_SHARD")
    source = resharded if is_second or key not in t else key
    if is_second and str(stated).lower() not in (*_TRUE, *_FALSE):
        t.wrong(source, "must be true or false in version 2 of FSDP")
        return
    if is_second:
        stated = str(stated).lower() in _TRUE
    if isinstance(stated, bool) or str(stated).lower() in ("true", "false"):
        zero = 3 if str(stated).lower() == "true" else 2
        name = ""
    else:
        name = str(stated).upper()
        name = _NUMBERED[int(name) - 1] if name.isdigit() and 1 <= int(name) <= 5 else name
        if name not in _STRATEGIES:
            t.wrong(source, "is no sharding strategy", hint=f"one of: {', '.join(_NUMBERED)}")
            return
        zero = _STRATEGIES[name]
    reason = None if source in t else "FULL_SHARD is the default"
    if zero == 0:
        t.put("@replicated", None, source, reason=reason)
        t.judge(source, "carried", to="@replicated")
    else:
        t.put("@sharded.zero", zero, source, reason=reason)
        t.judge(source, "carried", to="@sharded.zero")
    if "HYBRID" in name and world is not None and world % machines == 0:
        if machines > 1:
            t.put("mesh.dp_shard", world // machines, source, reason="ranks of a node")
            t.put("mesh.dp_replicate", machines, source, reason="nodes")
    for other in (key, resharded):
        t.judge(other, "ignored-there", f"{source.rpartition('.')[2]} decides in this version of FSDP")


def _recomputation(t: Translation, key_of: Callable[[str], str]) -> None:
    key, moved = key_of("activation_checkpointing"), key_of("activation_checkpointing_offload")
    if t.flag(key):
        t.put("@recomputed.mode", "full", key)
        t.judge(key, "carried", to="@recomputed.mode")
        t.switch(moved, "@activations")
    t.judge(key, "meaningless", "off")
    t.judge(moved, "meaningless", "off")


def names_of(value: object) -> list[str]:
    """Return class names of a text with commas, or of a list."""
    items = value if isinstance(value, list) else str(value or "").split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _units(t: Translation, key_of: Callable[[str], str], default: str) -> None:
    classes, policy, least = (
        key_of("transformer_layer_cls_to_wrap"),
        key_of("auto_wrap_policy"),
        key_of("min_num_params"),
    )
    wanted, kind = names_of(t.get(classes)), str(t.get(policy) or default).upper()
    is_sharded = path_of("@sharded.zero") in t.settings
    if kind == "NO_WRAP":
        if is_sharded:
            t.put("@sharded.units", [], policy, reason=None if policy in t else f"{t.table.title}'s default: NO_WRAP")
        t.judge(policy, "carried", "the whole model is one unit", to="@sharded.units")
    elif kind == "SIZE_BASED_WRAP":
        numel = t.integer(least, 0) or _LEAST_NUMEL
        if is_sharded:
            t.put("@sharded.unit_numel", numel, least, policy, reason=None if t.get(least) else "FSDP's default")
        is_nested = t.integer(key_of("version"), 1) == 2
        note = "memory: with FSDP2 every larger module is a unit there, those around it too" if is_nested else ""
        for key in (policy, least):
            t.judge(key, "changed" if is_nested else "carried", note, to="@sharded.unit_numel")
    elif wanted and is_sharded:
        t.carry(classes, "@sharded.unit_classes", wanted)
        t.judge(policy, "carried", to="@sharded.unit_classes")
    reason = "the model's blocks are units by default"
    t.judge(classes, "equal" if kind == "TRANSFORMER_BASED_WRAP" else "ignored-there", reason)
    t.judge(policy, "equal", reason)
    t.judge(least, "meaningless" if not t.get(least) else "ignored-there", "it belongs to SIZE_BASED_WRAP")
