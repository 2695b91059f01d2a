"""Pipeline schedules and their orders."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from composer3d.errors import StepError

__all__ = [
    "custom_pipeline_schedule",
    "described_stage",
    "held_graph",
    "inferring_from_zeros",
    "pipeline_orders",
    "pipeline_schedule",
    "without_own_messages",
]


def pipeline_schedule(name: str, *, most_in_flight: int | None = None) -> Any:
    """Return the class of a pipeline schedule by its name; the lookup is not exported (torch 2.11-2.15).

    Args:
        name: torch's, such as `1F1B`.
        most_in_flight: Micro-batches whose forward has run, and whose backward has not: what is returned makes a
            schedule that begins its backwards earlier, and may run fewer micro-batches. Two private attributes decide
            when 1F1B begins them; its constructor alone asks for a micro-batch a stage.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    cls: Any = get_schedule_class(name)

    def shorter(stage: Any, *, n_microbatches: int, **options: Any) -> Any:
        behind = stage.num_stages - stage.stage_index
        schedule = cls(stage, n_microbatches=max(n_microbatches, stage.num_stages), **options)
        schedule._n_microbatches = n_microbatches
        schedule._num_stages = stage.stage_index + min(behind, most_in_flight or behind)
        return schedule

    return cls if most_in_flight is None else shorter


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


@functools.cache
def described_stage() -> type:
    """Return a class of pipeline stages that tell their neighbours shapes in values which JSON carries.

    torch's own sends objects before the first step, which are unpickled on arrival. The class takes, beside torch's
    arguments, `send(value, rank)` and `receive(rank)`, of ranks of the stage's group; `receive_description(rank)` calls
    the latter. `agreed_outputs()` returns shape and dtype of each output as neighbours know them, and whether it needs
    a gradient: None with torch 2.11, which sends one back for each. What describes a tensor is private, and torch 2.11,
    where only a forward describes, sends tuples of meta tensors (torch 2.11-2.15).
    """
    from torch.distributed.pipelining import PipelineStage

    class DescribedStage(PipelineStage):
        def __init__(
            self, *args: Any, send: Callable[[Any, int], None], receive: Callable[[int], Any], **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            self._send_value, self._receive_value = send, receive

        def receive_description(self, rank: int) -> Any:
            return self._receive_value(rank)

        def agreed_outputs(self) -> list[tuple[Any, Any, bool | None]]:
            described = getattr(self, "_stage_meta", None)
            if described is None:
                return [(meta.shape, meta.dtype, None) for meta in cast(Any, self).get_outputs_meta()]
            return [(meta.shape, meta.dtype, meta.requires_grad) for meta in described.outputs]

        if hasattr(PipelineStage, "_recv_meta"):

            def _send_meta(self, meta: Any, dst_stage: int) -> None:
                self._send_value(_described(meta), self.stage_index_to_group_rank[dst_stage])

            def _recv_meta(self, src_stage: int) -> Any:
                return _description(self.receive_description(self.stage_index_to_group_rank[src_stage]))

        else:

            def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
                import torch.distributed as dist

                module = cast(Any, dist)

                def send(objects: list[Any], dst: int, **_: Any) -> None:
                    self._send_value(_described(objects[0]), dist.get_group_rank(cast(Any, self.group), dst))

                def receive(objects: list[Any], src: int, **_: Any) -> None:
                    objects[0] = _description(self.receive_description(dist.get_group_rank(cast(Any, self.group), src)))

                originals = module.send_object_list, module.recv_object_list
                module.send_object_list, module.recv_object_list = send, receive
                try:
                    return cast(Any, super())._shape_inference(*args, **kwargs)
                finally:
                    module.send_object_list, module.recv_object_list = originals

    return DescribedStage


def _described(meta: Any) -> list[Any]:
    """Return the kind and the tensors of a description; a gradient that does not come is None."""
    fields = ("forward_metas", "backward_metas")
    field = next((name for name in fields if hasattr(meta, name)), None)
    return [field, [_form(tensor) for tensor in (meta if field is None else getattr(meta, field))]]


def _form(tensor: Any) -> list[Any] | None:
    if tensor is None:
        return None
    if hasattr(tensor, "placements"):
        raise StepError("a stage ends in a DTensor, which cannot be sent; let blocks return plain tensors")
    stride = tensor.stride() if callable(tensor.stride) else tensor.stride
    return [list(tensor.shape), list(stride), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad]


def _description(value: Any) -> Any:
    """Return the description of which `_described` made this."""
    import torch

    field, forms = value
    if field is None:
        return tuple(
            torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad)
            for shape, stride, dtype, requires_grad in forms
        )
    from torch.distributed.pipelining import stage as stages
    from torch.distributed.pipelining._utils import _TensorMeta

    tensors = tuple(
        None
        if form is None
        else _TensorMeta(
            shape=torch.Size(form[0]), stride=tuple(form[1]), dtype=getattr(torch, form[2]), requires_grad=form[3]
        )
        for form in forms
    )
    module = cast(Any, stages)
    kind = module._StageForwardMeta if field == "forward_metas" else module._StageBackwardMeta
    return kind(**{field: tensors})


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
