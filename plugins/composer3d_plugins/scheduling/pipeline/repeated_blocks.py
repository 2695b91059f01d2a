"""Blocks that repeat one before them in a forward on meta: what that one did is taken over, with their names.

Each of eighty equal blocks would be recorded operator by operator, in records that differ in names alone.
A block is not run if nothing can tell it from one that was: its modules have the same classes, attributes and shapes at
the moment of the call, it is called with the same, or, for the hidden state, with a tensor of the same form from the
block before; and that block has only read its own parameters and buffers, made new tensors, and kept none of them. All
else runs: the first block, the last one, and whatever is not certain to be a repetition.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d_plugins.scheduling.pipeline.equal_modules import PLAIN, are_equal_trees, shared_objects
from composer3d_plugins.scheduling.pipeline.plain_state import Event
from composer3d_plugins.scheduling.pipeline.tensor_origins import Origins, Source, tensors_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RepeatedBlocks"]

_MOST_FORMS = 4  # of blocks that alternate, or of which none can be repeated


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Done:
    """Record of one block's run.

    Attributes:
        index: Of the block.
        given: Leaves of its arguments, and their structure.
        sources: Of the hidden state, besides the block before.
        surroundings: As from `_surroundings`.
        output: With a `_Form` in the place of each tensor.
        needed: Names of the parameters and buffers that it needs.
        uses: How many operators took each parameter.
        cost: Floating-point operations.
        made_bytes: Of its results.
        state_reads: Names of buffers and attributes that it read.
        reads: Plain attributes that it read, by name.
    """

    index: int
    given: tuple[list[Any], Any]
    sources: frozenset[Source]
    surroundings: tuple[Any, ...]
    output: Any
    needed: tuple[str, ...]
    uses: Mapping[str, int]
    cost: float
    made_bytes: float
    state_reads: tuple[str, ...]
    reads: tuple[tuple[str, Event], ...]


@dataclasses.dataclass(frozen=True)
class _Form:
    """Of a tensor with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


class _Restored:
    """A forward that is another one until `remove`, as a hook is."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        module.forward = forward

    def remove(self) -> None:
        del self._module.forward


class RepeatedBlocks(Origins):
    """Origins of a forward in which blocks that repeat an earlier one are not run.

    Args:
        model: As for `Origins`.
        blocks: FQNs, in the order of the calls.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__(model)
        self._blocks = tuple(blocks)
        self.repeats = True
        self.num_repeated = 0
        self._done: list[_Done] = []
        self._num_tried = 0
        self._is_repeating = self._has_written = False
        self._made_inside: set[int] = set()

    @abc.abstractmethod
    def _users(self, fqn: str) -> set[int]:
        """Return the blocks that need a parameter or buffer, which is changed in place."""

    def operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record it unless it makes the output of a block that is not run."""
        if self._is_repeating:
            return func(*args, **kwargs)
        return super().operator(func, types, args, kwargs)

    def _note_state(self, taken: Sequence[Tensor], made: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        if self._inside is not None:
            keys = [torch_compat.storage_key(tensor) for tensor in written]
            self._has_written |= not self._made_inside.issuperset(keys)
            old = {torch_compat.storage_key(tensor) for tensor in taken}.union(keys)
            self._made_inside.update(key for each in made if (key := torch_compat.storage_key(each)) not in old)
        super()._note_state(taken, made, written)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _attach_repeats(self) -> list[Any]:
        """Replace the blocks' forwards; call it when all hooks are attached."""
        blocks = [self.skeleton.get_submodule(fqn) for fqn in self._blocks]
        if len(set(blocks)) < len(blocks) or any("forward" in vars(block) for block in blocks):
            return []
        return [_Restored(block, self._repeating(index, block.forward)) for index, block in enumerate(blocks)]

    def _repeating(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        is_kept = index in (0, len(self._blocks) - 1)

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_kept or not self.repeats or self.values.is_guessing:
                return forward(*args, **kwargs)
            for done in self._done:
                if self._is_repetition(done, index, args, kwargs):
                    return self._repeat(done, index)
            if self._num_tried >= _MOST_FORMS:
                return forward(*args, **kwargs)
            self._num_tried += 1
            begin = self._noted(index)
            output = [forward(*args, **kwargs)]  # which no name holds, so that its references can be counted
            self._learn(index, begin, (args, kwargs), output)
            return output.pop()

        return run

    def _is_repetition(self, done: _Done, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves, structure = torch_compat.tree_flatten((args, kwargs))
        before, other = done.given
        if structure != other or len(leaves) != len(before) or done.surroundings != _surroundings():
            return False
        if not _have_equal_form(leaves[0], before[0]) or not all(map(_is_same, leaves[1:], before[1:])):
            return False
        if self._of(leaves[0]) - {index - 1} != done.sources:
            return False
        one, another = (self.skeleton.get_submodule(self._blocks[each]) for each in (done.index, index))
        # Hooks of this record: for calls, and for names.
        if not are_equal_trees(one, another, num_hooks=2):
            return False
        twins = self._twins(one, another)
        return len(set(twins.values())) == len(twins)

    # ---- what a block did --------------------------------------------------------------------------------------------

    def _noted(self, index: int) -> dict[str, Any]:
        """Return what is needed to see afterwards what a block does, which is about to run."""
        self._has_written, self._made_inside = False, set()
        outer, self.state_reads = self.state_reads, defaultdict(set)
        return {
            "uses": {fqn: counts[index] for fqn, counts in self._uses.items() if index in counts},
            "costs": (self._costs[index], self._computed_bytes[index]),
            "events": self.plain.num_events(),
            "values": self.values.num_reads,
            "state_reads": outer,
        }

    def _learn(self, index: int, begin: dict[str, Any], given: tuple[Any, Any], output: list[Any]) -> None:
        """Remember what a block did, if another one can repeat it; its output is the one item of a list."""
        inner, self.state_reads = self.state_reads, begin["state_reads"]
        for name, places in inner.items():
            self.state_reads[name] |= places
        leaves, structure = torch_compat.tree_flatten(given)
        reads = tuple(self.plain.events_since(begin["events"]))
        form = self._form_of(output)
        is_repeatable = (
            form is not None
            and not self._has_written
            and self.values.num_reads == begin["values"]
            and not any(event is None or event.written is not None for _, event in reads)
            and not self._keeps(output)
        )
        if not is_repeatable:
            return
        cost, made_bytes = begin["costs"]
        uses = {fqn: counts[index] - begin["uses"].get(fqn, 0) for fqn, counts in self._uses.items() if index in counts}
        self._done.append(
            _Done(
                index=index,
                given=(leaves, structure),
                sources=frozenset(self._of(leaves[0]) - {index - 1}),
                surroundings=_surroundings(),
                output=form,
                needed=tuple(fqn for fqn in self._all_names() if index in self._users(fqn)),
                uses={fqn: count for fqn, count in uses.items() if count},
                cost=self._costs[index] - cost,
                made_bytes=self._computed_bytes[index] - made_bytes,
                state_reads=tuple(inner),
                reads=tuple((name, event) for name, event in reads if event is not None),
            )
        )

    def _repeat(self, done: _Done, index: int) -> Any:
        """Record for a block what another one did; return tensors like those that it returned."""
        import torch

        one, other = (self.skeleton.get_submodule(self._blocks[each]) for each in (done.index, index))
        ours, theirs = f"{self._blocks[done.index]}.", f"{self._blocks[index]}."
        twins, shared = self._twins(one, other), shared_objects(one, other, ours)

        def renamed(name: str) -> str:
            return theirs + name.removeprefix(ours) if name.startswith(ours) else name

        for fqn in done.needed:
            self._users(renamed(fqn)).add(index)
        for fqn, count in done.uses.items():
            self._uses[twins.get(fqn, fqn)][index] += count
        for name in done.state_reads:
            self.state_reads[renamed(name)].add(index)
        for name, event in done.reads:
            is_shared = name.rpartition(".")[0] in shared
            at_work = renamed(f"{event.at_work}.").removesuffix(".")
            moved = dataclasses.replace(event, place=index, at_work=at_work)
            self.plain.add(name if is_shared else renamed(name), moved)
        self._costs[index] += done.cost
        self._computed_bytes[index] += done.made_bytes
        self._is_repeating = True
        self.num_repeated += 1
        try:
            output = torch_compat.tree_map(
                lambda leaf: (
                    torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
                    if isinstance(leaf, _Form)
                    else leaf
                ),
                done.output,
            )
        finally:
            self._is_repeating = False
        for tensor in tensors_of(output):
            self.written_at[self._key(tensor)] = index, True
        return output

    def _twins(self, one: nn.Module, other: nn.Module) -> dict[str, str]:
        """Return the first names of one block's parameters, each with that of the other's in the same place."""
        ours, theirs = self._firsts_inside(one), self._firsts_inside(other)
        return {ours[name]: theirs[name] for name in ours if name in theirs}

    def _firsts_inside(self, block: nn.Module) -> dict[str, str]:
        return {name: self._parameters[id(p)] for name, p in block.named_parameters(remove_duplicate=False)}

    def _all_names(self) -> Iterator[str]:
        yield from self._firsts
        yield from self._buffers.values()

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def _form_of(self, output: list[Any]) -> Any:
        """Return an output's structure; None where a tensor is not one that the block has computed from weights."""
        seen: set[int] = set()
        form = _flat_output(output[0])
        for tensor in tensors_of(output):
            key, bytes_held = torch_compat.storage_key(tensor), tensor.numel() * tensor.element_size()
            is_whole = not tensor.storage_offset() and tensor.untyped_storage().nbytes() == bytes_held
            is_new = self._first_at.get(key, -1) >= self._entered_at and key in self._made_inside
            is_of_weights = any(source in self._firsts for source in self._sources[key] if isinstance(source, str))
            if key in seen or not is_whole or not is_new or not is_of_weights:
                return None
            seen.add(key)
        return form

    def _keeps(self, output: list[Any]) -> bool:
        """Return whether what the block has made is held by anything but this record and its output."""
        made = {id(tensor): tensor for tensor in self._alive[self._entered_at :]}
        held: Counter[int] = Counter(id(tensor) for tensor in self._alive)
        held.update(self.values.references())
        news: list[Any] = [
            each for each in made.values() if self._first_at[torch_compat.storage_key(each)] >= self._entered_at
        ]
        made.clear()
        # A view has its base in C++, where all references together are one of Python's.
        held.update({id(each._base) for each in self._alive[self._entered_at :] if each._base is not None})
        pending: list[Any] = list(output)
        held.update(map(id, pending))
        while pending:
            value = pending.pop()
            if isinstance(value, tuple | list):
                news.append(value)
                held.update(map(id, value))
                pending += value
        value = None
        # One that only this list holds, besides the names of this function, tells how many references that makes.
        news.append(object())
        counts = [sys.getrefcount(each) for each in news]
        return any(count > held[id(each)] + counts[-1] for count, each in zip(counts[:-1], news, strict=False))


def _flat_output(value: Any) -> Any:
    """Return an output with forms in the places of its tensors; None where it holds other things than plain values."""
    import torch

    if type(value) is torch.Tensor:
        return _Form(tuple(value.shape), tuple(value.stride()), value.dtype)
    if type(value) in (tuple, list):
        found = [_flat_output(each) for each in value]
        is_known = all(form is not None or each is None for each, form in zip(value, found, strict=True))
        return type(value)(found) if is_known else None
    return value if type(value) in PLAIN else None


def _surroundings() -> tuple[Any, ...]:
    """Return what else a forward's operators depend on."""
    import torch

    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        tuple(map(id, torch_compat.function_modes())),
    )


def _have_equal_form(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    forms = [
        (each.shape, each.stride(), each.storage_offset(), each.dtype, each.device, each.requires_grad)
        for each in (one, other)
    ]
    return forms[0] == forms[1]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and repr(one) == repr(other))
