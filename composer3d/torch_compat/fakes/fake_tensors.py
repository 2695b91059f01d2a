"""Fake tensors: their modes, storages that change their size, and values that torch asks other ranks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from composer3d.torch_compat.fakes.assumed_sizes import ASSUMED, assumed_size_of
from composer3d.torch_compat.fakes.chosen_values import PLACES
from composer3d.torch_compat.fakes.operator_shapes import ResultMemory
from composer3d.torch_compat.modes import start_autograd
from composer3d.torch_compat.operators import device_question
from composer3d.torch_compat.pipelines import described_stage

__all__ = [
    "active_fake_mode",
    "fake_tensors",
    "is_in_place",
    "is_view",
    "lone_pipeline",
    "value_errors",
    "watch_storages",
    "with_values",
]

_READERS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_SPECIAL = frozenset({"_c10d_functional::wait_tensor", "aten::_grouped_mm"})


def fake_tensors(memory: ResultMemory | None = None) -> Any:
    """Return the mode in which operators make fake tensors; it has no public home (torch 2.11-2.15).

    Tensors with values are let in: models and plugins make small constants before. An operator that returns what a
    tensor holds as a Python value returns what `_value` says, where torch would refuse.

    What an operator returns is worked out once for every form of its arguments, and kept in the memory, which the next
    mode may be given; see `ResultMemory`.

    Half of what is dispatched asks for a tensor's device, and the way through dynamo, which steps aside, costs as much
    as an operator: the one is answered at once, the other not taken. Ranges of the profiler are no business of a fake
    mode, which takes 0.1 ms to find that out.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    question = device_question()
    ways: dict[Any, tuple[str, str, str]] = {}

    class Mode(FakeTensorMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is question and isinstance(args[0], FakeTensor):
                return args[0].fake_device
            way, name, base = ways.get(func) or ways.setdefault(func, _way_of(func))
            if chosen.are_any and chosen.concern(base, args, kwargs or {}):
                answer = chosen.answer(func, base, args, kwargs or {}, lambda: self.dispatch(func, types, args, kwargs))
                if answer is not NotImplemented:
                    return answer
            if way == "remembered":
                return known.run(func, args, kwargs, lambda: self.dispatch(func, types, args, kwargs))
            if way == "range":
                return func(*args, **(kwargs or {}))
            if way == "places":
                result = self.dispatch(func, types, args, kwargs)
                chosen.choose(name, args, kwargs or {}, result)
                return result
            answer = _without_kernel(func, name, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
            if name == "aten::_grouped_mm" and isinstance(args[0], FakeTensor):
                return known.run(func, args, kwargs, lambda: _grouped_product(*args, **(kwargs or {})))
            return known.run(func, args, kwargs, lambda: self.dispatch(func, types, args, kwargs))

    start_autograd()
    known = ResultMemory() if memory is None else memory
    chosen = known.chosen
    known.mode = Mode(allow_non_fake_inputs=True)
    # It is asked for what the memory does not know, nearly always for the first time: torch's own takes as long to note
    # a call as to answer it.
    known.mode.cache_enabled = False
    return known.mode


def _way_of(operator: Any) -> tuple[str, str, str]:
    """Return how `fake_tensors` answers an operator, its name, and that without the overload.

    It is `remembered`, a `range`, chooses `places`, or has a `special` way of its own.
    """
    name = operator.name()
    base = name.split(".")[0]
    if operator.namespace == "profiler":
        return "range", name, base
    if name in PLACES:
        return "places", name, base
    is_special = name in _READERS or name in _SPECIAL or base in ASSUMED
    return "special" if is_special else "remembered", name, base


def _without_kernel(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what is known of a result without asking the operator; NotImplemented for any other operator."""
    from torch._subclasses.fake_tensor import FakeTensor

    if name == "_c10d_functional::wait_tensor" and isinstance(args[0], FakeTensor):
        return args[0]  # torch's own would take new memory, where the real one returns what it is given
    if name in _READERS and any(isinstance(arg, FakeTensor) for arg in args):
        return _value(name, args[0].dtype)
    return assumed_size_of(operator, args, kwargs) if args and isinstance(args[0], FakeTensor) else NotImplemented


def _value(name: str, dtype: Any) -> Any:
    """Return what is read from a tensor without values.

    Tensors are equal. Floating-point numbers are losses, norms and counts: one. Numbers of items and truths are none
    and false, so that nothing that code looks for is found.
    """
    if name == "aten::equal":
        return True
    return 1.0 if dtype.is_floating_point else 0 if str(dtype) != "torch.bool" else False


def _grouped_product(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Return what a grouped matrix product makes of fake tensors, in any dtype that it is computed in.

    torch's own answer (torch 2.11-2.15) knows bfloat16 alone, where its kernels, on CPU and on CUDA, take float32 and
    float16 too. Rows of the result begin at multiples of 16 bytes, as the kernels make them.

    Args:
        mat_a: `[M, K]`, whose rows or columns are in groups; or `[G, M, K]`.
        mat_b: `[G, K, N]`, or `[K, N]`, whose rows or columns are in groups.
        offs: `[G]`, where each group ends.
        bias: None: no kernel takes one.
        out_dtype: None, or the one of the operands: no kernel makes another.

    Raises:
        RuntimeError: Where the kernels refuse: another dtype, or rows that begin elsewhere.
    """
    import torch

    for name, matrix in (("mat_a", mat_a), ("mat_b", mat_b)):
        if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise RuntimeError(f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {matrix.dtype}")
        if max(matrix.stride()[-2:]) * matrix.element_size() % 16:
            raise RuntimeError("strides should be multiple of 16 bytes")
    size: tuple[int, ...] = (mat_a.shape[-2], mat_b.shape[-1])
    if mat_a.dim() == mat_b.dim():
        size = (mat_a.shape[0] if mat_a.dim() == 3 else offs.shape[0], *size)
    step = 16 // mat_a.element_size()
    row = -(-size[-1] // step) * step
    return mat_a.new_empty_strided(size, (size[-2] * row, row, 1)[-len(size) :])


def with_values() -> Any:
    """Return a context in which tensors have values again, within `fake_tensors`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def active_fake_mode() -> Any:
    """Return the fake mode that is on, or None; see `fake_tensors`.

    Asked in every step: where no mode is on at all, torch's own search, in 5 microseconds, is left out.
    """
    import torch

    if not torch._C._len_torch_dispatch_stack() and torch._guards.TracingContext.try_get() is None:
        return None
    return torch._guards.detect_fake_mode()


def value_errors() -> tuple[type[Exception], ...]:
    """Return the errors of operators whose results values decide, on fake tensors; `func` is the operator."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def is_in_place(operator: Any) -> bool:
    """Return whether an operator writes to what it is given, as its schema says; schemas have no public home."""
    return bool(operator._schema.is_mutable)


def is_view(operator: Any) -> bool:
    """Return whether an operator only makes views of what it is given, in place too; operators have no public home."""
    import torch

    named = operator.name() in ("aten::_unsafe_view", "aten::detach", "aten::alias")
    return bool(operator.is_view) or torch.Tag.inplace_view in operator.tags or named


@contextlib.contextmanager
def watch_storages(resized: Callable[[Any], None], paused: Callable[[bool], None]) -> Iterator[None]:
    """Note storages whose size is changed by hand, and of the times in which DTensor computes with global shapes.

    FSDP2 frees and fills parameters by `UntypedStorage.resize_`, which passes no operator; DTensor's propagator runs
    operators at the global shape to know the result's form, which is private (torch 2.11-2.15).
    """
    import torch
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    storages: Any = torch.UntypedStorage
    name = "_propagate_tensor_meta_non_cached"
    resize, propagate = storages.resize_, getattr(propagator, name)

    def told(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        paused(True)
        try:
            return propagate(self, *args, **kwargs)
        finally:
            paused(False)

    storages.resize_ = told
    setattr(propagator, name, quiet)
    try:
        yield
    finally:
        # It is inherited: what is put over it is taken away again.
        del storages.resize_
        setattr(propagator, name, propagate)


@contextlib.contextmanager
def lone_pipeline(
    preparing: Callable[[bool], None],
    sent: Callable[[int, int, Any], None],
    wanted: Callable[[int, int], Any],
    awaited: Callable[[Any, str, int, int], None],
) -> Iterator[None]:
    """Let a pipeline's stages learn their shapes where the other stages do not exist.

    In its first step torch asks the stage before for the form of what it sends, and the stage behind for the form of
    the gradient, by methods that are private (torch 2.13); in torch 2.11 only the stage before, by lists of objects.
    What a stage sends backward has the form of what it was sent.

    Args:
        preparing: Called with True as the first step begins to learn shapes, and with False after.
        sent: Called with (stage, to, description of the stage's outputs).
        wanted: Called with (stage, from); returns such a description.
        awaited: Called with (tensor, "forward" or "backward", stage, micro-batch) before it is received or sent.
    """
    from torch.distributed.pipelining import schedules

    running: Any = schedules
    issue = running._batch_p2p

    def batch(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = issue(operations, *args, **kwargs)
        return [_Held(work, [operation.tensor for operation in operations]) for work in works]

    replaced = _heard(sent, wanted) | _prepared(preparing) | _asked(awaited)
    replaced[running, "_batch_p2p"] = batch
    originals = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), function in replaced.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def _heard(sent: Callable[[int, int, Any], None], wanted: Callable[[int, int], Any]) -> dict[tuple[Any, str], Any]:
    """Return, by owner and name, what is called in place of what exchanges descriptions."""
    from torch.distributed.pipelining import stage as stages

    module: Any = stages
    if not hasattr(stages.PipelineStage, "_recv_meta"):
        return _heard_forward(stages.PipelineStage, sent, wanted)
    cls: Any = described_stage()

    def receive(self: Any, source: int) -> Any:
        if source < self.stage_index:
            return wanted(self.stage_index, source)
        return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(self._stage_meta.outputs))

    def send(self: Any, meta: Any, target: int) -> None:
        if target > self.stage_index:
            sent(self.stage_index, target, meta)

    return {(cls, "_recv_meta"): receive, (cls, "_send_meta"): send}


def _asked(awaited: Callable[[Any, str, int, int], None]) -> dict[tuple[Any, str], Any]:
    """Return, by owner and name, what is called in place of what asks for the messages of an action."""
    from torch.distributed.pipelining import stage as stages

    def telling(ask: Any, kind: str) -> Any:
        def operations(self: Any, microbatch: int) -> Any:
            found = ask(self, microbatch)
            for operation in found:
                awaited(operation.tensor, kind, self.stage_index, microbatch)
            return found

        return operations

    names = (("get_fwd_recv_ops", "get_fwd_send_ops"), ("get_bwd_recv_ops", "get_bwd_send_ops"))
    kinds = {name: kind for kind, those in zip(("forward", "backward"), names, strict=True) for name in those}
    owner = next(cls for cls in stages.PipelineStage.__mro__ if kinds.keys() <= vars(cls).keys())
    return {(owner, name): telling(vars(owner)[name], kind) for name, kind in kinds.items()}


def _heard_forward(
    cls: Any, sent: Callable[[int, int, Any], None], wanted: Callable[[int, int], Any]
) -> dict[tuple[Any, str], Any]:
    """Do it for torch 2.11, where only a forward describes, by meta tensors in lists of objects."""
    import torch
    import torch.distributed as dist

    infer, module = cls._shape_inference, cast(Any, dist)

    def shape_inference(self: Any, *args: Any, **kwargs: Any) -> Any:
        def receive(objects: list[Any], *args: Any, **kwargs: Any) -> None:
            objects[0] = wanted(self.stage_index, self.stage_index - 1)

        def send(objects: list[Any], *args: Any, **kwargs: Any) -> None:
            # A fake tensor lives in its mode, and who is told of it has another one.
            with with_values():
                forms = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in objects[0]]
            sent(self.stage_index, self.stage_index + 1, tuple(forms))

        originals = module.recv_object_list, module.send_object_list
        module.recv_object_list, module.send_object_list = receive, send
        try:
            return infer(self, *args, **kwargs)
        finally:
            module.recv_object_list, module.send_object_list = originals

    return {(cls, "_shape_inference"): shape_inference}


def _prepared(preparing: Callable[[bool], None]) -> dict[tuple[Any, str], Any]:
    """Return, by owner and name, what is called in place of what a first step begins with.

    One method of all schedules in torch 2.13; in torch 2.11 one of those of a single stage, and one of the others.
    """
    from torch.distributed.pipelining import schedules

    module: Any = schedules
    common = (module._PipelineSchedule, "_initialize_pp_stages")
    single, several = module.PipelineScheduleSingle, module.PipelineScheduleMulti
    # torch 2.13 has all three, and the others call the common one.
    is_common = common[1] in vars(common[0])
    places = (common,) if is_common else ((single, "_initialize_stage"), (several, "_initialize_stages"))

    def telling(begin: Any) -> Any:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            preparing(True)
            try:
                return begin(*args, **kwargs)
            finally:
                preparing(False)

        return initialize

    return {(owner, name): telling(getattr(owner, name)) for owner, name in places}


class _Held:
    """A message under way; it keeps its tensor until it is waited for, as those of real backends do."""

    def __init__(self, work: Any, tensors: list[Any]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self, *args: Any) -> Any:
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
