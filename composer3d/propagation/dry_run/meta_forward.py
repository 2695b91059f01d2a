"""Forwards of modules on meta, where code sees shapes and no values, or with values where it looks at some."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.errors import TransformError
from composer3d.initialisation.reachable import reachable_tensors
from composer3d.propagation.dry_run.attribute_state import KeptState
from composer3d.propagation.dry_run.held_objects import reached_from, tensors_of
from composer3d.propagation.dry_run.outside_state import OutsideState
from composer3d.propagation.module_calls import SMALL, Call
from composer3d.propagation.shards import KeptShardError, PropagationError, ShardSpec, copy_mark, spec_of, specs_in
from composer3d.torch_compat.compilers import nothing_compiles

if TYPE_CHECKING:
    from torch.nn.modules.module import Module

__all__ = ["VALUES", "Note", "device_of", "in_mode", "on_meta", "patched", "unseen"]

# Called after each torch function with the function, its arguments by place and by name, and its result.
Note = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
VALUES = "it does what depends on values, of which a rank has a share"


@contextlib.contextmanager
def patched(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forwards of modules inside."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextlib.contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a module's training mode inside; in evaluation it draws no random numbers."""
    modes = {inner: inner.training for inner in module.modules()}
    try:
        for inner in modes:
            inner.training = training
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


class _Noted(TorchFunctionMode):
    """Has each torch function noted."""

    def __init__(self, notes: Sequence[Note]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        result = func(*args, **(kwargs or {}))
        for note in self._notes:
            note(func, args, kwargs or {}, result)
        return result


def on_meta(
    module: nn.Module,
    call: Call,
    *,
    seen: Callable[[Mapping[str, Tensor]], None] | None = None,
    notes: Sequence[Note] = (),
) -> Any:
    """Run a module with all its tensors on meta, gradients as in training; what it holds is left as it is.

    A call that has values runs with values, of which those on meta take no memory: each is one number. What torch keeps
    from its compiler is called without it: results are looked at, and the compiler's import takes longer than them.

    Args:
        module: Any module; its tensors are replaced inside alone.
        call: Its arguments.
        seen: Called with the tensors that stand for its own, by their names.
        notes: Called after each torch function, those that make these tensors included.
    """
    with nothing_compiles(), _Noted(notes) if notes else contextlib.nullcontext():
        return _run(module, call, seen)


def _run(module: nn.Module, call: Call, seen: Callable[[Mapping[str, Tensor]], None] | None) -> Any:
    device = device_of(module) if call.has_values else torch.device("meta")
    tensors = {
        name: _valued(tensor, device) if call.has_values else torch.empty_like(tensor, device="meta")
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        torch_compat.with_attributes_of(tensor, tensors[name]).requires_grad_(tensor.requires_grad)
    if seen is not None:
        seen(tensors)
    # What the code makes without a device is on meta too; what it draws is not taken from the run's numbers.
    drawing = torch.random.fork_rng() if call.has_values else contextlib.nullcontext()
    flexible = torch_compat.taken_flex_calls(_flex_on_meta)
    kept, outside = KeptState([module], buffers=False), OutsideState(module.modules()).now()
    try:
        with torch.enable_grad(), device, drawing, flexible, _replaced_tensors(module, tensors):
            random.seed(call.seed)
            np.random.seed(call.seed)
            if call.has_values:
                torch.manual_seed(call.seed)
            before, given = _kept_shards(module, call.kept), _held_in(call)
            output = module(*call.args, **call.kwargs)
            for path, (tensor, spec) in _kept_shards(module, call.kept).items():
                if not any(tensor is other for other, _ in before.values()):
                    raise KeptShardError(f'code outside of it uses what it keeps as "{path}"', sources=spec.sources)
            if call.leaves and specs_in(call.args, dict(call.kwargs)):
                _refuse_left(module, call, given)
            return output
    finally:
        kept.restore()
        outside()


def _kept_shards(module: nn.Module, shapes: Collection[tuple[int, ...]]) -> dict[str, tuple[Tensor, ShardSpec]]:
    """Return the sharded tensors that a module keeps, of these whole shapes, by the way in which they are reached."""
    return {
        reached.path: (reached.tensor, spec)
        for reached in (reachable_tensors(module) if shapes else ())
        if (spec := spec_of(reached.tensor)) is not None and tuple(spec.shadow.shape) in shapes
    }


def _held_in(call: Call) -> list[Tensor]:
    """Return the tensors in containers and objects that a call passes."""
    return [each for _, _, value in reached_from(_passed(call)) for each in tensors_of(value)] if call.leaves else []


def _passed(call: Call) -> list[Any]:
    return [each for each in [*call.args, *call.kwargs.values()] if not isinstance(each, Tensor)]


def _refuse_left(module: nn.Module, call: Call, given: Sequence[Tensor]) -> None:
    """Refuse shards of a sequence that a module leaves where a loss, or a loop, takes them for whole sequences."""
    with torch_compat.without_torch_functions():
        for owner, name, value in reached_from((module, _passed(call))):
            for each in tensors_of(value):
                spec = spec_of(each)
                if spec is not None and spec.is_sequence and not any(each is x for x in given):
                    who = type(owner).__name__ if isinstance(owner, nn.Module) else type(module).__name__
                    what = f'as "{name}"' if name else "in what it is given"
                    raise KeptShardError(
                        f"a loss can read what {who} keeps {what}, which is sharded along the sequence",
                        sources=spec.sources,
                    )


def _flex_on_meta(call: torch_compat.FlexCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the form of FlexAttention's results, which torch has for no tensors on meta."""
    if not call.query.is_meta:
        return call.whole()
    shape = [*call.query.shape[:-1], call.value.shape[-1]]
    output = call.query.new_zeros(shape, requires_grad=True).clone()
    return output, output.new_zeros(shape[:-1]), output.new_zeros(shape[:-1])


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's runs with values."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _valued(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's values, which the code may write to; one number for all where there are none."""
    if tensor.is_meta:
        return torch.full((), SMALL, device=device).to(tensor.dtype).expand(tensor.shape)
    return tensor.detach().clone() if not isinstance(tensor, nn.Parameter) else tensor.detach()


@contextlib.contextmanager
def _replaced_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace a module's tensors inside, under every name that it has for them.

    `torch.func.functional_call` leaves them there where one module has several names, as an embedding of encoder and
    decoder does: it saves what stands under each name, and under the second that is the replacement already.
    """
    others = {id(tensor): tensors[name] for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    held: list[Any] = [each for inner in module.modules() for each in (inner._parameters, inner._buffers)]
    before = [dict(each) for each in held]
    try:
        for each in held:
            each.update({name: others[id(tensor)] for name, tensor in each.items() if tensor is not None})
        yield
    finally:
        for each, own in zip(held, before, strict=True):
            each.update(own)


def unseen(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for a run on meta of a module that may look at values, as experts do that pick their tokens.

    There are none on meta. What it gives is then taken to be of the form of the activation that it was given: if it is
    not, the module around it fails in the same way, and is answered for by this as well.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            given = [leaf for leaf in [*args, *kwargs.values()] if isinstance(leaf, Tensor)]
            first = next((leaf for leaf in given if leaf.is_floating_point() and leaf.ndim > 1), None)
            if isinstance(error, TransformError) or first is None or not _is_about_values(error):
                raise
            with torch_compat.without_torch_functions():
                spec = next((spec for leaf in given if (spec := spec_of(leaf)) is not None), None)
                if spec is not None:
                    raise PropagationError(VALUES, sources=spec.sources) from error
                # A sequence that is sharded stays so, as its positions are those of the activation.
                return copy_mark(first, torch.empty_like(first, requires_grad=True).clone())

    return answer


def _is_about_values(error: RuntimeError) -> bool:
    # The last is said of grouped matrix products on meta alone.
    words = ("meta tensor", "Expected inputs of BF16")
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in words)
