"""Options of process groups; collectives that change numbers on purpose: codecs, and what `verify` knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes.late_imports import late_imports

if TYPE_CHECKING:
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

_MODULES = {
    "block_codecs": ("Cast", "Float8Blocks", "IntegerBlocks", "block_codec"),
    "coded_collectives": (
        "AllReduce",
        "Codec",
        "CodedCollectives",
        "CodedExchange",
        "Held",
        "InPlaceCodec",
        "ReplicaReduction",
        "ReplicaReductions",
    ),
    "group_options": ("GroupOptions", "NCCLOptions"),
    "sequence_projections": ("GatheredLinear", "SequenceProjection", "SequenceProjections", "SummedLinear"),
}

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

__getattr__ = late_imports(__name__, _MODULES)
