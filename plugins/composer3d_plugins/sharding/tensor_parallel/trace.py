"""Running a model on meta: no memory and no arithmetic, only shapes, to see what its code does with its projections.

The model's own forward runs once on an example; blocks of equal form run once between them. Each distinct block is then
run again by itself, with its linear layers answering as they would under a plan.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composer3d import PluginError, RunContext, TransformError, select_fqns, torch_compat
from composer3d_plugins.sharding.tensor_parallel.functions import SIZES, name_of
from composer3d_plugins.sharding.tensor_parallel.records import Record
from composer3d_plugins.sharding.tensor_parallel.weights import kind_of

if TYPE_CHECKING:
    from torch.nn.modules.module import Module

__all__ = [
    "Call",
    "Recorder",
    "Traced",
    "activation_of",
    "in_training",
    "on_meta",
    "outside",
    "patched",
    "replaced",
    "trace",
]

# Image sizes that are tried where nothing tells one.
IMAGE_SIZES = (224, 32, 28, 64, 16, 96, 48, 384)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> Call:
        """Return the same tensors in containers of their own: a module may change what it is given, such as a cache."""
        tensors = [
            leaf for leaf in torch_compat.tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)
        ]
        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)), {id(tensor): tensor for tensor in tensors})
        except Exception:  # an object of the model's own may refuse, for any reason
            return self
        return Call(args=args, kwargs=kwargs)


def activation_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the place of the activation that a block takes, its first floating-point argument of three dims."""
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in everything:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return key
    return None


def replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], key: int | str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which the one at `key` is changed."""
    if isinstance(key, int):
        return (*args[:key], change(args[key]), *args[key + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, key: change(kwargs[key])}


@dataclass(kw_only=True)
class Traced:
    """What one forward of the whole model showed.

    Attributes:
        forms: The first block of each form, and all that have it; the root alone where there are no blocks.
        calls: How those first blocks were called.
        output: What the model returned.
        results: What each linear layer and embedding outside blocks returned last.
        order: The blocks as they were called.
        between: What the model's own code does with activations between blocks, if it does not just hand them on.
        call: How the model was called.
        outputs: What the first blocks returned.
    """

    forms: dict[str, list[str]]
    call: Call
    calls: dict[str, Call] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    results: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    between: str | None = None


class Recorder(TorchFunctionMode):
    """Notes each torch function, but while something else does.

    Args:
        record: Takes them.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self.is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._record.note(func, args, dict(kwargs or {}), result)
        return result


class Handing(TorchFunctionMode):
    """Sees whether the model hands each block's activation on to the next block, and does nothing else with it.

    Attributes:
        between: The first thing that it does with it otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between: str | None = None
        self._depth = 0
        self._given: list[Tensor] = []
        # What was done with the last block's activation: if another block follows, it was not the last.
        self._touched: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        if not self._depth and self._given:
            leaves = torch_compat.tree_leaves([list(args), dict(kwargs or {})])
            if any(leaf is given for leaf in leaves for given in self._given):
                result, name = func(*args, **(kwargs or {})), name_of(func)
                if name in SIZES or any(isinstance(leaf, Tensor) for leaf in torch_compat.tree_leaves(result)):
                    self._touched = self._touched or name
                return result
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def inside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Enter a block with its arguments."""
        if self._given and not self._depth:
            with torch_compat.without_torch_functions():
                key = activation_of(args, kwargs)
            value = args[key] if isinstance(key, int) else kwargs.get(key or "")
            if not any(value is given for given in self._given):
                self.between = self.between or self._touched or "something else than the block before it returned"
            elif self._touched is not None:
                self.between = self.between or self._touched
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def given(self, output: Any) -> Any:
        """Return what a block returned as tensors of their own."""
        if self._depth:
            return output
        with torch_compat.without_torch_functions():
            result = torch_compat.tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) else x, output)
        self._given = [leaf for leaf in torch_compat.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._touched = None
        return result


def forms_of(model: nn.Module, context: RunContext) -> dict[str, list[str]]:
    """Group the blocks by the names and shapes of their parameters."""
    try:
        blocks = select_fqns(context.blocks, context.fqns)
    except TransformError:
        return {"": [""]}
    groups: dict[Any, list[str]] = {}
    for fqn in blocks:
        block = model.get_submodule(fqn)
        form = (type(block), tuple((name, tuple(p.shape)) for name, p in block.named_parameters()))
        groups.setdefault(form, []).append(fqn)
    return {group[0]: group for group in groups.values()}


@contextlib.contextmanager
def patched(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards inside."""
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
def in_training(module: nn.Module) -> Iterator[None]:
    """Have a module behave as in training inside: what it draws at random, it draws only then."""
    modes = {inner: inner.training for inner in module.modules()}
    try:
        for inner in modes:
            inner.training = True
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


def on_meta(module: nn.Module, call: Call) -> Any:
    """Run a module with all its tensors on meta, gradients as in training; what it holds is left as it is."""
    tensors = {
        name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    # What the code makes without a device is on meta too.
    with torch.enable_grad(), torch.device("meta"):
        return torch.func.functional_call(module, tensors, call.args, dict(call.kwargs))


def trace(model: nn.Module, context: RunContext, *, scale: int = 1) -> Traced:
    """Run the model on an example: the one that `compose` was given, else the first that works.

    Args:
        model: Whole.
        context: The run.
        scale: How many times as long an example is as it need be, where none was given.

    Raises:
        PluginError: None works; with what the first one met.
    """
    failures: list[str] = []
    for call in _examples(model, context, scale):
        traced, handing = Traced(forms=forms_of(model, context), call=call), Handing()
        try:
            with patched(_watching(model, traced, handing)), handing:
                traced.output = on_meta(model, call)
        except Exception as error:  # a model's own code may raise anything
            failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        if all(fqn in traced.calls for fqn in traced.forms):
            traced.between = handing.between
            return traced
        failures.append("its blocks were not called")
    raise PluginError(
        f"the model could not be run on meta to see what its projections are for ({failures[0]})",
        hint="pass compose(example=(args, kwargs)), or write the plan",
    )


def outside(model: nn.Module, traced: Traced) -> Record:
    """Return what the model's own code does around its blocks, which are called with and give what was traced."""
    record = Record()

    def answered(fqn: str, first: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            record.note(fqn, args, kwargs, traced.outputs[first])
            return traced.outputs[first]

        return answer

    answers = {
        model.get_submodule(fqn): answered(fqn, first) for first, group in traced.forms.items() for fqn in group if fqn
    }
    with patched(answers), Recorder(record):
        on_meta(model, traced.call)
    return record


def _watching(model: nn.Module, traced: Traced, handing: Handing) -> dict[nn.Module, Callable[..., Any]]:
    """Return forwards that note calls; of blocks of one form only the first runs, and the others give its output."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    first_of = {fqn: first for first, group in traced.forms.items() for fqn in group}
    inside = tuple(f"{fqn}." for group in traced.forms.values() for fqn in group if fqn)
    for first, group in traced.forms.items():
        outputs: list[Any] = []
        block = model.get_submodule(first)

        def run(
            *args: Any, forward: Any = block.forward, first: str = first, outputs: Any = outputs, **kwargs: Any
        ) -> Any:
            traced.calls.setdefault(first, Call(args=args, kwargs=kwargs).fresh())
            outputs[:] = [forward(*args, **kwargs)]
            traced.outputs[first] = outputs[0]
            return outputs[0]

        def called(*args: Any, fqn: str, outputs: Any = outputs, run: Any = run, **kwargs: Any) -> Any:
            traced.order.append(fqn)
            with handing.inside(args, kwargs):
                output = outputs[0] if outputs and fqn != first_of[fqn] else run(*args, **kwargs)
            # Each call gives tensors of its own, so that they can be told apart.
            return handing.given(output)

        forwards |= {model.get_submodule(fqn): functools.partial(called, fqn=fqn) for fqn in group}
    for fqn, module in model.named_modules():
        if kind_of(module) != "other" and not fqn.startswith(inside):

            def keep(*args: Any, forward: Any = module.forward, fqn: str = fqn, **kwargs: Any) -> Any:
                result = traced.results[fqn] = forward(*args, **kwargs)
                return result

            forwards[module] = keep
    return forwards


def _examples(model: nn.Module, context: RunContext, scale: int) -> Iterator[Call]:
    """Yield what the model could be called with: tokens, images, vectors."""
    if context.example is not None:
        args, kwargs = torch_compat.tree_map(
            lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf,
            [tuple(context.example[0]), dict(context.example[1])],
        )
        yield Call(args=tuple(args), kwargs=kwargs)
        return
    modules: list[Any] = list(model.modules())
    length, batch = 2 * max(context.degrees["tp"], 2) * scale, 1 + scale
    if any(kind_of(module) == "embedding" for module in modules):
        yield Call(args=(torch.zeros(batch, length, dtype=torch.int64, device="meta"),), kwargs={})
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    first: Any = next((m for m in modules if isinstance(m, nn.Conv2d) or kind_of(m) == "linear"), None)
    if isinstance(first, nn.Conv2d):
        for height, width in _image_sizes(model):
            yield Call(
                args=(torch.empty(batch, first.in_channels, height, width, dtype=dtype, device="meta"),), kwargs={}
            )
    elif first is not None:
        lengths = dict.fromkeys([length, *(m.in_features for m in modules if kind_of(m) == "linear")])
        for size in lengths:
            yield Call(args=(torch.empty(batch, size, first.in_features, dtype=dtype, device="meta"),), kwargs={})
        yield Call(args=(torch.empty(batch, first.in_features, dtype=dtype, device="meta"),), kwargs={})


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in ("image_size", "img_size"):
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    told.append((value, value))
                elif isinstance(value, tuple | list) and len(value) == 2:
                    told.append((int(value[0]), int(value[1])))
    return [*dict.fromkeys(told), *((size, size) for size in IMAGE_SIZES)]
