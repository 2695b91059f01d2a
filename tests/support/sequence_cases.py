"""Attention of sharded sequences beside that of one device: inputs, masks, and one comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.attention_traffic import AttentionShape, Layout
from composer3d_plugins.sharding.context_parallel.sequence_attention import (
    Attention,
    SequencePlan,
    attend,
)
from composer3d_plugins.sharding.context_parallel.sequence_groups import SequenceGroup, divided_group
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, contiguous, zigzag
from torch.distributed.device_mesh import init_device_mesh

from composer3d.testing import count_collectives

BATCH, HEADS, WIDTH = 2, 8, 8
PATTERNS = {
    "full": Pattern(),
    "causal": Pattern.causal(),
    "window": Pattern.causal(11),
    "both sides": Pattern(5, 3),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention; the defaults are causal self-attention of 48 positions."""

    method: str = "gather"
    pattern: str = "causal"
    mask: str = "none"
    kv_heads: int = 2
    balanced: bool = True
    rows: Positions | None = None
    columns: Positions | None = None
    length: int = 48
    value_dim: int = WIDTH
    scale: float | None = None
    softcap: float = 0.0
    dtype: torch.dtype = torch.float64

    def positions(self, degree):
        rows = self.rows or (zigzag if self.balanced else contiguous)(self.length, degree)
        return rows, self.columns or rows

    def layout(self, degree, inner_degree=1):
        rows, columns = self.positions(degree)
        return Layout(rows=rows, columns=columns, pattern=PATTERNS[self.pattern], inner_degree=inner_degree)

    def shape(self):
        return AttentionShape(
            batch=BATCH,
            num_heads=HEADS,
            num_kv_heads=self.kv_heads,
            head_dim=WIDTH,
            value_dim=self.value_dim,
            element_bytes=self.dtype.itemsize,
        )


def inputs(case, degree):
    """Return queries, keys, values and the gradient of the output, whole and in float64."""
    rows, columns = case.positions(degree)
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (HEADS, rows.length, WIDTH),
        (case.kv_heads, columns.length, WIDTH),
        (case.kv_heads, columns.length, case.value_dim),
        (HEADS, rows.length, case.value_dim),
    ]
    drawn = [torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(case.dtype).double() for x in drawn]


def mask_of(name, num_rows, num_columns):
    """Return a mask of whole rows and columns; documents end where no shard does."""
    columns, rows = torch.arange(num_columns), torch.arange(num_rows)
    documents = torch.stack([torch.bucketize(rows, torch.tensor(ends), right=True) for ends in ((13, 41), (7, 30))])
    of_columns = torch.stack([torch.bucketize(columns, torch.tensor(ends), right=True) for ends in ((13, 41), (7, 30))])
    tail = torch.stack([columns < num_columns * 3 // 4, columns >= 0])
    head = torch.stack([columns >= 0, columns >= 5])
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, HEADS, num_rows, num_columns, generator=generator, dtype=torch.float64)
    return {
        "none": None,
        "documents": (documents[:, :, None] == of_columns[:, None, :])[:, None],
        "padding": (tail & head)[:, None, None, :],
        "head": head[:, None, None, :],
        "tail": tail[:, None, None, :],
        "documents and padding": (documents[:, :, None] == of_columns[:, None, :])[:, None] & tail[:, None, None, :],
        "bias": bias,
        "bias of two dims": bias[0, 0],
        "least values": torch.zeros(BATCH, 1, num_rows, num_columns, dtype=torch.float64).masked_fill(
            ~(tail & head)[:, None, None, :], torch.finfo(torch.float64).min
        ),
    }[name]


def one_device(case, degree):
    """Return output and gradients of queries, keys and values of the whole sequence, written out."""
    q, k, v, grad = inputs(case, degree)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    rows, columns = case.positions(degree)
    seen = PATTERNS[case.pattern].mask(torch.arange(rows.length), torch.arange(columns.length))
    mask = mask_of(case.mask, rows.length, columns.length)
    if seen is not None and mask is not None:
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
    mask = seen if mask is None else mask
    repeats = HEADS // case.kv_heads
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    if case.softcap:
        scale = WIDTH**-0.5 if case.scale is None else case.scale
        scores = torch.tanh(q @ keys.transpose(-1, -2) * scale / case.softcap) * case.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        output = scores.softmax(-1) @ values
    else:
        output = F.scaled_dot_product_attention(q, keys, values, mask, scale=case.scale)
    output.backward(grad)
    return [output.detach(), q.grad, k.grad, v.grad]


def sharded(case, group, **replaced):
    """Return this rank's output and gradients, and its collectives."""
    rows, columns = case.positions(group.degree)
    q, k, v, grad = (x.to(case.dtype) for x in inputs(case, group.degree))
    of_rows, of_columns = rows.index(group.rank), columns.index(group.rank)
    q, k, v = (x[:, :, i].clone().requires_grad_() for x, i in ((q, of_rows), (k, of_columns), (v, of_columns)))
    attention = Attention(
        pattern=PATTERNS[case.pattern],
        mask=mask_of(case.mask, rows.length, columns.length),
        scale=case.scale,
        softcap=case.softcap,
    )
    attention = replace(attention, **replaced)
    with count_collectives() as collectives:
        output = attend(q, k, v, attention, SequencePlan.of(Method(case.method), group, rows, columns))
        output.backward(grad[:, :, of_rows])
    return [output.detach(), q.grad, k.grad, v.grad], collectives


def error(case, group):
    """Return the largest difference of this rank's results, of each relative to its largest element on one device."""
    found, _ = sharded(case, group)
    rows, columns = case.positions(group.degree)
    whole = one_device(case, group.degree)
    worst = 0.0
    for mine, reference, positions in zip(found, whole, (rows, rows, columns, columns), strict=True):
        expected = reference[:, :, positions.index(group.rank)]
        assert mine.shape == expected.shape
        if mine.numel():
            worst = max(worst, float((mine.double() - expected).abs().max() / reference.abs().max()))
    return worst


def sequence_group():
    """Return all ranks as one group; four of them also as two inner groups of two."""
    if dist.get_world_size() != 4:
        return SequenceGroup.of(dist.group.WORLD)
    return divided_group(init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), axis="cp", inner_degree=2)
