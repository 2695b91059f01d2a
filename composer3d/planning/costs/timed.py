"""Interpolation between measured times of a machine, by size.

Time is interpolated along straight lines in the logarithms of size and time: from what a cache holds to what none does,
it does not grow evenly. Below the least size it is proportional to it, the constant part being the launch's; beyond the
greatest too.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from composer3d.planning.hardware.cluster import BROADCAST, SHORT_ROW, Device, TimedCollective
from composer3d.planning.tracing.traced import Operators

__all__ = ["attention_speed", "fresh_s", "interpolated_s", "result_bytes", "timed_collective_s", "timed_operator_s"]

# What operators that were not timed themselves are like: those that only move, and those that compute by element.
_MOVES = ("copy", "cat", "clone", "gather", "scatter", "index", "fill", "zero", "roll", "repeat", "pad", "split")
_MOVED, _COMPUTED = "aten.copy_", "aten.mul"
_OF_TWO = ("aten.mul", "aten.add", "aten.sub", "aten.div")


def interpolated_s(size: float, timed: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a size.

    Args:
        size: In bytes.
        timed: Sizes and seconds, at least one.
    """
    points = sorted(timed)
    if size <= points[0][0] or len(points) == 1:
        return points[0][1] * size / points[0][0]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    above = bisect.bisect_left(points, (size, 0.0))
    (left, first), (right, last) = points[above - 1], points[above]
    part = math.log(size / left) / math.log(right / left)
    return math.exp((1 - part) * math.log(first) + part * math.log(last))


def timed_operator_s(operators: Operators, device: Device) -> float | None:
    """Return the seconds of a call of an operator without products; None where nothing like it was timed.

    One that was not timed itself is like a copy if it only moves elements, else like a multiplication; another dtype
    is like float32.

    Args:
        operators: The call.
        device: With its timed operators.
    """
    moves = any(word in operators.name for word in _MOVES)
    for name in (operators.name, _MOVED if moves else _COMPUTED):
        whole = _timed_as(name, operators, device)
        if whole is not None:
            return whole + _between_rows_s(whole, operators, device)
    return None


def _timed_as(name: str, operators: Operators, device: Device) -> float | None:
    for dtype in (operators.dtype, "float32"):
        found = [(t.bytes, t.seconds) for t in device.operators if t.name == name and t.dtype == dtype]
        if found:
            return interpolated_s(operators.bytes_moved, found)
    return None


def _between_rows_s(whole: float, operators: Operators, device: Device) -> float:
    """Return what it takes longer where an input is one for several rows of another: the loop is as long as a row.

    What comes with a row does not depend on its length, so that it is as often as rows are shorter than the timed ones.

    Args:
        whole: Seconds where both inputs are of the result's shape.
        operators: The call.
        device: With its timed operators.
    """
    length = _row_length(operators.shapes) if operators.name.rstrip("_") in _OF_TWO else 0
    short = _timed_as(BROADCAST, operators, device) if length else None
    return 0.0 if short is None else max(0.0, short - whole) * SHORT_ROW / length


def _row_length(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many elements an innermost loop has, over dims that the smaller of two inputs all has, or all lacks.

    Returns:
        0 where nothing ends it: both inputs are of one shape, or one is a single element.
    """
    if len(shapes) != 2:
        return 0
    small, large = sorted(shapes, key=math.prod)
    small = (1,) * (len(large) - len(small)) + small
    length, has = 1, None
    for mine, whole in zip(reversed(small), reversed(large), strict=False):
        if whole > 1:
            if has is not None and has != (mine == whole):
                return length
            has = mine == whole
            length *= whole
    return 0


def attention_speed(operators: Operators, device: Device, *, backward: bool) -> float | None:
    """Return the operations a second of an attention between the timed lengths and widths; None where none was timed.

    Args:
        operators: The call; the queries are its first input, behind the gradient in a backward.
        device: With its timed attention.
        backward: Which of the two.
    """
    shapes = [shape for shape in operators.shapes if len(shape) == 4]
    timed = [row for row in device.attentions if row.dtype == operators.dtype]
    timed = timed or [row for row in device.attentions if row.dtype == "float32"]
    if not shapes or not timed:
        return None
    length, width = shapes[0][-2:]
    speeds = {(row.length, row.width): row.backward if backward else row.forward for row in timed}
    lengths, widths = sorted({row.length for row in timed}), sorted({row.width for row in timed})
    by_length = []
    for known in lengths:
        own = [(width, speeds[known, width]) for width in widths if (known, width) in speeds]
        by_length.append((known, _between(width, own)))
    return _between(length, by_length)


def _between(size: float, known: Sequence[tuple[float, float]]) -> float:
    """Return a speed on a straight line, in logarithms, between the nearest two sizes; beyond all that of the last."""
    above = bisect.bisect_left([each for each, _ in known], size)
    if above in (0, len(known)):
        return known[min(above, len(known) - 1)][1]
    (left, first), (right, last) = known[above - 1], known[above]
    part = math.log(size / left) / math.log(right / left)
    return math.exp((1 - part) * math.log(first) + part * math.log(last))


def timed_collective_s(op: str, size: float, num_ranks: int, timed: Sequence[TimedCollective]) -> float | None:
    """Return the seconds of a collective; None where none of so many ranks was timed.

    Below the least size that was timed a collective takes as long as at that size: it is all latency. One that was not
    timed is like the one with which it shares the passes over the buffer.

    Args:
        op: As in `Transfer`.
        size: Bytes of the whole buffer.
        num_ranks: That take part.
        timed: Over the group's link.
    """
    known = "send" if op in ("send", "receive") else op
    for name in (known, _LIKE.get(known, known)):
        found = [(row.bytes, row.seconds) for row in timed if row.op == name and row.ranks == num_ranks]
        if found:
            return interpolated_s(max(size, min(found)[0]), found)
    return None


def fresh_s(operators: Sequence[Operators], device: Device) -> float:
    """Return the seconds in which the system hands out memory for the largest results of a stretch.

    malloc gives memory back once twice the largest block that it has freed lies unused at the end of its own: the
    largest results of a stretch, logits say, which lie there, are allocated anew by the system, page for page; smaller
    ones find room between others. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.

    Args:
        operators: Of the stretch.
        device: With the bandwidth of fresh memory.
    """
    if not device.fresh_bandwidth:
        return 0.0
    made = [(result_bytes(call), call.count) for call in operators]
    largest = max((size for size, _ in made), default=0)
    if largest < _LEAST_GIVEN_BACK:
        return 0.0
    return math.fsum(size * count for size, count in made if size > _NEARLY * largest) / device.fresh_bandwidth


def result_bytes(call: Operators) -> int:
    """Return the bytes of what an operator makes; of one in place, none."""
    if call.name.endswith("_") or "empty" in call.name or call.name.startswith("fsdp."):
        return 0
    taken = sum(math.prod(shape) for shape in call.shapes) * _WIDTHS.get(call.dtype, 4)
    return max(0, call.bytes_moved - taken)


# Well above malloc's first threshold of 128 KiB: the largest block that a process frees in starting raises it, and that
# is some MB where Python imports torch.
_LEAST_GIVEN_BACK = 2**21
_NEARLY = 0.9
_WIDTHS = {"float64": 8, "bfloat16": 2, "float16": 2}
_LIKE: Mapping[str, str] = {"broadcast": "all_gather", "all_to_all": "all_gather"}
