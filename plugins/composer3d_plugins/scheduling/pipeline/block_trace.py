"""Block trace: a model's calls of its blocks and the parameters that each needs, from one forward on meta.

Every operator of the forward is intercepted. A tensor carries its sources: parameters, and the outputs of blocks. So it
is known, and not guessed from names, which stage needs the embedding, the head, a bias that all blocks share, and
whether a value skips a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from composer3d import TransformError, torch_compat
from composer3d_plugins.scheduling.pipeline.carried_values import refuse_carried_values
from composer3d_plugins.scheduling.pipeline.plain_state import Changes
from composer3d_plugins.scheduling.pipeline.repeated_blocks import RepeatedBlocks
from composer3d_plugins.scheduling.pipeline.tensor_origins import (
    Source,
    leaves_of,
    run_on_meta,
    same_places,
    tensors_of,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NotStraightError", "Observation", "observe"]

# What block i returns besides the hidden state, or keeps of it, has the source _BESIDES - i.
_BESIDES = -2


class NotStraightError(TransformError):
    """Blocks are not called once each, in order, hidden state first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """One forward.

    Attributes:
        blocks: FQNs in the order in which they were called.
        needs: For every name of a parameter, the indices of the blocks whose stages need it under this name. Parameters
            used only before the first block belong to it, those used only after the last block to that.
        buffers: The same for buffers; those that this forward does not use go with the module's other tensors. Buffers
            of an unused module are needed by no stage; every stage keeps them.
        firsts: For every name of a parameter its first one; they differ for tied parameters.
        uses: For every parameter, under its first FQN, how many operators took it, by place: the index of a block (with
            what comes between it and the block before), -1 before the first, the number of blocks after the last.
        returns: Every block's output with None for tensors; the hidden state x_BSD is the output, or its first item.
        hidden: Shape and dtype of every block's hidden state.
        costs: Floating-point operations of every block; parameters, where there are no operations that count.
        between: Of the forward itself before every block: floating-point operations, and bytes of results.
        first_cost: Floating-point operations before the blocks.
        last_cost: Floating-point operations after them.
        activations_bytes: Bytes of every block's results: about what it keeps for its backward.
        parameters_bytes: Of every block; those needed before the first, or behind the last, belong to these.
        changes: Reads and writes of plain attributes that the forward changes, by name.
        skeleton: The model on meta, without weights.
    """

    blocks: tuple[str, ...]
    needs: Mapping[str, frozenset[int]]
    buffers: Mapping[str, frozenset[int]]
    firsts: Mapping[str, str]
    uses: Mapping[str, Mapping[int, int]]
    returns: tuple[Any, ...]
    hidden: tuple[tuple[Any, ...], ...]
    costs: tuple[float, ...]
    between: tuple[tuple[float, float], ...]
    first_cost: float
    last_cost: float
    activations_bytes: tuple[float, ...]
    parameters_bytes: tuple[float, ...]
    changes: Changes
    skeleton: nn.Module

    @functools.cached_property
    def users(self) -> Mapping[str, frozenset[int]]:
        """For every parameter, under its first FQN, the indices of the blocks whose stages need it under any name."""
        return _users_of(self.needs, self.firsts)

    def needed(self, start: int, end: int) -> frozenset[str]:
        """Return the names of parameters and buffers that the stage of blocks `start` to `end` (exclusive) needs."""
        return frozenset(fqn for fqn, users in self.needs.items() if any(start <= user < end for user in users))

    def absent_buffers(self, start: int, end: int) -> frozenset[str]:
        """Return the names of the buffers that only other stages than this one need, statistics for example."""
        return frozenset(
            fqn for fqn, users in self.buffers.items() if users and not any(start <= user < end for user in users)
        )

    def uses_once(self, start: int, end: int) -> bool:
        """Return whether such a stage uses every parameter in one place, and not through earlier results."""
        places = {*range(start, end), *((end,) if end == len(self.blocks) else ())}
        return all(
            sum(count for place, count in self.uses[fqn].items() if place in places) == 1
            for fqn in {self.firsts[name] for name in self.needed(start, end)}
            if self.uses[fqn]
        )


def observe(model: nn.Module, blocks: Sequence[str], example: Any) -> Observation:
    """Run a copy of the model on meta, in the mode it is in.

    Args:
        model: On any device; it and its weights are not changed.
        blocks: FQNs of the repeated blocks.
        example: `(args, kwargs)` of a forward; None tries a batch of token numbers.

    Raises:
        TransformError: The forward fails on meta, or carries a value to its beginning in the next one; a
            NotStraightError where blocks are not called once each, in order, hidden state first.

    Memory: none. Collectives: none.
    """
    make = functools.partial(_Watch, model, blocks)
    watch, output = run_on_meta(make, example)
    seen = watch.finish(output)
    refuse_carried_values(watch, make, example, len(blocks) - 1)
    return seen


class _Watch(RepeatedBlocks):
    """Propagates sources through a forward in which every block is called once, in order."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__(model, blocks)
        self._needs: dict[str, set[int]] = {fqn: set() for fqn in self._firsts}
        self._buffer_needs: dict[str, set[int]] = {fqn: set() for fqn in self._buffers.values()}
        self._called: list[int] = []
        self._returns: dict[int, Any] = {}
        self._hidden: dict[int, tuple[Any, ...]] = {}
        self._between: dict[int, tuple[float, float]] = {}

    @property
    def _position(self) -> int:
        return len(self._called) or -1

    @property
    def call_names(self) -> Sequence[str]:
        """FQNs of the blocks."""
        return self._blocks

    def _needed(self, sources: set[Source], place: int) -> None:
        """Record the sources that a block uses; of other blocks' outputs it may use only the previous one's."""
        for source in sources:
            if isinstance(source, str):
                self._users(source).add(place)
            elif source != place - 1:
                raise NotStraightError(
                    f'"{self._blocks[place]}" is given something that "{self._computed_by(source)}" computed, and '
                    "between stages only the hidden state travels, from each block to the next"
                )

    def _of(self, value: Any) -> set[Source]:
        kept = {keeper for tensor in tensors_of(value) if (keeper := self._keeper(tensor)) is not None}
        return super()._of(value) | {_BESIDES - index for index in kept}

    def _users(self, fqn: str) -> set[int]:
        return self._needs[fqn] if fqn in self._needs else self._buffer_needs[fqn]

    def _computed_by(self, source: Source) -> str:
        assert isinstance(source, int), "of calls"
        return self._blocks[source if source >= 0 else _BESIDES - source]

    def _described(self, sources: set[Source]) -> str:
        named = (f'"{source if isinstance(source, str) else self._computed_by(source)}"' for source in sources)
        return " and ".join(sorted(named))

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def attach(self) -> list[Any]:
        """Hook the blocks' calls."""
        handles: list[Any] = []
        for index, fqn in enumerate(self._blocks):
            block = self.skeleton.get_submodule(fqn)
            handles.append(block.register_forward_pre_hook(self._entering(index), with_kwargs=True, prepend=True))
            handles.append(block.register_forward_hook(self._leaving(index)))
        return [*handles, *self._attach_names(), *self._attach_repeats()]

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            import torch

            fqn = self._blocks[index]
            if index in self._called:
                raise NotStraightError(f'"{fqn}" is called more than once in a forward')
            if index != len(self._called):
                missed = self._blocks[len(self._called)]
                raise NotStraightError(f'"{fqn}" is called before "{missed}", which stands before it')
            if not args or not isinstance(args[0], torch.Tensor):
                what = f"a {type(args[0]).__name__}" if args else f"only {', '.join(sorted(kwargs)) or 'nothing'}"
                raise NotStraightError(f'"{fqn}" is called with {what} first, and not with the hidden state')
            if (function := self.caller_of(fqn)) is not None:
                raise NotStraightError(f'"{fqn}" is called without a graph by the autograd function "{function}"')
            given = self._of(args[0])
            if index and index - 1 not in given:
                raise NotStraightError(f'"{fqn}" is not given what "{self._blocks[index - 1]}" returned')
            if self._follows_in_checkpoint():
                raise NotStraightError(
                    f'"{fqn}" and "{self._blocks[index - 1]}" are recomputed together by a checkpoint'
                )
            self._called.append(index)
            self._needed(given, index)
            self._inside, self._entered_at = index, len(self._alive)
            self._between[index] = self._costs[index], self._computed_bytes[index]

        return enter

    def _leaving(self, index: int) -> Callable[..., Any]:
        def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            import torch

            output = self._returned(index, output)
            self._inside = None
            first = output[0] if isinstance(output, list | tuple) and output else output
            if not isinstance(first, torch.Tensor):
                raise NotStraightError(
                    f'"{self._blocks[index]}" returns a {type(output).__name__}, and not the hidden state, or a tuple '
                    "that begins with it"
                )
            for tensor in tensors_of(output):
                self._sources[self._key(tensor)] = {index}
            # Only the hidden state is sent; whatever else a block returns is marked, so that its use is detected.
            for tensor in tensors_of(output):
                if tensor is not first and torch_compat.storage_key(tensor) != torch_compat.storage_key(first):
                    self._sources[self._key(tensor)] = {_BESIDES - index}
            self._returns[index] = torch_compat.tree_map(_no_tensor, output)
            self._hidden[index] = tuple(first.shape), first.dtype
            return output

        return leave

    # ---- the end -----------------------------------------------------------------------------------------------------

    def finish(self, output: Any) -> Observation:
        """Find the sources of the output, and return the result."""
        last = len(self._blocks) - 1
        if len(self._called) <= last:
            raise NotStraightError(f'"{self._blocks[len(self._called)]}" is not called in a forward')
        sources: set[Source] = set()
        for tensor in leaves_of(output):
            sources |= self._of(tensor)
        if last not in sources:
            raise NotStraightError(f'the output does not depend on what "{self._blocks[last]}" returned')
        for source in sources:
            if isinstance(source, str):
                self._users(source).add(last)
            elif source != last:
                raise NotStraightError(
                    f'the output depends on something that "{self._computed_by(source)}" computed besides the hidden '
                    f'state that "{self._blocks[last]}" returned, and only that reaches the last stage'
                )
        costs = [self._costs[index] for index in range(len(self._blocks))]
        if not any(costs):
            costs = [float(self._num_parameters(fqn)) for fqn in self._blocks]
        self._refuse_module_of_several_blocks()
        self._leave_own_names()
        homes = {
            # What nothing uses stays where it lies; outside of blocks with what is used beside it.
            fqn: self._home(fqn)
            for fqn, users in self._needs.items()
            if not users and not self._uses[self._firsts[fqn]] and self._firsts[fqn] == fqn
        }
        for fqn, home in homes.items():
            self._needs[fqn].add(home)
        return Observation(
            blocks=self._blocks,
            needs={fqn: frozenset(blocks) for fqn, blocks in self._needs.items()},
            buffers=self._settled_buffers(),
            firsts=self._firsts,
            uses=self._uses,
            returns=tuple(self._returns[index] for index in range(len(self._blocks))),
            hidden=tuple(self._hidden[index] for index in range(len(self._blocks))),
            costs=tuple(costs),
            between=tuple(self._between[index] for index in range(len(self._blocks))),
            first_cost=self._costs[-1],
            last_cost=self._costs[len(self._blocks)],
            activations_bytes=tuple(self._computed_bytes[index] for index in range(len(self._blocks))),
            parameters_bytes=self._parameters_bytes(),
            changes=self.plain.changes(),
            skeleton=self.skeleton,
        )

    def _settled_buffers(self) -> dict[str, frozenset[int]]:
        settled = {}
        for fqn, users in self._buffer_needs.items():
            prefix, dot, _ = fqn.rpartition(".")
            beside = [name for name, _ in self.skeleton.get_submodule(prefix).named_parameters(recurse=False)]
            beside += [name for name, _ in self.skeleton.get_submodule(prefix).named_buffers(recurse=False)]
            siblings = [f"{prefix}{dot}{name}" for name in beside]
            # Statistics are written and not read, in a step: they belong where the rest of their module is.
            known = [self._needs.get(name) or self._buffer_needs.get(name) or set() for name in siblings]
            settled[fqn] = frozenset(users or set().union(*known))
        return settled

    def _leave_own_names(self) -> None:
        """Let a block need a weight that it shares with another block under the name that it has for it itself."""
        names: dict[str, list[str]] = defaultdict(list)
        for fqn, first in self._firsts.items():
            names[first].append(fqn)
        for same in (each for each in names.values() if len(each) > 1):
            own = {block: fqn for fqn in same if (block := self._block_of(fqn)) is not None}
            for fqn in same:
                lies_in = self._block_of(fqn)
                if lies_in is not None:
                    self._needs[fqn] -= {
                        block for block in own if block != lies_in and block in self._needs[own[block]]
                    }

    def _home(self, fqn: str) -> int:
        inside = self._block_of(fqn)
        if inside is not None:
            return inside
        names = fqn.split(".")[:-1]
        for length in range(len(names), 0, -1):
            prefix = ".".join(names[:length]) + "."
            beside = set().union(*(users for name, users in self._needs.items() if name.startswith(prefix)))
            if beside:
                return min(beside)
        return 0

    def _block_of(self, fqn: str) -> int | None:
        return next((index for index, block in enumerate(self._blocks) if fqn.startswith(f"{block}.")), None)

    def _refuse_module_of_several_blocks(self) -> None:
        """Refuse a module with parameters that blocks hold, and others too: it would be in one stage's tree only."""
        for names in same_places(self.skeleton):
            blocks = {self._block_of(name) for name in names}
            if len(names) > 1 and len(blocks) > 1:
                raise NotStraightError(f'"{names[0]}" and "{names[-1]}" are one parameter of one module')

    def _parameters_bytes(self) -> tuple[float, ...]:
        """Sum parameters per block; those that several blocks need count at the first and the last of them."""
        total = [0.0] * len(self._blocks)
        all_users = _users_of(self._needs, self._firsts)
        for fqn, parameter in self.skeleton.named_parameters():
            users = all_users[fqn]
            for index in {min(users), max(users)} if users else ():
                total[index] += parameter.numel() * parameter.element_size()
        return tuple(total)

    def _num_parameters(self, fqn: str) -> int:
        return sum(parameter.numel() for parameter in self.skeleton.get_submodule(fqn).parameters())


def _users_of(needs: Mapping[str, Set[int]], firsts: Mapping[str, str]) -> dict[str, frozenset[int]]:
    users: dict[str, set[int]] = defaultdict(set)
    for name, first in firsts.items():
        users[first] |= needs[name]
    return {first: frozenset(blocks) for first, blocks in users.items()}


def _no_tensor(value: Any) -> Any:
    import torch

    return None if isinstance(value, torch.Tensor) else value
