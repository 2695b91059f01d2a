"""Codecs of gradients by where ranks are: int4 between nodes, and never inside of one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from composer3d import PluginError, RunContext

__all__ = ["codec_inside"]

BETWEEN_NODES, INSIDE = "int4", "int8"


def codec_inside(gradients: str | None, axes: Sequence[str], context: RunContext) -> str | None:
    """Return the codec of gradients over the axis of shards, which stands inside of that of replicas.

    It depends on the manifest alone: a run that goes on where nodes have other sizes sends the same numbers. Ranks that
    a launcher has started know the size of their node, too, and refuse what would be int4 in no exchange between nodes.

    Args:
        gradients: Codec in the manifest.
        axes: Over which gradients are compressed.
        context: Of the run.

    Raises:
        PluginError: All ranks that would exchange int4 share a node.
    """
    if gradients != BETWEEN_NODES or not axes:
        return gradients
    stated = context.manifest.mesh.gpus_per_node
    launched = os.environ.get("LOCAL_WORLD_SIZE") if context.purpose == "run" else None
    per_node = int(launched) if stated is None and launched else stated
    if per_node is not None and not any(context.layout.leaves_node(axis, per_node) for axis in axes):
        source = "[mesh] gpus_per_node" if stated is not None else "the launcher"
        raise PluginError(
            f'gradients = "{gradients}" over {" and ".join(axes)}, whose ranks share a node, of {per_node} ranks as '
            f"{source} says: it is for links between nodes, and inside of one its errors, 16 times those of {INSIDE}, "
            "buy nothing",
            hint=f'write gradients = "{INSIDE}", or, where these ranks are on several nodes, [mesh] gpus_per_node = 1, '
            "or as many as one has",
            keys=("gradients",),
        )
    shards = context.layout.shards
    if len(axes) == 1 or (stated is not None and context.layout.leaves_node(shards, stated)):
        return gradients
    return INSIDE
