"""Plugins that do, each on request, one thing that composer3d refuses."""

from __future__ import annotations

from typing import Literal

from torch import nn

from composer3d import Axis, Dtypes, Phase, PluginError, Role, Transform, hookimpl, plugin, select_fqns


@plugin(family="sharding")
class Faulty:
    """A transform of the blocks with a chosen fault.

    Args:
        fault: Name of the fault.
        phase: Phase of the transform.
        name: The transform's.
        patterns: Patterns of the selected modules.
        styles: By pattern.
        after: Names.
        requires: Names.
        conflicts: Names.
        may_be_empty: Whether it may select nothing.
    """

    fault: (
        Literal[
            "selects_nothing",
            "selects_none",
            "selects_foreign",
            "touches_less",
            "touches_none",
            "touches_more",
            "renames",
            "drops",
            "adds",
        ]
        | None
    ) = None
    phase: Literal["CONVERT", "TENSOR", "RECOMPUTE", "MATERIALISE"] = "TENSOR"
    name: str = "faulty"
    patterns: tuple[str, ...] = ("layers.*",)
    styles: dict[str, str] | None = None
    after: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    may_be_empty: bool = False

    @hookimpl
    def composer3d_shard(self, context):
        return Transform(
            name=self.name,
            phase=Phase[self.phase],
            select=self._select,
            apply=self._apply,
            after=self.after,
            requires=dict.fromkeys(self.requires, "it cannot stand alone"),
            conflicts=dict.fromkeys(self.conflicts, "they do not go together"),
            may_be_empty=self.may_be_empty,
        )

    def _select(self, model, context):
        if self.fault == "selects_none":
            return None
        if self.fault == "selects_nothing":
            return []
        if self.fault == "selects_foreign":
            return ["layers.0", "layers.9"]
        return [fqn for pattern in (*self.patterns, *(self.styles or ())) for fqn in select_fqns(pattern, context.fqns)]

    def _apply(self, model, fqns, context):
        if self.fault == "touches_none":
            return None
        if self.fault == "renames":
            model.layers[1] = nn.Sequential(model.layers[1])
        if self.fault == "drops":
            model.layers[1].up.bias = None
        if self.fault == "adds":
            model.layers[1].scale = nn.Parameter(model.layers[1].up.bias.detach().clone())
        more = ["norm"] if self.fault == "touches_more" else []
        return [*fqns[1:], *more] if self.fault == "touches_less" else [*fqns, *more]


@plugin(family="sharding", owns=("tp",))
class Tensor:
    """Owns tp and does nothing."""


@plugin(family="sharding", owns=("dp_shard",))
class Rival:
    """Owns what fsdp2 owns."""


@plugin(family="communication", axes=(Axis(name="site", role=Role.INDEPENDENT),), owns=("site",))
class Sites:
    """Brings an axis."""


@plugin(family="precision", devices=("cuda", "xpu"))
class OnlyGpu:
    """Works on accelerators."""


@plugin(family="precision")
class Unheard:
    """Returns dtypes that a transform has to query."""

    @hookimpl
    def composer3d_dtypes(self, context, fqn):
        return Dtypes()


@plugin(family="communication")
class Refuses:
    """Refuses the run.

    Args:
        reason: Why.
    """

    reason: str = "not today"

    @hookimpl
    def composer3d_configure(self, context):
        raise PluginError(f"{self.reason} ({context.purpose})", hint="try tomorrow")


@plugin(family="profiling")
class FailsToClose:
    """Raises when it is closed."""

    @hookimpl
    def composer3d_close(self, context):
        raise OSError("the disk is full")


@plugin(family="sharding", owns=("dp_shards",))
class OwnerOfNothing:
    """Owns what is no axis."""
