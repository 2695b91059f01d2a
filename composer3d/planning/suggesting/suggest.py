"""From a search to a few manifests worth trying: different, accepted by `check`, fitting by `plan`, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from composer3d.interfaces import Action
from composer3d.planning.formulas.decoder_dims import ModelShape
from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.search import Candidate, Choices, Found, Keep, evaluate, search

__all__ = ["Accepted", "Planned", "Suggestion", "against", "bases", "different", "suggest"]

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
class Planned:
    """Memory of a layout's fullest rank, as `plan` finds it.

    Args:
        peak: Allocated.
        total: What a device must have.
    """

    peak: int
    total: int


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
    plan: Callable[[Setup], Planned | None] = lambda setup: None,
    own_bytes: float | None = None,
    choices: Choices | None = None,
) -> tuple[tuple[Suggestion, ...], Found, tuple[str, ...]]:
    """Return the best layouts that `check` accepts and that fit by the plan, what was searched, and what was refused.

    The formulas of the search are quick, and may be far off for a kind of layout. So every layout is planned before it
    is proposed; where one does not fit, the kind's formulas are corrected by what the plan says, and searched anew.

    Args:
        shape: Of the model.
        own: The given manifest in numbers.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device.
        keep: What the user pins.
        check: Asks for one layout.
        plan: Plans one layout; None where it cannot be planned, and the formulas have to do.
        own_bytes: What the given manifest needs by the plan.
        choices: What installed plugins can make.
    """
    jury = _Jury(shape=shape, hardware=hardware, memory_bytes=memory_bytes, check=check, plan=plan)
    while True:
        searched = [
            search(
                shape,
                base,
                hardware,
                world_size=world_size,
                memory_bytes=memory_bytes,
                keep=keep,
                choices=choices,
                correction=jury.correction,
            )
            for base in bases(own, hardware)
        ]
        found = _together(searched)
        if not jury.hear(different(found.best, jury.chosen)):
            break
    for candidate in _in_float8(jury.chosen, shape, hardware, keep):
        jury.ask(candidate)
    # Lower precision is another run: it comes after all that compute what was asked for.
    jury.chosen.sort(key=lambda candidate: (candidate.setup.precision.dtype != own.precision.dtype, candidate.step_s))
    mine = evaluate(shape, own, hardware) if own.world_size == world_size else None
    if mine is not None and own_bytes is not None:
        mine = replace(mine, reserved_bytes=own_bytes)
    found_all = tuple(
        Suggestion(candidate=candidate, reasons=tuple(against(candidate, mine, memory_bytes)))
        for candidate in jury.chosen
    )
    return found_all, found, tuple(jury.refused)


def _together(searched: Sequence[Found]) -> Found:
    return Found(
        best=tuple(candidate for one in searched for candidate in one.best),
        num_tried=sum(one.num_tried for one in searched),
        num_fitting=sum(one.num_fitting for one in searched),
        smallest=min((one.smallest for one in searched if one.smallest), key=lambda c: c.peak_bytes, default=None),
    )


@dataclass(kw_only=True)
class _Jury:
    """What `check` and `plan` said so far.

    Args:
        shape: Of the model.
        hardware: The cluster.
        memory_bytes: Of a device.
        check: Asks for one layout.
        plan: Plans one layout.
    """

    shape: ModelShape
    hardware: Hardware
    memory_bytes: float
    check: Callable[[Setup], Accepted]
    plan: Callable[[Setup], Planned | None]
    chosen: list[Candidate] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _asked: list[Setup] = field(default_factory=list)
    _corrections: dict[tuple[object, ...], float] = field(default_factory=dict)

    def correction(self, setup: Setup) -> float:
        """Return by what the modelled memory of such layouts is multiplied."""
        return self._corrections.get(_kind(setup), 1.0)

    def hear(self, candidates: Iterable[Candidate]) -> bool:
        """Ask for the best of some layouts; return whether the rest has to be searched for anew."""
        for candidate in candidates:
            if len(self.chosen) == NUM_SUGGESTIONS - 1 or len(self._asked) >= NUM_CHECKED:
                return False
            if candidate.setup not in self._asked and self.ask(candidate):
                return True
        return False

    def ask(self, candidate: Candidate) -> bool:
        """Let check and plan judge a layout; return whether the plan says that it does not fit."""
        setup = candidate.setup
        self._asked.append(setup)
        answer = self.check(setup)
        if answer.refusal is not None:
            self.refused.append(answer.refusal)
            return False
        found = evaluate(self.shape, setup, self.hardware, orders=answer.orders)
        planned = self.plan(setup)
        if planned is not None:
            modelled = found.reserved_bytes
            found = replace(found, peak_bytes=planned.peak, reserved_bytes=float(planned.total), is_planned=True)
            self._corrections[_kind(setup)] = max(self.correction(setup), planned.total / modelled)
            if found.verdict(self.memory_bytes) == "does not fit":
                needs, has = planned.total / GIB, self.memory_bytes / GIB
                self.refused.append(
                    f"needs {needs:.1f} of {has:.1f} GiB by the plan, and {modelled / GIB:.1f} by formulas"
                )
                return True
        self.chosen.append(found)
        return False


def _kind(setup: Setup) -> tuple[object, ...]:
    """Return what layouts have in common that the formulas misjudge alike."""
    return setup.recompute, setup.pp > 1, setup.stages_per_rank > 1


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
    source = "by the plan" if candidate.is_planned else "by formulas, not planned"
    yield f"{candidate.reserved_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB ({part:.0%}), {source}"
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
