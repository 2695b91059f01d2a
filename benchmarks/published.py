"""Published runs as shapes, layouts and clusters: what their sources say, and nothing fitted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoder_shape import ModelShape

from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.cluster import Hardware, Stack, StackName
from composer3d.planning.hardware.hardware_file import load_hardware

__all__ = ["Run", "published_runs"]

DATA = Path(__file__).parent / "data"
GIB = 2**30
# fp16 weights and gradients, an fp32 copy and two moments; before the step fp16 gradients become fp32 beside it.
FP16 = Precision(dtype="float16", param_bytes=2, grad_bytes=2, reduce_bytes=2, state_bytes=8, master_bytes=8)
BF16_PURE = Precision(param_bytes=4, grad_bytes=4, reduce_bytes=2)
# The first FlashAttention, in Triton, with biases for positions: parts of the peak, fitted to MPT on one node of each.
FLASH_1 = {"A100": (0.36, 0.32), "H100": (0.25, 0.175)}
# Of Transformer Engine: scales of a tensor, of blocks of it, and four bits with scales of 16 elements.
_FORMATS = {"float8": "float8_e4m3fn", "float8_block": "float8_block", "float4": "float4_e2m1fn"}
# DeepSpeed's reduce and all-gather buckets of 5e8 elements each, in two bytes.
DEEPSPEED_BUCKETS = int(2 * 5e8 * 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Args:
        name: Its key in the data.
        family: Its source, shortened: errors are told by family.
        stack: The software that ran it, as hardware files name it.
        shape: Of the model.
        setup: Its layout.
        hardware: Its cluster.
        step_s: Measured; None where only memory was.
        memory_gib: Measured, as the allocator reserved it or the driver showed it; None where it is not known.
        shows_context: Whether what was measured has the driver's context in it.
        ran_out: Whether it did not fit.
    """

    name: str
    family: str
    stack: StackName
    shape: ModelShape
    setup: Setup
    hardware: Hardware
    step_s: float | None
    memory_gib: float | None
    shows_context: bool = True
    ran_out: bool = False


def published_runs(folder: Path = DATA) -> list[Run]:
    """Read the runs of a folder's `published_runs.json`; equal rows of one source count once."""
    data = json.loads((folder / "published_runs.json").read_text(encoding="utf-8"))
    found: dict[tuple[Any, ...], Run] = {}
    rows = (*_records(data["records"]), *_torchtitan(data["torchtitan"]["records"]), *_tables(data.get("tables", ())))
    for run in rows:
        found.setdefault((run.family, run.shape, run.setup, run.hardware.name, run.step_s, run.memory_gib), run)
    return list(found.values())


def _records(rows: list[Mapping[str, Any]]) -> Iterator[Run]:
    for row in rows:
        family = _family(row["source"])
        if family is None:
            continue
        measured = row["measured"]
        yield Run(
            name=row["id"],
            family=family,
            stack="eager" if family.startswith("MPT") else "megatron",
            shape=_shape(row, family),
            setup=_setup(row, family),
            hardware=_hardware(row, family),
            step_s=measured.get("step_time_s") or measured.get("step_time_s_derived"),
            memory_gib=measured.get("peak_mem_gib"),
            ran_out=bool(measured.get("oom")),
        )


def _family(source: str | None) -> str | None:
    known = {"BigScience": "BLOOM", "Megatron-LM": "Megatron 2020", "A100 40GB": "MPT A100-40"}
    known["A100 80GB"] = "MPT A100-80"
    return next((family for text, family in known.items() if source and text in source), None)


def _shape(row: Mapping[str, Any], family: str) -> ModelShape:
    model = row["model"]
    hidden, vocab = model["hidden"], model.get("vocab") or 51200
    layers = model.get("layers") or round((model["params"] - vocab * hidden) / (12 * hidden**2))
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        num_heads=model["heads"],
        num_kv_heads=model.get("kv_heads") or model["heads"],
        head_dim=hidden // model["heads"],
        ffn=model["ffn"],
        vocab_size=vocab,
        gated=False,
        tied=True,
        positions=0 if family == "BLOOM" else row["seq"],
    )


def _setup(row: Mapping[str, Any], family: str) -> Setup:
    tp, pp = row["tp"], row["pp"]
    dp = row["dp"] or row["gpus"] // (tp * pp)
    common = Setup(
        seq_len=row["seq"],
        global_batch=row["global_batch"],
        microbatch=row["micro_batch"],
        tp=tp,
        pp=pp,
        recompute=row["ac"],
        kernels="fused",
    )
    if family.startswith("MPT"):
        pure = "PURE" in row["precision"]
        return replace(common, dp_shard=dp, zero=3, precision=BF16_PURE if pure else Precision())
    megatron = replace(common, attention="math", precision=FP16, overlap=False)
    if family == "BLOOM":
        # DeepSpeed's pipeline keeps what a stage has sent until its gradient is back.
        sent = 2 * row["micro_batch"] * row["seq"] * row["model"]["hidden"]
        return replace(
            megatron,
            dp_shard=dp,
            zero=1,
            shards_weights=False,
            extra_bytes=DEEPSPEED_BUCKETS + min(pp, common.num_microbatches) * sent,
            async_messages=False,
        )
    return replace(megatron, dp_replicate=dp, zero=0)


def _hardware(row: Mapping[str, Any], family: str) -> Hardware:
    if "V100" in row["gpu"]:
        return _under(load_hardware("v100-32").with_nodes(16), "megatron")
    name = "a100-40" if "40GB" in row["gpu"] else "a100-80"
    network = {"BLOOM": "opa-400", "Megatron 2020": "ib-hdr-200"}.get(family, "roce-200")
    hardware = load_hardware(f"{name}/{network}")
    if not family.startswith("MPT"):
        return _under(hardware, "megatron")
    return _with_flash_1(_under(hardware, "eager"))


def _with_flash_1(hardware: Hardware) -> Hardware:
    forward, backward = FLASH_1[hardware.device.name[:4]]
    device = replace(hardware.device, attention_efficiency=forward, attention_backward_efficiency=backward)
    return replace(hardware, device=device)


def _under(hardware: Hardware, stack: StackName) -> Hardware:
    """Return a cluster under a stack; what fused kernels read and write is in the closed forms already."""
    stacks = {name: replace(one, pointwise=1.0, launches=1.0) for name, one in hardware.stacks.items()}
    return replace(hardware, stacks=stacks).with_stack(stack)


def _tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    for row in rows:
        model = row["model"]
        shape = ModelShape(
            num_layers=model["layers"],
            hidden=model["hidden"],
            num_heads=model["heads"],
            num_kv_heads=model["kv_heads"],
            head_dim=model["hidden"] // model["heads"],
            ffn=model["ffn"],
            vocab_size=model["vocab"],
            gated=model["gated"],
            tied=model["tied"],
            positions=model["positions"],
        )
        known = _under(_h100_96() if row["hardware"] == "h100-96" else load_hardware(row["hardware"]), row["stack"])
        yield Run(
            name=row["id"],
            family=row["family"],
            stack=row["stack"],
            shape=shape,
            setup=_setup_of(row),
            hardware=_with_flash_1(known) if row["family"].startswith("MPT") else known,
            step_s=row["global_batch"] * row["seq"] / row["gpus"] / row["tokens_per_s_per_gpu"],
            memory_gib=row.get("peak_mem_gib"),
            shows_context=False,
        )


def _setup_of(row: Mapping[str, Any]) -> Setup:
    tp, pp, cp = row["tp"], row["pp"], row["cp"]
    data_parallel = row["gpus"] // (tp * pp * cp)
    shards = row.get("dp_shard", data_parallel)
    precision = Precision()
    if row["precision"] != "bfloat16":
        precision = Precision(dtype=_FORMATS[row["precision"]], gather_bytes=1 if row["zero"] == 3 else 2)
    kernels: dict[str, Any] = {"compiled": "compiled", "megatron": "fused", "eager": "fused"}
    return Setup(
        seq_len=row["seq"],
        global_batch=row["global_batch"],
        microbatch=row["micro_batch"],
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=shards,
        dp_replicate=data_parallel // shards,
        zero=row["zero"],
        shards_weights=row["stack"] != "megatron",
        schedule="Interleaved1F1B" if row["vp"] > 1 and pp > 1 else "1F1B",
        stages_per_rank=row["vp"] if pp > 1 else 1,
        sequence_parallel=tp > 1,
        recompute=row["ac"],
        kernels=kernels[row["stack"]],
        async_tp=row.get("async_tp", False),
        loss="compiled loss" if row["family"] == "torchtitan H200" else "",
        precision=precision,
    )


def _h100_96() -> Hardware:
    """Return H100 with the memory of another, 96 GB at 2.4 TB/s, and 500 instead of 700 W.

    Clocks go with about the root of the power.
    """
    plain, slower = load_hardware("h100/ib-ndr-400"), (500 / 700) ** 0.5
    stacks = {name: replace(one, gemm_efficiency=_scaled(one, slower)) for name, one in plain.stacks.items()}
    parts = {dtype: part * slower for dtype, part in plain.device.gemm_efficiency.items()}
    device = replace(
        plain.device, name="H100 96GB", memory_bytes=95 * GIB, memory_bandwidth=2.4e12, gemm_efficiency=parts
    )
    return replace(plain, name="h100-96", device=device, stacks=stacks)


def _scaled(stack: Stack, factor: float) -> dict[str, float]:
    return {dtype: part * factor for dtype, part in stack.gemm_efficiency.items()}


def _torchtitan(rows: list[Mapping[str, Any]]) -> Iterator[Run]:
    hardware = _h100_96()
    for row in rows:
        dims = row["model_dims"]
        shape = ModelShape(
            num_layers=dims["n_layers"],
            hidden=dims["dim"],
            num_heads=dims["n_heads"],
            num_kv_heads=dims["n_kv_heads"],
            head_dim=dims["dim"] // dims["n_heads"],
            ffn=dims["ffn_hidden"],
            vocab_size=dims["vocab_size"],
        )
        float8 = row["float8"] != "none"
        precision = Precision(dtype="float8_e4m3fn", gather_bytes=1) if float8 else Precision()
        setup = Setup(
            seq_len=row["seq_len"],
            global_batch=row["global_batch_size"],
            microbatch=row["local_batch_size"],
            dp_shard=row["dp_shard"],
            recompute="selective" if row["ac"].startswith("selective") else row["ac"],
            kernels="compiled" if row["compile"] else "eager",
            precision=precision,
        )
        yield Run(
            name=row["id"],
            family="torchtitan",
            stack="compiled" if row["compile"] else "eager",
            shape=shape,
            setup=setup,
            hardware=_under(hardware, "compiled" if row["compile"] else "eager"),
            step_s=row["local_batch_size"] * row["seq_len"] / row["tokens_per_s_per_gpu"],
            memory_gib=row["peak_memory"],
            shows_context=False,
        )
