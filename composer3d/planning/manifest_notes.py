"""Notes of a plan on what a run's tables keep or do besides the steps that are planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer3d.planning.reports.plan_text import size

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.planning.traced_manifest import TracedManifest

__all__ = ["manifest_notes"]


def manifest_notes(manifest: Manifest, made: TracedManifest) -> Iterator[str]:
    """Yield what a reader has to know of a manifest's checkpoints in memory, and of averages that it keeps.

    Args:
        manifest: With the runner's tables.
        made: Its traces.
    """
    yield from _of_local_checkpoints(manifest, made)
    yield from _of_averages(manifest, made)


def _of_local_checkpoints(manifest: Manifest, made: TracedManifest) -> Iterator[str]:
    """Yield the cost of states that nodes keep in their memory, where the manifest asks for it."""
    table, per_node = manifest.tables["checkpoint"], made.gpus_per_node
    if table.local_every is None:
        return
    memories = [trace.memory for trace in made.traces]
    state = max(each.parameters + each.optimizer + each.buffers + each.averages for each in memories)
    has_peers = per_node is not None and made.layout.world_size > per_node
    files, where = (4 if has_peers else 2) * state, table.local_folder or "/dev/shm"
    sent = f"{size(state)} is sent to the next node each time" if has_peers else "on one node nothing is sent"
    yield (
        f"checkpoint.local_every = {table.local_every}: a rank keeps at most {size(files)} in {where}, and "
        f"{size(2 * state)} more of host memory while it writes; {sent}"
    )


def _of_averages(manifest: Manifest, made: TracedManifest) -> Iterator[str]:
    """Yield what of moving averages is not in the planned step."""
    table = manifest.tables["ema"]
    if table.decay is None:
        return
    if table.every > 1:
        yield f"ema.every = {table.every}: the planned step updates the averages, and so does one step of {table.every}"
    if table.evaluate and manifest.tables["evaluation"].every is not None:
        own = max(trace.memory.parameters for trace in made.traces)
        yield (
            f"ema.evaluate: while it is evaluated with the averages, a rank keeps {size(own)} more for its own "
            "parameters, and no gradients; evaluations are not planned"
        )
