"""Detection of the first module in a step whose output or gradient is not finite."""

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
    """Find the first module whose output, or the gradient of whose output, is not finite.

    Each module's first input, its outputs and their gradients are reduced on the device to one flag each. The flags are
    read once a step, after the backward and before gradients are reduced. A finding is written as one line of JSON to
    the run's folder and logged as a warning; `composer3d doctor` reports it. `[stability]` decides whether the run
    stops. The inside of compiled modules is not observed: a fault there is attributed to the module that consumes their
    output. With float16, a loss scale that is too high is found as well; `gradients = false` ignores it.

    Memory: one flag per module, direction and micro-batch, freed after the backward.
    Collectives: none; each rank checks its local tensors.

    Args:
        every: Check every n-th step.
        gradients: Check gradients as well as outputs.
        limit: Number of steps with a finding after which checking stops.
        folder: Folder of `rank-R.jsonl`; default: `anomaly` in the run's folder.
    """

    every: int = Field(default=1, ge=1)
    gradients: bool = True
    limit: int = Field(default=10, ge=1)
    folder: str | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Claim the gradients: they must be present when the backward ends."""
        context.claim("gradients", by=self)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Start checking when a step begins; read the flags before gradients are reduced or unscaled."""
        return [
            StepAction(name="anomaly.begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="anomaly.microbatch", point=StepPoint.BEFORE_MICROBATCH, run=self._microbatch),
            StepAction(name="anomaly.read", point=StepPoint.GRADIENTS_LOCAL, run=self._read),
        ]

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Report the findings of an interrupted step and remove the hooks."""
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
    """One checked tensor: its flag, and the module, micro-batch and stage that it belongs to."""

    is_finite: Any
    what: str
    fqn: str
    microbatch: int
    stage: int


class _Watch:
    """Hooks on every module of this rank, and the tensors checked in the current step."""

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
        """Start checking this step, if it is due."""
        is_due = state.step % self._options.every == 0 and self._num_found < self._options.limit
        self._state, self._looks, self._has_begun = (state if is_due else None), [], False

    def microbatch(self) -> None:
        """Drop checks made before the first micro-batch: a pipeline infers shapes from uninitialised tensors."""
        if self._state is not None and not self._has_begun and not self._state.forward_done:
            self._looks.clear()
        self._has_begun = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    # ---- in forward and backward -------------------------------------------------------------------------------------

    def _before(self, stage: int, fqn: str, _: Any, args: tuple[Any, ...]) -> None:
        if self._is_off():
            return
        # The first input alone: others may be masks, in which infinities are valid.
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
        # One module's output is usually the next one's input: check it once.
        if self._state is None or tensor is self._last or _is_absent(tensor) or not _can_be_infinite(tensor):
            return
        self._last = tensor
        self._looks.append(_Look(_is_finite(tensor), what, fqn, self._state.index, stage))

    # ---- after the backward ------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Report the first tensor that is not finite. Synchronises with the device once."""
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
            self._report(state.step, looks[found.index(False)])

    def _class_of(self, module: nn.Module) -> str:
        """Return the name of the module's original class, which data parallelism replaces by a subclass."""
        unit = self._context.stash(Units).by_module.get(module)
        return (type(module) if unit is None else unit.written_class).__name__

    def _report(self, step: int, look: _Look) -> None:
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
    """Return whether the tensor is a placeholder, without values, for one that another stage computes."""
    return bool(getattr(tensor, "composer3d_absent", False))


def _can_be_infinite(tensor: Any) -> bool:
    # torch has no isfinite for 8-bit floats; their values were checked before the cast.
    return bool(tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel())


def _is_finite(tensor: Any) -> Any:
    """Return a flag on the tensor's device; of a DTensor, of its local tensor, so that nothing is communicated."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        return torch.isfinite(local).all()
