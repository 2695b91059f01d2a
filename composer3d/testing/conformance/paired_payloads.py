"""Collectives of a plugin that ranks issue in another order: equal sizes go through, and numbers are mixed up.

What one rank puts into the first collective and another rank into the second was to be reduced with itself. It is known
by its values, since all ranks are given the same batch; by its name in the plugin's code, which other values of a shard
have too; and by the line of the call. What a broadcast overwrites is known by its name and line alone, among those of
one source.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from composer3d.observation import Collectives
from composer3d.testing.conformance.observed_steps import NUM_STEPS, Loop, digest, is_of
from composer3d.testing.ranks import run_ranks
from composer3d.torch_compat import dispatch_mode, is_wrapper_subclass, local_of

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Sent", "out_of_order", "sent_on_equal_batches"]

_BROADCAST = "broadcast"
# To which every rank of the group contributes, or from which every rank takes.
_PAIRED = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", _BROADCAST)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One collective of a plugin, as a rank issued it.

    Args:
        step: Its number.
        op: As of `Collective`.
        axis: As of `Collective`.
        ranks: Of its process group.
        size: Dtypes and shapes.
        values: Digest of what this rank puts in; empty where all elements are one integer, as of flags and counts,
            which say nothing of what they are, and of a broadcast, whose receivers have anything.
        names: What the plugin's code calls it; empty where it has no name.
        place: File, line and function of the plugin.
        is_nothing: Whether it adds nothing to what other ranks put in: one rank at a time may have something.
        source: In the group, of a broadcast.
    """

    step: int
    op: str
    axis: str
    ranks: tuple[int, ...]
    size: str
    values: str
    names: str
    place: str
    is_nothing: bool = False
    source: int | None = None


def sent_on_equal_batches(manifest: Path, plugin: type, *, world_size: int) -> list[list[Sent]]:
    """Run steps on forked ranks that are given the same batch; return what the plugin's code sent on each.

    Args:
        manifest: Of a run, or of a loop.
        plugin: Whose code is meant: its module, and those of its package.
        world_size: Ranks.

    Raises:
        RankError: A rank failed.
    """
    return run_ranks(_send, world_size, manifest, plugin, timeout_s=300.0)


def _send(manifest: Path, plugin: type) -> list[Sent]:
    found: list[Sent] = []
    with Loop(manifest, is_alike=True) as loop:
        collectives = Collectives.over(loop.run.mesh)
        step = 0

        def handle(operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if any(is_wrapper_subclass(cls) for cls in types):
                return NotImplemented
            # Before it runs: an all-reduce overwrites what it is given.
            if Collectives.is_collective(operator) and (frames := _frames(plugin.__module__, operator)):
                found.extend(_sent(collectives.sent(operator, args), frames, step, loop.run))
            return operator(*args, **kwargs)

        with dispatch_mode(handle):
            for step in range(NUM_STEPS):
                loop.step(step)
    return found


def _sent(issued: Any, frames: Sequence[FrameType], step: int, run: Composition) -> Iterator[Sent]:
    if issued is not None and issued.op in _PAIRED:
        inner = frames[0]
        is_broadcast = issued.op == _BROADCAST
        is_told = not is_broadcast and any(map(_is_telling, issued.tensors))
        yield Sent(
            step=step,
            op=issued.op,
            axis=issued.axis,
            ranks=issued.ranks,
            size=" ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in issued.tensors),
            values=" ".join(map(digest, issued.tensors)) if is_told else "",
            names=", ".join(sorted(_names(issued.tensors, frames, run))),
            place=f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno} in {inner.f_code.co_name}",
            is_nothing=not is_broadcast and all(map(_is_nothing, issued.tensors)),
            source=issued.source,
        )


def _is_telling(tensor: Tensor) -> bool:
    """Return whether elements differ, or are no integers."""
    elements = tensor.detach().reshape(-1)
    return bool((elements != elements[:1]).any() or (elements[:1] != elements[:1].round()).any())


def _is_nothing(tensor: Tensor) -> bool:
    """Return whether all elements are zero, or none is finite, as where the largest is sought."""
    return not bool((tensor.detach().isfinite() & (tensor != 0)).any())


def _frames(module: str, operator: Any) -> list[FrameType]:
    """Return what runs of a plugin's code, the innermost first; none of a dispatch mode that passes an operator on."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and _is_given(frame, operator):
            found.clear()  # others issued it, and the plugin's mode sees it on its way
        if is_of(frame, module):
            found.append(frame)
        frame = frame.f_back
    return found


def _is_given(frame: FrameType, operator: Any) -> bool:
    code = frame.f_code
    return any(frame.f_locals.get(name) is operator for name in code.co_varnames[: code.co_argcount])


def _names(tensors: Sequence[Tensor], frames: Sequence[FrameType], run: Composition) -> set[str]:
    """Return names of tensors in a plugin's code, and those of parameters and gradients."""
    sought = {_key(tensor) for tensor in tensors if tensor.numel()}
    # Of the context: those of the run reshard what a backward that is running has yet to read.
    named = [(f"the gradient of {fqn}", p.grad) for fqn, p in run.context.named_parameters()]
    named += [(fqn, p) for fqn, p in run.context.named_parameters()]
    held = [pair for frame in frames for name, value in frame.f_locals.items() for pair in _held(name, value)]
    return {name for name, value in (*named, *held) if value is not None and _key(value) in sought}


def _held(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a variable holds, itself, in containers, or as attributes of a method's object."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _held(f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[...]", item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _held(f"{name}[{at}]", item, depth - 1)
    elif depth and name == "self":
        for key, item in getattr(value, "__dict__", {}).items():
            yield from _held(f"self.{key}", item, depth - 1)


def _key(tensor: Tensor) -> tuple[int, int]:
    local = local_of(tensor)
    return local.data_ptr(), local.numel()


def out_of_order(ranks: Sequence[Sequence[Sent]]) -> str:
    """Return which collectives two ranks have issued in another order; empty where all have the same.

    Args:
        ranks: By rank, what a plugin sent.
    """
    for group in sorted({sent.ranks for rows in ranks for sent in rows}):
        first, *others = group
        for other in others:
            mine, theirs = _alike(ranks[first], group), _alike(ranks[other], group)
            for key in mine:
                said = _say(mine[key], theirs.get(key, ()), first, other)
                if said:
                    return said
    return ""


def _alike(rows: Sequence[Sent], group: tuple[int, ...]) -> Mapping[tuple[int, str, str, int | None], list[Sent]]:
    """Return collectives by what ranks have to have in common, each list in its order."""
    found: defaultdict[tuple[int, str, str, int | None], list[Sent]] = defaultdict(list)
    for sent in rows:
        if sent.ranks == group:
            found[sent.step, sent.op, sent.size, sent.source].append(sent)
    return found


def _say(mine: Sequence[Sent], theirs: Sequence[Sent], first: int, other: int) -> str:
    for how in ("values", "names", "place"):
        pair = _exchanged(*([getattr(sent, how) * (not sent.is_nothing) for sent in rows] for rows in (mine, theirs)))
        if pair is not None:
            here, there = pair
            sent = mine[here]
            is_received = sent.source is not None
            does, becomes = ("takes as", "given the values of") if is_received else ("puts into", "reduced with")
            named = f" ({sent.names})" if sent.names else ""
            return (
                f"of {len(mine)} {sent.op} of {sent.size} over {sent.axis} in step {sent.step}, what rank {first} "
                f"{does} number {here + 1}{named}, at {sent.place}, rank {other} {does} number {there + 1}: each is "
                f"{becomes} another one"
            )
    return ""


def _exchanged(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, int] | None:
    """Return two places of which one rank has at the first what the other has at the second; None for equal orders."""
    apart = [at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other and one and other]
    for here in apart:
        for there in apart:
            if mine[here] == theirs[there] and mine[there] == theirs[here]:
                return here, there
    if apart and Counter(mine[at] for at in apart) == Counter(theirs[at] for at in apart):
        return apart[0], next(at for at in apart if theirs[at] == mine[apart[0]])
    return None
