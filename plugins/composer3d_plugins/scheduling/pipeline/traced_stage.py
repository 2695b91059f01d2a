"""Stages of a traced model: each runs the parent's own forward; calls of other stages return received values.

As in `stage`, the forward that runs is the model's own, with its own modules under their own names, so that whatever
works on modules works on stages. A call of another stage's module is not made: it returns the values that were
received, or absent tensors in the form of what nobody behind it needs. Behind the stage's last call the forward is
left, with all values that later stages need; those of earlier stages are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import StepError, torch_compat
from composer3d_plugins.scheduling.pipeline.absent import Absent, absent_zeros, end_reading, refuse_absent
from composer3d_plugins.scheduling.pipeline.model_copy import copy_model
from composer3d_plugins.scheduling.pipeline.surgery import (
    Done,
    Given,
    Kept,
    Received,
    as_received,
    become,
    become_root,
    descend,
    inner_call,
    refuse_out_of_reach,
    refuse_without_graph,
    take_out_tensors,
    tensors_of_stage,
)
from composer3d_plugins.scheduling.pipeline.tensor_origins import leaves_of, tensors_of, to_meta
from composer3d_plugins.scheduling.pipeline.tracer import Trace
from composer3d_plugins.scheduling.pipeline.values import Values, draw_values

__all__ = ["TracedRunner", "build_traced_stage"]

_CALLS = "_composer3d_calls"


class TracedRunner:
    """State of one stage's forward.

    Args:
        trace: Of the whole model.
        start: Index of its first call.
        end: Index after its last call.
        enters: Values that it receives, in their order.
        leaves: Values that it sends, in their order.
        has_halves: Whether gradients of inputs and of weights can be computed separately, as zero-bubble schedules do.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        start: int,
        end: int,
        enters: Sequence[int],
        leaves: Sequence[int],
        has_halves: bool,
    ) -> None:
        self._trace, self._start, self._end = trace, start, end
        self._enters, self._leaves = tuple(enters), tuple(leaves)
        self.num_received = len(self._enters)
        self.has_halves = has_halves
        self.call: Callable[..., Any] | None = None
        self.given: Given = as_received
        self._position = 0
        self._is_running = self.is_inside = self._has_graph = False
        self.written: str | None = None
        self.absent: list[tuple[Any, str]] = []
        self.casts: tuple[torch.dtype, torch.dtype] | None = None
        self.readers: AbstractContextManager[Any] | None = None
        self._values: dict[int, Tensor] = {}
        self._forms: dict[Hashable, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self._end == len(self._trace.calls)

    @property
    def sent_by(self) -> Sequence[str]:
        """For every value that is sent, the name of the call that returns it, of an earlier stage perhaps."""
        names = {number: call.name for call in self._trace.calls for number in call.values}
        return [names[number] for number in self._leaves]

    @property
    def next_name(self) -> str:
        """Name of the call with which the next stage begins."""
        return self._trace.calls[self._end].name

    def runs(self, index: int) -> bool:
        """Return whether the stage makes a call."""
        return self._start <= index < self._end or (index < self._end and self._trace.calls[index].is_everywhere)

    def attach(self, stage: nn.Module) -> None:
        """Route the calls of the stage's modules through this runner; again after modules were replaced."""
        made = {call.fqn for index, call in enumerate(self._trace.calls) if self.runs(index)}
        for fqn in dict.fromkeys(call.fqn for call in self._trace.calls if call.fqn):
            module = descend(stage, fqn)
            if not isinstance(module, _Called):
                become(module, _Made if fqn in made else _Called, _CALLS, (self, fqn))

    def forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], received: tuple[Tensor, ...]
    ) -> Any:
        """Run the parent's forward on a batch and return the values this stage sends, or the model's output.

        Raises:
            StepError: The calls were not those of the forward that was traced.
        """
        if torch.is_grad_enabled():
            self.has_halves = self.has_halves and all(tensor.requires_grad for tensor in received)
        self._values = {number: Received.apply(tensor) for number, tensor in zip(self._enters, received, strict=True)}
        self._position, self._is_running, self.written = 0, True, None
        self._has_graph = torch.is_grad_enabled()
        try:
            output = inner_call(model)(*args, **kwargs)
        finally:
            end_reading(self)
            self._is_running = self.is_inside = False
            self._values = {}
        if self._position != self._end:
            name = self._trace.calls[self._position].name
            raise StepError(f'the forward of this batch did not call "{name}", as it did when the model was split')
        if self.is_last:
            refuse_absent(leaves_of(output), stage=self)
        return output

    def called(
        self, fqn: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_trained: bool
    ) -> Any:
        """Make a call of a module, or stand in for it; behind the stage's last one leave the parent's forward."""
        # Recomputed in a backward, or called by a module that is itself called: not ours to count.
        if not self._is_running or self.is_inside:
            return run(*args, **kwargs)
        index = self._position
        if index >= len(self._trace.calls) or self._trace.calls[index].fqn != fqn:
            raise StepError(
                f'the forward of this batch called "{fqn}" in another place than when the model was split; a pipeline '
                "needs the same calls in every forward"
            )
        self._position += 1
        output = self._make(index, run, args, kwargs) if self.runs(index) else self._stand_in(index, args, kwargs)
        if self._position == self._end and not self.is_last:
            leaving = [self._values[number] for number in self._leaves]
            refuse_absent(leaving, stage=self)
            if is_trained and self._has_graph and not torch.is_grad_enabled():
                refuse_without_graph(self._trace.calls[index].name)
            raise Done(tuple(tensor.contiguous() for tensor in leaving))
        return output

    def _make(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_inside = True
        try:
            output = run(*args, **kwargs)
        finally:
            self.is_inside = False
        call = self._trace.calls[index]
        tensors = tensors_of(output)
        if len(tensors) != len(call.values):
            raise StepError(
                f'"{call.name}" returned {len(tensors)} tensors, and {len(call.values)} when the model was split'
            )
        for number, tensor in zip(call.values, tensors, strict=True):
            if number in self._leaves:
                # What is written over later travels as it was returned.
                self._values[number] = tensor.clone() if number in self._trace.written else tensor
        return output

    def _stand_in(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._trace.calls[index]
        numbers = iter(enumerate(call.values))
        arrived = [self._values[number] for number in self._trace.calls[index].values if number in self._values]
        if self._has_graph and not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arrived):
            refuse_without_graph(self._trace.calls[index].name)

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            at, number = next(numbers)
            if number in self._values:
                received = self._values[number]
                # It may be sent on, so what is written over is another.
                made = received.clone() if number in self._trace.written else received
                return self.given(call.fqn, call.repeat, at, made)
            return absent_zeros(
                leaf,
                device=self._device(args, kwargs),
                source=f'what "{call.name}" returns',
                stage=self,
                is_written=number in self._trace.written,
            )

        return torch_compat.tree_map(value, self._form(index, args, kwargs))

    @staticmethod
    def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        return next((tensor.device for tensor in tensors_of((args, kwargs))), torch.get_default_device())

    def _form(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a call's output on meta; computed once for arguments of the same shapes."""
        leaves = torch_compat.tree_leaves((args, kwargs))
        key = (index, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        try:
            if key in self._forms:
                return self._forms[key]
        except TypeError:  # an argument that cannot be a key
            return self._run_on_meta(index, args, kwargs)
        return self._forms.setdefault(key, self._run_on_meta(index, args, kwargs))

    def _run_on_meta(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._trace.skeleton.get_submodule(self._trace.calls[index].fqn)
        try:
            return _form_of(module, args, kwargs, draws=False, casts=self.casts)
        except Exception:  # code that needs sizes which add up, say
            try:
                return _form_of(module, args, kwargs, draws=True, casts=self.casts)
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else ""
                raise StepError(
                    f'a stage stands in for "{self._trace.calls[index].name}", which another stage runs, and what that '
                    f"returns does not follow from what arrives, a shard perhaps ({type(error).__name__}: {text}); "
                    "begin no stage between modules that read one value: split = { tracer = [...] } states where"
                ) from error


def _form_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    draws: bool,
    casts: tuple[torch.dtype, torch.dtype] | None,
) -> Any:
    """Return what a call returns, on meta.

    Args:
        module: On meta.
        args: Integers may say how long things are; what weights computed is another stage's to know.
        kwargs: As `args`.
        draws: Weights, and what weights computed, have values at random.
        casts: As a stage has them: the module here is in the first of the two dtypes, and the run's in the second.
    """
    values = Values()
    given, cast = casts or (None, None)

    def turned(value: Any, dtype: torch.dtype | None, into: torch.dtype | None) -> Any:
        is_of = casts is not None and isinstance(value, Tensor) and value.dtype is dtype
        return value.to(into) if is_of else value

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, Absent):
            return turned(to_meta(leaf.plain), cast, given)
        is_number = isinstance(leaf, Tensor) and not leaf.dtype.is_floating_point
        return values.twin(leaf) if is_number else turned(to_meta(leaf), cast, given)

    args, kwargs = torch_compat.tree_map(on_meta, (args, kwargs))
    if draws:
        floats = [tensor for tensor in tensors_of((args, kwargs)) if tensor.dtype.is_floating_point]
        draw_values(values, [*module.parameters(), *floats])
    try:
        with (
            torch.no_grad(),
            torch_compat.dispatch_mode(
                lambda func, types, args, kwargs: values.run(func, args, kwargs), compiles=False, opens=False
            ),
        ):
            output = module(*args, **kwargs)
    finally:
        values.forget()
    return torch_compat.tree_map(lambda leaf: turned(leaf, given, cast), output)


class _Called:
    """A module whose calls are counted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, fqn = vars(self)[_CALLS]
        is_trained = any(parameter.requires_grad for parameter in self.parameters())  # type: ignore[attr-defined]
        return runner.called(fqn, super().__call__, args, kwargs, is_trained=is_trained)  # type: ignore[misc]


class _Made(Kept, _Called):
    """A module that this stage calls."""


def build_traced_stage(
    model: nn.Module,
    runner: TracedRunner,
    trace: Trace,
    *,
    needed: frozenset[str],
    absent_buffers: frozenset[str],
    clones: Sequence[str],
    device: torch.device,
) -> nn.Module:
    """Return the stage of a runner; the structure is copied, tensors are not.

    Args:
        model: The whole model; on meta, or with weights. It is not changed.
        runner: Of the stage.
        trace: Of this model.
        needed: Names of the parameters that the stage holds.
        absent_buffers: Names of the buffers that it does not.
        clones: First FQNs of parameters that another stage on this rank holds already; these are copied.
        device: Of what stands for absent parameters.
    """
    memo = tensors_of_stage(
        model, trace.firsts, needed=needed, absent_buffers=absent_buffers, clones=clones, device=device, runner=runner
    )
    stage = copy_model(model, memo)
    become_root(stage, runner, around=[call.fqn for call in trace.calls if call.fqn])
    runner.attach(stage)
    take_out_tensors(stage, "", needed, absent_buffers, device=device, runner=runner)
    refuse_out_of_reach(stage, needed)
    return stage
