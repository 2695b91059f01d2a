"""Manifest tables as frozen, strict dataclasses, and the core's own tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, dataclass_transform

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from composer3d.errors import KeyFault, MeshError
from composer3d.manifest.validation import validate
from composer3d.registry import TABLE_CONFIG

__all__ = [
    "MOST_SAMPLES",
    "CORE_TABLES",
    "TABLE_CONFIG",
    "Degree",
    "MeshTable",
    "ModelTable",
    "TrainTable",
    "mesh_table",
    "table",
    "validate",
]

T = TypeVar("T")
MOST_SAMPLES = 1 << 28  # of one batch
_NO_AXES = ("gpus_per_node", "layouts")  # keys of [mesh]
Degree: TypeAlias = Annotated[int, Field(ge=1)] | Literal[-1]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def table(cls: type[T]) -> type[T]:
    """Make a class a table: frozen, keyword-only, no unknown keys, nothing converted.

    A key's description, for the schema and for the message that it is missing, is its `Field(description=...)` or its
    entry under `Args:` in the docstring of the class. Tables in a table must be tables themselves: the fields of a
    plain dataclass would accept unknown keys.

    >>> @table
    ... class Evaluation:
    ...     every: int = 100
    >>> Evaluation(every=10)
    Evaluation(every=10)
    """
    result: Any = dataclass(frozen=True, kw_only=True, config=TABLE_CONFIG)(cls)
    return cast(type[T], result)


@table
class MeshTable:
    """The mesh: degrees of the axes, outermost first.

    Args:
        pp: Number of pipeline stages' ranks.
        dp_replicate: Ranks that hold replicas of the parameters and other samples.
        dp_shard: Ranks that hold shards of the parameters and other samples; -1 takes the ranks that are left.
        cp: Context-parallel degree: ranks among which each sequence is sharded.
        tp: Ranks that share a tensor, innermost: neighbours on one node.
        ep: Ranks that share the experts, carved out of dp_shard x cp, or, where it does not divide those, out of
            dp_shard x cp x tp.
        gpus_per_node: Lets `check` warn when tp or cp crosses a node; ranks of a node that `run.nodes` counts.
        layouts: Other degrees for a world of so many ranks: `layouts = { 4 = { tp = 2 }, 2 = { tp = 1 } }`; what an
            entry does not name is as above.
    """

    pp: Degree | None = None
    dp_replicate: Degree | None = None
    dp_shard: Degree | None = None
    cp: Degree | None = None
    tp: Degree | None = None
    ep: Degree | None = None
    gpus_per_node: int | None = Field(default=None, ge=1, le=1 << 10)
    layouts: dict[str, dict[str, Degree]] = Field(default_factory=dict)

    @property
    def degrees(self) -> dict[str, int | None]:
        """The degrees that are stated for any world, by axis."""
        names = [name for name in vars(self) if name not in _NO_AXES and not name.startswith("_")]
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _layouts_are_of_worlds(self) -> MeshTable:
        for size, degrees in self.layouts.items():
            if not re.fullmatch(r"[1-9]\d{0,6}", size):
                raise KeyFault(
                    "layouts", f'layouts."{size}" is no number of ranks; write layouts = {{ 4 = {{ dp_shard = 4 }} }}'
                )
            unknown = next((axis for axis in degrees if axis not in self.degrees), None)
            if unknown is not None:
                axes = ", ".join(self.degrees)
                raise KeyFault("layouts", f"layouts.{size}.{unknown}: there is no axis {unknown}; axes are {axes}")
        return self


@table
class ModelTable:
    """Options of the model that the core uses.

    Args:
        blocks: FQN pattern of the repeated blocks, for every plugin that works per block; found by itself if the model
            has one list, or `nn.ModuleDict`, of equal blocks.
    """

    blocks: str | None = None


@table
class TrainTable:
    """Options of the training step that the core uses.

    Args:
        microbatch: Sequences per forward and data-parallel rank; default: in a run 1, embedded the whole batch that
            the loop passes.
        global_batch: Sequences per optimizer step over the whole world; default microbatch x data-parallel degree.
        accumulate: Micro-batches per optimizer step on each data-parallel rank, in place of `global_batch`, which then
            grows with the data-parallel degree: accumulate x microbatch x degree.
        seed: Of weights, data order and dropout.
        random_numbers: `samples`: what a forward or a loss draws with the samples along its leading dim is drawn for
            each sample by its place in the global batch, so that layouts agree; a microsecond a torch function. `auto`
            does so if the first step draws anything. `ranks`: every rank and micro-batch draws by itself, as compiled
            blocks always do.
    """

    microbatch: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    global_batch: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    accumulate: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    random_numbers: Literal["auto", "samples", "ranks"] = "auto"

    @model_validator(mode="after")
    def _one_states_the_batch(self) -> TrainTable:
        if self.global_batch is not None and self.accumulate is not None:
            raise KeyFault("accumulate", "accumulate and global_batch both state the batch of a step; keep one of them")
        return self

    @property
    def batch_key(self) -> str | None:
        """The key that states the batch of a step; None where the default holds."""
        return (
            "global_batch" if self.global_batch is not None else "accumulate" if self.accumulate is not None else None
        )

    def batch_over(self, degree: int) -> int:
        """Return the sequences of an optimizer step over the whole world.

        Args:
            degree: Data-parallel ranks that read different samples, of all replica groups.
        """
        return self.global_batch or (self.accumulate or 1) * (self.microbatch or 1) * degree

    def num_microbatches(self, degree: int) -> int:
        """Return the micro-batches of an optimizer step on each of so many data-parallel ranks, at least one."""
        return max(1, self.batch_over(degree) // ((self.microbatch or 1) * degree))


CORE_TABLES: Mapping[str, type] = MappingProxyType({"mesh": MeshTable, "model": ModelTable, "train": TrainTable})


def mesh_table(extra_axes: Sequence[str]) -> type:
    """Return the class of `[mesh]` with the axes that plugins declare.

    Raises:
        MeshError: An axis is no bare key, or is there already.
    """
    taken = set(MeshTable.__annotations__)
    for axis in extra_axes:
        if not axis.isidentifier() or axis.startswith("_"):
            raise MeshError(f'the axis "{axis}" cannot be a key of [mesh]; use letters, digits and underscores')
        if axis in taken:
            raise MeshError(f'the axis "{axis}" is declared twice')
        taken.add(axis)
    if not extra_axes:
        return MeshTable
    body: dict[str, Any] = dict.fromkeys(extra_axes)
    body["__annotations__"] = dict.fromkeys(extra_axes, Degree | None)
    return table(type("MeshTable", (MeshTable,), {"__doc__": MeshTable.__doc__, "__module__": __name__, **body}))
