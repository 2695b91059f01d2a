"""Statistics of module outputs and of the loss in the first step: enough to find the first wrong module."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import in_backward, without_torch_functions

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.interfaces import LossFunction

__all__ = [
    "INPUTS",
    "LOSS",
    "TARGETS",
    "Difference",
    "Output",
    "Outputs",
    "first_difference",
    "watched_loss",
    "watching",
]

_CLOSE = 1e-9
# Names, beside FQNs, of the model's inputs, and of the loss's targets and result.
INPUTS, TARGETS, LOSS = "(inputs)", "(targets)", "(loss)"


@dataclass(frozen=True, kw_only=True)
class Output:
    """Statistics of one output.

    Args:
        shape: Local shape.
        total: Weighted sum of its elements, in float64.
        size: Sum of their absolute values.
        powers: Sums of the elements, their squares and their cubes, which are additive over shards.
        sizes: The same of absolute values.
    """

    shape: tuple[int, ...]
    total: float
    size: float
    powers: tuple[float, ...]
    sizes: tuple[float, ...]

    @property
    def num_elements(self) -> int:
        """Number of local elements."""
        return math.prod(self.shape)


# Outputs of every call outside a backward, in order, by FQN in the order of the forward.
Outputs = Mapping[str, Sequence[Output]]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first input, output or loss that differs from one device's.

    Args:
        fqn: The module, or `TARGETS` or `LOSS`, or `INPUTS` with the argument's place or name.
        ranks: Ranks on which it differs.
        call: Index of its earliest call that differs.
        due: Index of the call of one device that it equals instead; None where it equals none.
        is_missing: Whether it is an argument that the model did not receive.
    """

    fqn: str
    ranks: tuple[int, ...]
    call: int
    due: int | None = None
    is_missing: bool = False


@contextlib.contextmanager
def watching(run: Composition) -> Iterator[dict[str, list[Output]]]:
    """Record the model's inputs, and the first tensor that every module returns. Collectives: none."""
    import torch

    found: dict[str, list[Output]] = {}

    def hook(fqn: str) -> Any:
        return lambda module, args, output: _note(found, fqn, output)

    def enter(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        for name, value in (*enumerate(args), *kwargs.items()):
            _note(found, f"{INPUTS} {name}", value)

    hooks: list[Any] = [
        module.register_forward_hook(hook(fqn))
        for part in run.parts
        for fqn, module in part.module.named_modules()
        if fqn
    ]
    hooks += [part.module.register_forward_pre_hook(enter, with_kwargs=True) for part in run.parts if part.is_first]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield found
    finally:
        for handle in hooks:
            handle.remove()


def watched_loss(loss_fn: LossFunction | None, found: dict[str, list[Output]]) -> LossFunction | None:
    """Return a loss function that records its inputs and its result; None stays None."""
    if loss_fn is None:
        return None
    inner = loss_fn

    @functools.wraps(inner)
    def watched(output: Any, target: Any) -> Any:
        _note(found, TARGETS, target)
        value = inner(output, target)
        _note(found, LOSS, value.sum if hasattr(value, "count") and hasattr(value, "auxiliary") else value)
        return value

    return watched


def _note(found: dict[str, list[Output]], fqn: str, output: Any) -> None:
    import torch

    from composer3d.step import local

    tensor = output[0] if isinstance(output, tuple | list) and output else output
    is_data = fqn.startswith((INPUTS, TARGETS, LOSS))
    # What is recomputed in a backward was noted in the forward.
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or in_backward():
        return
    if getattr(tensor, "composer3d_absent", False):  # another part's to compute, and to note
        return
    if not is_data and not tensor.dtype.is_floating_point:
        return
    # Modes of plugins propagate the model's operators; these are none of them.
    with without_torch_functions():
        values = local(tensor.detach()).double()
        flat, sizes = values.flatten(), values.flatten().abs()
        # Weighted, since a norm's output sums to zero.
        weights = torch.linspace(1.0, 2.0, values.numel(), dtype=values.dtype, device=values.device)
        noted = Output(
            shape=tuple(values.shape),
            total=float(flat @ weights),
            size=float(sizes.sum()),
            powers=tuple(float((flat**power).sum()) for power in (1, 2, 3)),
            sizes=tuple(float((sizes**power).sum()) for power in (1, 2, 3)),
        )
    found.setdefault(fqn, []).append(noted)


def first_difference(right: Outputs, ranks: Mapping[int, Outputs]) -> Difference | None:
    """Return the first difference from one device, in the order of the forward.

    A rank may have all of an output, a shard of it, or a partial sum. An output with fewer elements than on one device,
    and not a multiple of them over all ranks, cannot be compared.

    Args:
        right: Outputs of one device, on the batch of these ranks.
        ranks: Outputs by rank, of those that read one batch.
    """
    for fqn, expected in right.items():
        having = {rank: list(found[fqn])[-len(expected) :] for rank, found in ranks.items() if found.get(fqn)}
        given = tuple(rank for rank, found in ranks.items() if any(name.startswith(INPUTS) for name in found))
        if fqn.startswith(INPUTS) and given and not having:
            return Difference(fqn=fqn, ranks=given, call=0, is_missing=True)
        for call in range(min([len(expected), *map(len, having.values())])) if having else ():
            whole = fqn.startswith((INPUTS, TARGETS))
            wrong = _wrong_ranks(expected[call], {rank: found[call] for rank, found in having.items()}, whole=whole)
            if wrong and not _in_another_order(expected, having[wrong[0]]):
                # Where there are more calls than on one device, which is which is not known.
                is_known = len(ranks[wrong[0]][fqn]) == len(expected)
                due = _due(expected, having[wrong[0]][call], call) if is_known else None
                return Difference(fqn=fqn, ranks=wrong, call=call, due=due)
    return None


def _wrong_ranks(right: Output, found: Mapping[int, Output], *, whole: bool) -> tuple[int, ...]:
    """Return the ranks that differ; `whole` means that together they have all elements, once or several times."""
    alike = {rank: output for rank, output in found.items() if output.shape == right.shape}
    wrong = tuple(rank for rank, output in alike.items() if not _same(output, right))
    if wrong and abs(sum(found[rank].total for rank in wrong) - right.total) <= _CLOSE * right.size:
        wrong = ()  # parts of a sum
    pieces = {rank: output for rank, output in found.items() if output.shape != right.shape}
    number = sum(output.num_elements for output in pieces.values())
    if wrong or not right.num_elements or not pieces:
        return wrong
    times, rest = divmod(number, right.num_elements)
    if rest or times > len(pieces):
        return tuple(pieces) if whole else ()
    for power, size, index in zip(right.powers, right.sizes, range(len(right.powers)), strict=True):
        if not abs(sum(output.powers[index] for output in pieces.values()) - times * power) <= _CLOSE * times * size:
            return tuple(pieces)
    return ()


def _same(one: Output, other: Output) -> bool:
    return one.shape == other.shape and abs(one.total - other.total) <= _CLOSE * other.size


def _in_another_order(right: Sequence[Output], found: Sequence[Output]) -> bool:
    """Return whether all of one device's outputs exist, in any order."""
    return len(found) == len(right) and all(any(_same(one, other) for one in found) for other in right)


def _due(right: Sequence[Output], found: Output, call: int) -> int | None:
    equal = [index for index, output in enumerate(right) if _same(found, output)]
    return equal[0] if len(equal) == 1 and equal[0] != call else None
