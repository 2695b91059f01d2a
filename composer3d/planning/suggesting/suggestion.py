"""From a search to a few manifests worth trying: different from each other, accepted by `check`, with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from composer3d.planning.formulas.setup import Precision, Setup
from composer3d.planning.formulas.shape import ModelShape
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.search import Candidate, Found, Keep, evaluate, search
from composer3d.protocol import Action

__all__ = ["Accepted", "Suggestion", "against", "bases", "different", "suggest"]

GIB = 2**30
NUM_SUGGESTIONS, NUM_CHECKED = 5, 12


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What `check` said of a layout.

    Args:
        refusal: Why it cannot be; None where it can.
        orders: Of its pipeline.
    """

    refusal: str | None
    orders: Sequence[Sequence[Action]] | None = None


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
    shape: ModelShape,
    own: Setup,
    hardware: Hardware,
    *,
    world_size: int,
    memory_bytes: float,
    keep: Keep,
    check: Callable[[Setup], Accepted],
) -> tuple[tuple[Suggestion, ...], Found, tuple[str, ...]]:
    """Return the best layouts that `check` accepts, what was searched, and what check refused.

    Args:
        shape: Of the model.
        own: The given manifest in numbers.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device.
        keep: What the user pins.
        check: Asks for one layout.
    """
    searched = [
        search(shape, base, hardware, world_size=world_size, memory_bytes=memory_bytes, keep=keep)
        for base in bases(own, hardware)
    ]
    found = Found(
        best=tuple(candidate for one in searched for candidate in one.best),
        num_tried=sum(one.num_tried for one in searched),
        num_fitting=sum(one.num_fitting for one in searched),
        smallest=min((one.smallest for one in searched if one.smallest), key=lambda c: c.peak_bytes, default=None),
    )
    chosen: list[Candidate] = []
    refused: list[str] = []

    def ask(candidate: Candidate) -> None:
        answer = check(candidate.setup)
        if answer.refusal is None:
            chosen.append(evaluate(shape, candidate.setup, hardware, orders=answer.orders))
        else:
            refused.append(answer.refusal)

    for candidate in different(found.best, chosen):
        if len(chosen) == NUM_SUGGESTIONS - 1 or len(chosen) + len(refused) == NUM_CHECKED:
            break
        ask(candidate)
    for candidate in _in_float8(chosen, shape, hardware, keep):
        ask(candidate)
    # Lower precision is another run: it comes after all that compute what was asked for.
    chosen.sort(key=lambda candidate: (candidate.setup.precision.dtype != own.precision.dtype, candidate.step_s))
    mine = evaluate(shape, own, hardware) if own.world_size == world_size else None
    found_all = tuple(
        Suggestion(candidate=candidate, reasons=tuple(against(candidate, mine, memory_bytes))) for candidate in chosen
    )
    return found_all, found, tuple(refused)


def bases(own: Setup, hardware: Hardware) -> tuple[Setup, ...]:
    """Return the precisions to search: the manifest's, and bfloat16 compute on weights that stay in float32."""
    if own.precision.dtype == "float32" and "bfloat16" in hardware.device.peaks:
        return own, replace(own, precision=Precision())
    return (own,)


def _in_float8(chosen: Sequence[Candidate], shape: ModelShape, hardware: Hardware, keep: Keep) -> tuple[Candidate, ...]:
    """Return the fastest of the chosen with products in float8, where the device has them and they are faster."""
    if not chosen or "float8" not in hardware.device.peaks:
        return ()
    best = min(chosen, key=lambda candidate: candidate.step_s)
    if best.setup.precision.dtype != "bfloat16":
        return ()
    setup = replace(best.setup, precision=replace(best.setup.precision, dtype="float8_e4m3fn"))
    found = evaluate(shape, setup, hardware)
    return (found,) if keep(setup) and found.step_s < best.step_s else ()


def different(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> Iterable[Candidate]:
    """Yield candidates by step time that differ from those chosen so far in degrees or precision; then by anything."""
    ordered = sorted(candidates, key=lambda candidate: candidate.step_s)
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
    yield f"{candidate.reserved_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB ({part:.0%})"
    if own is None:
        return
    if own.verdict(memory_bytes) == "does not fit":
        yield f"the given manifest needs {own.reserved_bytes / GIB:.1f} GiB and does not fit"
        return
    yield f"{own.step_s / candidate.step_s:.2f} x the speed of the given manifest"
    if candidate.time is None or own.time is None:
        return
    parts = (
        ("compute", candidate.time.compute_s.value, own.time.compute_s.value),
        ("exposed communication", candidate.time.exposed_s.value, own.time.exposed_s.value),
        ("waiting in the pipeline", candidate.time.bubble_s.value, own.time.bubble_s.value),
    )
    for name, new, old in sorted(parts, key=lambda row: row[1] - row[2]):
        if abs(new - old) > 0.01 * own.step_s:
            yield f"{name} {old:.3g} s -> {new:.3g} s"
