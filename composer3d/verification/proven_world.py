"""World of a verification where the manifest leaves the degree of data parallelism open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d.composition import layout_of
from composer3d.errors import ManifestError
from composer3d.hooks import Hooks
from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.mesh import Layout

__all__ = ["ProvenWorld", "proven_world"]


@dataclass(frozen=True, kw_only=True)
class ProvenWorld:
    """The open degree of a proof.

    Args:
        overrides: `table.key=value`, as given to `--set`.
        notes: For the report, a line each.
    """

    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def proven_world(manifest: Manifest, *, world_size: int | None, max_ranks: int) -> ProvenWorld:
    """Return the degree of the axis that takes the ranks of a run which are left: that of `world_size`, or 2.

    A world of one rank has neither all-gathers nor averages, so that its proof does not hold for several. Where
    2 does not divide the global batch, the next degree that does is taken.

    Args:
        manifest: With the runner's tables.
        world_size: Ranks of the run that is to be proven; None where it is not stated.
        max_ranks: Most ranks that the machine runs.

    Raises:
        ManifestError: The degrees do not fit that world.
    """
    hooks = Hooks(manifest.plugins)
    try:
        closed = layout_of(manifest, hooks, world_size=None)
    except ManifestError:
        return ProvenWorld()  # `inspect` reports it with everything else
    if world_size is not None:
        stated = layout_of(manifest, hooks, world_size=world_size)
        chosen = [f"mesh.{name}={degree}" for name, degree in stated.degrees.items() if degree != closed.degrees[name]]
        return ProvenWorld(overrides=tuple(chosen))
    axis = _open_axis(manifest, hooks, closed)
    if axis is None:
        return ProvenWorld()
    batch, most = closed.degree(Role.BATCH) * (manifest.train.microbatch or 1), max_ranks // closed.world_size
    whole = manifest.train.global_batch
    degree = next((degree for degree in range(2, most + 1) if not whole or whole % (batch * degree) == 0), None)
    if degree is None:
        why = f"{max_ranks} ranks are the most here" if most < 2 else f"none up to {most} divides {whole} sequences"
        return ProvenWorld(notes=(f"{axis} = 1, though the manifest leaves it open ({why}): no averages are proven",))
    note = f"{axis} = {degree}, which the manifest leaves open; --world-size N proves the world of a run on N ranks"
    return ProvenWorld(overrides=(f"mesh.{axis}={degree}",), notes=(note,))


def _open_axis(manifest: Manifest, hooks: Hooks, closed: Layout) -> str | None:
    """Return the axis that takes the ranks which are left; None where every degree is stated."""
    try:
        doubled = layout_of(manifest, hooks, world_size=2 * closed.num_ranks)
    except ManifestError:
        return None
    return next(name for name, degree in doubled.degrees.items() if degree != closed.degrees[name])
