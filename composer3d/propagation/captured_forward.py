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
from composer3d.propagation.decision_cache import HASHABLE, NUMBERS
from composer3d.propagation.shards import AXES, ShardSpec, attach, spec_of, strip

__all__ = ["CAPTURED", "Graphs", "captured_forward"]

log = logging.getLogger(__name__)

# Of a forward that can be captured: called with `Graphs`, it returns the forward that runs compiled graphs.
CAPTURED = "composer3d_captured"
# So many forms of one block are compiled: sizes that change all the time run as they are.
MOST_FORMS = 16
# What a module's attributes may be to be a part of the form; tensors are by identity.
SETTINGS = (*NUMBERS, *HASHABLE)
# What every module has.
OF_MODULES = frozenset(vars(nn.Module()))
STATE = frozenset({"_parameters", "_buffers", "_modules", "forward"})


class Graphs:
    """Compiled graphs of blocks, of which equal ones are compiled once.

    Args:
        compiled: Compiles a graph.
        axis: Of the marks.
        around: Returns what else a forward depends on beside its arguments.
    """

    def __init__(
        self, compiled: Callable[[Any], Callable[..., Any]], *, axis: str, around: Callable[[], Hashable]
    ) -> None:
        self.axis, self.around = axis, around
        self._compiled = compiled
        self._known: dict[Any, Callable[..., Any]] = {}

    def compiled(self, graph: Any, given: Sequence[Tensor]) -> Callable[..., Any]:
        """Return what runs a graph."""
        if any(node.op == "get_attr" for node in graph.graph.nodes):
            return self._compiled(graph)  # with constants of its own
        key = (graph.code, tuple(map(_form_of, given)))
        if key not in self._known:
            self._known[key] = self._compiled(graph)
        return self._known[key]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Graph that replaces a forward of one form, and the structure of its results."""

    run: Callable[..., Any]
    restore: Callable[[Sequence[Any]], Any]


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
        self._entries: dict[Any, _Entry | None] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_compat.is_run_eagerly() or torch_compat.capture_is_on():
            return self._forward(*args, **kwargs)
        leaves, tree = torch_compat.tree_flatten([list(args), kwargs])
        held = self._held()
        key = self._key(leaves, tree, held)
        if key is None:
            return self._forward(*args, **kwargs)
        if key not in self._entries:
            self._entries[key] = self._captured(leaves, tree, held)
        entry = self._entries[key]
        if entry is None:
            return self._forward(*args, **kwargs)
        given = [strip(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        with torch_compat.outside_function_modes():
            results = entry.run(*(tensor for _, _, tensor in held), *given)
        return entry.restore(results)

    def _held(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return where parameters and buffers are, and what they are now: a unit may have gathered them."""
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in self._modules:
            for where in (module._parameters, module._buffers):
                found += [(where, name, tensor) for name, tensor in where.items() if tensor is not None]
        return found

    def _key(self, leaves: Sequence[Any], tree: Any, held: Sequence[tuple[Any, str, Tensor]]) -> Any:
        """Return all that a graph depends on beside values; None where something has no reliable form."""
        key: list[Any] = [tree, torch.is_grad_enabled(), self._graphs.around()]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if any(spec_of(leaf, axis) is not None for axis in AXES if axis != self._graphs.axis):
                    return None
                key += (_form_of(leaf), _described(spec_of(leaf, self._graphs.axis)))
            elif isinstance(leaf, SETTINGS):
                key += (type(leaf), leaf)
            else:
                return None
        for _, _, tensor in held:
            if type(tensor) not in (Tensor, nn.Parameter):
                return None
            key.append(_form_of(tensor))
            device = tensor.device.type
        if held and torch.is_autocast_enabled(device):
            key.append(torch.get_autocast_dtype(device))
        seen: set[int] = set()
        for module in self._modules:
            settings = vars(module)
            if module is not self._modules[0] and (settings["_forward_hooks"] or settings["_forward_pre_hooks"]):
                return None
            for name, value in settings.items():
                if isinstance(value, SETTINGS):
                    key += (type(value), value)
                elif isinstance(value, Tensor):
                    key.append(id(value))
                elif name not in OF_MODULES and id(value) not in seen:  # a configuration is one object for all
                    seen.add(id(value))
                    key.append(_settings_in(value))
        return tuple(key)

    def _captured(
        self, leaves: Sequence[Any], tree: Any, held: Sequence[tuple[dict[str, Any], str, Tensor]]
    ) -> _Entry | None:
        """Capture and compile a graph; None where the forward cannot be captured."""
        if len(self._entries) >= MOST_FORMS:
            return None
        specs = [spec_of(leaf, self._graphs.axis) for leaf in leaves]
        returned: list[Any] = []

        def run(*tensors: Any) -> list[Tensor]:
            own, given = tensors[: len(held)], iter(tensors[len(held) :])
            again = [_as_marked(next(given), spec) if isinstance(leaf, Tensor) else leaf for leaf, spec in pairs]
            args, kwargs = torch_compat.tree_unflatten(again, tree)
            for (where, name, _), tensor in zip(held, own, strict=True):
                where[name] = tensor
            try:
                with self._alone():
                    results, form = torch_compat.tree_flatten(self._forward(*args, **kwargs))
            finally:
                for where, name, tensor in held:
                    where[name] = tensor
            marks = [spec_of(leaf, self._graphs.axis) for leaf in results]
            # Tensors are told by their class, and are the graph's.
            values = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in results]
            returned[:] = [form, list(zip(values, marks, strict=True))]
            return [strip(leaf) for leaf in results if isinstance(leaf, Tensor)]

        pairs = list(zip(leaves, specs, strict=True))
        given = [*(tensor for _, _, tensor in held), *(strip(leaf) for leaf in leaves if isinstance(leaf, Tensor))]
        before = [_attributes(module) for module in self._modules]
        try:
            with torch_compat.outside_function_modes():
                graph = torch_compat.capture_graph(run, given)
            self._refuse_writes(before)
        except torch_compat.CaptureError as error:
            log.warning('compile: "%s" runs as it is, since its graph cannot be captured: %s', self._fqn, error)
            return None
        form, others = returned
        return _Entry(run=self._graphs.compiled(graph, given), restore=functools.partial(_restored, form, others))

    def _refuse_writes(self, before: Sequence[dict[str, Any]]) -> None:
        """Raise an error where the code has written to its modules, which a graph would not do again."""
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
            if changed:
                raise torch_compat.CaptureError(f"it writes to {type(module).__name__}.{changed[0]}")


def _settings_in(value: Any) -> tuple[Any, ...]:
    """Return the settings that an attribute of a module holds: a configuration, a list or a dict."""
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = [*value]
    else:
        inner = [] if callable(value) else [*getattr(value, "__dict__", {}).values()]
    return tuple((type(each), each) for each in inner if isinstance(each, SETTINGS))


def _as_marked(x: Tensor, spec: ShardSpec | None) -> Tensor:
    return x if spec is None else attach(x.view_as(x), spec)


def _restored(form: Any, others: Sequence[tuple[Any, ShardSpec | None]], results: Sequence[Tensor]) -> Any:
    """Return a forward's results of those of its graph, marked as the propagation has marked them."""
    tensors = iter(results)
    leaves = [
        value if value is not Tensor else attach(next(tensors), spec) if spec is not None else next(tensors)
        for value, spec in others
    ]
    return torch_compat.tree_unflatten(leaves, form)


def _form_of(x: Tensor) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


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
