"""Sharding plugins of other packages that say what they are to a layout, and which layouts they can make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d import LayoutOffer, LayoutTraits, hookimpl, plugin


def table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    return {"stage": wanted.zero} if wanted.zero else None


@plugin(family="sharding", owns=("dp_shard",), offer=LayoutOffer(table=table, choices={"zero": (3,)}))
class Foreign:
    """Parameters sharded by somebody else's code."""

    stage: int = 3

    @hookimpl
    def composer3d_layout(self, degrees):
        return LayoutTraits(zero=self.stage, gather_bytes=1)


@plugin(family="precision")
class Contrary:
    """A table that says another stage than the one that shards."""

    @hookimpl
    def composer3d_layout(self, degrees):
        return LayoutTraits(zero=1)
