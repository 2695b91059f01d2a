"""Value trace of any model: the calls of its modules and the inputs of each, from one forward on meta.

Traced are the calls of blocks and of the outermost modules beside them (embeddings, heads, down- and upsampling); what
such a call returns are values. What the forward itself computes between calls is cheap, and every stage that needs it
recomputes it from values. So only values are sent between stages, and calls in any order can be divided into stages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import TransformError, torch_compat
from composer3d_plugins.scheduling.pipeline.carried_values import refuse_carried_values
from composer3d_plugins.scheduling.pipeline.plain_state import Changes
from composer3d_plugins.scheduling.pipeline.tensor_origins import (
    Origins,
    Source,
    leaves_of,
    run_on_meta,
    tensors_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["CHANGED", "DRAWN", "KEPT", "Call", "Trace", "trace"]

# Sources besides FQNs and numbers of values: the operator that drew random numbers, the call that wrote over a tensor,
# the call that kept what it also returned.
DRAWN, CHANGED, KEPT = "drawn", "changed", "kept"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: The module's FQN; further calls of the same module have torch's `@1`, `@2` behind it.
        fqn: The module's FQN.
        repeat: How many calls of the module come before.
        is_block: Whether it is a repeated block before which a stage can begin: no checkpoint of the forward's
            own recomputes it together with the call before it.
        takes: Sources of its inputs: FQNs of parameters and buffers, numbers of values, and special ones.
        values: Numbers of the tensors that it returns, in their order.
        is_everywhere: It depends on the batch and buffers alone, as a rotary embedding does: every stage runs it.
        function: The autograd function of the model's own that makes it in its forward, without a graph, if one does.
    """

    name: str
    fqn: str
    repeat: int
    is_block: bool
    takes: frozenset[Source]
    values: tuple[int, ...]
    is_everywhere: bool
    function: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One forward.

    Attributes:
        calls: In the order of the forward.
        takes: Sources of the output.
        forms: Shape and dtype of every value, by its number.
        written: Values that are overwritten in place later.
        buffer_writers: For every buffer that calls write, the indices of the calls.
        firsts: For every name of a parameter its first one; they differ for tied parameters.
        uses: For every parameter, under its first FQN, how many operators took it.
        costs: Floating-point operations by call; operators between two calls count with the second.
        between: Of the forward itself before every call: floating-point operations, and bytes of results.
        computed_bytes: Bytes of all results, by call: about what is kept for the backward.
        changes: Reads and writes of plain attributes that the forward changes, by name.
        skeleton: The model on meta, without weights.
    """

    calls: tuple[Call, ...]
    takes: frozenset[Source]
    forms: Mapping[int, tuple[Any, ...]]
    written: frozenset[int]
    buffer_writers: Mapping[str, frozenset[int]]
    firsts: Mapping[str, str]
    uses: Mapping[str, int]
    costs: Mapping[int, float]
    between: Mapping[int, tuple[float, float]]
    computed_bytes: Mapping[int, float]
    changes: Changes
    skeleton: nn.Module

    @property
    def block_calls(self) -> list[int]:
        """The indices of calls of blocks; a stage can begin at each but the first."""
        return [index for index, call in enumerate(self.calls) if call.is_block]

    def is_chain(self, fqns: Sequence[str]) -> bool:
        """Return whether modules are called once each, in order, each with what the one before it returned."""
        made = [call for call in self.calls if call.fqn in fqns]
        links = itertools.pairwise(made)
        return [call.fqn for call in made] == list(fqns) and all(
            after.takes.intersection(before.values) for before, after in links
        )


def trace(model: nn.Module, blocks: Sequence[str], example: Any) -> Trace:
    """Run a copy of the model on meta, in the mode it is in.

    Args:
        model: On any device; it and its weights are not changed.
        blocks: FQNs of the repeated blocks.
        example: `(args, kwargs)` of a forward; None tries a batch of token numbers.

    Raises:
        TransformError: The forward fails on meta, a call hides tensors, or something passes by what calls return.

    Memory: none. Collectives: none.
    """
    make = functools.partial(_Watch, model, blocks)
    watch, output = run_on_meta(make, example)
    seen = watch.finish(output)
    refuse_carried_values(watch, make, example, len(watch.call_names) - 1)
    return seen


class _Watch(Origins):
    """Propagates values through one forward."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._seen: dict[int, set[int]] = defaultdict(set)  # tensors by storage
        self._born: dict[int, int] = {}  # storages, and how many operators had run when each was first seen
        self._num_operators = 0
        super().__init__(model)
        skeleton = self.skeleton
        self._blocks = {id(skeleton.get_submodule(fqn)) for fqn in blocks}
        around = {".".join(fqn.split(".")[:length]) for fqn in blocks for length in range(fqn.count(".") + 1)}
        self._around = {id(skeleton.get_submodule(fqn)) for fqn in around} - self._blocks
        self._called: list[tuple[str, bool]] = []
        self._takes: dict[int, set[Source]] = defaultdict(set)
        self._callers: list[str | None] = []
        self._values: list[tuple[int, ...]] = []
        self._forms: dict[int, tuple[Any, ...]] = {}
        self._between: dict[int, tuple[float, float]] = {}
        self._num_values = self._num_drawn = 0
        self._held_by: dict[int, set[int]] = defaultdict(set)  # storages that hold values
        self._written: set[int] = set()
        self._buffer_writers: dict[str, set[int]] = defaultdict(set)
        self._made_in: dict[int, int] = {}  # storages made inside a call and not returned
        self._entered = 0  # operators that had run when the call at work was entered
        self._overwritten: set[int] = set()  # storages that are older than it, and that it wrote to
        self._changed: dict[int, int] = {}  # tensors that a call changed in place, and the call

    @property
    def _position(self) -> int:
        return len(self._called)

    @property
    def call_names(self) -> Sequence[str]:
        """Names of the calls."""
        return [name for name, _ in self._called]

    def _key(self, tensor: Tensor) -> int:
        key = super()._key(tensor)
        self._seen[key].add(id(tensor))
        self._born.setdefault(key, self._num_operators)
        return key

    # ---- operators ---------------------------------------------------------------------------------------------------

    def operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; also record random draws and in-place writes."""
        import torch

        written = torch_compat.written_tensors(func, args, kwargs)
        for tensor in written:
            self._note_written(tensor)
        for tensor in tensors_of((args, kwargs)):
            self._key(tensor)
        self._num_operators += 1
        result = super().operator(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = (DRAWN, self._num_drawn)
            self._num_drawn += 1
            if self._inside is not None:
                self._takes[self._inside].add(drawn)
            for tensor in [*tensors_of(result), *written]:
                self._sources[self._key(tensor)].add(drawn)
        if self._inside is not None:
            for tensor in tensors_of(result):
                key = self._key(tensor)
                if self._born[key] == self._num_operators:
                    self._made_in[key] = self._inside
        return result

    def _note_written(self, tensor: Tensor) -> None:
        key = self._key(tensor)
        self._written |= self._held_by[key]
        if self._inside is None:
            return
        if key in self._storages:
            self._buffer_writers[self._storages[key]].add(self._inside)
        elif self._born[key] <= self._entered:
            self._overwritten.add(key)

    def _of(self, value: Any) -> set[Source]:
        found = super()._of(value)
        for tensor in tensors_of(value):
            made_in = self._made_in.get(self._key(tensor))
            if made_in not in (None, self._inside):
                raise TransformError(
                    f'the forward uses something that "{self._name_of(made_in)}" computed and did not return, and only '
                    "what modules return can travel between stages"
                )
            if id(tensor) in self._changed and self._changed[id(tensor)] != self._inside:
                found.add((CHANGED, self._changed[id(tensor)]))
            if (keeper := self._keeper(tensor)) is not None:
                found.add((KEPT, keeper))
        return found

    def _needed(self, sources: set[Source], place: int) -> None:
        self._takes[place] |= sources

    def _described(self, sources: set[Source]) -> str:
        made = {number: index for index, values in enumerate(self._values) for number in values}
        named = (
            source if isinstance(source, str) else self._name_of(made.get(source))
            for source in sources
            if not isinstance(source, tuple)
        )
        return " and ".join(sorted(f'"{name}"' for name in named))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _name_of(self, index: int | None) -> str:
        assert index is not None, "of a call"
        fqn, repeat = self._called[index][0], self._repeat(index)
        return f"{fqn}@{repeat}" if repeat else fqn

    def _repeat(self, index: int) -> int:
        return sum(other == self._called[index][0] for other, _ in self._called[:index])

    def attach(self) -> list[Any]:
        """Hook the calls of all modules that do not contain blocks; calls inside a call are ignored."""
        handles: list[Any] = []
        running: list[str] = []
        for fqn, module in self.skeleton.named_modules():
            if id(module) in self._around:
                continue
            handles.append(
                module.register_forward_pre_hook(self._entering(fqn, running), with_kwargs=True, prepend=True)
            )
            handles.append(module.register_forward_hook(self._leaving(running)))
        return handles + self._attach_names()

    def _entering(self, fqn: str, running: list[str]) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append(fqn)
            if len(running) > 1:
                return
            self._refuse_hidden((args, kwargs), f'"{fqn}" is given')
            self._callers.append(self.caller_of(fqn))
            self._inside = len(self._called)
            is_inner = self._follows_in_checkpoint()
            self._between[self._inside] = self._costs[self._inside], self._computed_bytes[self._inside]
            self._called.append((fqn, id(module) in self._blocks and not is_inner))
            for tensor in tensors_of((args, kwargs)):
                self._key(tensor)
            self._entered, self._entered_at, self._overwritten = self._num_operators, len(self._alive), set()

        return enter

    def _leaving(self, running: list[str]) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            fqn = running.pop()
            if running:
                return output
            index = self._inside
            assert index is not None, "a call was entered"
            self._refuse_hidden(output, f'"{fqn}" returns')
            older = [tensor for key in self._overwritten for tensor in self._seen[key]]
            self._changed.update(dict.fromkeys(older, index))
            # Objects of their own, so that they differ from what was given and changed in place.
            output = self._returned(index, output)
            for tensor in tensors_of(output):
                self._changed.pop(id(tensor), None)
            self._inside = None
            self._values.append(self._number(tensors_of(output)))
            return output

        return leave

    def _number(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Number the tensors that a call returns; each is its own source from then on."""
        numbers = range(self._num_values, self._num_values + len(tensors))
        self._num_values += len(tensors)
        new: dict[int, set[Source]] = defaultdict(set)
        for number, tensor in zip(numbers, tensors, strict=True):
            key = self._key(tensor)
            new[key].add(number)
            self._forms[number] = tuple(tensor.shape), tensor.dtype
            self._made_in.pop(key, None)
            if key in self._overwritten:
                self._held_by[key] = set()
            self._held_by[key].add(number)
        for key, values in new.items():
            # What a call passes on as it was given is still what it was.
            is_kept = self._born[key] <= self._entered and key not in self._overwritten
            self._sources[key] = values | (self._sources[key] if is_kept else set())
        return tuple(numbers)

    @staticmethod
    def _refuse_hidden(value: Any, what: str) -> None:
        plain = {id(tensor) for tensor in tensors_of(value)}
        for leaf in torch_compat.tree_leaves(value):
            if any(id(tensor) not in plain for tensor in leaves_of(leaf)):
                raise TransformError(
                    f"{what} a {type(leaf).__name__} that holds tensors, and torch does not know how to take it apart; "
                    "register it with torch.utils._pytree.register_dataclass"
                )

    # ---- the end -----------------------------------------------------------------------------------------------------

    def finish(self, output: Any) -> Trace:
        """Find the sources of the output, and return the result."""
        takes: set[Source] = set()
        for tensor in leaves_of(output):
            takes |= self._of(tensor)
        calls = []
        everywhere: set[Source] = set(self._buffers.values())
        for index, ((fqn, is_block), values) in enumerate(zip(self._called, self._values, strict=True)):
            writes = any(index in writers for writers in self._buffer_writers.values())
            is_everywhere = not is_block and not writes and self._takes[index] <= everywhere
            everywhere |= set(values) if is_everywhere else set()
            calls.append(
                Call(
                    name=self._name_of(index),
                    fqn=fqn,
                    repeat=self._repeat(index),
                    is_block=is_block,
                    takes=frozenset(self._takes[index]),
                    values=values,
                    is_everywhere=is_everywhere,
                    function=self._callers[index],
                )
            )
        return Trace(
            calls=tuple(calls),
            takes=frozenset(takes),
            forms=self._forms,
            written=frozenset(self._written),
            buffer_writers={fqn: frozenset(writers) for fqn, writers in self._buffer_writers.items()},
            firsts=self._firsts,
            uses={fqn: Counter.total(places) for fqn, places in self._uses.items()},
            costs=self._costs,
            between=self._between,
            computed_bytes=self._computed_bytes,
            changes=self.plain.changes(),
            skeleton=self.skeleton,
        )
