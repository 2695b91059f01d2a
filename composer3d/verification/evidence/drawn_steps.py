"""A step with its random numbers, on one device and on the ranks, and the call sites at which layouts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.verification.comparison import EXACT, difference, scale_of
from composer3d.verification.evidence.deviations import gathered
from composer3d.verification.one_device import copies, microbatches
from composer3d.verification.subject import Subject, without_plugins

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.step import Site

__all__ = ["Drawing", "apart", "draw_alone", "drawing_failures", "drawing_notes"]

_FILE = "drawn.pt"
# Relative, and much above roundings of float64; another number drawn is at least ten powers of ten larger.
_SAME = 1e3 * EXACT
_UNSEEN = "places that no mode of torch sees"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A step with random numbers on one rank.

    Args:
        sites: Where it draws.
        off: How far gradients are from one device's, by FQN; of those beyond rounding.
        is_by_rank: Every rank draws by itself, as the manifest or a plugin asks for.
    """

    sites: tuple[Site, ...] = ()
    off: tuple[tuple[str, float], ...] = ()
    is_by_rank: bool = False


def draw_alone(subject: Subject, folder: Path, *, degree: int) -> None:
    """Leave one device's gradients of the first step with its random numbers in a file.

    The step is the composition's own, on one process: how it adds up is compared elsewhere.

    Args:
        subject: What to run.
        folder: Of the file.
        degree: Data-parallel degree.
    """
    import torch

    with subject.composed("float64", without_plugins(subject.manifest), draws=True) as run, run.step(0):
        for piece in microbatches(subject, 0, degree, "float64"):
            run.forward_backward(*piece.args, target=piece.target, **piece.kwargs)
        gradients = {fqn: p.grad for fqn, p in run.named_parameters() if p.grad is not None}
        torch.save(copies(gradients), folder / _FILE)


def apart(run: Composition, folder: Path) -> Drawing:
    """Compare the gradients of this rank's first step, drawn so far, with one device's.

    Collectives: what gathers them.
    """
    import torch

    streams = run.context.streams
    if streams.policy == "ranks" or not (folder / _FILE).exists():
        return Drawing(is_by_rank=(folder / _FILE).exists())
    expected = torch.load(folder / _FILE, weights_only=True)
    found = gathered(run, [(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None])
    least = scale_of(expected.values())
    off = {fqn: difference(found[fqn], expected[fqn], scale=least) for fqn in found.keys() & expected.keys()}
    return Drawing(
        sites=tuple(streams.sites.values()),
        off=tuple((fqn, rel) for fqn, rel in sorted(off.items(), key=lambda pair: -pair[1]) if not rel <= _SAME),
    )


def _apart_sites(ranks: Sequence[Drawing]) -> list[str]:
    """Return where not every sample has its own numbers."""
    sites = [site for drawing in ranks for site in drawing.sites]
    if not sites:
        return [_UNSEEN] if any(drawing.off for drawing in ranks) else []
    return sorted({str(site) for site in sites if not site.by_sample})


def drawing_failures(ranks: Sequence[Drawing]) -> list[str]:
    """Return that gradients differ with random numbers on, where all of them are drawn by sample."""
    off = {fqn: rel for drawing in ranks for fqn, rel in drawing.off}
    if not off or _apart_sites(ranks):
        return []
    sites = sorted({str(site) for drawing in ranks for site in drawing.sites})
    more = f", or at one of {len(sites) - 1} other sites" if len(sites) > 1 else ""
    return [
        f"with its random numbers {len(off)} gradients differ by up to {max(off.values()):.3g} (in float64): other "
        f"numbers than on one device are drawn at {sites[0]}{more}"
    ]


def drawing_notes(ranks: Sequence[Drawing]) -> list[str]:
    """Return where random numbers are not those of one device in every layout."""
    if any(drawing.is_by_rank for drawing in ranks):
        return ["random numbers are drawn by rank and micro-batch: another layout trains on other ones"]
    sites = _apart_sites(ranks)
    if not sites:
        return []
    shown = "; ".join(sites[:3]) + (f"; and {len(sites) - 3} more" if len(sites) > 3 else "")
    off = [rel for drawing in ranks for _, rel in drawing.off]
    here = f", and this layout is off by {max(off):.2g} with them" if off else ""
    return [
        f"random numbers drawn at {shown} are not drawn for each sample: they depend on micro-batches and ranks, so "
        f"another layout draws other ones{here}"
    ]
