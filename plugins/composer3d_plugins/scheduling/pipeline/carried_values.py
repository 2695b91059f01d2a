"""Values that a forward leaves in attributes or buffers for the next one, or for another module, across stages.

A memory inside of a block is its stage's own, and micro-batches come to it in order. What the end of a model leaves for
its beginning is not there yet when the next micro-batch begins: no schedule has it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from composer3d import TransformError, torch_compat
from composer3d_plugins.scheduling.pipeline.tensor_origins import Origins, kept_tensors, run_forward, tensors_of

__all__ = ["refuse_carried_values"]

log = logging.getLogger(__name__)


def refuse_carried_values(watch: Origins, make: Callable[[], Origins], example: Any, last: int) -> None:
    """Run a second forward on what the first one left, if it left anything that it computed.

    Args:
        watch: Of the first forward.
        make: Makes what watches, new for a forward.
        example: `(args, kwargs)` of a forward; None for token numbers.
        last: The place of the last block or call; what stands behind it is in its stage.

    Raises:
        TransformError: A value is used at another place than the one where it is computed.
    """
    _refuse_uncounted(watch, last)
    left = {name: tensor for name, tensor in kept_tensors(watch.skeleton) if watch.is_computed(tensor)}
    if not left:
        return
    second = make()
    second.repeats = False
    for name in left:
        fqn, _, attribute = name.rpartition(".")
        owner, before = second.skeleton.get_submodule(fqn), watch.skeleton.get_submodule(fqn)
        if attribute in owner._buffers:
            owner._buffers[attribute] = before._buffers[attribute]
        else:
            vars(owner)[attribute] = vars(before)[attribute]
    uses = _Uses(second, {torch_compat.storage_key(tensor): name for name, tensor in left.items()})
    try:
        run_forward(second, example, uses.operator)
    except Exception as error:  # values that the first forward knew are not known of what it left
        log.debug("a second forward on what the first one left in %s does not run on meta: %s", list(left), error)
        return
    for name, tensor in kept_tensors(second.skeleton):
        written = uses.made.get(torch_compat.storage_key(tensor))
        read = {min(max(place, 0), last) for place in uses.read[name]}
        if name in left and written is not None and read - {min(max(written, 0), last)}:
            raise TransformError(
                f'the model leaves "{name}", which {watch.place_name(written)} computes, for its next forward, in '
                f"which {watch.place_name(min(read))} uses it: in a pipeline these are different stages, and a "
                "micro-batch begins before the one before it has come to its end; keep such a value inside of the "
                "block that uses it, or train without [scheduling.pipeline]"
            )


def _refuse_uncounted(watch: Origins, last: int) -> None:
    """Refuse state that is written where not every stage that reads it comes: a counter, say.

    Code between modules runs in its own stage and in all later ones, code inside of a module in its own alone.
    """
    names = {name: key for key, name in watch.state.items()}
    for name, tensor in kept_tensors(watch.skeleton):
        keys = {names.get(name), torch_compat.storage_key(tensor)}  # of what it was, and of what it is
        written = [watch.written_at[key] for key in keys if key in watch.written_at]
        reads = {min(max(place, 0), last) for place in watch.state_reads.get(name, ())}
        for place, is_inside in () if watch.is_computed(tensor) else written:
            at = min(max(place, 0), last)
            before = sorted(read for read in reads if (read != at if is_inside else read < at))
            if before:
                raise TransformError(
                    f'the model writes into "{name}" in {watch.place_name(place)}, and {watch.place_name(before[0])} '
                    "uses it: in a pipeline these are different stages, and that which uses it has a copy that nobody "
                    "writes; write it before the first block (every stage runs what comes before its own blocks), or "
                    "train without [scheduling.pipeline]"
                )


class _Uses:
    """Places of the operators that take what an earlier forward left, and of those that compute."""

    def __init__(self, watch: Origins, left: dict[int, str]) -> None:
        self._watch, self._left = watch, left
        self.read: dict[str, set[int]] = defaultdict(set)
        self.made: dict[int, int] = {}

    def operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._watch.place
        for tensor in tensors_of((args, kwargs)):
            name = self._left.get(torch_compat.storage_key(tensor))
            if name is not None:
                self.read[name].add(place)
        result = self._watch.operator(func, types, args, kwargs)
        for tensor in (*tensors_of(result), *torch_compat.written_tensors(func, args, kwargs)):
            self.made[torch_compat.storage_key(tensor)] = place
        return result
