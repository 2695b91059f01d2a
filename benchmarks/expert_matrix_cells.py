"""Cells of the matrix of experts: layouts with ep, of at most eight ranks, in which every two options stand together.

Every cell must be proven: nothing of these may be refused. Routing is balanced by biases, which a step's counts move:
with a count that is lost, or counted twice, it is another model a step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from layout_matrix_cells import NUM_SEQUENCES, SEQ_LEN, TENSOR, VOCAB_SIZE, Refusal
from torch import nn

from composer3d.models import moe
from composer3d.testing import pairwise

__all__ = ["CORNERS", "OPTIONS", "ExpertCell", "cells", "covering"]

MAX_RANKS = 8
NUM_MICROBATCHES = 2
RECOMPUTED = {"kept": "", "recomputed": "[scheduling.activation_checkpoint]\n"}
COMPILED = {"eager": "", "compiled": '[scheduling.compile]\nbackend = "aot_eager"\n'}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "pp": ("1", "2"),
    "dp_replicate": ("1", "2"),
    "dp_shard": ("1", "2", "4"),
    "cp": ("1", "2"),
    "tensor": tuple(TENSOR),
    "ep": ("2", "4"),
    "zero": ("1", "2", "3"),
    "recompute": tuple(RECOMPUTED),
    "compile": tuple(COMPILED),
}


@dataclass(frozen=True, kw_only=True)
class ExpertCell:
    """One layout; each option is one of `OPTIONS`."""

    pp: str = "1"
    dp_replicate: str = "1"
    dp_shard: str = "1"
    cp: str = "1"
    tensor: str = "tp1"
    ep: str = "2"
    zero: str = "3"
    recompute: str = "kept"
    compile: str = "eager"

    def __str__(self) -> str:
        degrees = "-".join(f"{name}{degree}" for name, degree in self.degrees.items())
        return f"{degrees}/{self.tensor}/zero{self.zero}/{self.recompute}/{self.compile}"

    @property
    def permitted(self) -> Sequence[Refusal]:
        """Refusals that are right."""
        return ()

    def make(self) -> nn.Module:
        """Make the model: four experts, two of which a token has."""
        return moe(
            dim=16,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=VOCAB_SIZE,
            max_seq_len=SEQ_LEN,
            num_experts=4,
            expert_dim=8,
            balance_loss=0.0,
            bias_rate=0.01,
        )

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees above 1."""
        found = {name: int(getattr(self, name)) for name in ("pp", "dp_replicate", "dp_shard", "cp", "ep")}
        return {
            name: degree for name, degree in {**found, "tp": 1 if self.tensor == "tp1" else 2}.items() if degree > 1
        }

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(degree for name, degree in self.degrees.items() if name != "ep")

    @property
    def is_there(self) -> bool:
        """Whether ep can be carved out of the other degrees, and the ranks are few."""
        tp, ep, outer = self.degrees.get("tp", 1), int(self.ep), int(self.dp_shard) * int(self.cp)
        return (outer % ep == 0 or (outer * tp % ep == 0 and ep % tp == 0)) and self.world_size <= MAX_RANKS

    @property
    def manifest(self) -> str:
        """The text of its manifest."""
        mesh = "".join(f"{name} = {degree}\n" for name, degree in self.degrees.items())
        readers = int(self.dp_replicate) * int(self.dp_shard)
        size = NUM_SEQUENCES // readers // NUM_MICROBATCHES
        tables = [f"[sharding.fsdp2]\nzero = {self.zero}\n[sharding.expert_parallel]\n", TENSOR[self.tensor]]
        tables += ["[sharding.context_parallel]\n"] if self.cp != "1" else []
        tables += ['[scheduling.pipeline]\nschedule = "1F1B"\n'] if self.pp != "1" else []
        tables += [RECOMPUTED[self.recompute], COMPILED[self.compile]]
        train = f"global_batch = {NUM_SEQUENCES}\nmicrobatch = {size}\n"
        return f"composer3d = 1\n[mesh]\n{mesh}[train]\n{train}{''.join(tables)}"


# Five dimensions, with experts on two ranks and on four.
CORNERS = (
    ExpertCell(pp="2", cp="2", dp_shard="2", ep="2"),
    ExpertCell(pp="2", cp="2", dp_shard="2", ep="4"),
    ExpertCell(pp="2", cp="2", tensor="tp2", ep="2"),
    ExpertCell(pp="2", cp="2", tensor="tp2-sp", ep="4", recompute="recomputed"),
)


def cells() -> Iterator[ExpertCell]:
    """Yield all layouts there are."""
    for values in product(*OPTIONS.values()):
        cell = ExpertCell(**dict(zip(OPTIONS, values, strict=True)))
        if cell.is_there:
            yield cell


def covering() -> list[ExpertCell]:
    """Return the corners, and a few cells in which every two options stand together that can."""

    def excluded(row: Mapping[str, str]) -> bool:
        free = [name for name in OPTIONS if name not in row]
        within = ("pp", "dp_replicate", "dp_shard", "cp", "tensor", "ep")
        open_names = [name for name in free if name in within]
        return not any(
            ExpertCell(**{**row, **dict(zip(open_names, values, strict=True))}).is_there
            for values in product(*(OPTIONS[name] for name in open_names))
        )

    return list(dict.fromkeys([*CORNERS, *(ExpertCell(**row) for row in pairwise(OPTIONS, excluded=excluded))]))
