"""Published runs as shapes, layouts and clusters: what their sources say, and nothing fitted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoder_shape import ModelShape

from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.hardware.hardware_file import load_hardware

__all__ = ["Run", "published_runs"]

DATA = Path(__file__).parent / "data"
GIB = 2**30
# fp16 weights and gradients, an fp32 copy and two moments; before the step fp16 gradients become fp32 beside it.
FP16 = Precision(dtype="float16", param_bytes=2, grad_bytes=2, reduce_bytes=2, state_bytes=8, master_bytes=8)
BF16_PURE = Precision(param_bytes=4, grad_bytes=4, reduce_bytes=2)
# The first FlashAttention, in Triton, with biases for positions: parts of the peak, fitted to MPT A100-80.
FLASH_1 = (0.36, 0.32)
# DeepSpeed's reduce and all-gather buckets of 5e8 elements each, in two bytes.
DEEPSPEED_BUCKETS = int(2 * 5e8 * 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Args:
        name: Its key in the data.
        family: Its source, shortened: errors are told by family.
        shape: Of the model.
        setup: Its layout.
        hardware: Its cluster.
        step_s: Measured; None where only memory was.
        memory_gib: Measured, as the allocator reserved it or the driver showed it; None where it is not known.
        ran_out: Whether it did not fit.
    """

    name: str
    family: str
    shape: ModelShape
    setup: Setup
    hardware: Hardware
    step_s: float | None
    memory_gib: float | None
    ran_out: bool = False


def published_runs(folder: Path = DATA) -> list[Run]:
    """Read the runs of a folder's `published_runs.json`; equal rows of one source count once."""
    data = json.loads((folder / "published_runs.json").read_text(encoding="utf-8"))
    found: dict[tuple[Any, ...], Run] = {}
    for run in (*_records(data["records"]), *_torchtitan(data["torchtitan"]["records"])):
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
        return replace(
            megatron, dp_shard=dp, zero=1, shards_weights=False, extra_bytes=DEEPSPEED_BUCKETS, async_messages=False
        )
    return replace(megatron, dp_replicate=dp, zero=0)


def _hardware(row: Mapping[str, Any], family: str) -> Hardware:
    if "V100" in row["gpu"]:
        return load_hardware("v100-32").with_nodes(16)
    name = "a100-40" if "40GB" in row["gpu"] else "a100-80"
    network = {"BLOOM": "opa-400", "Megatron 2020": "ib-hdr-200"}.get(family, "roce-200")
    hardware = load_hardware(f"{name}/{network}")
    if not family.startswith("MPT"):
        return hardware
    forward, backward = FLASH_1
    device = replace(hardware.device, attention_efficiency=forward, attention_backward_efficiency=backward)
    return replace(hardware, device=device)


def _torchtitan(rows: list[Mapping[str, Any]]) -> Iterator[Run]:
    # H100 with the memory of another, 96 GB at 2.4 TB/s, and 500 instead of 700 W: clocks go with about the root.
    plain = load_hardware("h100/ib-ndr-400")
    parts = {dtype: part * (500 / 700) ** 0.5 for dtype, part in plain.device.gemm_efficiency.items()}
    device = replace(
        plain.device, name="H100 96GB", memory_bytes=95 * GIB, memory_bandwidth=2.4e12, gemm_efficiency=parts
    )
    hardware = replace(plain, name="h100-96", device=device)
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
            shape=shape,
            setup=setup,
            hardware=hardware,
            step_s=row["local_batch_size"] * row["seq_len"] / row["tokens_per_s_per_gpu"],
            memory_gib=row["peak_memory"],
        )
