"""Spans around every block's forward and backward, from hooks on modules and on the tensors between them."""

from __future__ import annotations

from typing import Any

from composer3d import RunContext, map_tensors, select_fqns
from composer3d_plugins.profiling.opentelemetry.span_recorder import SpanRecorder

__all__ = ["watch_blocks"]


def watch_blocks(context: RunContext, recorder: SpanRecorder) -> None:
    """Open `block` around the forward of every block, and `block_backward` from the gradient of its output to that of
    its input; recomputation is part of the backward.

    Args:
        context: Complete.
        recorder: Takes the spans.

    Raises:
        TransformError: The model has no blocks.
    """
    backward: list[tuple[Any, Any]] = []
    for part in context.parts:
        here = dict(part.module.named_modules())  # of all blocks, those of this stage
        for fqn in select_fqns(context.blocks, context.fqns):
            if fqn in here:
                _watch(here[fqn], {"block": fqn}, recorder, backward)


def _watch(module: Any, attributes: dict[str, str], recorder: SpanRecorder, backward: list[tuple[Any, Any]]) -> None:
    """Watch one block; `backward` holds the block whose backward runs, for all of them."""
    opened: list[Any] = []

    def before(_: Any, args: Any) -> None:
        opened.append(recorder.begin("block", attributes))

    def after(_: Any, args: Any, output: Any) -> None:
        if opened:
            recorder.end(opened.pop())
        call = object()

        def begin(gradient: Any) -> None:
            # A block's output is the next one's input, and the hook of the output comes first.
            if not backward or backward[-1][0] is not call:
                finish()
                backward.append((call, recorder.begin("block_backward", attributes)))

        def end(gradient: Any) -> None:
            if backward and backward[-1][0] is call:
                finish()

        def finish() -> None:
            if backward:
                recorder.end(backward.pop()[1])

        # Without an input that has a gradient nothing says when the backward of the block is done.
        inputs = _with_gradient(args)
        if inputs:
            for tensor in _with_gradient(output):
                tensor.register_hook(begin)
            for tensor in inputs:
                tensor.register_hook(end)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _with_gradient(value: Any) -> list[Any]:
    found: list[Any] = []
    map_tensors(lambda tensor: found.append(tensor) if tensor.requires_grad else None, value)
    return found
