"""Division of a model into stages: the calls that each stage makes, and the parameters that it holds for them."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from composer3d import ModelFindings
from composer3d_plugins.scheduling.pipeline.balance import Load
from composer3d_plugins.scheduling.pipeline.block_trace import Observation, observe
from composer3d_plugins.scheduling.pipeline.plain_state import refuse_missed_changes

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["CallForm", "Choose", "Division", "Straight", "divide_straight"]

# FQN, cost, and cost between calls.
CallForm = tuple[str, tuple[float, ...], tuple[float, ...]]
# Returns the indices of the places that begin stages, given the places and the load after each.
Choose = Callable[[Sequence[str], Load], Sequence[int]]


class Seen(Protocol):
    """Trace of one forward of the whole model: an `Observation` or a `Trace`."""

    @property
    def uses(self) -> Mapping[str, object]:
        """Uses of every parameter, by its first FQN."""


S = TypeVar("S", bound=Seen)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Division(abc.ABC, Generic[S]):
    """A model divided into stages.

    Args:
        seen: Trace of the whole model.
        starts: The index of every stage's first block, or call.
        costliest: Fraction of the whole forward's cost that falls to the costliest stage.
    """

    seen: S
    starts: tuple[int, ...]
    costliest: float

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.starts)

    @property
    @abc.abstractmethod
    def blocks(self) -> Sequence[str]:
        """FQNs of the modules before which a stage could begin."""

    @property
    def parameters(self) -> Iterable[str]:
        """The first FQNs of all parameters."""
        return self.seen.uses

    @abc.abstractmethod
    def holders(self, fqn: str) -> tuple[int, ...]:
        """Return the stages that need a parameter, given by its first name."""

    def called_elsewhere(self, stage: int) -> frozenset[str]:
        """Return the FQNs of modules that the stage calls, and other stages too."""
        return frozenset()

    @abc.abstractmethod
    def received(self, stage: int, trained: Set[str]) -> tuple[Hashable, ...]:
        """Return the form of every value that a stage receives: shape, dtype, whether trained parameters made it."""

    @abc.abstractmethod
    def calls(self, stage: int) -> tuple[CallForm, ...]:
        """Return a stage's calls, as `StageForms` describes them."""

    @abc.abstractmethod
    def build(self, model: nn.Module, stage: int, *, clones: Sequence[str], device: torch.device) -> nn.Module:
        """Return a stage's module; parameters under `clones` are copied, since this rank holds them already."""


class Straight(Division[Observation]):
    """Division of blocks that are called once each, in order; only the hidden state x_BSD is sent."""

    @property
    def blocks(self) -> Sequence[str]:
        """FQNs of the modules before which a stage could begin."""
        return self.seen.blocks

    def _end(self, stage: int) -> int:
        return (*self.starts, len(self.seen.blocks))[stage + 1]

    @functools.cached_property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        stage_of = [bisect.bisect_right(self.starts, block) - 1 for block in range(len(self.seen.blocks))]
        return {fqn: tuple(sorted({stage_of[user] for user in users})) for fqn, users in self.seen.users.items()}

    def holders(self, fqn: str) -> tuple[int, ...]:
        """Return the stages that need a parameter, given by its first name."""
        return self._holders[fqn]

    def received(self, stage: int, trained: Set[str]) -> tuple[Hashable, ...]:
        """Return the form of every value that a stage receives: shape, dtype, whether trained parameters made it."""
        start = self.starts[stage]
        if not start:
            return ()
        is_trained = any(min(users, default=start) < start for fqn, users in self.seen.needs.items() if fqn in trained)
        return ((*self.seen.hidden[start - 1], is_trained),)

    def calls(self, stage: int) -> tuple[CallForm, ...]:
        """Return a stage's calls, as `StageForms` describes them."""
        seen = self.seen
        rows = zip(seen.blocks, zip(seen.costs, seen.activations_bytes, strict=True), seen.between, strict=True)
        return tuple(rows)[self.starts[stage] : self._end(stage)]

    def build(self, model: nn.Module, stage: int, *, clones: Sequence[str], device: torch.device) -> nn.Module:
        """Return a stage's module; parameters under `clones` are copied, since this rank holds them already."""
        from composer3d_plugins.scheduling.pipeline.stage import build_stage

        return build_stage(
            model, self.seen, start=self.starts[stage], end=self._end(stage), device=device, clones=clones
        )


def divide_straight(
    model: nn.Module, blocks: Sequence[str], example: object, choose: Choose, findings: ModelFindings | None = None
) -> Straight:
    """Trace a model whose blocks are called once each, in order, and divide it.

    Args:
        model: The whole model; it is not changed.
        blocks: Their FQNs.
        example: As for `observe`.
        choose: Which blocks begin stages.
        findings: Of the model; None has none.

    Raises:
        NotStraightError: Blocks are not called once each, in order.
        TransformError: The forward cannot be run on meta.
    """
    key = (observe, tuple(blocks))
    found = findings or ModelFindings()
    observation = found.of_model(model, key, lambda: observe(model, blocks, example), example=example)
    load = Load(
        costs=observation.costs,
        first_cost=observation.first_cost,
        last_cost=observation.last_cost,
        parameters_bytes=observation.parameters_bytes,
        activations_bytes=observation.activations_bytes,
    )
    starts = tuple(choose(blocks, load))
    refuse_missed_changes(observation.changes, starts, observation.blocks)
    return Straight(seen=observation, starts=starts, costliest=load.costliest(starts))
