"""Numbers of samples or tokens that a forward counts: on a rank those of its own samples, on one device of all.

Ranks count alike where their batches are of one size, so that no comparison of ranks finds such a counter. Its growth
does: by as many as there are samples, or by another number in each forward, where what counts forwards, as batch-norm's
`num_batches_tracked`, grows by one and the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.mesh import Role
from composer3d.step.buffers import UpdatedBuffers, held_in_part
from composer3d.step.microbatches import first_tensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext

__all__ = ["watch_sample_counters"]

log = logging.getLogger(__name__)

_NUM_FORWARDS = 3
_NUM_ELEMENTS = 2**20  # of a buffer that is added up; caches of positions have more
_SHOWN = 3
_OF_FORWARDS = re.compile("step|batch|iter|call|update|forward|epoch|layer", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """Increments of one forward to numbers, by FQN, and the samples and positions of its input."""

    growth: Mapping[str, float]
    num_samples: int
    num_positions: int


def watch_sample_counters(context: RunContext, loss_fn: Any) -> None:
    """Log a warning, once a module, of numbers that count a rank's samples in the first forwards that train.

    Buffers, plain tensors and Python's numbers are looked at that modules keep, but for `summed_buffers`. What a
    forward computes from such a number is not one device's. With one sample a rank, a counter of samples grows as one
    of forwards does, and its name decides.

    Memory: none. Collectives: none. Three forwards wait for the device, once for each number.

    Args:
        context: Of a run, frozen; nothing is watched where all ranks have the same samples.
        loss_fn: Watched if it is a module.
    """
    from torch import nn

    if context.layout.degree(Role.BATCH) == 1 or context.purpose != "run":
        return
    updates = UpdatedBuffers(context)
    for part in context.parts:
        _Watch("", part.module, context, updates)
    if isinstance(loss_fn, nn.Module):
        _Watch("loss_fn.", loss_fn, context)


class _Watch:
    def __init__(
        self, prefix: str, module: nn.Module, context: RunContext, updates: UpdatedBuffers | None = None
    ) -> None:
        self._prefix, self._module, self._context, self._updates = prefix, module, context, updates
        self._before: dict[str, float] = {}
        self._sizes = 0, 0
        self._forwards: list[_Forward] = []
        self._is_inside = False
        module.register_forward_pre_hook(torch_compat.uncompiled(self._begin), with_kwargs=True)
        module.register_forward_hook(torch_compat.uncompiled(self._end))

    def _begin(self, owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        import torch

        if owner is self._module and self._updates is not None:
            self._updates.compare()
        if owner is not self._module or len(self._forwards) >= _NUM_FORWARDS:
            return
        self._is_inside = owner.training and torch.is_grad_enabled() and torch_compat.active_fake_mode() is None
        if self._is_inside:
            first = first_tensor((args, kwargs))
            shape = (0,) if first is None else first.shape
            self._sizes = shape[0], shape[1] if len(shape) > 1 else 1
            self._before = dict(_numbers(owner))
            if self._updates is not None:
                self._updates.begin()

    def _end(self, owner: nn.Module, *_: Any) -> None:
        if owner is not self._module or not self._is_inside:
            return
        self._is_inside = False
        growth = {fqn: after - self._before[fqn] for fqn, after in _numbers(owner) if fqn in self._before}
        samples, positions = self._sizes
        self._forwards.append(_Forward(growth=growth, num_samples=samples, num_positions=positions))
        is_last = len(self._forwards) == _NUM_FORWARDS
        if self._updates is not None:
            self._updates.end(is_last=is_last)
        if is_last:
            self._report()

    def _report(self) -> None:
        context, first = self._context, self._forwards[0]
        num_ranks = context.layout.degree(Role.BATCH)
        found = [fqn for fqn in first.growth if _counts_samples(fqn, self._forwards, num_ranks)]
        found = [fqn for fqn in found if not _counts_all(fqn, context)]
        if not found or any(context.coordinates[axis] for axis in context.layout.names(*_OTHERS)):
            return
        shown = ", ".join(f'"{self._prefix}{fqn}" (+{first.growth[fqn]:g})' for fqn in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)
        log.warning(
            "%s%s: %sa forward of %d samples adds to what the model keeps as a number of this rank's samples, of which "
            "one device counts those of all %d data-parallel ranks, so that what is computed from it is another than "
            "one device's, and a checkpoint holds one rank's; count in a buffer of int64 that the module names in "
            "summed_buffers, and add it to this number in the module's after_step(), which the run calls after "
            "optimizer.step() with the sum over all ranks, and a loop on one device calls itself; or count the samples "
            "of all ranks in the model",
            shown,
            more,
            # Of one sample a forward, a growth of 1 says neither.
            "unless it counts forwards, " * (first.num_samples == 1 and any(first.growth[fqn] == 1 for fqn in found)),
            first.num_samples,
            num_ranks,
        )


_OTHERS = (Role.BATCH, Role.SEQUENCE, Role.TENSOR)


def _counts_samples(fqn: str, forwards: Sequence[_Forward], num_ranks: int) -> bool:
    """Return whether a number grows by this rank's samples, positions, or some of these, in every forward."""
    growths = [forward.growth.get(fqn, 0.0) for forward in forwards]
    if not all(growth > 0 and growth == int(growth) for growth in growths):
        return False
    each = list(zip(growths, forwards, strict=True))
    if all(growth in (f.num_samples, f.num_samples * f.num_positions) for growth, f in each):
        is_one = all(growth == 1.0 for growth in growths)
        return not (is_one and _OF_FORWARDS.search(fqn.rpartition(".")[2]))
    if all(f.num_samples > 1 and growth % f.num_samples == 0 for growth, f in each):
        return any(growth % (f.num_samples * num_ranks) for growth, f in each)  # a model may count all ranks' itself
    return len(set(growths)) > 1 and all(growth <= f.num_samples * f.num_positions for growth, f in each)


def _counts_all(fqn: str, context: RunContext) -> bool:
    """Return whether experts keep a number: their one holder counts the rows of all ranks."""
    own = held_in_part(context, fqn)
    return own is not None and own.mesh.size() == context.layout.degree(Role.EXPERT)


def _numbers(root: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the numbers that modules keep, and the sums of their buffers, and of tensors of one element."""
    import torch

    for prefix, module in root.named_modules():
        left_out = {"num_batches_tracked", *getattr(module, "summed_buffers", ())}
        for name, value in (*module._buffers.items(), *vars(module).items()):
            kind, most = type(value), _NUM_ELEMENTS if name in module._buffers else 1
            if name in left_out or kind not in (int, float, torch.Tensor):
                continue
            if kind is torch.Tensor:
                if value.requires_grad or not 0 < value.numel() <= most or value.dtype not in _dtypes():
                    continue
                with torch.no_grad():
                    value = value.sum(dtype=torch.float64)
            yield f"{prefix}.{name}".removeprefix("."), float(value)


def _dtypes() -> tuple[torch.dtype, ...]:
    import torch

    return torch.int64, torch.int32, torch.int16, torch.float64, torch.float32
