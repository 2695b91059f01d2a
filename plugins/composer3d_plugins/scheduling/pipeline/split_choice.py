"""Choice of a split: straight where blocks are called once each, in order; traced where they are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import ComposerError, PluginError, TransformError
from composer3d_plugins.scheduling.pipeline.block_trace import NotStraightError
from composer3d_plugins.scheduling.pipeline.division import Choose, Division, divide_straight
from composer3d_plugins.scheduling.pipeline.split_places import around, block_lists, inner_lists, outermost
from composer3d_plugins.scheduling.pipeline.traced_split import Traced, divide_traced
from composer3d_plugins.scheduling.pipeline.tracer import trace

if TYPE_CHECKING:
    from torch import nn

    from composer3d import ModelFindings

__all__ = ["divide"]

logger = logging.getLogger(__name__)

# The costliest stage may cost so many times a stage's part before the model is looked at more closely.
_UNEVEN = 1.5
# Dividing before other modules has to make it so much cheaper.
_BETTER = 0.9


def divide(
    model: nn.Module,
    blocks: Sequence[str],
    example: Any,
    choose: Choose,
    *,
    num_stages: int,
    is_traced: bool,
    is_stated: bool,
    beginnings: Sequence[str] = (),
    findings: ModelFindings,
) -> Division[Any]:
    """Trace a model and divide it into stages.

    Args:
        model: The whole model; it is not changed.
        blocks: FQNs of its repeated blocks; none where there is no single list of equal ones.
        example: `(args, kwargs)` of a forward; None tries a batch of token numbers.
        choose: Which places begin stages.
        num_stages: Of the pipeline.
        is_traced: Whether values are traced whatever the blocks look like.
        is_stated: Whether somebody named the blocks: then stages begin nowhere else.
        beginnings: FQNs at whose calls traced stages are said to begin; of any modules where no blocks are named.
        findings: Of the model.

    Raises:
        TransformError: It cannot be divided; with the reasons found.
    """
    lists = [tuple(blocks)] if is_stated else block_lists(model)
    if not is_stated and _lie_elsewhere(model, beginnings, lists):
        return divide_traced(model, around(model, beginnings), example, choose)
    alone = tuple(blocks) or (lists[0] if len(lists) == 1 else ())
    if len(alone) < num_stages and lists != [tuple(blocks)]:
        alone = ()  # equal blocks among others, too few by themselves
    error: TransformError | None = None
    straight: Division[Any] | None = None
    if not is_traced and alone:
        try:
            straight = divide_straight(model, alone, example, choose, findings)
        except NotStraightError as refused:
            error = refused
        else:
            if lists == [alone] or straight.costliest <= _UNEVEN / num_stages:
                return straight
    if is_stated or lists == [tuple(blocks)]:
        try:
            return divide_traced(model, blocks, example, choose)
        except TransformError as refused:
            raise _joined(error, refused) from refused
    try:
        division = _traced(model, lists, example, choose, num_stages=num_stages, straight=error)
    except TransformError:
        if straight is None:
            raise
        return straight
    if straight is not None and division.costliest > _BETTER * straight.costliest:
        return straight
    logger.info("the model has %s; stages begin at calls of %s", _seen(lists), ", ".join(division.beginnings))
    return division


def _lie_elsewhere(model: nn.Module, names: Sequence[str], lists: Sequence[tuple[str, ...]]) -> bool:
    """Tell whether names are modules of the model, and some of them no blocks of its lists."""
    listed = {name for names in lists for name in names}
    return not listed >= set(names) and {fqn for fqn, _ in model.named_modules()} >= set(names)


def _traced(
    model: nn.Module,
    lists: Sequence[tuple[str, ...]],
    example: Any,
    choose: Choose,
    *,
    num_stages: int,
    straight: TransformError | None,
) -> Traced:
    """Divide before blocks of any lists; before other modules too where those are too few, or of unequal cost."""
    listed = [name for names in lists for name in names]
    found: list[Traced] = []
    errors: list[ComposerError] = []
    for places in _places(model, listed, example, num_stages=num_stages):
        try:
            found.append(divide_traced(model, places, example, choose))
        except (TransformError, PluginError) as error:
            errors.append(error)
        else:
            if found[-1].costliest <= _UNEVEN / num_stages:
                break
    if not found:
        raise TransformError(f"the model has {_seen(lists)}; {_joined(straight, errors[0])}") from errors[0]
    best = found[0]
    for other in found[1:]:
        best = other if other.costliest < _BETTER * best.costliest else best
    return best


def _places(model: nn.Module, listed: Sequence[str], example: Any, *, num_stages: int) -> Iterator[Sequence[str]]:
    """Yield ever more modules before which a stage could begin."""
    for wanted in (listed if len(listed) >= num_stages else (), outermost(model, num_stages=num_stages)):
        if not wanted:
            continue
        yield wanted
        inner = inner_lists(model, wanted)
        if inner:
            try:
                seen = trace(model, _opened(wanted, inner), example)
            except TransformError:  # as finely, it cannot be traced
                continue
            chains = {fqn: names for fqn, names in inner.items() if seen.is_chain(names)}
            if chains:
                yield _opened(wanted, chains)


def _opened(places: Sequence[str], inner: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for fqn in places for name in inner.get(fqn, (fqn,))]


def _joined(straight: TransformError | None, error: ComposerError) -> ComposerError:
    return error if straight is None else TransformError(f"{straight}; and where values are traced, {error}")


def _seen(lists: Sequence[tuple[str, ...]]) -> str:
    if not lists:
        return "no list of blocks"
    shown = [f"{names[0]} to {names[-1]}" for names in lists]
    return ("the list " if len(lists) == 1 else "the lists ") + ", ".join(shown)
