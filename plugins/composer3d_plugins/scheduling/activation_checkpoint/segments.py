"""Segments: several blocks recomputed as one, of which only the inputs of the first are kept."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import Units, torch_compat
from composer3d_plugins.scheduling.activation_checkpoint.buffer_updates import Found, versions

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["split_into_runs", "wrap"]


def split_into_runs(fqns: Sequence[str]) -> list[list[str]]:
    """Divide n blocks into about sqrt(n) runs of about sqrt(n)."""
    num_runs = math.ceil(len(fqns) / max(round(math.sqrt(len(fqns))), 1)) if fqns else 0
    bounds = [len(fqns) * index // num_runs for index in range(num_runs + 1)] if num_runs else [0]
    return [list(fqns[start:end]) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclass(kw_only=True, eq=False)
class Call:
    """One block's part of a run."""

    block: nn.Module
    forward: Callable[..., Any]
    arguments: Any
    found: Found
    random: list[Any]
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    num_saved: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """Placeholder for an argument: the tensor with this number among the previous block's outputs."""

    index: int


@dataclass(kw_only=True, eq=False)
class Frame:
    """One forward of one run, and, once its backward has begun, the tensors it would have saved.

    Attributes:
        calls: Of the blocks, in order.
        units: Modules whose parameters are gathered only when their own backward begins.
        returned: The tensors that the last of them returned, until the next one has begun, and their versions.
        saved: By call and number.
    """

    units: Units
    calls: list[Call] = field(default_factory=list)
    returned: list[tuple[Tensor, int]] = field(default_factory=list)
    saved: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def take(self, call: int, number: int) -> Tensor:
        """Return a saved tensor and drop it, recomputing the run if it is not there yet."""
        if (call, number) not in self.saved:
            self._recompute()
        return self.saved.pop((call, number))

    def _recompute(self) -> None:
        import torch

        self.saved.clear()
        before: list[Tensor] = []
        for index, call in enumerate(self.calls):
            for module in call.block.modules():
                if module in self.units.by_module:
                    self.units.by_module[module].gather()
            numbers = iter(range(1 << 30))

            def keep(tensor: Tensor, index: int = index, numbers: Any = numbers) -> None:
                self.saved[index, next(numbers)] = tensor.detach()

            args, kwargs = torch_compat.tree_map(functools.partial(_argument, before), call.arguments)
            with contextlib.ExitStack() as stack:
                stack.enter_context(call.found.restored())
                stack.enter_context(torch.enable_grad())
                stack.enter_context(call.autocast())
                stack.enter_context(_drawing(call.random))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, _never))
                before = _tensors(call.forward(*args, **kwargs))


def wrap(blocks: Mapping[str, nn.Module], *, units: Units, preserve_rng_state: bool) -> None:
    """Replace the forwards of a run of blocks, which are called one after the other.

    Arguments that the previous block returned are not kept but recomputed, unless code in between changed them in
    place; all others are kept.

    Args:
        blocks: By FQN, in the order of their calls.
        units: Of data-parallel plugins, once these are applied.
        preserve_rng_state: Recompute with the random numbers of the forward.
    """
    frames: list[Frame] = []
    fqns = list(blocks)
    for fqn, block in blocks.items():
        module: Any = block
        ends = fqn == fqns[0], fqn == fqns[-1]
        first = functools.partial(Frame, units=units)
        module.forward = _wrapped(fqn, block, frames, first=first, ends=ends, random=preserve_rng_state)


def _wrapped(
    fqn: str,
    block: nn.Module,
    frames: list[Frame],
    *,
    first: Callable[[], Frame],
    ends: tuple[bool, bool],
    random: bool,
) -> Callable[..., Any]:
    import torch

    forward = block.forward
    is_first, is_last = ends

    @functools.wraps(forward)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if is_first or not frames:
            frames[:] = [first()]
        frame = frames[0]
        known, frame.returned = frame.returned, []
        arguments = torch_compat.tree_map(functools.partial(_kept, known), (args, kwargs))
        call = Call(
            block=block,
            forward=forward,
            arguments=arguments,
            found=Found(fqn=fqn, block=block, arguments=arguments),
            random=_random_states(args, kwargs) if random else [],
            autocast=_autocast(args, kwargs),
        )
        frame.calls.append(call)
        index = len(frame.calls) - 1

        def pack(tensor: Tensor) -> int:
            call.num_saved += 1
            return call.num_saved - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, functools.partial(frame.take, index)):
            with call.found.recording():
                result = forward(*args, **kwargs)
        if is_last:  # from here on the graph keeps it
            frames.clear()
        else:
            frame.returned = versions(result)
        return result

    return segmented


def _kept(known: list[tuple[Tensor, int]], value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    for index, (tensor, version) in enumerate(known):
        if value.requires_grad and _is_same(value, tensor) and tensor._version == version:
            return Before(index=index)
    return value.detach().requires_grad_(value.requires_grad)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory seen alike: FSDP2 passes a block's inputs on as views."""
    if one is other:
        return True
    one, other = torch_compat.held_tensor(one), torch_compat.held_tensor(other)
    return (
        torch_compat.storage_key(one) == torch_compat.storage_key(other)
        and (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
        and one.dtype is other.dtype
    )


def _argument(before: list[Tensor], value: Any) -> Any:
    return before[value.index].detach().requires_grad_() if isinstance(value, Before) else value


def _never(_: Any) -> Tensor:
    raise AssertionError("what is recomputed has no backward of its own")


def _tensors(value: Any) -> list[Tensor]:
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _device(*trees: Any) -> Any:
    return next((leaf.device for leaf in _tensors(trees)), None)


def _random_states(*trees: Any) -> list[Any]:
    import torch

    device = _device(*trees)
    is_cuda = device is not None and device.type == "cuda"
    return [torch.get_rng_state(), *([(device, torch.cuda.get_rng_state(device))] if is_cuda else [])]


@contextlib.contextmanager
def _drawing(states: list[Any]) -> Any:
    import torch

    with torch.random.fork_rng(devices=[device for device, _ in states[1:]], enabled=bool(states)):
        if states:
            torch.set_rng_state(states[0])
        for device, state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield


def _autocast(*trees: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    import torch

    device = _device(*trees)
    kind = "cpu" if device is None else device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype)
