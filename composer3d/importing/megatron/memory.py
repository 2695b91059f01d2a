"""Recomputation and offloading of a Megatron-LM run."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["offload", "recomputation"]


def recomputation(translation: Translation) -> None:
    """Carry recomputation of whole blocks; that of attention's scores alone needs nothing here."""
    t = translation
    granularity = "selective" if t.flag("recompute_activations") else str(t.get("recompute_granularity") or "none")
    is_old = t.flag("checkpoint_activations") and granularity == "none"
    source = "checkpoint_activations" if is_old else "recompute_granularity"
    if is_old or granularity == "full":
        t.put("@recomputed.mode", "full", source)
        t.judge(source, "carried", to="@recomputed.mode")
        _runs(t)
    elif granularity == "selective":
        _modules(t)
    elif granularity != "none":
        t.wrong("recompute_granularity", "is neither full nor selective")
    note = "attention's scores alone, which kernels of scaled_dot_product_attention do not keep"
    for key in ("recompute_granularity", "recompute_activations"):
        t.judge(key, "equal" if granularity == "selective" else "meaningless", note)
    key = "distribute_saved_activations"
    t.judge(
        key, "missing" if t.flag(key) else "meaningless", "inputs of blocks sharded over tp; sequence_parallel has it"
    )
    for key in (
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "checkpoint_activations",
        "checkpoint_num_layers",
    ):
        t.judge(key, "meaningless", "not of this recomputation")


def _runs(t: Translation) -> None:
    method = str(t.get("recompute_method") or "uniform")
    key = "recompute_num_layers" if "recompute_num_layers" in t else "checkpoint_num_layers"
    count = t.integer(key, 1) or 1
    if method == "block":
        note = f"memory: the first {count} blocks of a stage there, all here; write units for less"
        t.judge(key, "changed", note, to="@recomputed.units")
        t.judge("recompute_method", "changed", note)
    note = (
        "numbers are equal" if count == 1 else f"memory: runs of {count} blocks are recomputed as one there, each here"
    )
    t.judge(key, "equal" if count == 1 else "changed", note)
    t.judge("recompute_method", "equal", "numbers are equal")


def _modules(t: Translation) -> None:
    key = "recompute_modules"
    named = t.get(key, ["core_attn"])
    named = named.split() if isinstance(named, str) else named if isinstance(named, list) else []
    others = [str(name) for name in named if name != "core_attn"]
    if others:
        note = f"memory: {', '.join(others)} are recomputed there; write their patterns in units"
        t.judge(key, "changed", note, to="@recomputed.units")
    t.judge(key, "equal", "attention's scores are not kept")


def offload(translation: Translation) -> None:
    """Carry what is kept in host memory."""
    t = translation
    if t.flag("optimizer_cpu_offload"):
        t.put("@host.mode", "optimizer", "optimizer_cpu_offload")
        note = "memory: the state is in host memory and the device steps; Megatron-LM's CPU steps"
        t.judge("optimizer_cpu_offload", "changed", note, to="@host.mode")
        share = t.number("optimizer_offload_fraction", 1.0)
        note = "memory: a share of the state there, all of it here"
        t.judge("optimizer_offload_fraction", "equal" if share == 1 else "changed", "" if share == 1 else note)
    for key in ("optimizer_cpu_offload", "optimizer_offload_fraction"):
        t.judge(key, "meaningless", "off")
    layers = t.integer("cpu_offloading_num_layers", 0) or 0
    if layers or t.flag("cpu_offloading") or t.flag("fine_grained_activation_offloading"):
        t.put("@activations", None, "cpu_offloading_num_layers", "fine_grained_activation_offloading")
        note = "memory: activations of all blocks; write units for some"
        for key in ("cpu_offloading", "cpu_offloading_num_layers", "fine_grained_activation_offloading"):
            t.judge(key, "changed" if t.get(key) else "meaningless", note, to="@activations.units")
        t.judge("offload_modules", "changed", note, to="@activations.units")
    for key in ("cpu_offloading", "cpu_offloading_num_layers", "fine_grained_activation_offloading", "offload_modules"):
        t.judge(key, "meaningless", "off")
