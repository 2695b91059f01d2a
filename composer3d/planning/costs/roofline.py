"""Operator time on a device by the roofline model: the slower of its arithmetic and its memory traffic.

Matrix products reach a part of the peak that depends on their shape: tiles that do not fill the last wave of
multiprocessors, sums that are too short to hide the loads, dims that no tile divides. Source: Samuel Williams et al.,
Roofline: An Insightful Visual Performance Model, 2009; NVIDIA, Matrix Multiplication Background User's Guide; Quentin
Anthony et al., The Case for Co-Designing Model Architectures with Hardware, arXiv:2401.14489, 2024 (alignment).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from composer3d.planning.costs.timed import attention_speed, timed_operator_s
from composer3d.planning.hardware.cluster import Device, Gemm
from composer3d.planning.tracing.traced import Operators

__all__ = ["gemm_dims", "gemm_efficiency", "operator_s"]

_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "scaled_mm", "scaled_grouped_mm", "grouped_mm")
# Tiles of products, with the part of the speed of the largest that each reaches.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.65))
_SUM_LENGTH = 64  # where a sum is this long, loads and the epilogue take as long as the products
# The part of the speed by the largest power of two that divides the dims, in elements of two bytes.
_ALIGNMENT = {64: 1.0, 32: 0.92, 16: 0.78, 8: 0.55, 4: 0.45, 2: 0.4, 1: 0.3}
_TOUCHING_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_NARROW = ("float8", "float4")  # formats of them differ in their scales, and share a peak
_ROWWISE = "_rowwise"
_CAUSAL = 0.5  # what a causal kernel executes of the operations that are counted


def operator_s(operators: Operators, device: Device) -> float:
    """Return the seconds of one call on an otherwise idle device, without its launch."""
    name = operators.name.removeprefix("aten.").removeprefix("_").split(".")[0]
    if name in _TOUCHING_NOTHING:
        return 0.0
    traffic = operators.bytes_moved / (device.memory_bandwidth * device.memory_efficiency)
    if not operators.flops:
        timed = timed_operator_s(operators, device)
        return traffic if timed is None else timed
    if "scaled_dot_product" in name or "attention" in name:
        backward = "backward" in name
        speed = attention_speed(operators, device, backward=backward)
        if speed is not None:
            return operators.flops * _CAUSAL / speed
        part = device.attention_backward_efficiency if backward else device.attention_efficiency
        return max(operators.flops * _CAUSAL / (peak_of(operators.dtype, device) * part), traffic)
    dims = gemm_dims(name, operators.shapes)
    if dims is None:
        return max(operators.flops / peak_of(operators.dtype, device), traffic)
    arithmetic = operators.flops / gemm_speed(dims, format_of(operators), device)
    # A product that was timed has fetched its factors and written its result.
    return arithmetic if _timed_gemms(operators.dtype, device) else max(arithmetic, traffic)


def peak_of(dtype: str, device: Device) -> float:
    """Return the peak of a dtype; one that the device does not have runs as the widest that it has."""
    known = next((short for short in _NARROW if dtype.startswith(short)), dtype)
    return device.peaks.get(known) or device.peaks.get("float32") or min(device.peaks.values())


def format_of(operators: Operators) -> str:
    """Return the dtype of a product's factors, and of float8 whether each row has a scale of its own."""
    scales = [shape for shape in operators.shapes[2:] if operators.name.endswith("scaled_mm") and len(shape) == 2]
    is_rowwise = any(min(shape) == 1 < max(shape) for shape in scales)
    return f"float8{_ROWWISE}" if is_rowwise and operators.dtype.startswith("float8") else operators.dtype


def gemm_dims(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Return rows, columns and sum length of a matrix product; None for other operators.

    Args:
        name: Without `aten.` and leading underscores.
        shapes: Of its tensor inputs.
    """
    if name not in _GEMMS:
        return None
    factors = [shape for shape in shapes if len(shape) >= 2]
    if len(factors) > 2 and name in ("baddbmm", "addmm"):
        factors = factors[-2:]
    if len(factors) < 2:
        return None
    left, right = factors[0], factors[1]
    rows, length = left[-2] * math.prod(left[:-2] if len(right) == 2 else ()), left[-1]
    columns = right[-1] if right[-2] == length and name != "linear" else right[-2]
    return rows, columns, length


def gemm_speed(dims: tuple[int, int, int], dtype: str, device: Device) -> float:
    """Return the operations a second of a matrix product, of a dtype or of a format of it."""
    timed = _timed_gemms(dtype, device)
    if timed:
        return _interpolated(dims, timed)
    parts = device.gemm_efficiency
    short = next((short for short in _NARROW if dtype.startswith(short)), dtype)
    part = parts.get(dtype, parts.get(short, parts.get("default", 0.5)))
    return peak_of(dtype, device) * part * gemm_efficiency(dims, device)


def _timed_gemms(dtype: str, device: Device) -> list[Gemm]:
    return [gemm for gemm in device.gemms if gemm.dtype == dtype]


def gemm_efficiency(dims: tuple[int, int, int], device: Device) -> float:
    """Return the part of the speed of large products that one of these dims reaches, by the best of several tiles.

    Args:
        dims: Rows, columns, sum length.
        device: Whose multiprocessors share the tiles.
    """
    rows, columns, length = dims
    aligned = _ALIGNMENT[min(64, *(dim & -dim for dim in (columns, length)))] if rows > 1 else 1.0
    filled = max(_filled(rows, columns, tile, device.num_units) * tile[2] for tile in _TILES)
    return aligned * filled * length / (length + _SUM_LENGTH)


def _filled(rows: int, columns: int, tile: tuple[int, int, float], num_units: int) -> float:
    """Return which part of the multiprocessors' time goes into the result."""
    tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    covered = rows * columns / (tiles * tile[0] * tile[1])
    if not num_units:
        return covered
    waves = tiles / num_units
    return covered * waves / math.ceil(waves)


def _interpolated(dims: tuple[int, int, int], timed: Sequence[Gemm]) -> float:
    """Weigh products that were timed by their nearness in the logarithms of their dims."""
    total = weights = 0.0
    for gemm in timed:
        distance = sum(math.log2(mine / other) ** 2 for mine, other in zip(dims, (gemm.m, gemm.n, gemm.k), strict=True))
        weight = 1 / (distance**2 + 1e-6)
        total += weight * math.log(gemm.flops_per_s)
        weights += weight
    return math.exp(total / weights)
