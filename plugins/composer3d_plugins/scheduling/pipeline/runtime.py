"""Execution of stages: torch's schedules for training, forwards alone for evaluation.

Shape suffixes: B micro-batch, S sequence, D hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d import (
    Batch,
    ComposerError,
    PluginError,
    RunContext,
    StepError,
    WarmUp,
    receive_json,
    send_json,
    torch_compat,
)
from composer3d.propagation import KeptState
from composer3d_plugins.scheduling.pipeline.agreed_shapes import refuse_other_shapes
from composer3d_plugins.scheduling.pipeline.csv_schedule import CustomSchedule
from composer3d_plugins.scheduling.pipeline.schedule_rules import NamedSchedule
from composer3d_plugins.scheduling.pipeline.surgery import runner_of
from composer3d_plugins.scheduling.pipeline.tensor_origins import leaves_of

__all__ = ["PipelineRuntime"]

_HEADER = 16  # numbers that say what an activation is: dtype, number of dims, dims
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class PipelineRuntime:
    """The answer to `composer3d_schedule`.

    torch's schedules are made for a number of micro-batches and for one shape; they are rebuilt when either changes,
    which costs one forward and backward of a micro-batch, whose gradients are discarded.

    Args:
        context: With mesh and parts.
        parts: This rank's stages.
        loss_fn: The core's, (output, target) to a scalar; it owns all scaling.
        schedule: Order of actions by rank.
    """

    def __init__(
        self,
        *,
        context: RunContext,
        parts: Sequence[Any],
        loss_fn: Any,
        schedule: NamedSchedule | CustomSchedule,
    ) -> None:
        self._context, self._parts, self._loss_fn = context, tuple(parts), loss_fn
        self._order = schedule
        self._degree = context.degrees["pp"]
        self.owner = {stage: rank for rank in range(self._degree) for stage in schedule.stages_of(rank)}
        self._group = context.mesh["pp"].get_group()
        self._signature: Any = None
        self._schedule: Any = None
        self._microbatches: Sequence[Batch] = ()
        self._kept: KeptState | None = None
        for part in self._parts:
            runner = runner_of(part.module)
            # Precisions put other modules in the place of those that are called.
            runner.attach(part.module)
            runner.call = self._caller(part)

    # ---- one stage, one micro-batch ----------------------------------------------------------------------------------

    def _caller(self, part: Any) -> Any:
        """Return the stage's forward as torch calls it: with the received tensors x_BSD and the micro-batch's index."""

        def call(*received: Tensor, microbatch: Tensor) -> Any:
            return self._run(part, int(microbatch), () if part.is_first else received)

        return call

    def _run(self, part: Any, index: int, received: tuple[Tensor, ...]) -> Any:
        """Return the stage's output x_BSD; on the last stage the loss, so that a model's output may have any form."""
        batch = self._microbatches[index]
        output = runner_of(part.module).forward(part.module, batch.args, dict(batch.kwargs), received)
        return self._loss_fn(output, batch.target) if part.is_last else output

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self, microbatches: Sequence[Batch]) -> None:
        """Run forward and backward of every micro-batch in the schedule's order."""
        signature = _signature(microbatches)
        if signature != self._signature:
            self._schedule = self._make(len(microbatches))
            self._signature = signature
            stashed = self._stash_gradients()
        else:
            stashed = []
        self._microbatches = microbatches
        indices = torch.arange(len(microbatches))
        try:
            with torch_compat.bounded_messages(self._group, self._context.device), self._watching():
                self._schedule.step(
                    *((indices,) if any(part.is_first for part in self._parts) else ()),
                    **({"target": indices} if any(part.is_last for part in self._parts) else {}),
                    microbatch=indices,
                    return_outputs=False,
                )
        except BaseException as error:
            self._signature = None
            if (refusal := _refusal_behind(error)) is not None:
                raise refusal from None
            raise
        finally:
            self._microbatches = ()
        for parameter, grad in stashed:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _watching(self) -> AbstractContextManager[None]:
        """Open spans around waits for messages, if there are recorders."""
        if not self._context.has_recorders:
            return nullcontext()
        return torch_compat.watching_messages(partial(self._context.span, axis="pp"))

    def _stash_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Stash gradients: torch's shape inference sets those of FSDP2's modules to None."""
        held = [(p, p.grad) for part in self._parts for p in part.module.parameters() if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        return [(parameter, grad) for parameter, grad in held if grad is not None]

    def _make(self, num_microbatches: int) -> Any:
        num_stages = self._parts[0].num_stages
        most_in_flight = self._context.stash(WarmUp).most_in_flight
        reason = self._order.refusal(num_microbatches) if most_in_flight is None else None
        if reason is not None:
            raise PluginError(
                f"this batch has {num_microbatches} micro-batches, and {self._order.name} {reason}",
                hint="hand over more sequences a call, or set [train] microbatch",
            )
        self._kept = KeptState(part.module for part in self._parts)
        stage, messages = torch_compat.described_stage(), {"send": self._send_value, "receive": self._receive_value}
        stages = [
            self._watched(
                stage(part.module, part.index, num_stages, self._context.device, group=self._group, **messages),
                num_microbatches,
            )
            for part in self._parts
        ]
        options: dict[str, Any] = {
            "n_microbatches": num_microbatches,
            "loss_fn": lambda loss, _: loss,
            "scale_grads": False,
        }
        if isinstance(self._order, CustomSchedule):
            return torch_compat.custom_pipeline_schedule(stages, self._order.orders, **options)
        schedule = torch_compat.pipeline_schedule(self._order.name, most_in_flight=most_in_flight)
        return schedule(stages[0] if self._order.has_one_stage else stages, **options)

    def _send_value(self, value: Any, rank: int) -> None:
        send_json(value, to=rank, group=self._group)

    def _receive_value(self, rank: int) -> Any:
        return receive_json(source=rank, group=self._group)

    def _watched(self, stage: Any, num_microbatches: int) -> Any:
        """Wrap a stage's forward and backward of a micro-batch in random streams, step actions and spans."""
        torch_compat.inferring_from_zeros(torch_compat.without_own_messages(stage))
        context, number, runner = self._context, stage.stage_index, runner_of(stage.submod)
        forward, backward, weights = (
            stage.forward_one_chunk,
            stage.backward_one_chunk,
            stage.backward_weight_one_chunk,
        )

        def run_forward(index: int, *args: Any, **kwargs: Any) -> Any:
            if self._kept is not None:
                self._kept.restore()
                self._kept = None
            context.microbatches.begin(index, index == num_microbatches - 1, number)
            with context.span("forward", microbatch=index, stage=number, kind="F"):
                output = forward(index, *args, **kwargs)
            if not stage.is_last:
                refuse_other_shapes(output, stage, runner, index)
            return output

        graphs: dict[int, Any] = {}

        def run_backward(index: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            full_backward = full_backward or not runner.has_halves
            context.microbatches.resume(index, number)
            name, kind = ("backward", "B") if full_backward else ("backward_input", "I")
            held = nullcontext() if full_backward else torch_compat.held_graph(stage, index, graphs)
            with held, context.span(name, microbatch=index, stage=number, kind=kind):
                result = backward(index, *args, full_backward=full_backward, **kwargs)
            if full_backward:
                context.microbatches.end()
            return result

        def run_weights(index: int, *args: Any, **kwargs: Any) -> Any:
            if not runner.has_halves:
                return None
            context.microbatches.resume(index, number)
            with context.span("backward_weight", microbatch=index, stage=number, kind="W"):
                result = weights(index, *args, **kwargs)
            graphs.pop(index, None)
            context.microbatches.end()
            return result

        reduce = stage.perform_reduce_grad

        def run_reduction(*args: Any, **kwargs: Any) -> None:
            torch_compat.unify_gradients(stage.submod)
            reduce(*args, **kwargs)

        stage.perform_reduce_grad = run_reduction
        stage.forward_one_chunk = run_forward
        stage.backward_one_chunk = run_backward
        stage.backward_weight_one_chunk = run_weights
        return stage

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, microbatches: Sequence[Batch]) -> None:
        """Run the forward of every micro-batch, stage after stage; any number of them.

        What is sent may have another shape in every micro-batch, as the rows that its values choose have.

        Collectives: per stage boundary and micro-batch one message for each value, and one of 16 numbers a value.
        """
        self._microbatches = microbatches
        sent: list[tuple[Any, Tensor]] = []
        at_hand: list[tuple[Tensor, ...]] = []
        try:
            for part in sorted(self._parts, key=lambda part: part.index):
                at_hand = self._evaluate_stage(part, at_hand, sent)
            for work, _ in sent:
                self._wait(work)
        finally:
            self._microbatches = ()

    def _evaluate_stage(
        self, part: Any, at_hand: list[tuple[Tensor, ...]], sent: list[tuple[Any, Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """Run one stage on all micro-batches; return its outputs if the next stage is on this rank."""
        here = dist.get_rank(self._group)
        source, target = self.owner.get(part.index - 1), self.owner.get(part.index + 1)
        kept: list[tuple[Tensor, ...]] = []
        for index in range(len(self._microbatches)):
            self._context.microbatches.begin(index, index == len(self._microbatches) - 1, part.index)
            received: tuple[Tensor, ...] = ()
            if source == here:
                received = at_hand[index]
            elif source is not None:
                received = self._receive_header(source, runner_of(part.module).num_received)
                for tensor in received:
                    with self._context.span("receive", axis="pp", bytes=tensor.nbytes):
                        self._receive(tensor, source)
            result = self._run(part, index, received)
            if target is None:
                continue
            output = result if isinstance(result, tuple) else (result,)
            if target == here:
                kept.append(output)
            else:
                self._send(output, target, sent)
        return kept

    def _send(self, output: tuple[Tensor, ...], target: int, sent: list[tuple[Any, Tensor]]) -> None:
        if any(isinstance(tensor, DTensor) for tensor in output):
            raise StepError("a stage ends in a DTensor, which cannot be sent; let blocks return plain tensors")
        output = tuple(tensor.contiguous() for tensor in output)
        for message in (self._header(output), *output):
            sent.append((dist.isend(message, group=self._group, group_dst=target), message))

    def _receive(self, tensor: Tensor, source: int) -> None:
        self._wait(dist.irecv(tensor, group=self._group, group_src=source))

    def _wait(self, work: Any) -> None:
        torch_compat.wait_for_message(work, self._group, self._context.device)

    def _header(self, tensors: tuple[Tensor, ...]) -> Tensor:
        rows = []
        for tensor in tensors:
            numbers = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            rows.append(numbers + [0] * (_HEADER - len(numbers)))
        return torch.tensor(rows, device=self._context.device)

    def _receive_header(self, source: int, num_tensors: int) -> tuple[Tensor, ...]:
        header = torch.zeros(num_tensors, _HEADER, dtype=torch.int64, device=self._context.device)
        self._receive(header, source)
        return tuple(
            torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self._context.device)
            for dtype, dims, *shape in header.tolist()
        )


def _refusal_behind(error: BaseException) -> ComposerError | None:
    """Return the error meant for the user that torch, which names stage and arguments, wrapped in a RuntimeError."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ComposerError):
        found = found.__cause__
    return found


def _signature(microbatches: Sequence[Batch]) -> Any:
    """Return what the shapes of messages follow from: those of a batch's tensors, and its flags, names and sizes."""
    first = microbatches[0]
    inputs = (first.args, dict(first.kwargs))
    plain = tuple(leaf for leaf in torch_compat.tree_leaves(inputs) if isinstance(leaf, bool | int | str))
    return len(microbatches), tuple((leaf.shape, leaf.dtype) for leaf in leaves_of(inputs)), plain
