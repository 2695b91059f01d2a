"""Pipeline schedules and their orders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "custom_pipeline_schedule",
    "held_graph",
    "inferring_from_zeros",
    "pipeline_orders",
    "pipeline_schedule",
    "without_own_messages",
]


def pipeline_schedule(name: str) -> Any:
    """Return the class of a pipeline schedule by its name; the lookup is not exported (torch 2.11-2.15)."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


def custom_pipeline_schedule(stages: Any, orders: Sequence[Sequence[tuple[int, str, int]]], **options: Any) -> Any:
    """Return a schedule that runs the given actions; torch's runtime for these has no public name (torch 2.11-2.15).

    Args:
        stages: This rank's.
        orders: Of every rank, as (stage, kind, micro-batch); kinds are F, B, I and W.
        options: Of the schedule's constructor.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, **options)
    schedule.pipeline_order = {
        rank: [_Action.from_str(f"{stage}{kind}{index}") for stage, kind, index in order]
        for rank, order in enumerate(orders)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def pipeline_orders(
    name: str, degree: int, num_microbatches: int, stages_per_rank: int
) -> list[list[tuple[int, str, int]]]:
    """Return the actions of every rank as (stage, kind, micro-batch), for schedules of several stages a rank.

    Kinds are F, B, I and W. The lists are those that a schedule makes in its constructor; torch gives them without
    process groups only in a private module, its visualizer (torch 2.11-2.15). Overlapped pairs are taken apart, idle
    places left out.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    orders = get_schedule_ops(name, degree, num_microbatches, num_stages_per_rank=stages_per_rank)
    return [
        [
            (single.stage_index, kinds[single.computation_type.name], single.microbatch_index or 0)
            for action in order
            if action is not None
            for single in (getattr(action, "sub_actions", None) or (action,))
        ]
        for order in orders
    ]


def without_own_messages(stage: Any) -> Any:
    """Return a stage that greets its neighbours before the first step, but not those on its own rank.

    Stages exchange a number with their neighbours to open connections. Where a schedule gives a rank two stages that
    follow each other, torch 2.11 sends that number from the rank to itself, which gloo cannot; torch 2.13 votes
    instead. The method is private (torch 2.11-2.15).
    """
    greet = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [each for each in greet() if each.group_peer != stage.group_rank]
    return stage


def inferring_from_zeros(stage: Any) -> Any:
    """Return a stage that infers shapes by a forward of zeros, where torch 2.13 hands it memory that nobody wrote.

    What a model does may depend on values: routing, comparisons of two runs, counters. Unwritten memory holds NaN now
    and then, and always under `torch.use_deterministic_algorithms`. torch 2.11 infers from zeros itself; the method is
    private (torch 2.13-2.15).
    """
    import torch

    materialise = getattr(stage, "_to_tensor", None)
    if materialise is None:
        return stage

    def zeros(arg: Any) -> Any:
        tensor = materialise(arg)
        if not isinstance(arg, torch.Tensor):
            tensor.detach().zero_()
        return tensor

    stage._to_tensor = zeros
    return stage


@contextlib.contextmanager
def held_graph(stage: Any, microbatch: int, kept: dict[int, Any]) -> Iterator[None]:
    """Keep a micro-batch's graph over the half of its backward that computes the gradients of inputs.

    The second half begins at nodes that the first one found. torch 2.11 releases the graph between the two, with which
    the nodes of functions written in Python go; it is kept where there are such nodes. torch 2.13 needs no help. What a
    stage keeps of its forwards and between the halves is private.

    Args:
        stage: torch's pipeline stage.
        microbatch: Index of the micro-batch in the step.
        kept: Graphs by micro-batch; the caller takes them out when the second half is done.
    """
    import torch
    from torch.autograd.graph import get_gradient_edge

    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        yield
        return
    outputs = stage.fwd_cache[microbatch][0]
    edges = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
    yield
    _, groups, *_ = stage.backward_state.get(microbatch, (None, ()))
    nodes = (node for group in groups or () for node in group["intermediates"])
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes):
        kept[microbatch] = edges
