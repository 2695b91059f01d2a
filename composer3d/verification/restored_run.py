"""Report on a run that was saved and loaded: failed checks, their likely cause, and what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from composer3d.mesh import Layout
from composer3d.verification.evidence.resuming import OTHER_FORM, Restored

if TYPE_CHECKING:
    from composer3d.verification.verdict import Evidence

__all__ = ["causes_of_restored", "failures_of_restored", "notes_of_restored", "text_of_restored"]

_SHOWN = 4


def _by_rank(evidence: Evidence) -> dict[int, Restored]:
    """Return what every rank found of a run that was saved and loaded."""
    return {
        rank: steps.restored
        for rank, report in enumerate(evidence.ranks)
        for steps in report.steps.values()
        if steps.restored is not None
    }


def failures_of_restored(evidence: Evidence) -> Iterator[str]:
    """Yield a line for each stage at which a loaded run differs."""
    found = _by_rank(evidence)
    failed = next((one.failed for one in found.values() if one.failed), "")
    if failed:
        yield f"a checkpoint that the run has saved cannot be loaded: {failed}"
    for name, when in (("loaded", "right after a load"), ("stepped", "in the step after a load")):
        wrong = _gathered(found, name)
        if wrong:
            first = next(iter(wrong))
            yield f"{len(wrong)} values are not those of the run that was saved {when}, as {first}"


def causes_of_restored(evidence: Evidence) -> Iterator[str]:
    """Yield what a loaded run has otherwise, and where that may come from."""
    found = _by_rank(evidence)
    loaded, stepped = _gathered(found, "loaded"), _gathered(found, "stepped")
    if loaded:
        cause = "what saves or restores it gives it other values"
        if all(how.startswith(OTHER_FORM) for ranks in loaded.values() for how in ranks.values()):
            cause = (
                "tensors of a plugin's state that a first step makes come back whole, as plain ones; make them with "
                "the object that has the state, and each rank loads its shards into them"
            )
        yield f"saved and loaded, {_shown(loaded, evidence.layout)}: {cause}"
    if not stepped:
        return
    draws = list(dict.fromkeys(site for one in found.values() for site in one.draws))
    unsaved = list(dict.fromkeys(fqn for one in found.values() for fqn in one.unsaved))
    cause = (
        "it rests on something that no checkpoint has: an attribute of a module, a plugin, the loss or the optimizer"
    )
    if any(one.in_backward for one in found.values()):
        cause = f"it stepped in the backward, and the other run after it; or {cause}"
    if unsaved:
        cause = (
            f"it rests on {_some(unsaved)}, which no checkpoint has: make it a persistent buffer, or attach it with "
            "run.attach(...)"
        )
    if draws:
        cause = (
            f"it draws other random numbers at {_some(draws)}, from a generator whose state no checkpoint has and no "
            "step sets; draw from torch.Generator().manual_seed(composer3d.seed_of(seed, name, step, fqn)), which "
            "every run seeds alike"
        )
    yield f"saved, loaded and equal, and a step later {_shown(stepped, evidence.layout)}: {cause}"


def notes_of_restored(evidence: Evidence) -> list[str]:
    """Return why a run was not saved and loaded, or how far it was compared."""
    found = _by_rank(evidence)
    refused = next((one.refused for one in found.values() if one.refused), "")
    if refused:
        return [f"not saved, loaded and stepped: {refused}"]
    inexact = max((one.inexact for one in found.values()), default=0.0)
    if inexact:
        return [
            f"two runs that load one checkpoint differ in their next step, and differ from the run that went on by "
            f"{inexact:.2g} of the way that the parameters go in it: compared within a bound"
        ]
    return []


def text_of_restored(evidence: Evidence) -> list[str]:
    """Return the line of the report; none where nothing was saved."""
    found = _by_rank(evidence)
    if not found or any(one.refused for one in found.values()):
        return []
    if any(one.failed or one.loaded or one.stepped for one in found.values()):
        return ["saved, loaded and stepped: not equal"]
    inexact = any(one.inexact for one in found.values())
    where = " in the backward" if any(one.in_backward for one in found.values()) else ""
    return [f"saved, loaded and stepped{where}: equal" + (" within rounding" if inexact else "")]


def _gathered(found: Mapping[int, Restored], name: str) -> dict[str, dict[int, str]]:
    """Return how entries differ, by name and by rank."""
    result: dict[str, dict[int, str]] = {}
    for rank, one in found.items():
        for what, how in getattr(one, name).items():
            result.setdefault(what, {})[rank] = how
    return result


def _shown(wrong: Mapping[str, Mapping[int, str]], layout: Layout) -> str:
    shown = []
    everywhere = {rank for ranks in wrong.values() for rank in ranks}
    for what, ranks in list(wrong.items())[:_SHOWN]:
        rank, how = next(iter(ranks.items()))
        where = f" on {layout.who(rank)}" if len(ranks) == 1 and layout.world_size > 1 and len(everywhere) == 1 else ""
        shown.append(f"{what} {how}{where}")
    more = f" and {len(wrong) - _SHOWN} more are other ones" if len(wrong) > _SHOWN else ""
    return ", ".join(shown) + more


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
