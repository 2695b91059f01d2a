"""Simulation of a manifest's pipeline schedule: the actions that the run would execute, at given costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import pieces_of
from composer3d.checking import collected_rarely, device_of, inspect, open_manifest
from composer3d.errors import ComposerError, ManifestError
from composer3d.planning.schedules.drawing import draw_svg, draw_text
from composer3d.planning.schedules.simulation import Costs, Simulation, simulate

if TYPE_CHECKING:
    from composer3d.composition import Preparation

__all__ = ["ScheduleResult", "schedule"]


@dataclass(frozen=True, kw_only=True)
class ScheduleResult:
    """Answer of `schedule`.

    Args:
        manifest: As messages name it.
        num_microbatches: Of one batch and rank.
        costs: Those of the simulation.
        simulation: Start and end of every action on every rank, in the unit of the costs.
    """

    manifest: str
    num_microbatches: int
    costs: Costs
    simulation: Simulation

    def to_text(self, *, width: int) -> str:
        """Return the drawing as text of at most `width` columns."""
        return draw_text(self.simulation, width=width)

    def to_svg(self) -> str:
        """Return the drawing as SVG."""
        num_ranks = len(self.simulation.ranks)
        title = f"{self.manifest}: {num_ranks} ranks, {self.num_microbatches} micro-batches"
        return draw_svg(self.simulation, title=title)

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d schedule --json` prints."""
        simulation = self.simulation
        return {
            "microbatches": self.num_microbatches,
            "stages_per_rank": simulation.stages_per_rank,
            "costs": asdict(self.costs),
            "total": simulation.total,
            "bubble": {"share": simulation.bubble_share, "relative": simulation.bubble_relative},
            "in_flight": list(simulation.in_flight),
            "ranks": [
                [
                    {
                        "kind": cell.action.kind,
                        "stage": cell.action.stage,
                        "microbatch": cell.action.microbatch,
                        "start": cell.start,
                        "end": cell.end,
                    }
                    for cell in cells
                ]
                for cells in simulation.ranks
            ],
        }


@collected_rarely()
def schedule(
    manifest: str | Path,
    *,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    num_microbatches: int | None = None,
    costs: Costs,
) -> ScheduleResult:
    """Simulate the actions of a manifest's pipeline. No process group, no weights.

    Args:
        manifest: Path, or the name of a shipped manifest.
        world_size: Ranks of the run; default: what the degrees multiply to.
        overrides: `table.key=value`, as given to `--set`.
        num_microbatches: Of one batch and rank; default: what `[train]` makes.
        costs: Times of a micro-batch's actions, in any one unit.

    Raises:
        ManifestError: The manifest has problems, all of which it has.
        ComposerError: No axis of stages is above 1.
    """
    inspected = open_manifest(str(manifest), overrides)
    found = inspect(inspected, world_size=world_size, rank=0, device=device_of(inspected.manifest))
    if not found.ok(strict=False) or found.preparation is None:
        raise ManifestError(found.ordered())
    number, file = num_microbatches or _num_microbatches(found.preparation), inspected.manifest.document.file
    orders = found.preparation.actions(number)
    if orders is None:
        raise ComposerError(f"{file}: there is no pipeline to draw: no axis of stages above 1")
    return ScheduleResult(manifest=file, num_microbatches=number, costs=costs, simulation=simulate(orders, costs))


def _num_microbatches(preparation: Preparation) -> int:
    """Return the number of micro-batches of a step on each data-parallel rank."""
    context = preparation.context
    pieces = pieces_of(context)
    return pieces.most * context.manifest.train.num_microbatches(pieces.total * context.layout.num_groups)
