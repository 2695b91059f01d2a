"""Division of a traced model: each stage's calls, parameters and buffers, and the values that are sent."""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from typing import TYPE_CHECKING

from composer3d import TransformError
from composer3d_plugins.scheduling.pipeline.balance import Load
from composer3d_plugins.scheduling.pipeline.division import CallForm, Choose, Division
from composer3d_plugins.scheduling.pipeline.plain_state import refuse_missed_changes
from composer3d_plugins.scheduling.pipeline.tensor_origins import Source, same_places
from composer3d_plugins.scheduling.pipeline.tracer import CHANGED, DRAWN, KEPT, Trace, trace

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Traced", "divide_traced"]


class Traced(Division[Trace]):
    """Division into calls in any order; the values that later stages need are sent."""

    @property
    def blocks(self) -> Sequence[str]:
        """FQNs of the modules before which a stage could begin."""
        return list(dict.fromkeys(self.seen.calls[index].fqn for index in self.seen.block_calls))

    @property
    def beginnings(self) -> list[str]:
        """Names of the calls with which the second and every further stage begins."""
        return [self.seen.calls[start].name for start in self.starts[1:]]

    def holders(self, fqn: str) -> tuple[int, ...]:
        """Return the stages that need a parameter, given by its first name."""
        return tuple(sorted({stage for name in self._names[fqn] for stage in self._needs[name]}))

    def build(self, model: nn.Module, stage: int, *, clones: Sequence[str], device: torch.device) -> nn.Module:
        """Return a stage's module; parameters under `clones` are copied, since this rank holds them already."""
        from composer3d_plugins.scheduling.pipeline.traced_stage import TracedRunner, build_traced_stage

        needed = frozenset(fqn for fqn, stages in self._needs.items() if stage in stages)
        enters, leaves = self.values_into(stage), self.values_into(stage + 1)
        runner = TracedRunner(
            self.seen,
            start=self.starts[stage],
            end=(*self.starts, len(self.seen.calls))[stage + 1],
            enters=enters,
            leaves=leaves,
            # torch takes the halves of a backward apart by walking between one input and one output, and cannot where
            # a parameter is used in several places. The first stage has no such halves.
            has_halves=stage == 0
            or (len(enters) == 1 and len(leaves) <= 1 and all(self._is_used_once(fqn) for fqn in needed)),
        )
        absent = frozenset(fqn for fqn, stages in self._buffer_needs.items() if stage not in stages)
        return build_traced_stage(
            model, runner, self.seen, needed=needed, absent_buffers=absent, clones=clones, device=device
        )

    def _is_used_once(self, fqn: str) -> bool:
        return self.seen.uses[self.seen.firsts[fqn]] <= 1

    # ---- what goes where ---------------------------------------------------------------------------------------------

    def stage_of(self, call: int) -> int:
        """Return the stage that makes a call."""
        return bisect.bisect_right(self.starts, call) - 1

    def values_into(self, stage: int) -> list[int]:
        """Return the numbers of the values that a stage receives: those that it or a later one needs."""
        wanted = {source for takes in self._takes[stage:] for source in takes if isinstance(source, int)}
        return sorted(
            number
            for index, call in enumerate(self.seen.calls)
            if self.stage_of(index) < stage and not call.is_everywhere
            for number in wanted.intersection(call.values)
        )

    def received(self, stage: int, trained: Set[str]) -> tuple[Hashable, ...]:
        """Return the form of every value that a stage receives: shape, dtype, whether trained parameters made it."""
        made: set[Source] = set(trained)
        for call in self.seen.calls:
            if not call.takes.isdisjoint(made):
                made.update(call.values)
        return tuple((*self.seen.forms[number], number in made) for number in self.values_into(stage))

    def calls(self, stage: int) -> tuple[CallForm, ...]:
        """Return a stage's calls, as `StageForms` describes them."""
        seen = self.seen
        return tuple(
            (call.fqn, (seen.costs.get(index, 0), seen.computed_bytes.get(index, 0)), seen.between[index])
            for index, call in enumerate(seen.calls)
            if stage in self._stages_making(index)
        )

    def called_elsewhere(self, stage: int) -> frozenset[str]:
        """Return the FQNs of modules that the stage calls, and others too, where not every stage makes the call."""
        stages: dict[str, set[int]] = {}
        for index, call in enumerate(self.seen.calls):
            if not call.is_everywhere:
                stages.setdefault(call.fqn, set()).add(self.stage_of(index))
        return frozenset(fqn for fqn, made in stages.items() if stage in made and len(made) > 1)

    def _stages_making(self, call: int) -> range:
        first = self.stage_of(call)
        return range(first, self.num_stages if self.seen.calls[call].is_everywhere else first + 1)

    @functools.cached_property
    def _takes(self) -> list[set[Source]]:
        """Sources that each stage's calls take."""
        takes: list[set[Source]] = [set() for _ in self.starts]
        for index, call in enumerate(self.seen.calls):
            for stage in self._stages_making(index):
                takes[stage] |= call.takes
        takes[-1] |= self.seen.takes
        return takes

    @functools.cached_property
    def _names(self) -> dict[str, list[str]]:
        """All names of every parameter, by the first."""
        names: dict[str, list[str]] = defaultdict(list)
        for fqn, first in self.seen.firsts.items():
            names[first].append(fqn)
        return names

    @functools.cached_property
    def _needs(self) -> dict[str, set[int]]:
        """The stages that need a parameter, by every name of it."""
        needs = {fqn: {stage for stage, takes in enumerate(self._takes) if fqn in takes} for fqn in self.seen.firsts}
        for first, names in self._names.items():
            if not any(needs[name] for name in names):
                needs[first] = {min(self._callers(first), default=0)}  # it has to be somewhere
        for same in same_places(self.seen.skeleton):
            together = set().union(*(needs[name] for name in same))
            needs.update(dict.fromkeys(same, together))
        return needs

    def _callers(self, fqn: str) -> set[int]:
        """Return the stages that call a module around a parameter or buffer."""
        return {
            stage
            for index, call in enumerate(self.seen.calls)
            if fqn.startswith(f"{call.fqn}.")
            for stage in self._stages_making(index)
        }

    @functools.cached_property
    def _buffer_needs(self) -> dict[str, set[int]]:
        """The stages that need a buffer; one that this forward did not use goes with its module, or to all stages."""
        return {
            fqn: {stage for stage, takes in enumerate(self._takes) if fqn in takes}
            or self._callers(fqn)
            or set(range(self.num_stages))
            for fqn, _ in self.seen.skeleton.named_buffers()
        }

    # ---- what cannot be ----------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Refuse splits under which a stage would compute something else than one device.

        Raises:
            TransformError: With what it is.
        """
        for stage in range(1, self.num_stages):
            if not self.values_into(stage):
                name = self.seen.calls[self.starts[stage]].name
                raise TransformError(f'nothing that is computed before "{name}" is used there or later')
            self._refuse_functions(stage)
        seen: dict[int, int] = {}
        for stage, takes in enumerate(self._takes):
            for kind, number in sorted(source for source in takes if isinstance(source, tuple)):
                if kind == CHANGED and self.stage_of(number) != stage:
                    raise TransformError(
                        f'"{self.seen.calls[number].name}" changes in place what it is given, and another stage than '
                        "its own uses that; let it change a copy, or split elsewhere"
                    )
                if kind == KEPT and stage not in self._stages_making(number):
                    raise TransformError(
                        f'the forward takes what "{self.seen.calls[number].name}" computed from where it or a hook '
                        "left it, a list or an attribute, and another stage, which does not make the call, has nothing "
                        "there; take it from what the call returns, or split elsewhere"
                    )
                if kind == DRAWN and seen.setdefault(number, stage) != stage:
                    raise TransformError(
                        f"stages {seen[number]} and {stage} use the same random numbers, which the forward draws "
                        "between modules, and each would draw its own; draw them in a module (torch.nn.Dropout)"
                    )
        refuse_missed_changes(self.seen.changes, self.starts, [call.name for call in self.seen.calls])
        for fqn, writers in self.seen.buffer_writers.items():
            stages = sorted({self.stage_of(index) for index in writers})
            if len(stages) > 1:
                raise TransformError(
                    f'the buffer "{fqn}" is written by calls on stages {stages[0]} and {stages[-1]}, each of which '
                    "would have its own; split elsewhere"
                )

    def _refuse_functions(self, stage: int) -> None:
        """Refuse calls without a graph at the edge before a stage, through which no gradient would travel."""
        received = set(self.values_into(stage))
        for index, call in enumerate(self.seen.calls[: self.starts[stage]]):
            is_at_edge = index == self.starts[stage] - 1 or received.intersection(call.values)
            if call.function is not None and is_at_edge:
                raise TransformError(
                    f'the autograd function "{call.function}" calls "{call.name}" in its forward, without a graph, and '
                    "no gradient would travel from there to another stage; call modules outside of it, or split where "
                    "it is not at work"
                )


def divide_traced(model: nn.Module, blocks: Sequence[str], example: object, choose: Choose) -> Traced:
    """Trace the values of a model, and split it before calls of blocks.

    Raises:
        TransformError: It cannot be split there.
    """
    seen = trace(model, blocks, example)
    places = seen.block_calls
    if not places:
        raise TransformError(f'"{blocks[0]}" is not called in a forward, nor is another block')
    load = _load(seen)
    chosen = choose([seen.calls[place].name for place in places], load)
    starts = tuple(places[index] if index else 0 for index in chosen)
    division = Traced(seen=seen, starts=starts, costliest=load.costliest(chosen))
    division.refuse()
    return division


def _load(seen: Trace) -> Load:
    """Return costs between block calls: each from one call to the next, the first from the beginning."""
    places = seen.block_calls

    def segment(call: int) -> int:
        return max(0, bisect.bisect_right(places, call) - 1)

    costs, activations, weights = ([0.0] * len(places) for _ in range(3))
    for call, cost in seen.costs.items():
        costs[segment(call)] += cost
    for call, size in seen.computed_bytes.items():
        activations[segment(call)] += size
    sizes = {fqn: p.numel() * p.element_size() for fqn, p in seen.skeleton.named_parameters()}
    held: set[tuple[int, str]] = set()
    for index, made in enumerate(seen.calls):
        names = {name for name in made.takes if isinstance(name, str) and name in seen.firsts}
        held |= {(segment(index), seen.firsts[name]) for name in names}
    for place, fqn in held:
        weights[place] += sizes[fqn]
    if not any(costs):
        costs = [max(weight, 1.0) for weight in weights]
    return Load(costs=costs, parameters_bytes=weights, activations_bytes=activations)
