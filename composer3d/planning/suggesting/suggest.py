"""From a search to a few manifests worth trying: different, accepted by `check`, fitting by `plan`, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.search import (
    Candidate,
    Choices,
    Costs,
    Found,
    Keep,
    search,
    sequence_degrees,
)
from composer3d.planning.suggesting.trials import GIB, Planned, Trials, differences

__all__ = ["Suggestion", "against", "bases", "different", "suggest"]

_AS_ASKED = 3  # layouts that are planned before faster ones of other runs, where check or the plan refuses the first


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One layout worth trying.

    Args:
        candidate: It, with memory and time.
        reasons: Why it wins, with numbers.
    """

    candidate: Candidate
    reasons: tuple[str, ...]


def suggest(
    costs: Costs,
    own: Setup,
    hardware: Hardware,
    *,
    world_size: int,
    memory_bytes: float,
    keep: Keep,
    plan: Callable[[Setup], Planned],
    given: Planned | None = None,
    choices: Choices | None = None,
) -> tuple[tuple[Suggestion, ...], Found, tuple[str, ...]]:
    """Return the best layouts that `check` accepts and that fit by the plan, what was searched, and what was refused.

    The costs of the search are quick, and may be off for a kind of layout. So every layout is planned before it is
    proposed; where one does not fit, the kind's costs are corrected by the plan, and the search is repeated.

    Args:
        costs: Of the model's layouts.
        own: The given manifest in numbers.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device.
        keep: What the user pins.
        plan: Checks and plans one layout; raises ComposerError where it cannot be.
        given: The given manifest's own costs; None where it cannot run.
        choices: What installed plugins can make.
    """
    offered = choices or Choices()
    trials = Trials(costs=costs, hardware=hardware, memory_bytes=memory_bytes, plan=plan)

    options: dict[str, Any] = {"world_size": world_size, "memory_bytes": memory_bytes, "choices": offered}

    def searched(base: Setup, wanted: Keep = keep) -> Found:
        return search(costs, base, hardware, keep=wanted, correction=trials.correction, **options)

    while True:
        tried: list[Found] = []
        for cp in sequence_degrees(own, world_size, offered):
            tried += [searched(replace(base, cp=cp)) for base in bases(own, hardware)]
            if any(one.num_fitting for one in tried):
                break
        found = _together(tried)
        if not trials.hear(different(found.best or found.tight, trials.chosen, own)):
            break
    trials.ask_microbatches(keep)
    trials.ask_sequences(keep, tuple(sequence_degrees(own, world_size, offered)), searched)
    trials.ask_experts(keep, offered)
    trials.ask_other_runs(keep, offered)
    mine = None if given is None else given.of(own)
    found_all = tuple(
        Suggestion(candidate=candidate, reasons=(*against(candidate, mine, memory_bytes), *_other_run(candidate, own)))
        for candidate in trials.proposed(own)
    )
    return found_all, found, tuple(trials.refused)


def _together(searched: Sequence[Found]) -> Found:
    return Found(
        best=tuple(candidate for one in searched for candidate in one.best),
        tight=tuple(candidate for one in searched for candidate in one.tight),
        num_tried=sum(one.num_tried for one in searched),
        num_fitting=sum(one.num_fitting for one in searched),
        smallest=min((one.smallest for one in searched if one.smallest), key=lambda c: c.peak_bytes, default=None),
    )


def bases(own: Setup, hardware: Hardware) -> tuple[Setup, ...]:
    """Return the precisions to search: the manifest's, and bfloat16 compute on weights that stay in float32."""
    if own.precision.dtype == "float32" and "bfloat16" in hardware.device.peaks:
        return own, replace(own, precision=Precision())
    return (own,)


def different(candidates: Sequence[Candidate], chosen: Sequence[Candidate], own: Setup) -> Iterable[Candidate]:
    """Yield the fastest few that compute what was asked for, until one is chosen; then others by step time.

    Those come first that differ from all that were chosen in degrees or precision.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.step_s)
    for candidate in [one for one in ordered if not differences(one.setup, own)][:_AS_ASKED]:
        if all(differences(other.setup, own) for other in chosen):
            yield candidate
    left = []
    for candidate in ordered:
        if any(_key(candidate) == _key(other) for other in chosen):
            left.append(candidate)
        else:
            yield candidate
    for candidate in left:
        if all(candidate.setup != other.setup for other in chosen):
            yield candidate


def _key(candidate: Candidate) -> tuple[object, ...]:
    setup = candidate.setup
    return setup.tp, setup.pp, setup.precision.dtype


def against(candidate: Candidate, own: Candidate | None, memory_bytes: float) -> Iterable[str]:
    """Yield why a layout wins: its own figures, and what moved against the given manifest's."""
    part = candidate.reserved_bytes / memory_bytes
    tight = "; a longer batch, or fragmentation, may not fit" if candidate.verdict(memory_bytes) == "tight" else ""
    yield f"{candidate.reserved_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB ({part:.0%}), by the plan{tight}"
    if own is None:
        return
    if own.verdict(memory_bytes) == "does not fit":
        yield f"the given manifest needs {own.reserved_bytes / GIB:.1f} GiB and does not fit"
        return
    yield f"{own.step_s / candidate.step_s:.2f} x the speed of the given manifest"
    if candidate.time is None or own.time is None:
        return
    named = {"compute_s": "compute", "exposed_s": "exposed communication", "bubble_s": "waiting in the pipeline"}
    rows = [(name, candidate.time[key]["value"], own.time[key]["value"]) for key, name in named.items()]
    for name, new, old in sorted(rows, key=lambda row: row[1] - row[2]):
        if abs(new - old) > 0.01 * own.step_s:
            yield f"{name} {old:.3g} s -> {new:.3g} s"


def _other_run(candidate: Candidate, own: Setup) -> Iterable[str]:
    """Yield that a layout computes something else than was asked for."""
    found = differences(candidate.setup, own)
    if found:
        yield f"another run than was asked for: it {' and '.join(found)}"
