"""Anomalies: the first module of a step whose output, or gradient, was not finite."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from composer3d import RunContext, StepAction, StepPoint, StepState, Units, hookimpl, map_tensors, plugin

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Anomaly"]


@plugin(family="profiling", provides={"nonfinite_modules": {"limit": 1}})
class Anomaly:
    """Find the first module whose output is not finite, or whose output has a gradient that is not.

    Every module's first input, its outputs and their gradients are reduced to one bit each, on the device; the bits are
    read once a step, when the gradients are there and before the loss is judged. What is found is a line of JSON in the
    run's folder, and a warning; `composer3d doctor` reports it. Stopping is left to `[stability]`. Inside compiled
    modules nothing is seen: the first that is found is then the one that took their output. With float16 a loss scale
    that is too high is found too; `gradients = false` passes over it.

    Memory: one bit a module, direction and micro-batch, until the gradients are there.
    Collectives: none; each rank looks at what it has.

    Args:
        every: Steps from one that is looked at to the next.
        gradients: Look at gradients too.
        limit: Steps with a finding after which no more is looked for.
        folder: Of `rank-R.jsonl`; default: `anomaly` in the run's folder.
    """

    every: int = Field(default=1, ge=1)
    gradients: bool = True
    limit: int = Field(default=10, ge=1)
    folder: str | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Say that gradients are looked at, which must therefore be there when the backward is over."""
        context.claim("gradients", by=self)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Begin to look at the start of a step; read the bits before gradients are reduced or scaled."""
        return [
            StepAction(name="anomaly.begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="anomaly.microbatch", point=StepPoint.BEFORE_MICROBATCH, run=self._microbatch),
            StepAction(name="anomaly.read", point=StepPoint.GRADIENTS_LOCAL, run=self._read),
        ]

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Read what an interrupted step left; release the modules."""
        watch: _Watch | None = context.state.get(self)
        if watch is not None:
            watch.read()
            watch.close()

    def _begin(self, state: StepState) -> None:
        context = state.context
        if context.purpose == "run" and self not in context.state:
            context.state[self] = _Watch(self, context)
        if self in context.state:
            context.state[self].begin(state)

    def _microbatch(self, state: StepState) -> None:
        watch: _Watch | None = state.context.state.get(self)
        if watch is not None:
            watch.microbatch()

    def _read(self, state: StepState) -> None:
        watch: _Watch | None = state.context.state.get(self)
        if watch is not None:
            watch.read()


class _Look(NamedTuple):
    """One tensor that was looked at: whether it is finite, and whose it is."""

    is_finite: Any
    what: str
    fqn: str
    microbatch: int
    stage: int


class _Watch:
    """Hooks on every module of one rank, and what they saw in the open step."""

    def __init__(self, options: Anomaly, context: RunContext) -> None:
        self._options, self._context = options, context
        self._folder = context.output / "anomaly" if options.folder is None else Path(options.folder)
        self._state: StepState | None = None
        self._num_found = 0
        self._looks: list[_Look] = []
        self._last: Any = None
        self._modules: dict[tuple[int, str], Any] = {}
        self._handles: list[Any] = []
        for part in context.parts:
            for fqn, module in part.module.named_modules():
                self._modules[part.index, fqn] = module
                self._handles.append(module.register_forward_pre_hook(partial(self._before, part.index, fqn)))
                self._handles.append(module.register_forward_hook(partial(self._after, part.index, fqn)))

    def begin(self, state: StepState) -> None:
        """Look at this step, if it is its turn."""
        is_due = state.step % self._options.every == 0 and self._num_found < self._options.limit
        self._state, self._looks, self._has_begun = (state if is_due else None), [], False

    def microbatch(self) -> None:
        """Forget what ran before the first micro-batch: a pipeline infers shapes, from contents that mean nothing."""
        if self._state is not None and not self._has_begun and not self._state.forward_done:
            self._looks.clear()
        self._has_begun = True

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    # ---- in forward and backward -------------------------------------------------------------------------------------

    def _before(self, stage: int, fqn: str, _: Any, args: tuple[Any, ...]) -> None:
        if self._is_off():
            return
        # The first input alone: others may be masks, in which infinities mean something.
        map_tensors(partial(self._look, "input", stage, fqn), args[:1])

    def _after(self, stage: int, fqn: str, _: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._is_off():
            return
        map_tensors(partial(self._look, "output", stage, fqn), output)
        if self._options.gradients:
            map_tensors(partial(self._look_back, stage, fqn), output)

    def _is_off(self) -> bool:
        import torch

        return torch.compiler.is_compiling() or self._state is None

    def _look_back(self, stage: int, fqn: str, tensor: Any) -> None:
        if tensor.requires_grad and not _is_absent(tensor):
            tensor.register_hook(lambda gradient: self._look("gradient", stage, fqn, gradient))

    def _look(self, what: str, stage: int, fqn: str, tensor: Any) -> None:
        # What one module returns, the next is given: looked at once.
        if self._state is None or tensor is self._last or _is_absent(tensor) or not _can_be_infinite(tensor):
            return
        self._last = tensor
        self._looks.append(_Look(_is_finite(tensor), what, fqn, self._state.index, stage))

    # ---- after the backward ------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Write down the first that was not finite. Waits for the device once."""
        import torch

        state, looks, self._state, self._last = self._state, self._looks, None, None
        if state is None:
            return
        for part in self._context.parts if self._options.gradients else ():
            for fqn, parameter in part.module.named_parameters():
                if parameter.grad is not None and _can_be_infinite(parameter.grad):
                    looks.append(_Look(_is_finite(parameter.grad), "weight gradient", fqn, state.index, part.index))
        self._looks = []
        if not looks:
            return
        device = looks[0].is_finite.device
        found = torch.stack([look.is_finite.to(device) for look in looks]).tolist()
        if not all(found):
            self._tell(state.step, looks[found.index(False)])

    def _class_of(self, module: nn.Module) -> str:
        """Return the name of the class that the user wrote: data parallelism puts one of its own in its place."""
        unit = self._context.stash(Units).by_module.get(module)
        return (type(module) if unit is None else unit.written_class).__name__

    def _tell(self, step: int, look: _Look) -> None:
        self._num_found += 1
        module = self._modules.get((look.stage, look.fqn))
        bad = [
            name
            for name, parameter in (module.named_parameters(recurse=False) if module is not None else ())
            if _can_be_infinite(parameter) and not bool(_is_finite(parameter))
        ]
        content = {
            "step": step,
            "rank": self._context.rank,
            "what": look.what,
            "fqn": look.fqn,
            "class": self._class_of(module) if module is not None else "parameter",
            "microbatch": look.microbatch,
            "stage": look.stage,
            "weights_not_finite": bad,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank-{self._context.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        logging.getLogger(__name__).warning(
            "rank %d, step %d, micro-batch %d: the %s of %s is the first that is not finite%s",
            self._context.rank,
            step,
            look.microbatch,
            look.what,
            f"{look.fqn or 'the model'} ({content['class']})",
            f"; nor is its {' and '.join(bad)}" if bad else "",
        )


def _is_absent(tensor: Any) -> bool:
    """Return whether it stands for what another stage computes, so that it has no values."""
    return bool(getattr(tensor, "composer3d_absent", False))


def _can_be_infinite(tensor: Any) -> bool:
    # torch has no isfinite for the narrow types; what they hold was looked at before it was narrowed.
    return bool(tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel())


def _is_finite(tensor: Any) -> Any:
    """Return one bit on the tensor's device; of a DTensor that of the local part, for nothing is to be communicated."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        return torch.isfinite(local).all()
