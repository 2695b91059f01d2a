"""Runs of a model on meta: no memory and no arithmetic, only shapes, to see what its code does with its projections.

The model's own forward runs once on an example; blocks of equal form run once between them. Each distinct block is then
run again by itself, with its linear layers returning what they would under a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.context import RunContext
from composer3d.errors import PluginError
from composer3d.observation.call_sites import line_of
from composer3d.propagation.dry_run.block_flow import Flow
from composer3d.propagation.dry_run.meta_forward import device_of, on_meta, patched, unseen
from composer3d.propagation.dry_run.meta_records import Record
from composer3d.propagation.dry_run.parameter_reads import Reads
from composer3d.propagation.module_calls import Call
from composer3d.propagation.module_kinds import kind_of
from composer3d.torch_compat import forward_hooks

__all__ = ["Traced", "outside", "plain", "trace"]

# Image sizes that are tried where nothing tells one.
IMAGE_SIZES = (224, 32, 28, 64, 16, 96, 48, 384)
# Seeds that are tried where code leaves out blocks at random.
SEEDS = 8


@dataclass(kw_only=True)
class Traced:
    """Observations of one forward of the whole model.

    Attributes:
        forms: The first block of each form, and all that have it; the root alone where there are no blocks.
        calls: How those first blocks were called.
        output: What the model returned.
        results: What each linear layer and embedding outside blocks returned last.
        flow: Where the activations went that blocks returned.
        call: How the model was called.
        outputs: What the first blocks returned.
        read: Modules whose parameters are read by code outside of them; of equal blocks those in the first.
        outer: Modules of blocks that code outside of all blocks calls.
        hooked: Blocks with hooks that the forward itself registers, on them, on modules of them, or inside of them on
            gradients.
        at: The blocks that are called, the innermost last.
    """

    forms: dict[str, list[str]]
    call: Call
    calls: dict[str, Call] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    results: dict[str, Tensor] = field(default_factory=dict)
    flow: Flow = field(default_factory=Flow)
    read: frozenset[str] = frozenset()
    outer: set[nn.Module] = field(default_factory=set)
    hooked: set[str] = field(default_factory=set)
    at: list[str] = field(default_factory=list)


def forms_of(model: nn.Module, blocks: Sequence[str]) -> dict[str, list[str]]:
    """Group the blocks by the names and shapes of their parameters, what is on or off in them, and their hooks."""
    groups: dict[Any, list[str]] = {}
    for fqn in blocks or [""]:
        block = model.get_submodule(fqn)
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        # Switches choose between ways through the code.
        switches = [
            (name, key, value)
            for name, inner in block.named_modules()
            for key, value in vars(inner).items()
            if isinstance(value, bool)
        ]
        form = (type(block), shapes, tuple(switches), forward_hooks.hooks_form(block))
        groups.setdefault(form, []).append(fqn)
    return {group[0]: group for group in groups.values()}


def trace(model: nn.Module, context: RunContext, *, blocks: Sequence[str], scale: int = 1) -> Traced:
    """Run the model on an example: the one that `compose` was given, else the first that works.

    Args:
        model: The whole model.
        blocks: FQNs of the repeated blocks; none takes the model as one.
        scale: How many times as long an example is as it need be, where none was given.

    Raises:
        PluginError: None works; with what the first one met.
    """
    failures: list[str] = []
    is_given = context.example is not None
    for call in _with_values(_examples(model, context, scale), model, failures, context):
        try:
            traced, reads = _traced(model, blocks, call)
            # Blocks may be left out at random: then other numbers leave out others.
            for seed in range(1, SEEDS):
                if set(blocks) <= set(traced.flow.calls):
                    break
                others, again = _traced(model, blocks, replace(call.fresh(), seed=seed))
                if set(others.flow.calls) == set(traced.flow.calls):
                    break
                if len(set(others.flow.calls)) > len(set(traced.flow.calls)):
                    traced, reads = others, again
        except Exception as error:  # a model's own code may raise anything
            place = line_of(error)
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            failures.append(f"{text}, at {place}" if place else text)
            continue
        # A list may hold blocks that this model does not use.
        traced.forms = {first: group for first, group in traced.forms.items() if first in traced.calls}
        if traced.forms:
            traced.flow.end(plain(traced.output))
            traced.read = frozenset(reads.owners)
            traced.calls = {
                first: replace(
                    _on_meta_if_possible(model.get_submodule(first), block),
                    kept=traced.flow.kept_of(group),
                    leaves=traced.flow.leaves,
                )
                for first, block in traced.calls.items()
                for group in [traced.forms[first]]
            }
            return traced
        failures.append("its blocks were not called")
    if type(model).forward is nn.Module.forward:
        raise PluginError(
            f"{type(model).__name__} has no forward of its own, in which it would be seen how tensors go through it",
            hint="write one that calls its modules as the loop does, which may go on to call them one by one, or write "
            "the plan where the plugin has one",
        )
    with_values = f"; with the example's values: {failures[-1]}" if is_given and failures[-1] != failures[0] else ""
    example = "" if is_given else "pass compose(example=(args, kwargs)), which it can be run on, or "
    raise PluginError(
        f"the model could not be run on meta to see how tensors go through it ({failures[0]}{with_values})",
        hint=f"{example}write the plan where the plugin has one",
    )


def _traced(model: nn.Module, blocks: Sequence[str], call: Call) -> tuple[Traced, Reads]:
    """Run the model once."""
    traced, reads = Traced(forms=forms_of(model, blocks), call=call), Reads(model)
    forwards = {module: reads.around(module, each) for module, each in _watching(model, traced).items()}
    forward = forwards.get(model, model.forward)

    def searched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        traced.flow.look_at_left(model)
        return output

    with patched({**forwards, model: searched}), _registrations(traced):
        traced.output = on_meta(model, call, seen=reads.watch, notes=[reads.note, traced.flow.note])
    return traced, reads


def _with_values(
    calls: Iterator[Call], model: nn.Module, failures: Sequence[str], context: RunContext
) -> Iterator[Call]:
    """Yield each call, and again with values if code looked at some, which nothing on meta has.

    What failed of an example that was given may have, by what stood for a module's result on meta, for any reason. Its
    own values, such as lengths of which none may be 0, are tried last: those of other ranks may be others.
    """
    for call in calls:
        yield call
        if context.example is not None or "meta" in failures[-1] or failures[-1].startswith("NotImplementedError"):
            yield call.with_values(device_of(model))
    if context.example is not None:
        args, kwargs = context.example
        yield Call(args=tuple(args), kwargs=dict(kwargs)).with_values(device_of(model))


def _on_meta_if_possible(block: nn.Module, call: Call) -> Call:
    """Return a call without values, unless the block's own code looks at them."""
    if not call.has_values:
        return call
    without = call.without_values()
    try:
        with patched({module: unseen(module.forward) for name, module in block.named_modules() if name}):
            on_meta(block, without.fresh())
    except Exception:  # a model's own code may raise anything
        return call
    return without


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
    with patched(answers):
        on_meta(model, traced.call, notes=[record.note])
    return record


def plain(output: Any) -> Any:
    """Return what a dictionary-like or dataclass output holds."""
    if isinstance(output, Tensor | tuple | list | dict):
        return output
    return list(vars(output).values()) if hasattr(output, "__dict__") else output


def _watching(model: nn.Module, traced: Traced) -> dict[nn.Module, Callable[..., Any]]:
    """Return forwards that note calls; of blocks of one form only the first runs, and the others give its output."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    firsts = {fqn: first for first, group in traced.forms.items() for fqn in group}
    inside = tuple(f"{fqn}." for group in traced.forms.values() for fqn in group if fqn)
    within = {module: fqn for fqn in firsts if fqn for module in model.get_submodule(fqn).modules()}
    num_hooks = forward_hooks.num_registered()

    def look_at(module: nn.Module, fqns: Iterable[str]) -> None:
        """Note blocks that have hooks by now which they had not before."""
        if forward_hooks.num_registered() != num_hooks:
            found = forward_hooks.users_hooks(*forward_hooks.tables_of(module.modules()))
            if any(key >= num_hooks for _, key, _ in found):
                traced.hooked.update(fqns)

    for first, group in traced.forms.items():
        outputs: list[Any] = []
        block = model.get_submodule(first)

        def run(
            *args: Any, forward: Any = block.forward, first: str = first, outputs: Any = outputs, **kwargs: Any
        ) -> Any:
            call = Call(args=args, kwargs=kwargs, has_values=traced.call.has_values)
            traced.calls.setdefault(first, call.fresh())
            outputs[:] = [forward(*args, **kwargs)]
            traced.outputs[first] = outputs[0]
            return outputs[0]

        def called(*args: Any, fqn: str, outputs: Any = outputs, run: Any = run, **kwargs: Any) -> Any:
            look_at(model.get_submodule(fqn), [fqn])
            traced.at.append(fqn)
            try:
                with traced.flow.inside(fqn, args, kwargs):
                    output = outputs[0] if outputs and fqn != firsts[fqn] else run(*args, **kwargs)
                    return traced.flow.given(output) if fqn else output
            finally:
                traced.at.pop()

        forwards |= {model.get_submodule(fqn): functools.partial(called, fqn=fqn) for fqn in group}
    noted = dict(forwards)  # a block may be such a module itself, as a bare layer
    for fqn, module in model.named_modules():
        if fqn and module not in forwards:
            forwards[module] = module.forward if traced.call.has_values else unseen(module.forward)
            if module in within:
                look = functools.partial(look_at, module, traced.forms[firsts[within[module]]])
                forwards[module] = _placed(module, forwards[module], traced, look)
        if kind_of(module) != "other" and not fqn.startswith(inside):
            own = noted.get(module, module.forward)

            def keep(*args: Any, forward: Any = own, fqn: str = fqn, **kwargs: Any) -> Any:
                result = traced.results[fqn] = forward(*args, **kwargs)
                return result

            forwards[module] = keep
    return forwards


def _registrations(traced: Traced) -> torch_compat.backward_hooks.WatchedRegistrations:
    """Return the context that notes what blocks register on gradients."""

    def note() -> None:
        if traced.at:
            traced.hooked.update(next(group for group in traced.forms.values() if traced.at[-1] in group))

    def hooked(hook: Any) -> Any:
        if torch_compat.backward_hooks.is_users(hook):
            note()
        return hook

    return torch_compat.backward_hooks.WatchedRegistrations(lambda _, hook: hooked(hook), lambda _: note(), hooked)


def _placed(
    module: nn.Module, forward: Callable[..., Any], traced: Traced, look: Callable[[], None]
) -> Callable[..., Any]:
    """Return the forward of a module of a block that records calls from outside of all blocks, and looks at hooks."""

    def placed(*args: Any, **kwargs: Any) -> Any:
        look()
        if not traced.flow.is_inside:
            traced.outer.add(module)
        return forward(*args, **kwargs)

    return placed


def _examples(model: nn.Module, context: RunContext, scale: int) -> Iterator[Call]:
    """Yield what the model could be called with: tokens, images, vectors."""
    if context.example is not None:
        args, kwargs = torch_compat.tree_map(
            lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf,
            [tuple(context.example[0]), dict(context.example[1])],
        )
        yield Call(args=tuple(args), kwargs=kwargs)
        # Options may have the code look at values, as transformers' `use_cache = False` does at positions.
        yield Call(args=tuple(args), kwargs={name: x for name, x in kwargs.items() if isinstance(x, Tensor)})
        return
    modules: list[Any] = list(model.modules())
    length, batch = 2 * max(context.degrees["tp"], 2) * scale, 1 + scale
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    first: Any = next((m for m in modules if isinstance(m, nn.Conv2d) or kind_of(m) == "linear"), None)
    tokens = Call(args=(torch.zeros(batch, length, dtype=torch.int64, device="meta"),), kwargs={})
    if first is None or any(kind_of(module) == "embedding" for module in modules):
        yield tokens
        if scale > 1:  # a model may have a limit
            yield Call(args=(torch.zeros(batch, length // 2, dtype=torch.int64, device="meta"),), kwargs={})
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
    if first is None:
        for size in dict.fromkeys(size for p in model.parameters() if p.ndim > 1 for size in p.shape):
            yield Call(args=(torch.empty(batch, length, size, dtype=dtype, device="meta"),), kwargs={})
            yield Call(args=(torch.empty(batch, size, dtype=dtype, device="meta"),), kwargs={})
    # Looked up in a parameter, perhaps.
    yield tokens


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
