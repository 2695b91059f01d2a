"""Options of process groups; collectives that change numbers on purpose: codecs, and what `verify` knows of them."""

from __future__ import annotations

from composer3d.communication.block_codecs import Cast, Float8Blocks, IntegerBlocks, block_codec
from composer3d.communication.coded_collectives import (
    AllReduce,
    Codec,
    CodedCollectives,
    CodedExchange,
    Held,
    InPlaceCodec,
    ReplicaReduction,
    ReplicaReductions,
)
from composer3d.communication.group_options import GroupOptions, NCCLOptions
from composer3d.communication.sequence_projections import (
    GatheredLinear,
    SequenceProjection,
    SequenceProjections,
    SummedLinear,
)

__all__ = [
    "AllReduce",
    "Cast",
    "Codec",
    "CodedCollectives",
    "CodedExchange",
    "Float8Blocks",
    "GatheredLinear",
    "GroupOptions",
    "Held",
    "InPlaceCodec",
    "IntegerBlocks",
    "NCCLOptions",
    "ReplicaReduction",
    "ReplicaReductions",
    "SequenceProjection",
    "SequenceProjections",
    "SummedLinear",
    "block_codec",
]
