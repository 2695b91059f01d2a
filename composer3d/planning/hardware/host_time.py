"""Host time of operators: Python, dispatch, autograd, the hooks of sharded units, the placements of DTensors.

Measured on modules that are too small for their kernels to take any time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composer3d import torch_compat
from composer3d.planning.hardware.timed_calls import REPEATS, seconds_of

__all__ = ["launch_seconds", "overhead_seconds"]

# Of what the hooks do, most is for each parameter: units have as many as the blocks of decoders.
_WIDTH, _UNITS, _PARAMETERS = 8, 3, 8
_LEAST, _MOST_CALLS = 1e-6, 30
_MOVED = 2**19  # elements that are copied between blocks: more bytes than a core's own caches hold


def launch_seconds(device: torch.device, budget: float) -> float:
    """Return the time from one operator of a training step to the next where kernels have next to nothing to do.

    Measured on a small decoder, forward and backward: Python's modules, dispatch, autograd and views are in it, spread
    over the operators that the tracer counts. On a CPU memory is moved behind every module, as kernels do: the host
    then fetches its own code and data anew, which is in it, too.

    Args:
        device: Where.
        budget: Seconds for all calls.
    """
    from composer3d.models import llama

    model = llama(dim=16, num_layers=2, num_heads=2, vocab_size=16).to(device)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()

    step()  # from here on gradients are added to
    seconds = seconds_of(device, step, budget / 4)
    if device.type == "cpu":
        seconds += _fetching_s(model, step, budget / 4)
    return seconds / _counted(step)["aten"]


def _fetching_s(model: nn.Module, step: Callable[[], Any], budget: float) -> float:
    """Return what a step takes longer where memory is moved behind every module, without the time of moving it."""
    target, source = torch.zeros(_MOVED), torch.zeros(_MOVED)
    moves, moving = 0, False

    def move() -> None:
        nonlocal moves
        moves += 1
        if moving:
            target.copy_(source)

    def behind(module: nn.Module, args: Any, outputs: Any) -> None:
        move()
        if isinstance(outputs, torch.Tensor) and outputs.requires_grad:
            outputs.register_hook(lambda gradient: move())

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(behind)
    device = torch.device("cpu")
    still = seconds_of(device, step, budget)
    moves = 0
    step()
    number = moves
    moving = True
    moved = seconds_of(device, step, budget)
    alone = seconds_of(device, lambda: [target.copy_(source) for _ in range(number)], budget)
    return max(0.0, moved - alone - still)


def overhead_seconds(device: torch.device, budget: float) -> Iterator[tuple[str, float]]:
    """Yield what the host does besides launches: of `fsdp`, around an operator of its own; of `dtensor`, for one on it.

    It is the processor time that a few blocks of linear layers take longer, in forward and backward, when they are
    sharded, over the number of such operators. Before and behind each block, memory is moved that no near cache holds,
    as a block's kernels do: the host then fetches its own code and data anew. Waiting for other ranks is not in it. On
    a GPU nothing is yielded: what a host does there runs beside the kernels.

    Args:
        device: Where the layers are.
        budget: Seconds for all calls.

    Collectives: those of FSDP2 and of tensor parallelism, of some hundred bytes each, over all ranks.
    """
    if device.type != "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    number = max(REPEATS, min(_MOST_CALLS, int(budget / 3 / 0.05)))
    plain = _processor_s(_step_of(_blocks()), number)

    units = _blocks()
    for unit in units:
        if isinstance(unit, nn.Sequential):
            fully_shard(unit, mesh=mesh)
    fully_shard(units, mesh=mesh)
    step = _step_of(units)
    step()
    yield "fsdp", max((_processor_s(step, number) - plain) / _counted(step)["fsdp"], _LEAST)

    sharded = _blocks()
    for block in sharded:
        for index, layer in enumerate(block if isinstance(block, nn.Sequential) else ()):
            parallelize_module(layer, mesh, RowwiseParallel() if index % 2 else ColwiseParallel())
    step = _step_of(sharded)
    step()
    counted = _counted(step)
    # What the host does for a collective, to issue it and to wait for it, is in the collective's own time.
    values = torch.ones(_WIDTH)
    reductions = counted["_c10d_functional"] / 2 * _processor_s(lambda: dist.all_reduce(values.clone()), 10 * number)
    yield "dtensor", max((_processor_s(step, number) - plain - reductions) / counted["dtensor"], _LEAST)


def _blocks() -> nn.Sequential:
    """Return blocks of linear layers, before and behind each of which memory is moved."""
    width = _WIDTH * dist.get_world_size()

    def block() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_PARAMETERS)))

    return nn.Sequential(_Mover(), *(module for _ in range(_UNITS) for module in (block(), _Mover())))


class _Mover(nn.Module):
    """A module that returns what it is given, and moves memory, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = torch.zeros(_MOVED), torch.zeros(_MOVED)

    def forward(self, values: torch.Tensor) -> Any:
        """Move memory, then and in the backward."""
        return _Moving.apply(values, self._memory)


class _Moving(torch.autograd.Function):
    """Nothing, beside which memory is moved, forward and backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Move memory."""
        context.memory = memory
        memory[0].copy_(memory[1])
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Move it again."""
        context.memory[0].copy_(context.memory[1])
        return gradient, None


def _step_of(blocks: nn.Sequential) -> Callable[[], Any]:
    values = torch.randn(1, _WIDTH * dist.get_world_size(), requires_grad=True)
    return lambda: blocks(values).sum().backward()


def _processor_s(step: Callable[[], Any], number: int) -> float:
    """Return the median of this thread's processor time; all ranks call as often."""
    times = []
    for _ in range(number + 1):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return statistics.median(times[1:])


def _counted(step: Callable[[], Any]) -> Counter[str]:
    """Count operators as the tracer does, by the first part of their names, and those on DTensors."""
    counted: Counter[str] = Counter()

    def handle(operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(torch_compat.is_wrapper_subclass(cls) for cls in types):
            counted["dtensor"] += 1
            return NotImplemented
        counted[operator.namespace] += not torch_compat.is_view(operator)
        return operator(*args, **kwargs)

    with torch_compat.dispatch_mode(handle, compiles=False):
        step()
    return counted
