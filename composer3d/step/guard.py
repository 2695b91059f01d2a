"""Step guard: one all-reduce that counts valid tokens and verifies that all ranks run the same step.

In plain torch a rank that skips a step trains on, each of its collectives paired with another step's, without an error.
Here every rank writes its fingerprint into its own slots of the vector that carries the token count: step, plan, number
of micro-batches, identity of the batch, and what its loop decided for itself. Slots are added to zeros, so that ranks
at different steps meet in the same all-reduce, and the first one of the wrong step names the ranks that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError
from composer3d.mesh import Layout, MeshViews, Role
from composer3d.processes.json_exchange import all_gather_json
from composer3d.step.control_numbers import ControlNumbers
from composer3d.step.loops.loop_state import Compared, Decided, same_pieces, same_stage
from composer3d.step.microbatches import Digest
from composer3d.step.rank_numbers import RankNumbers
from composer3d.step.same_batches import SameBatches
from composer3d.step.sharded_tensors.written_values import WRITTEN

if TYPE_CHECKING:
    import torch

__all__ = ["Guard", "Totals", "contract_group", "control_device"]

# Instead of the batch's number: an evaluation is never taken for a step of the same number.
_EVALUATION = 0xFFFF
_OUTSIDE = MappingProxyType(  # of steps
    {"run.save": 0xFFFE, "run.full_state_dict": 0xFFFD, "run.close": 0xFFFC, "optimizer.add_param_group": 0xFFFB}
)
_PLAN_BITS = 40
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of one global batch over all ranks.

    Args:
        count: Valid tokens of the global batch.
        num_microbatches: Micro-batches of the global batch.
        equal: Whether every micro-batch has the same count.
    """

    count: int
    num_microbatches: int
    equal: bool


_NOTHING = Decided()


def control_device(device: torch.device) -> torch.device:
    """Return the device of small control tensors: CPU if the default group supports it, so no step waits for a GPU."""
    import torch
    import torch.distributed as dist

    config = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in config or config in ("gloo", "fake") else device


def contract_group(layout: Layout, views: MeshViews) -> Any:
    """Return the process group of one global batch: all axes but independent ones; None for the world."""
    if layout.degree(Role.INDEPENDENT) == 1:
        return None
    names = tuple(axis.name for axis in layout.dense_axes if axis.role is not Role.INDEPENDENT)
    return views.joined(names).get_group()


class Guard:
    """Sums token counts and verifies that ranks run the same step.

    Args:
        layout: Axes and degrees.
        rank: Global rank of this process, for messages.
        group: Process group of one global batch; None for the world.
        device: Device of the reduced vector.
        plan: Fingerprint of the plan; its lower 40 bits are compared.
        compares: False only counts tokens: the vector has three integers, and ranks are not compared.
        is_answered: False in a fake process group: the all-reduce is issued, nothing is compared, and the totals are
            this rank's own counts, at least 1.
        whole_sequences: Whether ranks along a sequence axis receive the same batch, which a plugin shards.
        compared: Axes along which ranks have parameters in common, as `compared_axes`.
        numbers: Further numbers of each rank; None without any.

    Attributes:
        half_loaded: Checkpoint of which the model may hold a part: it is being read, or that failed.

    Collectives: one all-reduce of 3 + (5 + numbers) x ranks integers a call.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        group: Any,
        device: torch.device,
        plan: int = 0,
        compares: bool = True,
        is_answered: bool = True,
        whole_sequences: bool = True,
        compared: Mapping[Compared, Sequence[str]] = MappingProxyType({}),
        numbers: RankNumbers | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist

        self._ranks = dist.get_process_group_ranks(group) if group is not None else range(layout.world_size)
        self._group, self._device, self._layout = group, device, layout
        self._exchanged = ControlNumbers(dtype=torch.int64, device=device, group=group)
        self._numbers = numbers or RankNumbers()
        self.has_refused = False  # ranks whose loops or values differ
        self.half_loaded: str | None = None
        self._slot = list(self._ranks).index(rank)
        self._plan, self._compares, self._is_answered = plan % (1 << _PLAN_BITS), compares, is_answered
        coordinates = layout.coordinates(rank)
        others = layout.names(Role.TENSOR, Role.STAGE)
        # Ranks along tp and pp hold the same samples: only the first of them counts.
        self._counts = all(coordinates[name] == 0 for name in others)
        sharing = (Role.TENSOR, Role.STAGE, Role.SEQUENCE) if whole_sequences else (Role.TENSOR, Role.STAGE)
        self._peers = self._groups(sharing)
        self._digest = Digest()
        # A trace represents the steps after the first ones, in which batches are not compared.
        self._same = SameBatches(layout, self._ranks if is_answered else ())
        self._stages = same_stage(layout, self._ranks)
        self._alike: dict[Compared, tuple[tuple[int, ...], ...]] = {
            "state": self._stages,
            **{which: same_pieces(layout, self._ranks, axes) for which, axes in compared.items() if axes},
        }

    def _groups(self, sharing: Sequence[Role]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of ranks that must receive the same batch: those that differ in `sharing` roles only."""
        axes = [axis.name for axis in self._layout.dense_axes if axis.role not in sharing]
        return self._layout.alike(self._ranks, axes)

    @property
    def compares(self) -> bool:
        """Whether ranks compare their fingerprints."""
        return self._compares and len(self._ranks) > 1 and self._is_answered

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks that hold shards of the same parameters, this one included."""
        group = next((group for group in self._stages if self._slot in group), (self._slot,))
        return tuple(self._ranks[position] for position in group)

    def digest(self, value: Any) -> int:
        """Return the digest of a batch; 0 if no two ranks must have the same one and first steps are not compared.

        Args:
            value: Nested tensors, as passed by the loop.

        Memory: the weights of `Digest`, kept if ranks have peers, otherwise freed before the step's forward.
        """
        if not self._compares or not (self._peers or self._same.is_looking):
            return 0
        return self._digest(value) if self._peers else Digest()(value)

    def refuse_half_loaded(self, what: str) -> None:
        """Refuse to go on with weights of which a part is a checkpoint's.

        Raises:
            StepError: The last load failed after it had read some tensors.
        """
        if self.half_loaded is not None:
            told = f"{self.half_loaded} failed to load, and the model holds a part of it"
            raise StepError(f"{what} is refused: {told}; load a checkpoint that is whole, or compose anew")

    def agree(
        self,
        *,
        step: int,
        call: int | None,
        counts: Sequence[int],
        digest: int = 0,
        decided: Decided = _NOTHING,
        copy: int = 0,
    ) -> Totals:
        """Sum counts over all ranks; verify that they run the same step, and that peers have the same batch.

        Args:
            step: Number of this step, or of the evaluation.
            call: Index of the batch within this step; None for an evaluation.
            counts: Valid tokens of each of this rank's micro-batches.
            digest: Digest of the batch; compared between ranks that must have the same one.
            decided: Decisions of this rank's loop.
            copy: This rank's index among those that count the same targets; the first's counts are summed.

        Raises:
            StepError: Ranks differ, or hold a part of a checkpoint; raised on every rank, with their names.
        """
        self.refuse_half_loaded("a step" if call is not None else "an evaluation")
        size, numbers = len(self._ranks) if self._compares else 0, self._numbers
        vector = [0] * (3 + (5 + len(numbers.names)) * size)
        if self._counts and not copy:
            vector[:3] = [sum(counts), len(counts), sum(count * count for count in counts)]
        if size:
            # Calls start at 1, so that an empty slot differs from step 0.
            vector[3 + self._slot] = (step << 16) + (_EVALUATION if call is None else call + 1)
            vector[3 + size + self._slot] = (len(counts) << _PLAN_BITS) | self._plan
            vector[3 + 2 * size + self._slot] = digest
            vector[3 + 3 * size + self._slot] = decided.state
            vector[3 + 4 * size + self._slot] = decided.weights
            for place, name in enumerate(numbers.names, start=5):
                vector[3 + place * size + self._slot] = numbers.own.get(name, 0)
        total: list[int] = self._exchanged.all_reduce(vector)
        if size and self._is_answered:
            numbers.ranks = tuple(self._ranks)
            for place, name in enumerate(numbers.names, start=5):
                numbers.everyone[name] = tuple(total[3 + place * size : 3 + (place + 1) * size])
            self._compare(total[3 : 3 + size], total[3 + size : 3 + 2 * size])
            if self._same.is_looking and call == 0:
                self._same.compare(total[3 + 2 * size : 3 + 3 * size], is_this_first=not self._slot)
            states, weights = total[3 + 3 * size : 3 + 4 * size], total[3 + 4 * size : 3 + 5 * size]
            self._compare_decided(total[3], states, weights, decided)
            # After what explains it: a model in another mode returns other outputs, of which a loop's batch is made.
            self._compare_batches(total[3], total[3 + 2 * size : 3 + 3 * size])
        if not self._is_answered:
            return Totals(count=max(sum(counts), 1), num_microbatches=len(counts), equal=len(set(counts)) <= 1)
        count, microbatches, squares = total[:3]
        return Totals(count=count, num_microbatches=microbatches, equal=microbatches * squares == count * count)

    def compare_replicas(self, step: int, decided: Callable[[], Decided], *, at: str) -> None:
        """Compare replicated parameters outside of steps.

        Args:
            step: Number of the next step.
            decided: Returns the digests of this rank's parameters.
            at: The call that compares them, such as `run.save`.

        Raises:
            StepError: Replicas differ, or another rank is elsewhere: the all-reduce is that of a step.

        Collectives: one all-reduce, if there are replicas.
        """
        if self.compares and any(groups for compared, groups in self._alike.items() if compared != "state"):
            self.agree(step=step, call=_OUTSIDE[at] - 1, counts=(), decided=decided())

    def meet(self, step: int, *, at: str) -> None:
        """Verify that all ranks make a call outside of steps, before it sends anything.

        Args:
            step: Number of the next step.
            at: The call.

        Raises:
            StepError: Another rank is elsewhere: the all-reduce is that of a step.

        Collectives: one all-reduce.
        """
        if self.compares:
            self.agree(step=step, call=_OUTSIDE[at] - 1, counts=())

    def any(self, votes: Sequence[bool]) -> list[bool]:
        """Return, for each vote, whether any rank cast it. Collectives: one all-reduce."""
        return list(map(bool, self._exchanged.all_reduce(votes, takes_maximum=True)))

    # ---- comparison of fingerprints ----------------------------------------------------------------------------------

    def _compare(self, places: list[int], setups: list[int]) -> None:
        """Compare the gathered fingerprints; ranks are examined one by one only where they differ."""
        if len(places) == 1:
            return
        if places.count(places[0]) != len(places):
            self._differ(
                places,
                "ranks do not run the same step",
                lambda place: f"is at {_place(place)}",
                lambda place: f"are at {_place(place)}",
                "call it on all ranks"
                if any(place & 0xFFFF in _OUTSIDE.values() for place in places)
                else "a rank skipped or repeated a batch",
            )
        if setups.count(setups[0]) != len(setups):
            at = _place(places[0])
            plans = [setup & ((1 << _PLAN_BITS) - 1) for setup in setups]
            if plans.count(plans[0]) != len(plans):
                self._differ(
                    plans,
                    f"ranks do not run the same plan at {at}",
                    lambda plan: f"has plan {plan:010x}",
                    lambda plan: f"have plan {plan:010x}",
                    "start all ranks with the same manifest, overrides and plugins",
                )
            self._differ(
                [setup >> _PLAN_BITS for setup in setups],
                f"ranks split {at} into different numbers of micro-batches",
                lambda num: f"has {num}",
                lambda num: f"have {num}",
                "collectives of micro-batches need all ranks, so hand every rank a batch of the same size",
            )

    def _compare_batches(self, place: int, digests: list[int]) -> None:
        for group in self._peers:
            if len({digests[position] for position in group}) != 1:
                self._other_batch(group, digests, _place(place))

    def _compare_decided(self, place: int, states: list[int], weights: list[int], decided: Decided) -> None:
        """Compare the decisions of loops; where they differ, all-gather their components to name them."""
        thirds = [Decided.thirds(number) for number in weights] if len(weights) > 1 else []
        for compared, groups in self._alike.items() if thirds else ():
            numbers = states if compared == "state" else [each[compared] for each in thirds]
            for group in groups:
                usual = Counter(numbers[position] for position in group).most_common(1)[0][0]
                odd = [position for position in group if numbers[position] != usual]
                if odd:
                    other = next(position for position in group if numbers[position] == usual)
                    described = all_gather_json(dict(decided.described(compared)), group=self._group)
                    try:
                        self._other_loop(odd[0], other, described, compared, _place(place))
                    except StepError:
                        self.has_refused = True
                        raise

    def _other_loop(
        self, odd: int, other: int, described: Sequence[Mapping[str, Any]], compared: Compared, at: str
    ) -> None:
        one, two = described[odd], described[other]
        keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
        if compared != "state":
            if not keys:  # a write that made no difference
                return
            shown = ", ".join(keys[:_SHOWN])
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            raise StepError(
                f"{self._layout.who(self._ranks[odd])} holds other values than rank {self._ranks[other]}, its replica, "
                f"at {at}: {shown}{more}; something changed parameters on some ranks alone"
            )
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        if all(key.startswith(WRITTEN) for key in keys):
            shown = ", ".join(key.removeprefix(WRITTEN) for key in keys[:_SHOWN])
            raise StepError(
                f"{self._layout.who(self._ranks[odd])} wrote other values than rank {self._ranks[other]} before {at}, "
                f"into {shown}{more}; each rank keeps its shard of what it writes, so that the model would be none of "
                "theirs: load the same file, or compute the same values, on all ranks"
            )
        shown = ", ".join(f"{key}: {one.get(key)}, not {two.get(key)}" for key in keys[:_SHOWN])
        raise StepError(
            f"the loop of {self._layout.who(self._ranks[odd])} decided something else than that of rank "
            f"{self._ranks[other]} before {at}: {shown}{more}; all ranks must decide alike"
        )

    def _differ(
        self, values: list[int], what: str, one: Callable[[int], str], many: Callable[[int], str], advice: str
    ) -> None:
        usual = Counter(values).most_common(1)[0][0]
        odd = [(rank, value) for rank, value in zip(self._ranks, values, strict=True) if value != usual]
        shown = ", ".join(f"{self._layout.who(rank)} {one(value)}" for rank, value in odd[:4])
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        rest = f"{len(values) - len(odd)} of {len(values)} ranks"
        raise StepError(f"{what}: {shown}{more}, while {rest} {many(usual)}; {advice}")

    def _other_batch(self, group: Sequence[int], digests: list[int], at: str) -> None:
        usual = Counter(digests[position] for position in group).most_common(1)[0][0]
        odd = next(position for position in group if digests[position] != usual)
        # The rank with the usual batch that differs in the fewest axes: the message names those.
        other = min(
            (position for position in group if digests[position] == usual),
            key=lambda position: len(self._layout.between(self._ranks[odd], self._ranks[position])),
        )
        axes = " and ".join(self._layout.between(self._ranks[odd], self._ranks[other]))
        raise StepError(
            f"{self._layout.who(self._ranks[odd])} was given another batch than rank {self._ranks[other]}, its peer "
            f"along {axes}, at {at}; ranks that differ only in {axes} must be handed the same samples"
        )


def _place(slot: int) -> str:
    if slot & 0xFFFF == _EVALUATION:
        return f"evaluation {slot >> 16}"
    for outside, number in _OUTSIDE.items():
        if slot & 0xFFFF == number:
            return f"{outside} before step {slot >> 16}"
    call = (slot & 0xFFFF) - 1
    return f"step {slot >> 16}" + (f", batch {call + 1}" if call else "")
