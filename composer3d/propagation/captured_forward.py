"""Forwards that are propagated, and run as compiled graphs of what the propagation makes of them.

No compiler follows a propagation, which decides at each function by marks on tensors. What it makes of a block is the
same in every step: functions of local shards, exchanges as operators, positions as constants. So a block is captured
once for every form of its arguments, and later calls run the compiled graph. Its Python code does not run again, so
what it depends on beside tensors is a part of the form: the settings of all its modules, and those of configurations
that they hold. Code that cannot be captured, as it reads values of tensors, runs as it is.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation.python_settings import SETTINGS, Surroundings, settings_in
from composer3d.propagation.shards import AXES, ShardSpec, attach, spec_of, strip
from composer3d.torch_compat import forward_hooks
from composer3d.torch_compat.compilers.captured_graphs import traced_function_modes

__all__ = ["CAPTURED", "Graphs", "captured_forward", "is_repeatable", "repeatable"]

log = logging.getLogger(__name__)

# Of a forward that can be captured: called with what compiles graphs, it returns the forward that runs them.
CAPTURED = "composer3d_captured"
# Of a hook, or a forward inside of a captured one, that a graph may hold: see `repeatable`.
REPEATABLE = "composer3d_repeatable"
# So many forms of one block are compiled: sizes that change all the time run as they are.
MOST_FORMS = 16
# What every module has.
OF_MODULES = frozenset(vars(nn.Module()))
# Of a module's hooks.
TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
STATE = frozenset({"_parameters", "_buffers", "_modules", "forward"})


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """State of a hook or a forward that it does the same with equal arguments: a graph may hold what it does."""
    setattr(function, REPEATABLE, True)
    return function


def is_repeatable(function: Any) -> bool:
    """Return whether a graph may hold what a function does."""
    return getattr(function, REPEATABLE, False) or hasattr(function, CAPTURED)


class Graphs:
    """Compiled graphs of blocks, of which equal ones are compiled once.

    Args:
        compiled: Compiles a graph.
        recomputes: See `torch_compat.capture_graph`.
        axis: Of the marks.
        around: Returns what else a forward depends on beside its arguments.
    """

    def __init__(
        self,
        compiled: Callable[[Any], Callable[..., Any]],
        *,
        recomputes: bool,
        axis: str,
        around: Callable[[], Hashable],
    ) -> None:
        self.recomputes, self.axis, self.around = recomputes, axis, around
        self._compiled = compiled
        self._known: dict[Any, Callable[..., Any]] = {}
        self._told: set[str] = set()

    def tell(self, fqn: str, why: str) -> None:
        """Say why a block runs as it is, once for all blocks."""
        if why not in self._told:
            self._told.add(why)
            log.warning('compile: "%s" runs as it is, and so do others like it, since %s', fqn, why)

    def compiled(self, graph: Any, given: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph."""
        if any(node.op == "get_attr" for node in graph.graph.nodes):
            return self._compiled(graph)  # with constants of its own
        key = (graph.code, tuple(_form_of(each) if isinstance(each, Tensor) else each for each in given))
        if key not in self._known:
            self._known[key] = self._compiled(graph)
        return self._known[key]


@dataclass(kw_only=True)
class _Form:
    """Structure of a forward's results, and each leaf's value, of which tensors are told by their class, and mark."""

    tree: Any = None
    leaves: Sequence[tuple[Any, ShardSpec | None]] = ()

    def restored(self, results: Sequence[Tensor]) -> Any:
        """Return a forward's results of those of its graph, marked as the propagation has marked them."""
        tensors = iter(results)
        leaves = [
            value if value is not Tensor else attach(next(tensors), spec) if spec is not None else next(tensors)
            for value, spec in self.leaves
        ]
        return torch_compat.tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Graphs that replace a forward of one form, and the structure of its results, known when they are captured."""

    run: Callable[..., Any]
    form: _Form


def captured_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    graphs: Graphs,
    *,
    fqn: str,
    alone: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """Return a forward that runs compiled graphs of another, where that can be captured.

    Args:
        module: Whose.
        forward: Propagated.
        graphs: Compiles.
        fqn: Of the module.
        alone: Returns the context in which the forward is propagated by itself, whatever is at work around it.
    """
    known = _Captured(module, forward, graphs, fqn=fqn, alone=alone)

    @functools.wraps(forward)
    def captured(*args: Any, **kwargs: Any) -> Any:
        return known(args, kwargs)

    return captured


class _Captured:
    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        graphs: Graphs,
        *,
        fqn: str,
        alone: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._forward, self._graphs, self._fqn, self._alone = forward, graphs, fqn, alone
        self._modules = list(module.modules())
        self._surroundings = Surroundings.of(self._modules)
        self._entries: dict[Any, _Entry | None] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_compat.is_run_eagerly() or torch_compat.capture_is_on():
            return self._forward(*args, **kwargs)
        leaves, tree = torch_compat.tree_flatten([list(args), kwargs])
        held = self._held()
        key = self._key(leaves, tree, held)
        if isinstance(key, str):
            self._graphs.tell(self._fqn, key)
            return self._forward(*args, **kwargs)
        given = [*(tensor for _, _, tensor in held), *(strip(leaf) for leaf in leaves if isinstance(leaf, Tensor))]
        if key not in self._entries and len(self._entries) >= MOST_FORMS:
            why = f"it has had {MOST_FORMS} forms before: sizes, or numbers that its code reads, change all the time"
            self._graphs.tell(self._fqn, why)
            return self._forward(*args, **kwargs)
        if key not in self._entries:
            self._entries[key], results = self._captured(leaves, tree, held, given)
        elif (entry := self._entries[key]) is not None:
            with torch_compat.outside_function_modes():
                results = entry.run(*given)
        if (entry := self._entries[key]) is None:
            return self._forward(*args, **kwargs)
        return entry.form.restored(results)

    def _held(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return where parameters and buffers are, and what they are now: a unit may have gathered them."""
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in self._modules:
            for where in (module._parameters, module._buffers):
                found += [(where, name, tensor) for name, tensor in where.items() if tensor is not None]
        return found

    def _key(self, leaves: Sequence[Any], tree: Any, held: Sequence[tuple[Any, str, Tensor]]) -> Any:
        """Return all that a graph depends on beside values, or why something has no reliable form."""
        modes = tuple(type(mode).__qualname__ for mode in traced_function_modes())
        key: list[Any] = [tree, torch.is_grad_enabled(), modes, self._graphs.around(), self._surroundings.settings()]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if any(spec_of(leaf, axis) is not None for axis in AXES if axis != self._graphs.axis):
                    return "it is given a tensor that is sharded over another axis too"
                key += (_form_of(leaf), _described(spec_of(leaf, self._graphs.axis)))
            elif isinstance(leaf, SETTINGS):
                key += (type(leaf), leaf)
            else:
                return f"it is given a {type(leaf).__name__}, to which its code may write"
        for _, name, tensor in held:
            if type(local := torch_compat.held_tensor(tensor)) not in (Tensor, nn.Parameter):
                return f"{name} is a {type(local).__name__}"
            key.append(_form_of(tensor))
            device = tensor.device.type
        if held and torch.is_autocast_enabled(device):
            key.append(torch.get_autocast_dtype(device))
        if forward_hooks.are_there(forward_hooks.tables_of(())):
            return "all modules have a hook"
        seen: set[int] = set()
        for module in self._modules:
            settings = vars(module)
            hooks = [hook for table in TABLES for hook in settings[table].values()]
            if module is not self._modules[0] and not all(map(is_repeatable, hooks)):
                return f"a {type(module).__name__} in it has a hook"
            for name, value in settings.items():
                if isinstance(value, SETTINGS):
                    key += (type(value), value)
                elif isinstance(value, Tensor):
                    key.append(id(value))
                elif name not in OF_MODULES and id(value) not in seen:  # a configuration is one object for all
                    seen.add(id(value))
                    key.append(settings_in(value))
        return tuple(key)

    def _captured(
        self,
        leaves: Sequence[Any],
        tree: Any,
        held: Sequence[tuple[dict[str, Any], str, Tensor]],
        given: Sequence[Tensor],
    ) -> tuple[_Entry | None, Sequence[Any]]:
        """Capture graphs and run them; return them with their results, or None where the forward cannot be captured."""
        specs = [spec_of(leaf, self._graphs.axis) for leaf in leaves]
        form = _Form()

        def run(*tensors: Any) -> list[Tensor]:
            own, inputs = tensors[: len(held)], iter(tensors[len(held) :])
            again = [_as_marked(next(inputs), spec) if isinstance(leaf, Tensor) else leaf for leaf, spec in pairs]
            args, kwargs = torch_compat.tree_unflatten(again, tree)
            for (where, name, _), tensor in zip(held, own, strict=True):
                where[name] = tensor
            try:
                with self._alone():
                    results, form.tree = torch_compat.tree_flatten(self._forward(*args, **kwargs))
            finally:
                for where, name, tensor in held:
                    where[name] = tensor
            marks = [spec_of(leaf, self._graphs.axis) for leaf in results]
            values = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in results]
            form.leaves = list(zip(values, marks, strict=True))
            return [strip(leaf) for leaf in results if isinstance(leaf, Tensor)]

        pairs = list(zip(leaves, specs, strict=True))
        before = [_attributes(module) for module in self._modules]

        def compiled(graph: Any, like: Sequence[Any]) -> Callable[..., Any]:
            if written := self._undo_writes(before):
                raise torch_compat.CaptureError(f"it writes to {written}")
            return self._graphs.compiled(graph, like)

        entry = _Entry(run=torch_compat.capture_graph(run, compiled, recomputes=self._graphs.recomputes), form=form)
        try:
            with torch_compat.outside_function_modes(but=traced_function_modes()):
                return entry, entry.run(*given)
        except torch_compat.CaptureError as error:
            self._undo_writes(before)
            log.warning('compile: "%s" runs as it is, since its graph cannot be captured: %s', self._fqn, error)
            return None, ()

    def _undo_writes(self, before: Sequence[dict[str, Any]]) -> str:
        """Undo what the code has written to its modules, which a graph would not do again; return what that was."""
        written = ""
        for module, attributes in zip(self._modules, before, strict=True):
            now = _attributes(module)
            changed = [name for name in now if name not in attributes or not _is_same(attributes[name], now[name])]
            for name in changed:
                if name in attributes:
                    value, held = attributes[name]
                    vars(module)[name] = value
                    if held is not None:
                        value.clear()
                        value.extend(held) if isinstance(value, list) else value.update(held)
                else:
                    del vars(module)[name]
            written = written or (f"{type(module).__name__}.{changed[0]}" if changed else "")
        return written


def _as_marked(x: Tensor, spec: ShardSpec | None) -> Tensor:
    return x if spec is None else attach(x.view_as(x), spec)


def _form_of(x: Tensor) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, getattr(x, "placements", None))


def _described(spec: ShardSpec | None) -> Any:
    if spec is None:
        return None
    return (spec.shadow.shape, spec.placed, spec.sources, spec.start, spec.scale, spec.whole, spec.is_weight)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a module's own attributes, with copies of containers among them."""
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else None)
        for name, value in vars(module).items()
        if name not in STATE
    }


def _is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] is not other[0] and not (isinstance(one[0], SETTINGS) and one[0] == other[0]):
        return False
    held, now = ([*x, *x.values()] if isinstance(x, dict) else list(x or ()) for x in (one[1], other[1]))
    return len(held) == len(now) and all(a is b for a, b in zip(held, now, strict=True))
