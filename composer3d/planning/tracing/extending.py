"""Extrapolation from the traces of two short stages to any number of equal blocks, linear in their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from composer3d.planning.tracing.calls import Calls
from composer3d.planning.tracing.step_recorder import Recording, Stretch
from composer3d.planning.tracing.traced import SegmentKind

if TYPE_CHECKING:
    from composer3d.interfaces import Action
    from composer3d.planning.tracing.repeated_actions import RepeatedActions

__all__ = ["Depths", "Message", "Place", "Sketch", "Stage", "extend", "hold_more", "repeat", "run_alike", "sketch_of"]

# Kinds of stretches by those of actions.
_KINDS: Mapping[str, tuple[SegmentKind, ...]] = {
    "F": ("forward",),
    "B": ("backward",),
    "I": ("input_backward", "backward"),
    "W": ("weight_backward",),
}
Key = TypeVar("Key", bound=Hashable)
# A module's place: its name, its block's place in the stage, and the stage's position on the rank.
Place = tuple[str, str, int]
# Equal collectives: op, axis, ranks, bytes, dtype, issuer, and whether the next operator waits.
Message = tuple[str, str, tuple[int, ...], int, str, str, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stretch of the step; see `Stretch`.

    Args:
        messages: Counts by collective.
        peaks: Bytes at the peak, by the module's place.
        left: As in `Stretch`.
    """

    kind: SegmentKind
    stage: int
    microbatch: int | None
    operators: Mapping[Calls, int]
    messages: Mapping[Message, int]
    peaks: Mapping[Place, tuple[int, int, int, int]]
    left: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch:
    """A recording with modules identified by place; its numbers are those of `Recording`, in bytes."""

    stretches: tuple[Stage, ...]
    parameters: int
    buffers: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    prepared: int
    num_prepared: int
    host: int
    pooled: int
    averages: int

    @property
    def peak(self) -> tuple[Stage, Place, tuple[int, int, int, int]]:
        """The moment with the most bytes: its stretch, its place, and its bytes as in `Stretch.peaks`."""
        moments = ((stage, place, sizes) for stage in self.stretches for place, sizes in stage.peaks.items())
        return max(moments, key=lambda moment: moment[2][0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Depths:
    """Traces of one rank at two depths of its equal blocks, one block apart; or one trace of all of it.

    Args:
        short: With `num_short` blocks.
        longer: With one block more; None where `short` has everything.
        num_short: Blocks of the short one, of all stages; 0 where there is no list of blocks.
        num_blocks: Blocks of the model.
    """

    short: Sketch
    longer: Sketch | None
    num_short: int
    num_blocks: int


_NUMBERS = [field.name for field in fields(Sketch) if field.name != "stretches"]


def sketch_of(recording: Recording, places_of: Callable[[str], Sequence[Place]]) -> Sketch:
    """Return a recording with module names replaced by places: a block may have one from either end."""
    numbers = {name: getattr(recording, name) for name in _NUMBERS}
    return Sketch(stretches=tuple(_stage(stretch, places_of) for stretch in recording.stretches), **numbers)


def _stage(stretch: Stretch, places_of: Callable[[str], Sequence[Place]]) -> Stage:
    peaks: dict[Place, tuple[int, int, int, int]] = {}
    for module, sizes in stretch.peaks.items():
        for place in places_of(module):
            peaks[place] = max(peaks.get(place, (-1, 0, 0, 0)), sizes)
    messages = Counter(
        (row.op, row.axis, row.ranks, row.bytes, str(row.dtype).removeprefix("torch."), row.issuer, waits)
        for row, waits in stretch.collectives
    )
    return Stage(
        kind=stretch.kind,
        stage=stretch.stage,
        microbatch=stretch.microbatch,
        operators=stretch.operators,
        messages=messages,
        peaks=peaks,
        left=stretch.left,
    )


def extend(short: Sketch, longer: Sketch, *, by: int) -> Sketch | None:
    """Return the sketch of a stage with `by` blocks more than the longer one, which has one more than the short one.

    None where the two have different stretches, or not all buffers of pieces yet, so that nothing can be extrapolated.
    """
    if not run_alike(short, longer) or short.pooled != longer.pooled:
        return None
    stretches = [_extended(one, other, by) for one, other in zip(short.stretches, longer.stretches, strict=True)]
    if any(stage is None for stage in stretches):
        return None
    numbers = {name: _line(getattr(short, name), getattr(longer, name), by) for name in _NUMBERS}
    return Sketch(stretches=tuple(stage for stage in stretches if stage is not None), **numbers)


def run_alike(short: Sketch, longer: Sketch) -> bool:
    """Return whether two sketches run the same actions in the same order."""
    orders = [[(s.kind, s.stage, s.microbatch) for s in sketch.stretches] for sketch in (short, longer)]
    return orders[0] == orders[1]


def _line(one: int, other: int, by: int) -> int:
    return other + by * (other - one)


def _extended(one: Stage, other: Stage, by: int) -> Stage | None:
    messages = _counts(one.messages, other.messages, by)
    operators = _counts(*_matched(one.operators, other.operators, by), by)
    if messages is None or operators is None:
        return None
    peaks: dict[Place, tuple[int, int, int, int]] = {}
    for place in (place for place in one.peaks if place in other.peaks):  # of equal ones, the first is shown
        sizes = (_line(a, b, by) for a, b in zip(one.peaks[place], other.peaks[place], strict=True))
        live, made, gradients, number = sizes
        peaks[place] = (live, made, gradients, number)
    live, made, number = (_line(a, b, by) for a, b in zip(one.left, other.left, strict=True))
    return replace(other, operators=operators, messages=messages, peaks=peaks, left=(live, made, number))


def _counts(one: Mapping[Key, int], other: Mapping[Key, int], by: int) -> dict[Key, int] | None:
    counts = {key: _line(one.get(key, 0), other.get(key, 0), by) for key in {**one, **other}}
    return {key: count for key, count in counts.items() if count} if min(counts.values(), default=0) >= 0 else None


def _matched(
    one: Mapping[Calls, int], other: Mapping[Calls, int], by: int
) -> tuple[dict[Calls, int], dict[Calls, int]]:
    """Extrapolate the shapes of operators that grow with the blocks: those on lists of all parameters."""
    only_one = sorted((key for key in one if key not in other), key=_order)
    only_other = sorted((key for key in other if key not in one), key=_order)
    left, right = dict(one), dict(other)
    for before, after in zip(only_one, only_other, strict=False):
        if before[:2] != after[:2] or one[before] != other[after]:
            continue
        more = Counter(after[2]) - Counter(before[2])
        shapes = (*after[2], *(shape for shape, count in more.items() for _ in range(count * by)))
        if len(after[2]) == len(before[2]):
            shapes = tuple(
                tuple(_line(a, b, by) for a, b in zip(x, y, strict=True)) if len(x) == len(y) else y
                for x, y in zip(before[2], after[2], strict=True)
            )
        grown: Calls = (after[0], after[1], shapes, _line(before[3], after[3], by), _line(before[4], after[4], by))
        left[grown], right[grown] = left.pop(before), right.pop(after)
    return left, right


def _order(key: Calls) -> Any:
    return key[:2], key[4], key[2]


def hold_more(sketch: Sketch, *, in_flight: int, by: int) -> Sketch:
    """Return the sketch of a step of one stage that begins its backwards later, by some micro-batches.

    Every micro-batch in flight keeps what the second forward left, from the last forward before the first backward to
    the first backward after the last forward that is not the step's first, which finds no gradients. The number of
    micro-batches is not changed.

    Args:
        sketch: Of a step with at least two micro-batches in flight, where `by` is above 0.
        in_flight: Of that step.
        by: Micro-batches to add to those in flight.
    """
    if not by:
        return sketch
    actions = [place for place, stage in enumerate(sketch.stretches) if stage.microbatch is not None]
    forwards = [place for place in actions if sketch.stretches[place].kind == "forward"]
    first, second = (sketch.stretches[place].left for place in forwards[:2])
    kept, made_kept, number_kept = (by * (after - before) for before, after in zip(first, second, strict=True))
    begin, following = forwards[in_flight - 1], actions[actions.index(forwards[-1]) + 1 :]
    end = next(place for place in following if sketch.stretches[place].microbatch != 0)
    stretches = [
        replace(
            stage,
            peaks={
                place: (live + kept, made + made_kept, gradients, number + number_kept)
                for place, (live, made, gradients, number) in stage.peaks.items()
            },
        )
        if begin <= place <= end
        else stage
        for place, stage in enumerate(sketch.stretches)
    ]
    return replace(sketch, stretches=tuple(stretches), activations=sketch.activations + made_kept)


def repeat(sketch: Sketch, *, num_microbatches: int, more: int, repeated: RepeatedActions | None = None) -> Sketch:
    """Return the sketch of a step with more micro-batches, none of which raises the peak of activations.

    Each added micro-batch repeats the last forward that another micro-batch's backward follows, and that backward; the
    batch and the receive buffers grow with each. What the repeated actions leave is there after each more of them.

    Args:
        sketch: Of a step that has reached the peak of micro-batches in flight.
        num_microbatches: Micro-batches of that step.
        more: Micro-batches to add.
        repeated: Actions that the longer step repeats; None where they leave nothing.
    """
    if repeated is not None:
        sketch = _leave_more(sketch, repeated, times=more // repeated.num_microbatches)
    each = (sketch.batch + sketch.prepared) // num_microbatches
    number_each = sketch.num_prepared // num_microbatches or 1  # where nothing is received, its loss
    added = [
        stage for number in {s.stage for s in sketch.stretches} for stage in _steady(sketch, number, num_microbatches)
    ]
    stretches = [
        replace(
            stage,
            peaks={
                place: (live + more * each, made, gradients, number + more * number_each)
                for place, (live, made, gradients, number) in stage.peaks.items()
            },
        )
        for stage in sketch.stretches
    ]
    return replace(
        sketch,
        stretches=(*stretches, *(replace(stage, peaks={}) for stage in added for _ in range(more))),
        batch=sketch.batch + more * sketch.batch // num_microbatches,
        prepared=sketch.prepared + more * sketch.prepared // num_microbatches,
        num_prepared=sketch.num_prepared + more * number_each,
    )


def _leave_more(sketch: Sketch, repeated: RepeatedActions, *, times: int) -> Sketch:
    """Add what the repeated actions leave, so many times, to all from the first of them on.

    Of moments in one of them that is the last repetition's.
    """
    places = {(s.kind, s.stage, s.microbatch): place for place, s in enumerate(sketch.stretches)}

    def last(actions: Sequence[Action]) -> int:
        # A stage may run a backward whole where the schedule has halves.
        kinds = [(kind, each.stage, each.microbatch) for each in actions for kind in _KINDS[each.kind]]
        return max(places[key] for key in kinds if key in places)

    begin, end = last(repeated.before), last(repeated.actions)
    before, after = sketch.stretches[begin].left, sketch.stretches[end].left
    live_left, made_left, number_left = (times * (b - a) for a, b in zip(before, after, strict=True))

    def grown(stage: Stage) -> Stage:
        peaks = {
            place: (live + live_left, made + made_left, gradients, number + number_left)
            for place, (live, made, gradients, number) in stage.peaks.items()
        }
        live, made, number = stage.left
        return replace(stage, peaks=peaks, left=(live + live_left, made + made_left, number + number_left))

    stretches = (*sketch.stretches[: begin + 1], *map(grown, sketch.stretches[begin + 1 :]))
    most = [max(s.left[1] for s in each if s.kind == "forward") for each in (sketch.stretches, stretches)]
    return replace(sketch, stretches=stretches, activations=sketch.activations + most[1] - most[0])


def _steady(sketch: Sketch, stage: int, num_microbatches: int) -> list[Stage]:
    """Return the stretches that every further micro-batch repeats: forward, and backward or its halves."""
    actions = [s for s in sketch.stretches if s.stage == stage and s.microbatch is not None]
    last = max((place for place, s in enumerate(actions) if s.kind == "forward"), default=None)
    if last is None:
        return []
    # Of a stage that runs some backwards whole and others in halves, a micro-batch has either.
    ways: tuple[tuple[SegmentKind, ...], ...] = ("backward",), ("input_backward", "weight_backward")
    follows = next((s.kind for s in actions[last:] if s.kind != "forward"), "backward")
    kinds = [kind for kind in next(way for way in ways if follows in way) if any(s.kind == kind for s in actions)]
    behind = {kind: next((s for s in actions[last:] if s.kind == kind), actions[last]) for kind in kinds}
    if any(s.microbatch in (0, num_microbatches - 1) for s in behind.values()):
        # The first and the last micro-batch differ from the others: take all of the one before the last.
        before = num_microbatches - 2
        return [s for s in actions if s.microbatch == before]
    return [actions[last], *behind.values()]
